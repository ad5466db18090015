"""Rows F1, F2, F5-F10 and F12-F14 of the cases from real life, each with the neighbours that share its fault.

F3 and F4 concern optimizers, F11 has tests/cases/test_overflow.py. FP16 is emulated: its numbers, on any CPU.

What a table of operators can't keep (``x * x``, an epsilon lost in half, a mask added and then softmaxed in
FP32 by hand) is noticed on the first step, named, and its module widened: the tests of "by hand" below.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from equipoise import LossScaler, Session
from equipoise.errors import NonFiniteError, SessionError

Tensor = torch.Tensor
Call = Callable[[Tensor], Tensor]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
each_half = pytest.mark.parametrize("half", HALF)

# torch warns about itself at its first compile and its first jvp
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def session_of(half: str, model: nn.Module | None = None, *, emulate: bool = True, **options: Any) -> Session:
    model = nn.Linear(8, 8) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Session(model, optimizer, precision=half, emulate=emulate and half != "fp32", **options)


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[str, Session]]:
    """One session a half format, for what needs its context alone."""
    made = {half: session_of(half) for half in HALF}
    yield made
    for session in made.values():
        session.restore()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Around(nn.Module):
    """A user's module: some code of its own between two layers, which give it half and take its result."""

    def __init__(self, code: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.code, self.last = nn.Linear(8, 8), code, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self.first(x)))


class OwnThread(threading.Thread):
    """Runs a function and keeps what it gave or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function, self.result, self.error = function, None, None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error

    @classmethod
    def get(cls, function: Callable[[], Any]) -> Any:
        thread = cls(function)
        thread.start()
        thread.join()
        if thread.error is not None:
            raise thread.error
        return thread.result


def in_a_thread(session: Session, call: Call, x: Tensor) -> Tensor:
    def run() -> Tensor:
        with session.autocast():
            return call(x)

    return OwnThread.get(run)


def eager(session: Session, call: Call, x: Tensor) -> Tensor:
    with session.autocast():
        return call(x)


def recomputed(session: Session, call: Call, x: Tensor) -> Tensor:
    seen = []

    def remembering(x: Tensor) -> Tensor:
        seen.append(call(x))
        return seen[-1]

    x = x.detach().requires_grad_()
    with session.autocast(), set_checkpoint_early_stop(False):  # recomputed to its end, to be looked at
        out = checkpoint(remembering, x, use_reentrant=False)
    if out.grad_fn is not None:
        torch.autograd.grad(out.sum(), x)
        # an operator that saves nothing, such as a sum, isn't computed again
        assert all(s.dtype is out.dtype and torch.equal(s, out) for s in seen)
    return out.detach()


def compiled(session: Session, call: Call, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    with session.autocast():
        return torch.compile(call, backend="aot_eager", fullgraph=True)(x)


WAYS = {"eager": eager, "checkpoint": recomputed, "thread": in_a_thread, "compiled": compiled}
each_way = pytest.mark.parametrize("way", WAYS)


def in_fp32(call: Call, x: Tensor) -> Tensor:
    """What FP32 gives on the same, already rounded, numbers."""
    return call(x.float())


def train(session: Session, model: nn.Module, x: Tensor, steps: int = 12) -> list[bool]:
    skipped = []
    for _ in range(steps):
        with session.autocast():
            loss = model(x).float().square().mean()
        skipped.append(session.step(loss).skipped)
    return skipped


def assert_named_and_mended(code: Call, operator: str, x: Tensor) -> None:
    """FP16's overflow in a user's own code: the module is named and computes in FP32 from then on."""
    model = Around(code)
    session = session_of("fp16", model)
    with pytest.warns(
        UserWarning, match=rf"{operator} in layer '\(root\)' \(forward\) leaves the range of fp16"
    ):
        skipped = train(session, model, x)
    assert [d.what for d in session.decisions] == ["widen"] and str(session.plan.policy).startswith("fp32;")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not skipped[-1]
    session.restore()


# ---- F1: a mask of half's lowest number -------------------------------------------------------------------

MASKED: dict[str, Call] = {
    "softmax": lambda s: torch.softmax(s, -1),
    "method": lambda s: s.softmax(-1),
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "module": nn.Softmax(-1),
    "Softmax2d": lambda s: nn.Softmax2d()(s.t()[None, :, :, None])[0, :, :, 0].t(),
    "to half": lambda s: torch.softmax(s, -1, dtype=s.dtype),
    "to float": lambda s: torch.softmax(s, -1, dtype=torch.float32),
    "log_softmax": lambda s: F.log_softmax(s, -1),
    "log_softmax module": nn.LogSoftmax(-1),
    "softmin": lambda s: F.softmin(-s, -1),
    "cross_entropy": lambda s: F.cross_entropy(s, torch.tensor([1, 2, 0]), reduction="none"),
    "cross_entropy module": lambda s: nn.CrossEntropyLoss()(s, torch.tensor([1, 2, 0])),
}


def masked(half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores of -17 and less, and a mask: nothing, all but one, everything."""
    mask = torch.zeros(3, 4, dtype=half)
    mask[1, 1:] = mask[2] = torch.finfo(half).min
    return (randn(3, 4) - 17).to(half), mask


