"""Misuse of a Session and of a LossScaler: an error that names it, and nothing is changed by it.

Each refusal is made inside :func:`refused`, which compares weights, optimizer state, scaler state, counters
and random generators bit for bit before and after. FP16 is emulated: its numbers on any CPU.
"""

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise import LossScaler, Plan, Policy, Session
from equipoise.errors import FormatError, NonFiniteError, PolicyError, SessionError
from recorded import machine

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
PRECISIONS = ["fp32", "bf16", "fp16"]
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(autouse=True)
def recorded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def session_of(model: nn.Module, precision: Any = "fp16", **options: Any) -> Session:
    optimizer = options.pop("optimizer", None) or optimizer_of(model)
    if "fp16" in str(precision):
        options.setdefault("scaler", LossScaler("cpu", init_scale=2.0**10))  # the first step is taken
    return Session(model, optimizer, precision=precision, emulate="16" in str(precision), **options)


def loss_of(session: Session, model: nn.Module) -> torch.Tensor:
    with session.autocast():
        return F.mse_loss(model(X).float(), Y)


def trained(precision: str = "fp16", steps: int = 2) -> tuple[nn.Module, Session]:
    """Some way into training: there is a momentum, a scale, a count."""
    model = small_model()
    session = session_of(model, precision)
    for _ in range(steps):
        assert not session.step(loss_of(session, model)).skipped
    return model, session


def state_of(*objects: Any) -> list[Any]:
    """A copy of everything that must survive a refusal."""
    state: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    for thing in objects:
        if isinstance(thing, Session):
            session = thing.state_dict() | {"model": thing._root.state_dict(), "taken": thing.step_count}
            state.append(copy.deepcopy(session))
        elif isinstance(thing, nn.Module):
            state.append(copy.deepcopy(thing.state_dict()))
            state.append([sorted(vars(m)) for m in thing.modules()])  # nor a hook or a forward left on it
        else:
            state.append(copy.deepcopy(thing.state_dict()))
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@contextmanager
def refused(error: type[Exception], says: str, *objects: Any) -> Iterator[None]:
    """What is inside raises ``error`` with these words and changes nothing of ``objects`` and generators."""
    before = state_of(*objects)
    with pytest.raises(error, match=says):
        yield
    assert same(before, state_of(*objects))


def test_the_comparison_sees_a_single_bit() -> None:
    model, session = trained()
    before = state_of(model, session)
    assert same(before, state_of(model, session))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
    assert not same(before, state_of(model, session))


# ---- unknown formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("fp17", "did you mean 'fp16'"), ("bf-16", "did you mean 'bf16'"), ("int8", "allowed: fp32"),
        ("fp8_e4m3", "allowed"), ("float8_e4m3fn", "allowed"), ("int4", "allowed"), ("tf32", "did you mean"),
        ("", "allowed"), ("auto; 0=fp32", "unknown format 'auto'"), ("bf16; 0=half2", "format 'half2'"),
        (torch.int8, "torch.int8"), (torch.float64, "torch.float64"), (torch.float8_e5m2, "allowed"),
        (None, "allowed"),
    ],
)  # fmt: skip
def test_unknown_formats(asked: Any, hint: str) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    with refused(FormatError, hint, model, optimizer):
        Session(model, optimizer, precision=asked)
    with refused((FormatError, PolicyError), "format|policy", model, optimizer):  # type: ignore[arg-type]
        Session(model, optimizer, plan=Plan(policy=Policy(asked)))


def test_an_unknown_format_in_a_plans_file(tmp_path: Any) -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    file = tmp_path / "plan.toml"
    Plan(policy=Policy("bf16")).save(file)
    file.write_text(file.read_text().replace('policy = "bf16"', 'policy = "bf61"'))
    with refused(PolicyError, "unknown format 'bf61'.*did you mean 'bf16'", model, optimizer):
        Session(model, optimizer, plan=str(file))


# ---- integer and quantised parameters ---------------------------------------------------------------------


def integer_layer(dtype: torch.dtype) -> nn.Sequential:
    model = small_model()
    model[0].weight = nn.Parameter(torch.ones(8, 6).to(dtype), requires_grad=False)
    return model


