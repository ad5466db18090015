"""Private names of torch that a step, planning and the probe touch: one that changes fails here, by name.

Those of the scaler: ``test_torch_privates_scaler.py``.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _optimizer(**more: bool) -> torch.optim.Optimizer:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return torch.optim.AdamW([p], lr=0.1, **more)


@pytest.mark.parametrize("name", ["_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"])
def test_a_fused_optimizer_carries_these_and_no_other_does(name: str) -> None:
    fused, plain = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, fused=f) for f in (True, None))
    assert getattr(fused, name) is True
    assert not hasattr(plain, name)


@pytest.mark.parametrize("name", ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"])
def test_hooks_of_an_optimizer_are_kept_under_these_names(name: str) -> None:
    optimizer, calls = _optimizer(), []
    kind = "pre" if "pre" in name else "post"
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: calls.append(1))
    hooks = getattr(optimizer, name)
    assert len(hooks) == 1
    setattr(optimizer, name, type(hooks)())
    optimizer.step()
    assert not calls
    setattr(optimizer, name, hooks)
    optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize(
    "name", ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
)
def test_hooks_of_a_module_are_kept_under_these_names(name: str) -> None:
    layer = nn.Linear(2, 2)
    register = "register_full" + name.removesuffix("s") if "backward" in name else "register" + name[:-1]
    getattr(layer, register)(lambda *_: None)
    assert len(getattr(layer, name)) == 1


def test_a_module_keeps_its_parts_under_these_names() -> None:
    layer = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert set(vars(layer)["_modules"]) == {"0"}
    assert set(layer[0]._parameters) == {"weight", "bias"} and layer[0]._parameters["bias"] is None
    assert torch.compile(layer, backend="eager")._modules["_orig_mod"] is layer
    assert hasattr(layer.state_dict(), "_metadata")
    assert DistributedDataParallel.forward is not nn.Module.forward  # it wraps, as ``module`` says


def test_forward_on_the_instance_is_what_a_call_runs() -> None:
    layer = nn.Linear(2, 2)
    object.__setattr__(layer, "forward", lambda x: "ours")
    assert layer(torch.ones(2)) == "ours"


def test_autocast_keeps_a_cast_of_a_weight_until_told() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = layer(x)
        layer.weight.data = torch.zeros(2, 2)
        assert torch.equal(layer(x), before)  # the stale copy
        torch.clear_autocast_cache()
        assert torch.count_nonzero(layer(x)) == 0


def test_the_norm_and_the_clipping_take_what_they_are_given() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    norm = torch.nn.utils.get_total_norm([p.grad])
    assert float(norm) == 5.0
    torch.nn.utils.clip_grads_with_norm_([p], 1.0, norm)
    assert math.isclose(float(p.grad.norm()), 1.0, rel_tol=1e-5)  # torch adds 1e-6 to the norm


def test_a_version_counts_writes_and_flags_share_memory() -> None:
    grad = torch.ones(2)
    version = grad._version
    grad.mul_(2)
    assert grad._version == version + 1
    found = torch.zeros(())
    seen = found.numpy()
    found.fill_(1.0)
    assert float(seen) == 1.0


def test_sparse_gradients_have_indices_and_values() -> None:
    grad = torch.eye(3, 2).to_sparse()
    assert grad._indices().shape == (2, 2) and grad._values().tolist() == [1.0, 1.0]


def test_what_the_probe_asks_torch() -> None:
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert torch.backends.cpu.get_cpu_capability()
    answers = [getattr(torch.ops.mkldnn, f"_is_mkldnn_{f}_supported") for f in ("bf16", "fp16")]
    assert all(isinstance(answer(), bool) for answer in answers)
    assert callable(torch._scaled_mm) and callable(torch.ops.aten.convolution_backward)
