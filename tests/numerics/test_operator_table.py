"""Every operator of the table in each of its forms: format, error against float64, gradient; and elsewhere.

The calls and their inputs are those of ``bench/operators.py``, which writes docs/operators.md. Where a result
must be FP32's own to the bit, its error against float64 is FP32's own as well.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from equipoise.sensitive import OPERATORS
from equipoise.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import operators as bench
from operator_calls import ROWS, UNCALLED, Row

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDE_KINDS = ("fp32", "fp32_out", "softmax", "cross_entropy", "promote")

# torch warns of its older and unfinished operators, and about itself while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
each_half = pytest.mark.parametrize("half", HALF)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def policies() -> Iterator[dict[str, bench.Policy]]:
    policies = {half: bench.Policy(half) for half in HALF}
    yield policies
    for policy in policies.values():
        policy.restore()


def test_every_operator_of_the_table_is_called_or_says_why_not() -> None:
    called = [row.name for row in ROWS]
    assert len(called) == len(set(called))
    assert {*called, *UNCALLED} == {row.name for row in OPERATORS}


@each_half
@each_row
def test_format_error_and_gradient(row: Row, half: str, policies: dict[str, bench.Policy]) -> None:
    """In every form; recomputed and in a thread too."""
    kind = bench.TABLE[row.name].kind
    found = bench.measure(row, half, policies[half])
    expected = {"float32", "int64"} if kind in WIDE_KINDS else {str(HALF[half])[6:]}
    assert set(found.dtypes.values()) <= expected
    assert found.checkpointed and found.threaded
    if kind in WIDE_KINDS:
        assert found.as_fp32 and found.grad_as_fp32 is not False
    else:  # one rounding of the result; recurrent layers round their states as well
        assert found.ours <= 4 * torch.finfo(HALF[half]).eps


def test_each_call_reaches_its_operator() -> None:
    """Else a line of the table would be true of something else."""
    spans: dict[str, str] = {}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for row in ROWS:
            tensors = bench.inputs(row.recipe, torch.float32)
            for call in row.calls:
                function = bench.callable_of(call, tensors, torch.float32, torch.bfloat16)
                spans[f"{row.name}: {call}"] = f"aten::{row.name.partition('.')[0]}"
                with record_function(f"{row.name}: {call}"):
                    function(tensors)
    inside: dict[str, set[str]] = {span: set() for span in spans}
    for event in seen.events():
        parent = event.cpu_parent
        while parent is not None and parent.name not in inside:
            parent = parent.cpu_parent
        if parent is not None:
            inside[parent.name].add(event.name)
    assert not {span: inside[span] for span, operator in spans.items() if operator not in inside[span]}


def test_half_alone_would_not_do() -> None:
    """What the table is for, where the reason says overflow: FP16 by itself on the same inputs."""
    policy = bench.Policy("fp16")
    for row in ROWS:
        if row.name in ("exp", "square", "sum", "mse_loss", "adaptive_avg_pool3d", "cov", "soft_margin_loss"):
            found = bench.measure(row, "fp16", policy)
            assert found.own == float("inf") and found.ours < 1e-6, row.name
    policy.restore()


ONE_OF_EACH_KIND = (
    "exp", "layer_norm", "var", "mse_loss", "linalg_matrix_exp", "fft_rfft", "upsample_nearest2d.vec",
    "upsample_bilinear2d.vec", "sum", "linalg_vector_norm", "softmax.int", "log_softmax.int", "index_copy",
    "cross_entropy_loss", "max_pool3d", "conv2d.padding", "linear", "lstm_cell",
    "scaled_dot_product_attention", "batch_norm",
)  # fmt: skip


def test_one_of_each_kind_compiled() -> None:
    rows = [row for row in ROWS if row.name in ONE_OF_EACH_KIND]
    assert {bench.TABLE[row.name].kind for row in rows} == {row.kind for row in OPERATORS}
    assert bench.compiled(rows, "bf16") == dict.fromkeys((row.name for row in rows), True)


@pytest.mark.slow
def test_the_page_says_what_is_measured() -> None:
    assert not bench.differences(bench.measure_all(ROWS), bench.PAGE.read_text(encoding="utf-8"))


def test_the_page_has_a_line_for_every_operator() -> None:
    assert set(bench.read_page(bench.PAGE.read_text(encoding="utf-8"))) == {row.name for row in ROWS}


def test_a_stale_page_is_noticed() -> None:
    row = next(row for row in ROWS if row.name == "exp")
    policies = {half: bench.Policy(half) for half in HALF}
    results = {"exp": [bench.measure(row, half, policy) for half, policy in policies.items()]}
    results["exp"][0].compiled = True
    text = bench.page(results)
    assert not bench.differences(results, text)
    stale = text.replace("FP32 | FP32 |", "FP32 | half |")
    assert any("method" in d for d in bench.differences(results, stale))
    results["exp"][0].ours *= 100
    assert any("ours" in d for d in bench.differences(results, text))
    for policy in policies.values():
        policy.restore()


# -- torch.func, and norms that users write


def session_of(half: str, model: nn.Module | None = None) -> Session:
    model = model or nn.Linear(8, 8)
    return Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision=half, emulate=half == "fp16"
    )


SCALAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda x: F.layer_norm(x, (8,)).exp().sum(),
    "fp32_out": lambda x: x.cumsum(-1).norm(),
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "promote": lambda x: torch.addcmul(x, x.float(), x).sum(),
    "inside": lambda x: F.instance_norm(x[None, None]).square().sum(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@each_half
@pytest.mark.parametrize("kind", SCALAR)
def test_torch_func_gives_the_gradients_of_autograd(kind: str, half: str) -> None:
    """vmap of grad, and of the function itself, row by row: as a loop over rows."""
    scalar, session = SCALAR[kind], session_of(half)
    x = torch.randn(3, 8).to(HALF[half])
    with session.autocast():
        values = torch.func.vmap(scalar)(x)
        grads = torch.func.vmap(torch.func.grad(scalar))(x)
        expected, rows = [], []
        for row in x:
            row.requires_grad_()
            value = scalar(row)
            expected.append(torch.autograd.grad(value, row)[0])
            rows.append(value.detach())
    assert values.dtype is torch.float32 and grads.dtype is HALF[half]
    # a batching rule may sum in another order; a last digit of half then differs
    torch.testing.assert_close(values, torch.stack(rows), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads, torch.stack(expected), rtol=0, atol=4 * torch.finfo(HALF[half]).eps)
    session.restore()


IN_HALF_UNDER_VMAP = {"cov", "corrcoef", "dot", "vdot", "tensordot", "binary_cross_entropy_with_logits"}
"""Their parts, products and a log-sigmoid, meet torch's own autocast again under vmap: docs/operators.md."""