NO_FLOATS = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NO_FLOATS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_layer_with_integer_or_fp8_weights_can_not_compute_in_half(
    dtype: torch.dtype, precision: str
) -> None:
    model = integer_layer(dtype)
    optimizer = optimizer_of(model)
    with refused(
        FormatError, rf"layer '0' can't compute in {precision}: its weight is {dtype}.*'fp32'", optimizer
    ):
        session_of(model, precision, optimizer=optimizer)
    session_of(model, f"{precision}; 0=fp32").restore()  # as the message says: left as it is
    session = Session(model, optimizer, plan_time_s=0)  # and so does auto
    assert session.plan is None or "fp32" in session.plan.formats.values()
    session.restore()


class Table(nn.Module):
    """A frozen integer parameter that is only looked up: nothing wrong with that."""

    def __init__(self) -> None:
        super().__init__()
        self.index = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)
        self.body = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, self.index])


@each_precision
def test_integers_that_no_product_reads_are_no_error(precision: str) -> None:
    model = Table()
    session = session_of(model, precision)
    for _ in range(2):
        assert not session.step(loss_of(session, model)).skipped
    assert torch.equal(model.index, torch.arange(6).flip(0)) and model.index.dtype is torch.int64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRUCell])
def test_quantised_layers(kind: Any, precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        quantised = quantize_dynamic(nn.Sequential(kind(8, 8)), {kind}).eval()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.frozen, self.last = nn.Linear(6, 8), quantised, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                h = self.head(x)
                out = self.frozen(h[None] if kind is nn.LSTM else h)
            seen.append((out[0] if isinstance(out, tuple) else out).dtype)
            return self.last(x)

    seen: list[torch.dtype] = []
    model = Model()
    optimizer = optimizer_of(model.last)
    with refused(
        FormatError, rf"layer 'frozen.0.*is quantised.*can't compute in {precision}.*'fp32'", optimizer
    ):
        session_of(model, precision, optimizer=optimizer)
    session = session_of(model, f"{precision}; frozen=fp32", optimizer=optimizer)
    assert not session.step(loss_of(session, model)).skipped
    assert seen == [torch.float32]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_auto_leaves_a_model_with_quantised_layers_in_fp32() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        model = nn.Sequential(quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear}), small_model())
    session = Session(model, optimizer_of(model), plan_time_s=0)
    session.step(F.mse_loss(model(X), Y))
    assert "quantised" in session.explain() and session.plan is not None
    assert set(session.plan.formats.values()) == {"fp32"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_is_half_already(dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    optimizer = optimizer_of(model)
    for precision in (*PRECISIONS, "auto"):
        with refused(FormatError, r"takes FP32 weights.*Leave out \.half\(\)", optimizer):
            session_of(model, precision, optimizer=optimizer)


# ---- shared weights in two formats ------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b: nn.Module = nn.Embedding(6, 6) if kind == "embedding" else nn.Linear(6, 6)
        if kind == "bias":
            self.b.bias = self.a.bias
        else:
            self.b.weight = self.a.weight
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(x.argmax(1)) if isinstance(self.b, nn.Embedding) else self.b(x)
        return self.out(self.a(x) + h)


@pytest.mark.parametrize("kind", ["linear", "embedding", "bias"])
@pytest.mark.parametrize("policy", ["bf16; b=fp16", "fp16; b=bf16", "fp32; a=bf16; b=fp16"])
def test_one_weight_in_two_half_formats(kind: str, policy: str) -> None:
    model = Tied(kind)
    optimizer = optimizer_of(model)
    with refused(
        PolicyError, r"one weight is shared by a\.\w+ \(.*give both layers the same", model, optimizer
    ):
        Session(model, optimizer, precision=policy, emulate=True)


@pytest.mark.parametrize("kind", ["linear", "embedding", "bias"])
@pytest.mark.parametrize("policy", ["bf16; b=fp32", "fp32; b=bf16", "fp16", "fp16; a=fp32"])
def test_one_weight_in_half_and_in_fp32_trains(kind: str, policy: str) -> None:
    model = Tied(kind)
    session = session_of(model, policy)
    before = model.a.weight.detach().clone()
    assert not session.step(loss_of(session, model)).skipped
    assert not torch.equal(before, model.a.weight) and model.a.weight.dtype is torch.float32


# ---- states from elsewhere --------------------------------------------------------------------------------

SCALER_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no scale": lambda s: {k: v for k, v in s.items() if k != "scale"},
    "another library's": lambda s: {"cur_scale": 1024.0, "cur_iter": 3, "dynamic": True},
    "nan": lambda s: s | {"scale": math.nan},
    "a floor of text": lambda s: s | {"min_scale": "low"},
    "floor above cap": lambda s: s | {"min_scale": 8.0, "max_scale": 4.0},
    "a scale of text": lambda s: s | {"scale": "large"},
    "no number": lambda s: s | {"scale": None},
    "text": lambda s: "scale=3",
    "counts of text": lambda s: s | {"overflows_left": "many"},
}


@pytest.mark.parametrize("what", SCALER_STATES)
def test_a_scaler_state_of_another_version_in_a_sessions_state(what: str) -> None:
    model, session = trained()
    state = copy.deepcopy(session.state_dict())
    state["scaler"] = SCALER_STATES[what](state["scaler"])
    with refused(SessionError, "scaler|min_scale", model, session):
        session.load_state_dict(state)


@pytest.mark.parametrize("what", SCALER_STATES)
def test_a_scaler_state_of_another_version(what: str) -> None:
    model, session = trained()
    scaler = session.scaler
    with refused(SessionError, "scaler state|min_scale", model, scaler):
        scaler.load_state_dict(SCALER_STATES[what](scaler.state_dict()))


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {k: v for k, v in state.items() if k != key}


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda s: s | {"version": 7}, "version 7"),
    "no version": (_without("version"), "version None"),
    "no optimizers": (_without("optimizers"), "lacks optimizers"),
    "no generators": (_without("rng"), "lacks rng"),
    "a second optimizer": (lambda s: s | {"optimizers": s["optimizers"] * 2}, "holds 2 optimizers"),
    "a schedule": (lambda s: s | {"lr_schedulers": [{}]}, "holds 1 lr_schedulers"),
    "something registered": (lambda s: s | {"registered": {"loader": {}}}, "register the same names"),
    "a plan for another model": (
        lambda s: s | {"plan": Plan(policy=Policy("bf16"), formats={"x": "bf16"}).to_toml()}, "doesn't fit",
    ),
    "another plan schema": (lambda s: s | {"plan": "schema = 99"}, "another version"),
}  # fmt: skip