@each_way
@each_half
@pytest.mark.parametrize("form", MASKED)
def test_f1_a_row_masked_in_full_is_no_nan(
    form: str, half: str, way: str, sessions: dict[str, Session]
) -> None:
    scores, mask = masked(HALF[half])
    out = WAYS[way](sessions[half], lambda s: MASKED[form](s + mask), scores)
    assert bool(out.isfinite().all())
    # FP32's numbers for the sum as half rounds it, where what overflows counts as half's lowest number
    expected = MASKED[form]((scores + mask).float().clamp_min(torch.finfo(HALF[half]).min))
    last = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.float(), expected.float(), rtol=8 * last, atol=8 * last)
    if out.shape == (3, 4) and "log" not in form:
        torch.testing.assert_close(out[2].float(), torch.full((4,), 0.25), rtol=1e-6, atol=0)


@each_half
@pytest.mark.parametrize("form", [f for f in MASKED if f != "to half"])
def test_f1_and_its_gradient_is_finite(form: str, half: str, sessions: dict[str, Session]) -> None:
    scores, mask = masked(HALF[half])
    scores.requires_grad_()
    with sessions[half].autocast():
        out = MASKED[form](scores + mask)
        factors = randn(12)[: out.numel()].reshape(out.shape)
        (grad,) = torch.autograd.grad((out * factors).sum(), scores)
    assert bool(grad.isfinite().all())
    wide = (scores + mask).detach().float().clamp_min(torch.finfo(HALF[half]).min).requires_grad_()
    (expected,) = torch.autograd.grad((MASKED[form](wide) * factors).sum(), wide)
    torch.testing.assert_close(grad, expected.to(HALF[half]), rtol=0, atol=1e-6)


@each_half
@pytest.mark.parametrize("mask", ["lowest", "-inf", "fp32's lowest", "boolean"])
@pytest.mark.parametrize("who", ["sdpa", "mha", "mha without weights"])
def test_f1_neighbour_attention(who: str, mask: str, half: str, sessions: dict[str, Session]) -> None:
    x = randn(2, 4, 8) * 4
    full = torch.ones(4, 4, dtype=torch.bool).triu()
    full[2] = True  # this row sees nothing
    value = {"lowest": torch.finfo(HALF[half]).min, "-inf": -math.inf}.get(
        mask, torch.finfo(torch.float32).min
    )
    hidden: Tensor = full if mask == "boolean" else torch.zeros(4, 4).masked_fill(full, value)
    with sessions[half].autocast():
        if who == "sdpa":
            q = x.to(HALF[half])
            given = ~full if mask == "boolean" else hidden.to(HALF[half]) if mask == "lowest" else hidden
            out = F.scaled_dot_product_attention(q, -q, q, attn_mask=given)
        else:
            torch.manual_seed(0)
            attention = nn.MultiheadAttention(8, 2, batch_first=True)
            out, _ = attention(x, x, x, attn_mask=hidden, need_weights=who == "mha")
    assert bool(out.isfinite().all())


@each_half
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    size=st.floats(-8, 10),
    hidden=st.lists(st.booleans(), min_size=45, max_size=45),
)
def test_f1_softmax_of_any_scores_and_mask(
    half: str, sessions: dict[str, Session], rows: int, columns: int, size: float, hidden: list[bool]
) -> None:
    dtype = HALF[half]
    scores = (randn(rows, columns) * 2.0**size).to(dtype)
    hide = torch.tensor(hidden[: rows * columns]).reshape(rows, columns)
    with sessions[half].autocast():
        out = torch.softmax(scores + hide * torch.tensor(torch.finfo(dtype).min, dtype=dtype), -1)
    assert out.dtype is torch.float32 and bool((out >= 0).all())
    torch.testing.assert_close(out.sum(-1), torch.ones(rows), rtol=1e-5, atol=0)
    some = ~hide.all(-1)
    assert not bool(out[some][hide[some]].any())  # what is hidden has no weight where anything is seen
    seen = torch.softmax(scores.float().masked_fill(hide, -math.inf), -1)
    torch.testing.assert_close(out[some], seen[some], rtol=1e-5, atol=1e-7)


def softmax_in_fp32_by_hand(h: Tensor) -> Tensor:
    return torch.softmax((h - 17 + torch.finfo(torch.float16).min).float(), -1)


def softmax_of_exp(h: Tensor) -> Tensor:
    scores = h - 17 + torch.finfo(torch.float16).min
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("code", [softmax_in_fp32_by_hand, softmax_of_exp])
def test_f1_by_hand_the_module_that_adds_the_mask_is_named_and_widened(code: Call) -> None:
    assert_named_and_mended(code, "add", randn(6, 8))


# ---- F2: an epsilon that half rounds to 0 -----------------------------------------------------------------

