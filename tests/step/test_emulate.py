"""Half by casts there and back: the numbers of the device's own half kernels, where it has them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from equipoise.errors import SessionError
from equipoise.session import Session
from equipoise.step.operators import Kernels, autocast

LINEAR = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)]
# A bias before batch norm has no gradient but rounding noise.
CONV = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)]
SHAPES = {"linear": (LINEAR, (32, 64)), "conv": (CONV, (4, 3, 16, 16))}


def gradients(model: nn.Module, x: torch.Tensor, dtype: torch.dtype, emulate: bool) -> list[torch.Tensor]:
    model.zero_grad()
    with autocast("cpu", dtype, True, emulate):
        out = model(x)
        loss = out.float().square().mean()
    (loss * 2.0**12).backward()
    assert out.dtype is dtype
    return [out.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_are_those_of_a_half_kernel(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers, shape = SHAPES[name]
    model, x = nn.Sequential(*layers), torch.randn(shape)
    kernels = Kernels("cpu"), Kernels("cpu", "emulate")
    own, emulated = (gradients(model, x, dtype, way) for way in (False, True))
    # A kernel may sum in another order; a last digit of half then differs, and what follows from it.
    for a, b in zip(own, emulated, strict=True):
        assert float((a - b).norm()) <= 4 * torch.finfo(dtype).eps * float(a.norm())
    for k in kernels:
        k.remove()


def fp16_session(model: nn.Module, **options: Any) -> Session:
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16", **options)


def test_a_format_that_the_device_lacks_trains_by_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: pytest.fail("emulation asks no probe"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    session = fp16_session(model, emulate=True)
    x = torch.randn(64, 8)
    y = x[:, :4].argmax(1)
    losses = []
    for _ in range(60):
        with session.autocast():
            out = model(x)
            loss = F.cross_entropy(out, y)
        losses.append(session.step(loss).loss)
    assert out.dtype is torch.float16 and losses[-1] < 0.8 * losses[0]
    assert "emulated" in session.explain() and "emulate = true" in session.plan.to_toml()
    session.restore()


def test_overflow_is_fp16s() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 100.0)
    session = fp16_session(model, emulate=True)
    with session.autocast():
        assert torch.isinf(model(torch.full((1, 4), 1000.0))).all()
        assert model(torch.full((1, 4), 1e-9)).count_nonzero() == 0
    session.restore()


# torch 2.13 warns about itself at the first torch.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_where_emulation_makes_no_sense() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SessionError, match="precision='auto'"):
        Session(model, optimizer, emulate=True)
    with pytest.raises(SessionError, match="eager code only"):
        Session(torch.compile(model), optimizer, precision="fp16", emulate=True)
    Session(model, optimizer, precision="fp32").restore()  # the refusals left nothing behind


@pytest.mark.parametrize("first", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.Linear])
def test_beside_a_session_that_does_not_emulate(kind: Any, first: str) -> None:
    """Each has its own format, in whatever order they came, and the one that stays keeps it.

    Under fake tensors as well, as torch.compile traces: there the kernels of both once called each other.
    """
    model, other = kind(8, 8), nn.Linear(8, 8)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    made = {}
    for half in sorted(dtypes, key=lambda half: half != first):
        own = model if half == "bf16" else other
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        made[half] = Session(own, optimizer, precision=half, emulate=half == "fp16")

    def seen(half: str) -> torch.dtype:
        found = set()
        # a session in FP16 looks at values in its first step: not with fake tensors
        fake = [FakeTensorMode(allow_non_fake_inputs=True)] if half == "bf16" else []
        for tensors in (nullcontext(), *fake):
            with tensors, made[half].autocast():
                out = model(torch.randn(3, 8))
            found.add((out[0] if isinstance(out, tuple) else out).dtype)
        return found.pop()

    assert {half: seen(half) for half in made} == dtypes
    made[first].restore()
    (left,) = set(made) - {first}
    assert seen(left) is dtypes[left]
    made[left].restore()