@each_precision
@pytest.mark.parametrize("what", STATES)
def test_a_session_state_that_does_not_fit(what: str, precision: str) -> None:
    model, session = trained(precision)
    change, says = STATES[what]
    state = change(copy.deepcopy(session.state_dict()))
    with refused((SessionError, PolicyError), says, model, session):  # type: ignore[arg-type]
        session.load_state_dict(state)
    assert not session.step(loss_of(session, model)).skipped


@each_precision
def test_a_state_of_another_models_optimizer(precision: str) -> None:
    model, session = trained(precision)
    other = nn.Linear(6, 2)
    theirs = session_of(other, precision)
    theirs.step(loss_of(theirs, other))
    state = copy.deepcopy(theirs.state_dict()) | {"plan": session.state_dict()["plan"]}
    with refused(
        SessionError, r"SGD has groups of \[2\] parameters, this optimizer of \[4\]", model, session
    ):
        session.load_state_dict(state)


def test_of_two_optimizers_none_is_loaded_when_the_second_does_not_fit() -> None:
    model = small_model()
    optimizers = [optimizer_of(model[0]), optimizer_of(model[3])]
    session = session_of(model, "fp16", optimizer=optimizers)
    session.step(loss_of(session, model))
    state = copy.deepcopy(session.state_dict())
    state["optimizers"][1]["param_groups"][0]["params"] = [0]
    session.step(loss_of(session, model))
    with refused(SessionError, "groups of", model, session):
        session.load_state_dict(state)


# ---- a first loss that isn't finite -----------------------------------------------------------------------


@each_precision
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_first_loss_that_is_not_finite(value: float, precision: str, accumulate: bool) -> None:
    model = small_model()
    session = session_of(model, precision)
    with session.autocast():
        loss = model(X).float().sum() * 0 + value
    with refused(
        NonFiniteError, f"the first loss is {value}, and nothing was trained yet.*Cause", model, session
    ):
        session.backward(loss) if accumulate else session.step(loss)
    assert all(p.grad is None for p in model.parameters())
    assert not session.step(loss_of(session, model)).skipped  # and the loop can go on