NORMALISED: dict[str, Call] = {
    "F.normalize": lambda z: F.normalize(z, dim=-1),
    "norm": lambda z: z / (z.norm(dim=-1, keepdim=True) + 1e-12),
    "torch.norm": lambda z: z / torch.norm(z, dim=-1, keepdim=True).clamp_min(1e-12),
    "linalg.norm": lambda z: z / (torch.linalg.norm(z, dim=-1, keepdim=True) + 1e-12),
    "vector_norm": lambda z: z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + 1e-12),
    "l1": lambda z: z / (z.abs().sum(-1, keepdim=True) + 1e-12),
    "square": lambda z: z / (z.square().sum(-1, keepdim=True) + 1e-12).sqrt(),
    "z * z": lambda z: z * torch.rsqrt((z * z).sum(-1, keepdim=True) + 1e-12),
    "cosine": lambda z: F.cosine_similarity(z, z + 0)[:, None] * z,
    "layer_norm": lambda z: F.layer_norm(z, (8,), eps=1e-12),
    "rms_norm": lambda z: F.rms_norm(z, (8,), eps=1e-12),
    "group_norm": lambda z: F.group_norm(z, 2, eps=1e-12),
}


@each_way
@each_half
@pytest.mark.parametrize("form", NORMALISED)
def test_f2_a_zero_vector_is_normalised_to_zero(
    form: str, half: str, way: str, sessions: dict[str, Session]
) -> None:
    out = WAYS[way](sessions[half], NORMALISED[form], torch.zeros(3, 8, dtype=HALF[half]))
    assert torch.equal(out.float(), torch.zeros(3, 8))


@each_half
@pytest.mark.parametrize("form", NORMALISED)
def test_f2_and_its_gradient_is_zero(form: str, half: str, sessions: dict[str, Session]) -> None:
    """Of a loss that has its minimum there, and behind units that are all dead: zero, as in FP32."""
    for dead in (False, True):
        z = (torch.full((3, 8), -1.0) if dead else torch.zeros(3, 8)).to(HALF[half]).requires_grad_()
        with sessions[half].autocast():
            out = NORMALISED[form](F.relu(z) if dead else z).float()
            loss = out.sum() if dead else out.square().sum()
        (grad,) = torch.autograd.grad(loss, z)
        if dead and form in ("layer_norm", "group_norm"):  # they take a mean off: gradients of 1e6 cancel
            assert not bool(grad.isnan().any())
        else:
            assert torch.equal(grad, torch.zeros_like(grad))


LENGTHS = ["F.normalize", "norm", "torch.norm", "linalg.norm", "vector_norm", "l1", "square"]


@each_half
@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.floats(-24, 15), columns=st.integers(1, 40), form=st.sampled_from(LENGTHS))
def test_f2_vectors_of_any_size_have_the_length_of_fp32(
    half: str, sessions: dict[str, Session], size: float, columns: int, form: str
) -> None:
    z = (randn(2, columns).clamp(-1.9, 1.9) * 2.0**size).to(HALF[half])
    out = eager(sessions[half], NORMALISED[form], z)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, in_fp32(NORMALISED[form], z), rtol=1e-5, atol=1e-6)


def scaled_by_its_largest(h: Tensor) -> Tensor:
    """Nothing here is in a list: the largest, the sum and the division stay in half, the epsilon is lost."""
    z = h * 0
    return z / (z.abs().amax(-1, keepdim=True) + 1e-12)


def test_f2_by_hand_the_module_that_loses_its_epsilon_is_named_and_widened() -> None:
    assert_named_and_mended(scaled_by_its_largest, "div", randn(6, 8))


def test_f2_by_hand_the_logarithm_of_a_lost_epsilon_is_named() -> None:
    """Its input is 0 in half, the logarithm itself is FP32: what is wrong with the first loss is said."""
    model = Around(lambda h: torch.log(h * 0 + 1e-12))
    session = session_of("fp16", model)
    with session.autocast():
        loss = model(randn(6, 8)).float().square().mean()
    with pytest.raises(NonFiniteError, match=r"log in layer '\(root\)'.*makes an inf or a NaN"):
        session.step(loss)


# ---- F5: squares and their sums ---------------------------------------------------------------------------

SQUARES: dict[str, Call] = {
    "pow": lambda x: x.pow(2).mean(-1, keepdim=True),
    "torch.pow": lambda x: torch.pow(x, 2).mean(-1, keepdim=True),
    "**": lambda x: (x**2).mean(-1, keepdim=True),
    "square": lambda x: x.square().mean(-1, keepdim=True),
    "abs.pow(3)": lambda x: x.abs().pow(3).mean(-1, keepdim=True).pow(2 / 3),
    "sum": lambda x: x.pow(2).sum(-1, keepdim=True) / x.shape[-1],
    "norm": lambda x: x.norm(dim=-1, keepdim=True).square() / x.shape[-1],
    "var": lambda x: x.var(-1, keepdim=True, correction=0) + x.mean(-1, keepdim=True).square(),
    "std": lambda x: x.std(-1, keepdim=True, correction=0) ** 2 + x.mean(-1, keepdim=True) ** 2,
    "dist": lambda x: torch.cdist(x[:, None], torch.zeros_like(x)[:, None])[:, 0].square() / x.shape[-1],
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none").mean(-1, keepdim=True),
}