def test_every_fp32_operator_under_vmap(policies: dict[str, bench.Policy]) -> None:
    """vmap takes operators apart before autocast sees them: without our rules softmax is in half there."""
    half, wrong, ran = torch.bfloat16, set(), set()
    for row in (row for row in ROWS if bench.TABLE[row.name].kind in WIDE_KINDS):
        given = bench.leaves(bench.inputs(row.recipe, half), half, all_of_them=False)
        for call in row.calls:
            function = bench.callable_of(call, given, torch.float32, half)

            def numbers(*values: torch.Tensor, function: Any = function, names: Any = given) -> Any:
                return tuple(bench.numbers(function(dict(zip(names, values, strict=True)))))

            with policies["bf16"].autocast(), torch.no_grad():
                expected = numbers(*given.values())
                twice = [torch.stack([t, t]) for t in given.values()]
                try:
                    found = torch.func.vmap(numbers, randomness="different")(*twice)
                except RuntimeError:  # torch has no batching for it
                    continue
            ran.add(row.name)
            for a, b in zip(found, expected, strict=True):
                if b.is_floating_point():
                    far = (a[1].double() - b.double()).abs().amax() > 1e-5 * b.abs().amax()
                    if a.dtype is not b.dtype or far:
                        wrong.add(row.name)
    assert wrong == IN_HALF_UNDER_VMAP
    assert len(ran) > 190


class OwnNorm(nn.Module):
    """Layer norm by hand, of mean and variance, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        centred = x - x.mean(-1, keepdim=True)
        self.seen = centred
        return self.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@each_half
@pytest.mark.parametrize("size", [300.0, 2.0**-10])
def test_a_norm_written_by_hand(half: str, size: float) -> None:
    """Its squares leave FP16's range, or vanish in it; the result has the error of its FP32 inputs alone."""
    model = OwnNorm()
    nn.init.eye_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    x = (torch.randn(5, 64) * size).to(HALF[half]).float()
    x[:, 0] = 4 * size
    session = session_of(half, model)
    with session.autocast():
        out = model(x)
    assert out.dtype is torch.float32 and model.seen.dtype is torch.float32
    exact = x.double() - x.double().mean(-1, keepdim=True)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    for _ in range(30):  # FP16's first scale may be too large for these gradients
        with session.autocast():
            loss: Any = model(x).square().mean()
        if not session.step(loss).skipped:
            break
    assert session.taken_count == 1 and all(p.isfinite().all() for p in model.parameters())
    session.restore()