# ---- a loss that can't go backward ------------------------------------------------------------------------

LOSSES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "one a sample": (lambda m: m(X).sum(-1), r"the loss is \(8,\); one number is needed.*\.mean\(\)"),
    "a matrix": (lambda m: m(X), r"the loss is \(8, 2\)"),
    "nothing": (lambda m: m(X)[:0].sum(-1), r"the loss is \(0,\)"),
    "a number": (lambda m: 3.0, "the loss is float"),
    "item()": (lambda m: m(X).sum().item(), "the loss is float"),
    "a tuple": (lambda m: (m(X).sum(), 1), "the loss is tuple"),
    "an output object": (lambda m: {"loss": m(X).sum()}, "the loss is dict"),
    "detached": (lambda m: m(X).sum().detach(), "no gradient.*detached"),
    "a copy": (lambda m: torch.tensor(m(X).sum().item()), "no gradient.*a new tensor"),
    "an integer": (lambda m: m(X).argmax().sum(), r"the loss is torch\.int64; a real number"),
    "complex": (lambda m: m(X).sum() * 1j, r"the loss is torch\.complex64; a real number"),
    "a closure by position": (lambda m: lambda: m(X).sum(), r"a closure is passed by name: .*closure=\.\.\."),
    "the loss function": (lambda m: nn.MSELoss(), "the loss is a MSELoss; a closure is passed by name"),
}


@each_precision
@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_loss_that_is_not_one_real_number_with_a_gradient(what: str, precision: str, call: str) -> None:
    model, session = trained(precision)
    make, says = LOSSES[what]
    model.eval()  # dropout draws no number: what the loss itself draws is not the session's
    loss = make(model)
    with refused(SessionError, says, model, session):
        getattr(session, call)(loss)
    with refused(SessionError, "before backward", model, session):
        session.unscale()  # the refused loss is no backward
    assert not session.step(loss_of(session, model)).skipped


@each_precision
def test_a_forward_under_no_grad(precision: str) -> None:
    model, session = trained(precision)
    with torch.no_grad(), session.autocast():
        loss = F.mse_loss(model(X).float(), Y)
    with refused(SessionError, "no gradient: its forward ran under no_grad", model, session):
        session.step(loss)


@each_precision
def test_a_loss_that_went_backward_before(precision: str) -> None:
    model, session = trained(precision)
    loss = loss_of(session, model)
    loss.backward()
    says = "no backward of this session made" if precision == "fp16" else "went backward before"
    with refused(SessionError, says, model, session):
        session.step(loss)
    session.drop()
    assert not session.step(loss_of(session, model)).skipped


@each_precision
def test_a_backward_that_fails_half_way_leaves_no_half_gradients(precision: str) -> None:
    model, session = trained(precision)

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError("no room")

    with session.autocast():
        h = model[0](X)
        h.register_hook(fail)
        loss = F.mse_loss(model[3](h).float(), Y)
    with refused(MemoryError, "no room", model, session):
        try:
            session.step(loss)
        except MemoryError as error:
            assert any("were dropped" in note for note in error.__notes__)
            raise
    assert all(p.grad is None for p in model.parameters())  # that of layer 3 was there already
    with refused(SessionError, "without a loss", model, session):
        session.step()
    assert not session.step(loss_of(session, model)).skipped


# ---- calls out of order -----------------------------------------------------------------------------------


@each_precision
def test_unscale_twice(precision: str) -> None:
    model, session = trained(precision)
    session.backward(loss_of(session, model))
    session.unscale()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.eval()
    loss = loss_of(session, model)
    for call in (session.unscale, lambda: session.backward(loss)):
        with refused(SessionError, r"unscale\(\)", model, session):
            call()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert not session.step().skipped


@each_precision
def test_step_without_backward(precision: str) -> None:
    for steps in (0, 2):
        model, session = trained(precision, steps)
        with refused(SessionError, r"step\(\) without a loss and without session\.backward", model, session):
            session.step()
        loss_of(session, model).backward()
        with refused(
            SessionError, r"gradients made by loss\.backward\(\) are not scaled or counted", model, session
        ):
            session.step()


