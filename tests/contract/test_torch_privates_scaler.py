"""Private names of torch that the scaler touches: a new torch that changes one fails here, by name."""

import inspect

import pytest
import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

ATTRIBUTES = (
    "_scale",
    "_growth_tracker",
    "_per_optimizer_states",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "_enabled",
    "_init_scale",
    "_init_growth_tracker",
)
SIGNATURES = {
    "_unscale_grads_": ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"],
    "_maybe_opt_step": ["self", "optimizer", "optimizer_state", "args", "kwargs"],
    "_check_scale_growth_tracker": ["self", "funcname"],
    "_check_inf_per_device": ["self", "optimizer"],
    "__getstate__": ["self"],
    "__init__": [
        "self",
        "device",
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "enabled",
    ],
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(name: str) -> None:
    assert hasattr(GradScaler("cpu"), name)


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name: str) -> None:
    assert list(inspect.signature(getattr(GradScaler, name)).parameters) == SIGNATURES[name]


def test_stages_and_the_state_of_an_optimizer() -> None:
    assert {s.name for s in OptState} == {"READY", "UNSCALED", "STEPPED"}
    scaler = GradScaler("cpu")
    assert scaler._per_optimizer_states[1] == {"stage": OptState.READY, "found_inf_per_device": {}}


def test_keys_of_the_state() -> None:
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    assert set(GradScaler("cpu").state_dict()) == keys


def test_kernel_checks_before_it_multiplies() -> None:
    grad, found = torch.tensor([1.0]), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor(float("inf")))
    assert float(found) == 0.0 and not torch.isfinite(grad).all()


def test_kernel_moves_the_scale() -> None:
    scale, tracker = torch.tensor(4.0), torch.tensor(1, dtype=torch.int32)
    torch._amp_update_scale_(scale, tracker, torch.tensor(0.0), 2.0, 0.5, 2)
    assert (float(scale), int(tracker)) == (8.0, 0)


def test_a_fused_optimizer_says_so_and_takes_its_flags_as_attributes() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    assert optimizer._step_supports_amp_scaling
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert torch.equal(p, torch.ones(2))


def test_state_of_sgd_has_its_momentum_under_this_name() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9, fused=True)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[p]