def rms_norm(square: Call) -> Call:
    return lambda x: x * torch.rsqrt(square(x) + 1e-6)


@each_way
@each_half
@pytest.mark.parametrize("form", SQUARES)
def test_f5_rms_norm_by_hand(form: str, half: str, way: str, sessions: dict[str, Session]) -> None:
    x = (torch.full((2, 8), 300.0) + randn(2, 8)).to(HALF[half])
    out = WAYS[way](sessions[half], rms_norm(SQUARES[form]), x)
    assert out.dtype is torch.float32
    # FP32's own few last digits: the forms sum in another order when they are compiled
    torch.testing.assert_close(out.double(), rms_norm(SQUARES["pow"])(x.double()), rtol=1e-5, atol=0)


@each_half
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    size=st.floats(-12, 15),
    columns=st.integers(1, 300),
    form=st.sampled_from(["pow", "torch.pow", "**", "square", "sum", "norm", "mse"]),
)
def test_f5_any_size_and_length(
    half: str, sessions: dict[str, Session], size: float, columns: int, form: str
) -> None:
    """As float64, from values whose squares vanish in FP16 to values whose squares overflow."""
    x = (randn(2, columns).clamp(-1.9, 1.9) * 2.0**size).to(HALF[half])
    out = eager(sessions[half], rms_norm(SQUARES[form]), x)
    torch.testing.assert_close(out.double(), rms_norm(SQUARES["pow"])(x.double()), rtol=2e-5, atol=1e-7)


BY_HAND: dict[str, tuple[Call, str]] = {
    "h * h": (lambda h: (h + 300) * (h + 300) / 9e4, "mul"),
    "pow_": (lambda h: (h + 300).pow_(2) / 9e4, "pow_"),
    "square_": (lambda h: (h + 300).square_() / 9e4, "pow_"),
    "exp_": (lambda h: (h * 0 + 12).exp_() / 2e5, "exp_"),
    "cumsum_": (lambda h: (h * 0 + 3e4).cumsum_(-1) / 3e5, "cumsum_"),
    "product": (lambda h: (h + 300) @ (h + 300).t() @ h / 1e7, r"(mm|matmul|the cast)"),
    "response norm": (lambda h: F.local_response_norm((h + 300)[None], 2)[0] / 50, "mul"),
}


@pytest.mark.parametrize("form", BY_HAND)
def test_f5_by_hand_what_no_list_keeps_is_named_and_widened(form: str) -> None:
    code, operator = BY_HAND[form]
    assert_named_and_mended(code, operator, randn(6, 8) * 0.1)


# ---- F6: a norm whose weights are half meets FP32, and the other way round --------------------------------

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "layer": (lambda: nn.LayerNorm(8), (4, 8), True),
    "layer without bias": (lambda: nn.LayerNorm(8, bias=False), (4, 8), True),
    "group": (lambda: nn.GroupNorm(2, 8), (4, 8, 3), True),
    "rms": (lambda: nn.RMSNorm(8), (4, 8), True),
    "batch": (lambda: nn.BatchNorm1d(8), (16, 8), False),
    "batch 2d": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3), False),
    "batch without statistics": (lambda: nn.BatchNorm1d(8, track_running_stats=False), (16, 8), False),
    "instance": (lambda: nn.InstanceNorm1d(8, affine=True), (4, 8, 16), False),
    "response": (lambda: nn.LocalResponseNorm(2), (2, 8, 5), False),
}


@each_way
@each_half
@pytest.mark.parametrize("weights", ["half", "fp32"])
@pytest.mark.parametrize("data", ["half", "fp32"])
@pytest.mark.parametrize("kind", [k for k in NORMS if k != "response"])
def test_f6_norms_of_mixed_widths(
    kind: str, data: str, weights: str, half: str, way: str, sessions: dict[str, Session]
) -> None:
    if way == "checkpoint" and "batch" in kind:
        pytest.skip("its running statistics would be updated twice, in FP32 as well")
    make, shape, wide = NORMS[kind]
    norm = make().to(HALF[half] if weights == "half" else torch.float32)
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    x = (randn(*shape) * 0.5 + 100).to(HALF[half] if data == "half" else torch.float32)
    exact = make().double()
    exact.load_state_dict(norm.state_dict())
    out = WAYS[way](sessions[half], norm, x)
    assert out.dtype is (torch.float32 if wide or data == "fp32" else HALF[half])
    # FP32's statistics: of a mean of 100 a half one is off by 0.4 (bf16), and so would the result be
    last = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=last, atol=max(2 * last, 1e-3))