def test_misuse_of_a_scaler_alone() -> None:
    model = small_model()
    optimizer, scaler = optimizer_of(model), LossScaler("cpu", init_scale=1024.0)
    objects = model, optimizer, scaler
    F.mse_loss(model(X), Y).backward()
    for call in (scaler.step, scaler.unscale_):
        with refused(SessionError, r"came before scale\(\)", *objects):
            call(optimizer)
    with refused(SessionError, r"update\(\) came before scale\(\)", *objects):
        scaler.update()
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(model(X), Y)).backward()
    with refused(SessionError, "without a step", *objects):
        scaler.update()
    for arguments, named in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with refused(SessionError, r"step\(\) got a closure.*Session\.step\(closure=", *objects):
            scaler.step(optimizer, *arguments, **named)
    scaler.unscale_(optimizer)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with refused(SessionError, r"unscale_\(\) has already been called", *objects):
        scaler.unscale_(optimizer)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    scaler.step(optimizer)
    for call, says in ((scaler.step, "already been called"), (scaler.unscale_, r"after step\(\)")):
        with refused(SessionError, says, *objects):
            call(optimizer)
    scaler.update()
    for call in (scaler.step, scaler.unscale_):
        with refused(SessionError, "without a backward pass since its last step", *objects):
            call(optimizer)


@pytest.mark.xfail(strict=True, reason="as in torch: scaled gradients are added to unscaled ones in silence")
@pytest.mark.parametrize("zero", [False, True])
def test_a_scaler_alone_refuses_a_backward_after_unscale(zero: bool) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), LossScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    if zero:
        optimizer.zero_grad()
    with pytest.raises(SessionError):
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(p, torch.zeros(2))


@pytest.mark.xfail(
    strict=True, reason="as in torch: whose gradient is true already is forgotten with the window"
)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_scaler_alone_refuses_an_old_gradient_in_a_later_window(stepped: bool) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    old, other = (torch.optim.SGD([p], lr=1.0) for p in params)
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaler.scale(params[0].sum()).backward()
    scaler.step(old) if stepped else scaler.unscale_(old)
    scaler.update()
    scaler.scale(params[1].sum()).backward()
    with pytest.raises(SessionError):
        scaler.unscale_(old)
    scaler.step(other)
    assert params[0].grad is not None and torch.equal(params[0].grad, torch.ones(2))


# ---- gradients changed in between -------------------------------------------------------------------------


def _clip(model: nn.Module, session: Session) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _clip_values(model: nn.Module, session: Session) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _plain_backward(model: nn.Module, session: Session) -> None:
    F.mse_loss(model(X), Y).backward()


def _replace(model: nn.Module, session: Session) -> None:
    model[3].bias.grad = torch.ones(2)


def _add(model: nn.Module, session: Session) -> None:
    model[0].weight.grad.add_(model[0].weight.detach(), alpha=0.1)


def _zero(model: nn.Module, session: Session) -> None:
    session._optimizers[0].zero_grad()


def _zero_in_place(model: nn.Module, session: Session) -> None:
    session._optimizers[0].zero_grad(set_to_none=False)


def _zero_one(model: nn.Module, session: Session) -> None:
    model[0].bias.grad = None


CHANGES = [_clip, _clip_values, _plain_backward, _replace, _add, _zero, _zero_in_place, _zero_one]


