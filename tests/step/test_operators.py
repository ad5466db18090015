"""The operator table at work: where it is in force, where it isn't, and that nothing of it stays behind."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from equipoise.session import Session
from equipoise.step.operators import Kernels

HALF = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()

SENSITIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": lambda x: torch.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "operator": lambda x: x**2,
    "module": nn.Softmax(-1),
    "norm": lambda x: F.layer_norm(x, (8,)),
    "sum": lambda x: x.sum(),
}


def session_of(model: nn.Module | None = None, **options: Any) -> Session:
    model = model or nn.Linear(8, 8)
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"precision": "bf16", **options})


@pytest.fixture
def session() -> Iterator[Session]:
    session = session_of()
    yield session
    session.restore()


@pytest.mark.parametrize("form", SENSITIVE)
def test_fp32_in_the_session_and_torchs_own_outside(form: str, session: Session) -> None:
    call = SENSITIVE[form]
    with session.autocast():
        assert call(HALF).dtype is torch.float32
    assert call(HALF).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(HALF).dtype is torch.bfloat16


def test_a_dtype_that_the_user_asks_for_is_given(session: Session) -> None:
    with session.autocast():
        assert torch.softmax(HALF, -1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert HALF.sum(dtype=torch.float64).dtype is torch.float64


def test_autocast_that_the_user_switches_off_stays_off(session: Session) -> None:
    with session.autocast(), torch.autocast("cpu", enabled=False):
        assert torch.softmax(HALF, -1).dtype is torch.bfloat16


def test_torchs_own_lists_on_request() -> None:
    session = session_of(sensitive="torch")
    with session.autocast():
        assert torch.softmax(HALF, -1).dtype is torch.bfloat16
    session.restore()


def test_f13_a_worker_thread_that_enters_the_session_has_its_formats(session: Session) -> None:
    found: dict[str, torch.dtype] = {}

    def work(enter: bool) -> None:
        if enter:
            with session.autocast():
                found["inside"] = torch.softmax(HALF, -1).dtype
        else:
            found["outside"] = torch.softmax(HALF, -1).dtype

    for enter in (True, False):
        with session.autocast():
            thread = threading.Thread(target=work, args=(enter,))
            thread.start()
            thread.join()
    assert found == {"inside": torch.float32, "outside": torch.bfloat16}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.dtypes: list[torch.dtype] = []

    def block(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x).softmax(-1)
        self.dtypes.append(scores.dtype)
        return scores * x

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        if reentrant is None:
            return self.out(self.block(x))
        return self.out(checkpoint(self.block, x, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("from_a_thread", [True, False])
def test_a_recomputed_forward_has_the_formats_of_the_first(reentrant: bool, from_a_thread: bool) -> None:
    gradients = []
    for way in (None, reentrant):
        torch.manual_seed(0)
        model = Attention()
        session = session_of(model)
        x = HALF.float().requires_grad_()
        with session.autocast():
            loss = model(x, way).float().square().mean()
        if from_a_thread:
            thread = threading.Thread(target=session.backward, args=(loss,))
            thread.start()
            thread.join()
        else:
            session.backward(loss)
        assert set(model.dtypes) == {torch.float32} and len(model.dtypes) == (1 if way is None else 2)
        gradients.append([p.grad for p in model.parameters()])
        session.restore()
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_so_it_has_when_somebody_else_calls_backward(reentrant: bool, session: Session) -> None:
    """A gradient penalty's torch.autograd.grad outside of the context; plain autocast keeps torch's list."""
    model = Attention()
    for context, expected in (
        (session.autocast, torch.float32),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.bfloat16),
    ):
        model.dtypes.clear()
        x = HALF.float().requires_grad_()
        with context():
            loss = model(x, reentrant).float().square().mean()
        if reentrant:
            loss.backward()
        else:
            torch.autograd.grad(loss, x, create_graph=True)
        assert model.dtypes == [expected] * 2
    assert torch.softmax(HALF, -1).dtype is torch.bfloat16


# torch builds its table of forward-mode rules with torch.jit.script at the first jvp
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_torch_func_sees_the_table(session: Session) -> None:
    dtypes = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x.bfloat16(), -1)
        dtypes.append(y.dtype)
        return y.square().sum()

    x = HALF.float()
    with session.autocast():
        grads = torch.func.vmap(torch.func.grad(loss))(x)
        _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    assert set(dtypes) == {torch.float32} and grads.shape == x.shape and tangent.dtype is torch.float32


class Product(torch.autograd.Function):
    """As people write it: no custom_fwd, no custom_bwd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        Product.seen = grad.dtype
        return grad @ w, grad.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_f9_a_function_without_decorators(precision: str) -> None:
    model = Custom()
    session = session_of(model, precision=precision)
    with session.autocast():
        y = model(HALF.float())
    report = session.step(y.float().square().mean())
    assert not report.skipped and Product.seen is y.dtype and y.dtype is not torch.float32
    session.restore()


def test_f9_a_function_outside_of_a_session_is_left_alone(session: Session) -> None:
    x, w = HALF.float().requires_grad_(), torch.eye(8, requires_grad=True)
    with torch.autocast("cpu", enabled=False):
        Product.apply(x, w).sum().backward()
    assert Product.seen is torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_f8_recurrent_layers_run_in_the_format_they_were_given(kind: Any, precision: str) -> None:
    model = kind(8, 8)
    session = session_of(model, precision=precision)
    x = torch.randn(3, 8) if isinstance(model, nn.RNNCellBase) else torch.randn(5, 3, 8)
    with session.autocast():
        out = model(x)
        y = out[0] if isinstance(out, tuple) else out
        loss = y.float().square().mean()
    assert y.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert not session.step(loss).skipped
    session.restore()


def test_packed_sequences_too() -> None:
    model = nn.GRU(8, 8)
    session = session_of(model)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), torch.tensor([5, 3, 2]))
    with session.autocast():
        out, _ = model(packed)
    assert out.data.dtype is torch.bfloat16
    session.restore()


# -- nothing stays behind


def kernels_of_softmax() -> str:
    dump = torch._C._dispatch_dump("aten::softmax.int")
    return "\n".join(line for line in dump.splitlines() if line.startswith("AutocastCPU"))


def test_kernels_come_with_the_first_session_and_go_with_the_last() -> None:
    function_apply = torch.autograd.function.BackwardCFunction.apply
    generator = checkpoints._checkpoint_without_reentrant_generator
    tag, before = torch.compiler.config.cache_key_tag, kernels_of_softmax()
    first, second = session_of(), session_of()
    assert kernels_of_softmax() != before and torch.compiler.config.cache_key_tag != tag
    first.restore()
    first.restore()
    with second.autocast():
        assert torch.softmax(HALF, -1).dtype is torch.float32
    second.restore()
    assert kernels_of_softmax() == before and torch.compiler.config.cache_key_tag == tag
    assert torch.autograd.function.BackwardCFunction.apply is function_apply
    assert checkpoints._checkpoint_without_reentrant_generator is generator
    assert torch.softmax(HALF, -1).dtype is torch.bfloat16


def test_a_session_that_is_forgotten_takes_its_kernels_along() -> None:
    before = kernels_of_softmax()
    session = session_of()
    del session
    gc.collect()
    assert kernels_of_softmax() == before


def test_an_fp32_session_brings_no_kernels() -> None:
    before = kernels_of_softmax()
    session = session_of(precision="fp32")
    assert kernels_of_softmax() == before
    session.restore()


def test_a_device_without_autocast_keys_is_let_be() -> None:
    Kernels("meta").remove()
