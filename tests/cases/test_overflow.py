"""Row F11 of the cases from real life: an overflow is noticed in the layer that makes it, by name.

"A linear layer whose true output is 128000, in FP16": the layer moves to FP32, training goes on. Neighbours
with the same fault: convolutions, products of tensors in a user's own forward, recurrent layers, a value that
the next layer's cast can't hold, a loss computed in half, layers that saturate after the overflow, and models
that were compiled.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise import Session
from equipoise.errors import NonFiniteError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def big_linear(features: int, out: int, value: float = 128000.0) -> nn.Linear:
    layer = nn.Linear(features, out)
    nn.init.constant_(layer.bias, value)
    return layer


class Back(nn.Module):
    """Large values brought back into range, so that FP32 trains well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 128000.0


class Squares(nn.Module):
    """A product that no list of operators can keep: ``x*x``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        nn.init.constant_(self.inner.bias, 400.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return (h * h).float() / 160000.0


class Scores(nn.Module):
    """Attention's scores written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.q(x) * 500) @ (self.k(x) * 500).t()
        return F.softmax(scores / 1e6, dim=-1) @ x


class Recurrent(nn.Module):
    """Its input's cast leaves FP16's range; the LSTM's gates saturate."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None] * 1e5)[0][:, 0]


BODIES = {
    "linear": (lambda: nn.Sequential(big_linear(16, 16), Back()), {"0.0"}),
    "conv": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)), self_biased_conv(), nn.Flatten(), Back(), nn.Linear(64, 16)
        ),
        {"0.1"},
    ),
    "squares": (Squares, {"0"}),
    "scores": (Scores, {"0"}),
    "cast": (Recurrent, {"0.lstm"}),
}


def self_biased_conv() -> nn.Conv2d:
    conv = nn.Conv2d(1, 4, 3, padding=1)
    nn.init.constant_(conv.bias, 128000.0)  # type: ignore[arg-type]
    return conv


def train(session: Session, model: nn.Module, steps: int = 12) -> list[bool]:
    skipped = []
    for _ in range(steps):
        with session.autocast():
            loss = F.mse_loss(model(X).float(), Y)
        skipped.append(session.step(loss).skipped)
    return skipped


@pytest.mark.parametrize("body", sorted(BODIES))
def test_f11_the_layer_that_overflows_is_named_and_widened(body: str) -> None:
    torch.manual_seed(0)
    make, expected = BODIES[body]
    model = nn.Sequential(make(), nn.Linear(16, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    with pytest.warns(UserWarning, match=r"leaves the range of fp16.*it computes in FP32 from now on"):
        skipped = train(session, model)
    assert {d.where for d in session.decisions} == expected
    assert all(d.what == "widen" and d.choice == "fp32" for d in session.decisions)
    assert skipped.count(True) <= 1 and not skipped[-1]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert session.plan is not None and session.plan.formats["1"] == "fp16"  # no more than was needed
    assert session.scaler.get_scale() == 2.0**16  # the overflow was not the scale's fault
    assert str(session.plan.policy) in session.plan.to_toml()  # a resumed run has it too


def test_f11_values_that_saturate_are_noticed_though_nothing_is_skipped() -> None:
    model = nn.Sequential(big_linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    with pytest.warns(UserWarning, match=r"layer '0'"):
        skipped = train(session, model)
    assert not any(skipped)
    assert [d.where for d in session.decisions] == ["0"]


def test_f11_a_large_value_is_followed_through_the_layers_that_can_not_hold_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(big_linear(16, 16), nn.Identity(), nn.Linear(16, 16), Back(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].weight.mul_(0.01)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    with pytest.warns(UserWarning):
        skipped = train(session, model)
    assert [d.where for d in session.decisions] == ["0", "2"]
    assert skipped == [True, True] + [False] * 10


def test_f11_later_in_training_too() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Back(), nn.Linear(16, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    assert not any(train(session, model, 5)) and not session.decisions
    nn.init.constant_(model[0].bias, 128000.0)
    with pytest.warns(UserWarning, match=r"layer '0'"):
        skipped = train(session, model, 10)
    assert skipped == [True] * 3 + [False] * 7
    assert session.scaler.get_scale() == 2.0**16


def test_f11_recorded_only_the_layer_keeps_its_format() -> None:
    model = nn.Sequential(big_linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    session = Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        precision="fp16",
        emulate=True,
        on_overflow="record",
    )
    with pytest.warns(UserWarning, match="leaves the range"):
        train(session, model)
    (decision,) = session.decisions
    assert (decision.what, decision.where, decision.choice) == ("overflow", "0", "none")
    assert decision.evidence["largest"] > 65504
    assert session.plan is not None and session.plan.formats["0"] == "fp16"


def test_f11_a_loss_in_half_outside_of_the_model_is_named_as_such() -> None:
    model = nn.Linear(16, 4)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    with pytest.warns(UserWarning, match=r"mul in the loss \(forward\) leaves the range of fp16"):
        with session.autocast():
            out = model(X) + 400
            loss = (out * out).float().mean() * 1e-6
        session.step(loss)
    assert session.decisions[0].what == "overflow"


def test_f11_compiled_models_are_watched_eagerly_and_compiled_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(big_linear(16, 16), Back(), nn.Linear(16, 4))
    compiled = torch.compile(model, backend="aot_eager")
    session = Session(compiled, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = train(session, compiled)  # type: ignore[arg-type]
    assert [d.where for d in session.decisions] == ["0"]
    assert skipped == [True] + [False] * 11


def test_the_loss_scales_own_overflows_move_no_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1e-7), precision="fp16", emulate=True)
    skipped = []
    for _ in range(12):
        with session.autocast():
            loss = F.mse_loss(model(X).float(), Y) * 2e2  # its gradients only fit at a smaller scale
        skipped.append(session.step(loss).skipped)
    assert skipped.count(True) >= 3 and not skipped[-1]
    assert not session.decisions
    assert session.plan is not None and set(session.plan.formats.values()) == {"fp16"}


def test_a_masks_lowest_number_is_no_overflow() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) + torch.full((8,), -3e38)
            return F.softmax(scores.half(), dim=-1)

    model = nn.Sequential(Masked(), nn.Linear(8, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", emulate=True)
    train(session, model)
    assert not session.decisions


# -- a first loss that isn't finite


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x - x)


FIRST = {
    "data": (lambda: nn.Linear(16, 4), X * float("inf"), "input of layer"),
    "weight": (lambda: spoiled(nn.Linear(16, 4)), X, r"weight (weight|0\.weight) holds"),
    "operator": (lambda: nn.Sequential(nn.Linear(16, 4), Inverse()), X, "fp32|finite"),
}


def spoiled(layer: nn.Linear) -> nn.Linear:
    nn.init.constant_(layer.weight, float("nan"))
    return layer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("what", sorted(FIRST))
def test_a_first_loss_that_is_not_finite_is_an_error_with_its_cause(what: str, precision: str) -> None:
    make, x, message = FIRST[what]
    model = make()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision, emulate=precision != "fp32"
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with session.autocast():
        loss = model(x).float().sum()
    if what == "data" and precision != "fp16":
        message = "look at the inputs"  # only FP16's first step is watched
    if what == "operator":
        message = "log in layer '1'" if precision == "fp16" else "weights are finite"
    with pytest.raises(NonFiniteError, match=message):
        session.step(loss)
    assert session.step_count == 0
    for name, p in model.named_parameters():
        assert torch.equal(p.nan_to_num(7.0), before[name].nan_to_num(7.0)) and p.grad is None