@pytest.mark.parametrize("next_call", ["step", "unscale", "backward", "step with a loss"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_while_they_carry_the_scale(change: Any, next_call: str) -> None:
    model, session = trained("fp16")
    model.eval()
    session.backward(loss_of(session, model) / 2)
    change(model, session)
    loss = loss_of(session, model) / 2
    calls = {
        "step": session.step,
        "unscale": session.unscale,
        "backward": lambda: session.backward(loss),
        "step with a loss": lambda: session.step(loss),
    }
    for _ in range(2):  # it stays refused until the user says what shall be
        with refused(
            SessionError, r"a gradient (was changed|is gone|is there).*session\.unscale\(\)", model, session
        ):
            calls[next_call]()
    session.drop()
    assert not session.step(loss_of(session, model)).skipped


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_scale_they_are_the_users_own(change: Any, precision: str) -> None:
    model, session = trained(precision)
    session.backward(loss_of(session, model))
    change(model, session)
    if change is _zero:
        with refused(
            SessionError, r"no parameter of the optimizer has a gradient.*zero_grad\(\)", model, session
        ):
            session.step()
        assert not session.step(loss_of(session, model)).skipped
    else:
        assert not session.step().skipped


@pytest.mark.parametrize("change", [c for c in CHANGES if c is not _zero])
def test_after_unscale_they_are_the_users_own(change: Any) -> None:
    """The step takes the gradients as they are then: the same as by hand from the same weights."""
    model, session = trained("fp16")
    model.eval()
    session.backward(loss_of(session, model))
    session.unscale()
    change(model, session)
    (optimizer,) = session._optimizers
    twin = copy.deepcopy(model)
    by_hand = optimizer_of(twin)
    by_hand.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    by_hand.step()
    assert not session.step().skipped
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_after_unscale_zero_grad_is_no_step() -> None:
    model, session = trained("fp16")
    session.backward(loss_of(session, model))
    session.unscale()
    _zero(model, session)
    with refused(SessionError, "no parameter of the optimizer has a gradient", model, session):
        session.step()
    assert not session.step(loss_of(session, model)).skipped


@pytest.mark.parametrize("value", [math.inf, math.nan])
@each_precision
def test_what_is_spoilt_between_unscale_and_step_is_a_skip(value: float, precision: str) -> None:
    model, session = trained(precision)
    session.backward(loss_of(session, model))
    session.unscale()
    model[3].bias.grad[0] = value
    before = [p.detach().clone() for p in model.parameters()]
    assert session.step().skipped
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_gradients_left_over_from_before_the_session() -> None:
    model = small_model()
    F.mse_loss(model(X), Y).backward()
    session = session_of(model, "fp16")
    with session.autocast():
        loss = F.mse_loss(model(X).float(), Y)
    with refused(SessionError, "is there that no backward of this session made", model, session):
        session.step(loss)
    model.zero_grad()
    assert not session.step(loss_of(session, model)).skipped


def test_an_optimizer_stepped_by_hand_is_noticed_at_the_next_call() -> None:
    """Its weights are lost: it took gradients 65536 times too large. But not in silence."""
    model, session = trained("fp16")
    (optimizer,) = session._optimizers
    session.backward(loss_of(session, model))
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(session, model)
    with refused(SessionError, r"a gradient is gone.*another optimizer\.step\(\)", model, session):
        session.backward(loss)


@each_precision
def test_an_optimizer_of_another_model(precision: str) -> None:
    model, other = small_model(), small_model()
    session = session_of(model, precision, optimizer=optimizer_of(other))
    loss = loss_of(session, model)
    with refused(SessionError, "Was the optimizer made with this model's parameters", model, session):
        session.step(loss)


def test_gradients_that_wait_for_their_own_optimizer_under_an_older_scale() -> None:
    """backward over both, a step of one: the other's gradients don't mix with those of a later scale."""
    model = small_model()
    first, second = optimizer_of(model[0]), optimizer_of(model[3])
    session = session_of(model, "fp16", optimizer=[first, second])
    session.backward(loss_of(session, model))
    assert not session.step(optimizer=first).skipped
    loss = loss_of(session, model)
    with refused(SessionError, "is there that no backward of this session made", model, session):
        session.step(loss)
    session.drop()
    assert not session.step(loss_of(session, model)).skipped


# ---- closures ---------------------------------------------------------------------------------------------


@each_precision
def test_a_closure_and_a_loss(precision: str) -> None:
    model, session = trained(precision)
    model.eval()
    loss = loss_of(session, model)
    with refused(SessionError, "got both", model, session):
        session.step(loss, closure=lambda: loss_of(session, model))


@each_precision
def test_a_closure_that_is_no_scalar(precision: str) -> None:
    model, session = trained(precision)
    model.eval()

    def closure() -> torch.Tensor:
        with session.autocast():
            return model(X)

    with refused(SessionError, r"the loss is \(8, 2\)", model, session):
        session.step(closure=closure)
    assert not session.step(loss_of(session, model)).skipped