@each_half
@pytest.mark.parametrize("kind", sorted(NORMS))
def test_f6_frozen_half_norms_inside_a_model_train(kind: str, half: str) -> None:
    make, shape, _ = NORMS[kind]
    features = math.prod(shape[1:])
    norm = make().to(HALF[half]).requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, features), nn.Unflatten(1, shape[1:]), norm, nn.Flatten())
    session = session_of(half, model)
    assert not any(train(session, model, randn(6, 8), 3))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    session.restore()


# ---- F7: operators called as functions --------------------------------------------------------------------

FUNCTIONS: dict[str, Call] = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "x.softmax": lambda x: x.softmax(-1),
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "torch.exp": torch.exp,
    "x.exp": lambda x: x.exp(),
    "torch.pow": lambda x: torch.pow(x, 3),
    "x ** y": lambda x: x.abs() ** x,
    "2 ** x": lambda x: 2**x,
    "rpow": lambda x: x.__rpow__(3.0),
    "F.layer_norm": lambda x: F.layer_norm(x, (8,)),
    "torch.sum": lambda x: torch.sum(x, -1),
    "x.sum": lambda x: x.sum(),
    "sum of two": lambda x: x.sum((0, 1), keepdim=True),
    "torch.norm": lambda x: torch.norm(x),
    "x.norm": lambda x: x.norm(p=3, dim=-1),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=-1),
    "torch.cumsum": lambda x: torch.cumsum(x, -1),
    "x.cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(-1),
    "prod": lambda x: x.prod(-1),
    "mean": lambda x: x.mean(),
    "nansum": lambda x: x.nansum(),
    "nanmean": lambda x: x.nanmean(),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "trapezoid": lambda x: torch.trapezoid(x),
    "F.softplus": F.softplus,
    "F.normalize": lambda x: F.normalize(x, dim=-1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "1 / x": lambda x: 1 / (x.abs() + 1),
    "kl_div": lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(-x, -1), reduction="sum"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, -x),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x[None], 1),
}


@each_way
@each_half
@pytest.mark.parametrize("form", FUNCTIONS)
def test_f7_functions_give_fp32_and_its_numbers(
    form: str, half: str, way: str, sessions: dict[str, Session]
) -> None:
    x = randn(4, 8).to(HALF[half])
    out = WAYS[way](sessions[half], FUNCTIONS[form], x)
    assert out.dtype is torch.float32
    if form in (
        "x ** y",
        "2 ** x",
        "rsqrt",
        "1 / x",
        "log1p",
        "trapezoid",
    ):  # what comes before them is in half
        torch.testing.assert_close(
            out, in_fp32(FUNCTIONS[form], x), rtol=4 * torch.finfo(HALF[half]).eps, atol=0
        )
    else:
        torch.testing.assert_close(out, in_fp32(FUNCTIONS[form], x), rtol=1e-6, atol=1e-6)


@each_half
def test_f7_inside_a_users_module_and_its_gradients(half: str) -> None:
    """The layers' products are half; everything between is FP32, gradients too."""
    seen: list[torch.dtype] = []

    def code(h: Tensor) -> Tensor:
        a = torch.exp(F.log_softmax(h, -1))
        b = torch.cumsum(F.layer_norm(h, (8,)), -1) / (1 + h.norm(dim=-1, keepdim=True) + h.pow(2).sum())
        seen.extend((h.dtype, a.dtype, b.dtype))
        a.register_hook(lambda g: seen.append(g.dtype))
        return a + b

    model = Around(code)
    session = session_of(half, model)
    assert not any(train(session, model, randn(6, 8), 2))
    assert seen == [HALF[half], torch.float32, torch.float32, torch.float32] * 2
    session.restore()


# ---- F8: recurrent layers ---------------------------------------------------------------------------------

RECURRENT = [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell]


@each_half
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("asked", ["half", "fp32"])
def test_f8_recurrent_layers_run_in_the_format_that_the_plan_says(kind: Any, half: str, asked: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8))
    session = session_of(half if asked == "half" else f"{half}; 1=fp32", model)
    x = randn(5, 8) if issubclass(kind, nn.RNNCellBase) else randn(5, 3, 8)
    with session.autocast():
        out = model(x)
        y = out[0] if isinstance(out, tuple) else out
        loss = y.float().square().mean()
    assert session.plan is not None and session.plan.formats["1"] == (half if asked == "half" else "fp32")
    assert y.dtype is (HALF[half] if asked == "half" else torch.float32)
    assert f"1: {session.plan.formats['1']} (" in session.explain()
    assert not session.step(loss).skipped
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    session.restore()


@each_half
@pytest.mark.parametrize("options", [
    {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}, {"bias": False},
    {"num_layers": 2, "dropout": 0.1},
])  # fmt: skip
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_f8_neighbour_every_kind_of_them(kind: Any, options: dict[str, Any], half: str) -> None:
    torch.manual_seed(0)
    model = kind(8, 8, **options)
    session = session_of(half, model)
    packed = nn.utils.rnn.pack_padded_sequence(randn(5, 3, 8), torch.tensor([5, 3, 2]))
    for x in (randn(5, 3, 8), packed):
        with session.autocast():
            out, _ = model(x)
            y = out if isinstance(out, Tensor) else out.data
            loss = y.float().square().mean()
        assert y.dtype is HALF[half] and not session.step(loss).skipped
    session.restore()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_f8_neighbour_projections_of_an_lstm() -> None:
    model = nn.LSTM(8, 8, proj_size=4)
    session = session_of("bf16", model)
    with session.autocast():
        y, _ = model(randn(5, 3, 8))
    assert y.dtype is torch.bfloat16 and not session.step(y.float().square().mean()).skipped
    session.restore()


# ---- F9: a user's own autograd Function -------------------------------------------------------------------


class Product(torch.autograd.Function):
    """As people write it: no custom_fwd, no custom_bwd."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        Product.seen.append(grad.dtype)
        return grad @ w, grad.t() @ x


class Exponential(torch.autograd.Function):
    """An FP32 operator inside; its own result is what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.exp(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


class Setup(torch.autograd.Function):
    """The newer form: forward and what it saves apart."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return torch.mm(grad, w), torch.mm(grad.t(), x)


class Applies(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.code = nn.Linear(8, 8), code
        self.weight = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.first(x), self.weight)


OWN_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": Product.apply,
    "newer form": Setup.apply,
    "exponential": lambda x, w: Exponential.apply(x) @ w,
    "in a checkpoint": lambda x, w: checkpoint(Product.apply, x, w, use_reentrant=False),
    "in a reentrant checkpoint": lambda x, w: checkpoint(Product.apply, x, w, use_reentrant=True),
    "twice": lambda x, w: Product.apply(Product.apply(x, w), w),
}


@each_half
@pytest.mark.parametrize("form", OWN_FUNCTIONS)
@pytest.mark.parametrize("thread", [False, True])
def test_f9_a_function_without_decorators_has_its_dtypes_in_backward(
    form: str, half: str, thread: bool
) -> None:
    Product.seen.clear()
    model = Applies(OWN_FUNCTIONS[form])
    wide = Applies(OWN_FUNCTIONS[form])
    scaler = LossScaler("cpu", init_scale=2.0**10) if half == "fp16" else None
    session = session_of(half, model, scaler=scaler)
    x = randn(6, 8)
    with session.autocast():
        out = model(x)
    loss = out.float().square().mean()
    if thread:
        OwnThread.get(lambda: session.backward(loss))
    else:
        session.backward(loss)
    assert set(Product.seen) <= {HALF[half]}
    session.unscale()
    wide(x).square().mean().backward()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None and p.grad.dtype is torch.float32
        assert float((p.grad - q.grad).norm()) < 8 * torch.finfo(HALF[half]).eps * float(q.grad.norm())
    assert not session.step().skipped
    session.restore()


# ---- F10: BCELoss and its kin -----------------------------------------------------------------------------

PAIRS = [("half", "half"), ("half", "fp32"), ("fp32", "half"), ("fp32", "fp32")]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BCELoss": lambda p, y: nn.BCELoss()(p, y),
    "binary_cross_entropy": F.binary_cross_entropy,
    "weighted": lambda p, y: F.binary_cross_entropy(p, y, weight=torch.full((8,), 0.5, dtype=p.dtype)),
    "with logits": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "kl": lambda p, y: F.kl_div(p, y, reduction="batchmean"),
    "poisson": F.poisson_nll_loss,
    "soft margin": F.soft_margin_loss,
    "hinge": F.hinge_embedding_loss,
    "gaussian": lambda p, y: F.gaussian_nll_loss(p, y, p.float()),
    "multilabel": F.multilabel_soft_margin_loss,
}


@each_way
@each_half
@pytest.mark.parametrize("loss", LOSSES)
def test_f10_losses_are_computed_in_fp32(
    loss: str, half: str, way: str, sessions: dict[str, Session]
) -> None:
    probabilities = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).clamp(0.01, 0.99)
    labels = probabilities.flip(0).round()
    if loss == "gaussian" and way == "compiled":
        pytest.skip("torch's own gaussian_nll_loss asks whether a variance is negative: a graph break")
    for p, y in PAIRS:
        given = [
            probabilities.to(HALF[half]) if p == "half" else probabilities,
            labels.to(HALF[half]) if y == "half" else labels,
        ]
        out = WAYS[way](sessions[half], lambda a, y=given[1]: LOSSES[loss](a, y), given[0])
        assert out.dtype is torch.float32
        # two are Python code of torch's: a log-sigmoid and a difference are taken in half
        rounded = 1e-6 if loss not in ("multilabel", "gaussian") else torch.finfo(HALF[half]).eps
        torch.testing.assert_close(
            out, LOSSES[loss](given[0].float(), given[1].float()), rtol=4 * rounded, atol=1e-6
        )


@each_half
def test_f10_saturated_probabilities_cost_what_they_cost_in_fp32(
    half: str, sessions: dict[str, Session]
) -> None:
    """Half makes 1 of 0.9999, and the logarithm of 1 - p is held at -100, as torch's own."""
    p, y = torch.tensor([1.0, 0.0, 0.5], dtype=HALF[half]).requires_grad_(), torch.tensor([0.0, 1.0, 1.0])
    with sessions[half].autocast():
        loss = F.binary_cross_entropy(p, y, reduction="none")
    assert torch.equal(loss, F.binary_cross_entropy(p.float(), y, reduction="none"))


@each_half
def test_f10_trains_as_in_fp32(half: str) -> None:
    losses: dict[str, list[float]] = {}
    x = randn(16, 8)
    y = (x[:, :1] > 0).float()
    for precision in ("fp32", half):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())
        session = session_of(precision, model)
        losses[precision] = []
        for _ in range(20):
            with session.autocast():
                loss = nn.BCELoss()(model(x), y)
            report = session.step(loss)
            assert not report.skipped
            losses[precision].append(report.loss or 0.0)
        session.restore()
    torch.testing.assert_close(torch.tensor(losses[half]), torch.tensor(losses["fp32"]), rtol=1e-2, atol=0)


# ---- F12: a cosine above 1 --------------------------------------------------------------------------------

COSINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "torch": lambda a, b: torch.cosine_similarity(a, b, -1),
    "module": lambda a, b: nn.CosineSimilarity(-1)(a, b),
    "pairs": lambda a, b: F.cosine_similarity(a[:, None], b[None], dim=-1),
    "corrcoef": lambda a, b: torch.corrcoef(torch.stack([a[0], b[0]])),
}


@each_half
@pytest.mark.parametrize("form", COSINES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(columns=st.integers(2, 200), size=st.floats(-6, 6), factor=st.floats(0.1, 8), seed=st.integers(0, 999))
def test_f12_parallel_vectors_have_a_cosine_of_one_and_never_more(
    form: str, half: str, sessions: dict[str, Session], columns: int, size: float, factor: float, seed: int
) -> None:
    a = (randn(16, columns, seed=seed) * 2.0**size).to(HALF[half])
    for b in (a, (a.float() * factor).to(HALF[half]), -a):
        with sessions[half].autocast():
            cosine = COSINES[form](a, b)
            angle = torch.acos(cosine)
        assert cosine.dtype is torch.float32 and float(cosine.abs().max()) <= 1.0
        assert not bool(angle.isnan().any())


def test_f12_fp32_alone_goes_beyond_one(sessions: dict[str, Session]) -> None:
    """So that the test above has something to find: the same vectors without a session."""
    beyond = 0
    for seed in range(40):
        a = randn(64, 100, seed=seed).half()
        beyond += bool((F.cosine_similarity(a.float(), a.float()) > 1).any())
        with sessions["fp16"].autocast():
            assert not bool((F.cosine_similarity(a, a) > 1).any())
    assert beyond


@each_way
@each_half
def test_f12_everywhere_with_the_gradient_of_fp32(half: str, way: str, sessions: dict[str, Session]) -> None:
    a = randn(64, 100).to(HALF[half])
    assert float(WAYS[way](sessions[half], lambda x: F.cosine_similarity(x, x), a).max()) <= 1
    b = randn(64, 100, seed=1).to(HALF[half]).requires_grad_()
    with sessions[half].autocast():
        (grad,) = torch.autograd.grad(F.cosine_similarity(a, b).sum(), b)
    wide = b.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(F.cosine_similarity(a.float(), wide).sum(), wide)
    assert torch.equal(grad, expected.to(HALF[half]))


def test_f12_by_hand_an_angle_of_more_than_one_is_named() -> None:
    """A product of normalised vectors follows the policy, and may round beyond 1."""

    def angles(h: Tensor) -> Tensor:
        n = F.normalize(h, dim=-1)
        return torch.acos((n @ n.t()).diagonal()[:, None] + 0.01).expand(-1, 8)

    model = Around(angles)
    session = session_of("bf16", model)
    with session.autocast():
        loss = model(randn(6, 8)).float().mean()
    with pytest.raises(NonFiniteError, match="the first loss is nan"):
        session.step(loss)


# ---- F13: threads -----------------------------------------------------------------------------------------


@each_half
@pytest.mark.parametrize("form", ["F.softmax", "torch.exp", "x.sum", "F.layer_norm"])
def test_f13_worker_threads_that_enter_the_session_have_its_policy(
    form: str, half: str, sessions: dict[str, Session]
) -> None:
    """Several at once, each with its own flag: one without the session beside them keeps torch's."""
    x, session = randn(4, 8).to(HALF[half]), sessions[half]
    barrier = threading.Barrier(4)

    def work(enter: bool) -> tuple[torch.dtype, torch.dtype]:
        with session.autocast() if enter else nullcontext():
            barrier.wait(timeout=60)
            return FUNCTIONS[form](x).dtype, F.linear(randn(4, 8), torch.eye(8)).dtype

    threads = [OwnThread(lambda enter=enter: work(enter)) for enter in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inside, outside = (torch.float32, HALF[half]), (HALF[half], torch.float32)
    assert [t.result for t in threads] == [inside, outside, inside, outside]


@each_half
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_f13_backward_in_a_thread_of_its_own_gives_the_same_bits(half: str, reentrant: bool | None) -> None:
    def gradients(thread: bool) -> list[Tensor]:
        def code(h: Tensor) -> Tensor:
            inner = lambda h: F.layer_norm(h, (8,)).exp() * h.softmax(-1)  # noqa: E731
            return inner(h) if reentrant is None else checkpoint(inner, h, use_reentrant=reentrant)

        model = Around(code)
        session = session_of(half, model)
        with session.autocast():
            loss = model(randn(6, 8)).float().square().mean()
        if thread:
            OwnThread.get(lambda: session.backward(loss))
        else:
            session.backward(loss)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        session.restore()
        return grads

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)


@each_half
def test_f13_a_step_taken_in_a_thread(half: str) -> None:
    weights = []
    for thread in (False, True):
        model = Around(lambda h: h.softmax(-1))
        session = session_of(half, model)
        run = lambda model=model, session=session: train(session, model, randn(6, 8), 3)  # noqa: E731
        assert not any(OwnThread.get(run) if thread else run())
        weights.append([p.detach().clone() for p in model.parameters()])
        session.restore()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_f13_a_watched_step_leaves_nothing_behind_in_any_thread(sessions: dict[str, Session]) -> None:
    """FP16's first step is watched, without compiled code: two threads at once, and a step inside."""
    model = Around(lambda h: h.softmax(-1))
    session = session_of("fp16", model)
    first, second = threading.Event(), threading.Event()

    def enters_first() -> None:
        with session.autocast():
            first.set()
            assert second.wait(timeout=60)

    def leaves_last() -> None:
        assert first.wait(timeout=60)
        with session.autocast():
            second.set()
            thread.join()

    thread = OwnThread(enters_first)
    thread.start()
    OwnThread.get(leaves_last)
    assert thread.error is None
    with session.autocast():
        assert not session.step(model(randn(6, 8)).float().square().mean()).skipped
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.compile(torch.sin, backend=counter)(randn(2))
    assert counter.frame_count == 1
    session.restore()


# ---- F14: torch.compile -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A model with a part of every kind: products, a norm, a softmax, user-written statistics, attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        weights = torch.softmax(self.q(h) @ self.k(h).t() / 4, -1)
        h = weights @ self.v(h)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(h)


@pytest.mark.parametrize("precision", ["bf16", "bf16; head=fp32", "fp32; q=bf16; k=bf16", "bf16; norm=fp32"])
def test_f14_a_compiled_model_has_eagers_formats_without_breaks_or_recompiles(precision: str) -> None:
    results = {}
    for way in ("eager", "compiled"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = Mixed()
        called: Any = torch.compile(model, backend=counter, fullgraph=True) if way == "compiled" else model
        session = session_of(precision, called, emulate=False)
        outs = []
        for step in range(6):
            with session.autocast():
                out = called(randn(6, 8, seed=step))
                loss = F.cross_entropy(out, torch.arange(6) % 4)
            outs.append(out.detach())
            assert not session.step(loss).skipped
        results[way] = outs, [p.detach().clone() for p in model.parameters()]
        if way == "compiled":
            assert counter.frame_count == 1  # one graph, once
        session.restore()
    for a, b in zip(results["eager"][0], results["compiled"][0], strict=True):
        assert a.dtype is b.dtype
    for a, b in zip(results["eager"][1], results["compiled"][1], strict=True):
        # products and sums may run in another kernel when compiled: bf16's last digit, through 6 steps
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("form", sorted({*FUNCTIONS} - {"2 ** x", "rpow"}))
def test_f14_neighbour_a_compiled_function_has_eagers_numbers(
    form: str, sessions: dict[str, Session]
) -> None:
    x = randn(4, 8).bfloat16()
    a, b = (WAYS[way](sessions["bf16"], FUNCTIONS[form], x) for way in ("eager", "compiled"))
    assert a.dtype is b.dtype
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_f14_neighbour_shapes_that_change_and_evaluation_compile_no_more_than_without_us() -> None:
    """A last batch that is smaller, evaluation under no_grad: as often as torch compiles plain autocast."""
    counts = []
    for ours in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = Mixed()
        called: Any = torch.compile(model, backend=counter)
        session = session_of("bf16", called, emulate=False) if ours else None
        for step, rows in enumerate((8, 8, 5, 8, 3)):
            context = session.autocast() if session is not None else torch.autocast("cpu", torch.bfloat16)
            with context:
                loss = F.cross_entropy(called(randn(rows, 8, seed=step)), torch.arange(rows) % 4)
            if session is not None:
                session.step(loss)
            else:
                loss.backward()
            with context if session is None else session.autocast(), torch.no_grad():
                called(randn(8, 8))
        counts.append(counter.frame_count)
        if session is not None:
            session.restore()
    assert 0 < counts[1] <= counts[0]


def test_f14_emulation_says_that_it_is_eager_only() -> None:
    with pytest.raises(SessionError, match="eager code only"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session_of("fp16", torch.compile(Mixed(), backend="aot_eager"))
