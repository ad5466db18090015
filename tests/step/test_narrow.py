"""Weights and state in few bits: what is kept, what a step does with it, how it is saved."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from equipoise import Session
from equipoise.errors import FormatError, PolicyError, SessionError
from equipoise.policy import Plan
from equipoise.step import narrow
from equipoise.step.narrow import compensated, from_8_bits, in_8_bits, join, split

KINDS = ("split", "kahan", "stochastic")


def all_low_halves(high: int) -> torch.Tensor:
    """FP32 numbers with one upper half and each of the 2**16 lower ones."""
    signed = high - 0x10000 if high >= 0x8000 else high
    return ((torch.tensor(signed, dtype=torch.int32) << 16) | torch.arange(2**16, dtype=torch.int32)).view(
        torch.float32
    )


def away_from_zero(w: torch.Tensor) -> torch.Tensor:
    """The nearest bf16 number, halves away from zero: what a split's upper half is."""
    return split(w)[0].float()


# -- formats


@pytest.mark.parametrize(
    "high", [0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x0001, 0x7F7E, 0x7F7F, 0xC2FF]
)
def test_a_split_gives_every_bit_back(high: int) -> None:
    """All lower halves of even and odd upper ones, both signs, subnormal and the largest."""
    w = all_low_halves(high)
    upper, lower = split(w)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(upper, lower).view(torch.int32), w.view(torch.int32))


@pytest.mark.parametrize("high", [0x3F80, 0x3F81, 0xBF80, 0x4049])
def test_the_upper_half_is_the_nearest_number(high: int) -> None:
    w = all_low_halves(high).double()
    upper = split(w.float())[0].double()
    nearest = w.float().to(torch.bfloat16).double()
    assert torch.equal((upper - w).abs(), (nearest - w).abs())
    differ = (upper != nearest).sum()
    assert differ == (1 if high % 2 == 0 else 0)  # the tie, which nearest-even rounds down there
    assert (upper.abs() >= nearest.abs()).all()


def test_the_tie_that_nearest_even_can_not_hold() -> None:
    w = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    assert join(*split(w)).view(torch.int32).item() == 0x3F808000
    lost = w - w.to(torch.bfloat16).float()
    distance = (w.view(torch.int32) - w.to(torch.bfloat16).float().view(torch.int32)).item()
    assert lost > 0 and distance == 2**15  # one more than 16 signed bits hold


@given(st.floats(width=32, allow_nan=False, allow_subnormal=False))
@settings(max_examples=500, deadline=None)
def test_any_number_is_split_and_joined(x: float) -> None:
    w = torch.tensor([x], dtype=torch.float32)
    assert torch.equal(join(*split(w)).view(torch.int32), w.view(torch.int32))


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x8000])
def test_a_nan_stays_one_in_both(payload: int) -> None:
    w = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    for halves in (split(w), compensated(w)):
        assert halves[0].isnan().all()
    assert join(*split(w)).isnan().all()
    assert narrow.stochastic(w, None).isnan().all()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_a_compensated_number_is_a_fixed_point(values: list[float]) -> None:
    """Saved as a sum in FP32 and loaded, both parts are the same bits: no step is needed to get there."""
    w = torch.tensor(values, dtype=torch.float32)
    high, low = compensated(w)
    again = compensated(high.float() + low.float())
    assert torch.equal(again[0], high) and torch.equal(again[1], low)
    assert torch.equal(high, w.to(torch.bfloat16))
    normal = w.abs() > 2.0**-100
    assert ((high.float() + low.float() - w).abs()[normal] <= w.abs()[normal] * 2.0**-16).all()


def test_compensated_ties_on_every_low_half() -> None:
    for upper in (0x3F80, 0x3F81, 0xBF80):
        high, low = compensated(all_low_halves(upper))
        again = compensated(high.float() + low.float())
        assert torch.equal(again[0], high) and torch.equal(again[1], low)


@pytest.mark.parametrize("low", [0, 1, 0x4000, 0x8000, 0xFFFF])
@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_stochastic_rounding_is_right_in_the_mean(low: int, sign: int) -> None:
    n = 200_000
    w = torch.full((n,), (0x3F80 << 16) + low + sign, dtype=torch.int32).view(torch.float32)
    up = (narrow.stochastic(w, torch.Generator().manual_seed(0)).abs() > 1).double().mean().item()
    share = low / 2**16
    assert (
        abs(up - share) <= 5 * (share * (1 - share) / n) ** 0.5
    )  # five deviations; none where nothing is cut


def test_random_bits_follow_the_generator_and_the_strides() -> None:
    w = torch.randn(6, 5, 4, 3).contiguous(memory_format=torch.channels_last)
    first = narrow.stochastic(w, torch.Generator().manual_seed(3))
    again = narrow.stochastic(w, torch.Generator().manual_seed(3))
    other = narrow.stochastic(w, torch.Generator().manual_seed(4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.stride() == w.stride()


def test_8_bit_state_is_right_in_the_mean_and_near_each_time() -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 256) * torch.logspace(-30, 8, 64, base=2)[:, None]
    values[3] = 0
    generator = torch.Generator().manual_seed(0)
    many = torch.stack([from_8_bits(*in_8_bits(values, generator)) for _ in range(400)])
    assert torch.equal(many[:, 3], torch.zeros(400, 256))
    largest = values.abs().amax(1, keepdim=True)
    step = torch.maximum(values.abs() * 2.0**-3, largest * 2.0**-9 / 448)
    assert ((many - values).abs() <= step * 1.001).all()
    assert ((many.mean(0) - values).abs() <= step * 0.2).all()  # eight deviations of at most half a step


# -- training


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        )
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


X, Y = digits()
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


def with_master(model: nn.Module) -> None:
    """FP32 master training: FP32 weights that forward reads rounded."""
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            for name in ("weight", "bias"):
                register_parametrization(layer, name, _Rounded())


class _Rounded(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + (away_from_zero(w.detach()) - w.detach())


def run(
    kind: str, optimizer: str, weights: str, steps: int, *, clip: float | None = None, parts: int = 1,
    state: str = "fp32", master: bool = False,
) -> tuple[nn.Module, Session]:  # fmt: skip
    model = model_of(kind)
    if master:
        with_master(model)
    session = Session(
        model, OPTIMIZERS[optimizer](model.parameters()), precision="bf16", emulate=True, weights=weights,
        state=state,
    )  # fmt: skip
    for step in range(steps):
        at = torch.arange(step * 32, step * 32 + 32) % 1500
        for part, chunk in enumerate(at.chunk(parts)):
            x = X[chunk].view(-1, 1, 8, 8) if kind == "conv" else X[chunk]
            with session.autocast():
                loss = F.cross_entropy(model(x), Y[chunk]) / parts
            if part < parts - 1:
                session.backward(loss)
        session.step(loss, max_grad_norm=clip)
    return model, session


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("parametrizations.", "").replace(".original", ""): value.detach().clone()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_split_is_fp32_master_training_bit_for_bit(kind: str, optimizer: str) -> None:
    """200 steps; the reference holds FP32 weights and rounds them as the upper half is rounded."""
    clip = 0.5 if optimizer == "adamw" else None
    ours, session = run(kind, optimizer, "split", 200, clip=clip)
    reference, _ = run(kind, optimizer, "fp32", 200, clip=clip, master=True)
    assert session.taken_count == 200
    own, theirs = weights_of(ours), weights_of(reference)
    assert set(own) == set(theirs)
    for name, value in own.items():
        assert torch.equal(value, theirs[name]), name
    assert next(ours.parameters()).dtype is torch.bfloat16


def test_split_with_accumulated_gradients_is_fp32_master_training() -> None:
    ours, _ = run("mlp", "adamw", "split", 50, parts=4, clip=1.0)
    reference, _ = run("mlp", "adamw", "fp32", 50, parts=4, clip=1.0, master=True)
    theirs = weights_of(reference)
    for name, value in weights_of(ours).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("weights", KINDS)
def test_a_step_in_parts_is_a_step(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run("mlp", "adamw", weights, 20)
    monkeypatch.setattr(narrow, "CHUNK", 1000)
    parts, _ = run("mlp", "adamw", weights, 20)
    theirs = weights_of(whole)
    for name, value in weights_of(parts).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_training_gets_as_far(weights: str, state: str) -> None:
    model, _ = run("mlp", "adamw", weights, 300, state=state)
    reference, _ = run("mlp", "adamw", "fp32", 300)
    with torch.no_grad():
        loss = F.cross_entropy(_in_fp32(model)(X[1500:]), Y[1500:])
        theirs = F.cross_entropy(_in_fp32(reference)(X[1500:]), Y[1500:])
    assert abs(loss - theirs) < 0.1 * theirs


def _in_fp32(model: nn.Module) -> nn.Module:
    twin = model_of("mlp")
    twin.load_state_dict(model.state_dict())
    return twin


def test_a_skipped_step_changes_nothing() -> None:
    for weights in KINDS:
        model, session = run("mlp", "adamw", weights, 3)
        before = weights_of(model)
        with session.autocast():
            loss = F.cross_entropy(model(X[:32]), Y[:32]) * float("inf")
        assert session.step(loss).skipped
        assert all(torch.equal(v, before[k]) for k, v in weights_of(model).items())


def test_which_weights_are_narrow() -> None:
    """Those of bf16 layers alone: not norms, not FP32 layers, not a weight that an embedding reads too."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
            self.norm, self.wide, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.wide(self.norm(self.inner(self.embedding(x)))))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    session = Session(model, optimizer, precision="bf16; wide=fp32", emulate=True, weights="split")
    with session.autocast():
        loss = F.cross_entropy(model(torch.arange(16)), torch.arange(16))
    session.step(loss)
    narrowed = {n for n, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert narrowed == {"inner.weight", "inner.bias"}
    assert "2 weights kept as split" in session.explain()


def test_frozen_weights_stay_as_they_are() -> None:
    model = model_of("mlp")
    model[0].requires_grad_(False)
    session = Session(model, torch.optim.SGD(model[3].parameters(), lr=0.1), precision="bf16", emulate=True,
                      weights="kahan")  # fmt: skip
    assert model[0].weight.dtype is torch.float32 and model[3].weight.dtype is torch.bfloat16
    session.restore()
    assert model[3].weight.dtype is torch.float32


def test_memory_is_printed() -> None:
    sizes = {}
    for weights in ("fp32", *KINDS):
        for state in ("fp32", "8bit"):
            model = nn.Sequential(nn.Linear(256, 256, bias=False))
            session = Session(model, torch.optim.AdamW(model.parameters()), precision="bf16", emulate=True,
                              weights=weights, state=state)  # fmt: skip
            with session.autocast():
                loss = model(torch.randn(4, 256)).square().mean()
            session.step(loss)
            if (weights, state) != ("fp32", "fp32"):
                assert session._narrow is not None
                sizes[weights, state] = sum(session._narrow.bytes_per_parameter().values())
                assert f"in all {sizes[weights, state]:.2f}" in session.explain()
    eight = 2 * (1 + 4 / 256)
    assert sizes == {
        ("fp32", "8bit"): 8 + eight, ("split", "fp32"): 14, ("kahan", "fp32"): 14, ("stochastic", "fp32"): 12,
        ("split", "8bit"): 6 + eight, ("kahan", "8bit"): 6 + eight, ("stochastic", "8bit"): 4 + eight,
    }  # fmt: skip


# -- saved, loaded, edited


@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", KINDS)
def test_a_resumed_run_goes_on_with_the_same_bits(weights: str, state: str) -> None:
    def go_on(model: nn.Module, session: Session, steps: range) -> None:
        for step in steps:
            with session.autocast():
                loss = F.cross_entropy(model(X[step * 32 : step * 32 + 32]), Y[step * 32 : step * 32 + 32])
            session.step(loss)

    def make() -> tuple[nn.Module, Session]:
        model = model_of("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, Session(model, optimizer, precision="bf16", emulate=True, weights=weights, state=state)

    unbroken, session = make()
    go_on(unbroken, session, range(10))
    file = io.BytesIO()
    torch.save({"model": unbroken.state_dict(), "session": session.state_dict()}, file)
    go_on(unbroken, session, range(10, 20))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(v.dtype is torch.float32 for v in saved["model"].values())
    resumed, session = make()
    resumed.load_state_dict(saved["model"])
    session.load_state_dict(saved["session"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(resumed, session, range(10, 20))
    theirs = weights_of(unbroken)
    assert all(torch.equal(v, theirs[k]) for k, v in weights_of(resumed).items())


def test_loading_fp32_weights_loses_no_bit_under_split() -> None:
    model, _ = run("mlp", "adamw", "split", 1)
    values = {k: torch.randn_like(v) for k, v in weights_of(model).items()}
    given = {k: v.clone() for k, v in values.items()}
    model.load_state_dict(given)
    assert all(torch.equal(v, values[k]) for k, v in weights_of(model).items())
    assert all(torch.equal(v, values[k]) and v.dtype is torch.float32 for k, v in given.items())


def test_a_state_that_does_not_fit_leaves_what_is_kept() -> None:
    model, _ = run("mlp", "adamw", "split", 2)
    before = weights_of(model)
    bad = {**before, "0.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(bad)
    assert torch.equal(weights_of(model)["0.weight"], before["0.weight"])


def _by_copy(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(2)


def _by_data(p: torch.Tensor) -> None:
    p.data.mul_(2)


def _by_swap(p: torch.Tensor) -> None:
    p.data = p.data * 2


def _by_one_number(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.view(-1)[7] += 1


@pytest.mark.parametrize("weights", ["split", "kahan"])
@pytest.mark.parametrize("edit", [_by_copy, _by_data, _by_swap, _by_one_number])
def test_weights_edited_by_hand_are_taken_as_they_are(edit: Any, weights: str) -> None:
    """An average swapped in, a weight reset, pruning: nothing stale is added to the new numbers."""
    model, session = run("mlp", "sgd", weights, 3)
    edit(model[0].weight)
    new = model[0].weight.detach().float().clone()
    with session.autocast():
        loss = F.cross_entropy(model(X[:32]), Y[:32]) * 0
    for group in session._optimizers[0].param_groups:
        group.update(lr=0.0)
    with pytest.warns(UserWarning, match=r"'0.weight' is the first"):
        session.step(loss)
    assert torch.equal(weights_of(model)["0.weight"], new)


def test_an_edit_before_saving_is_saved() -> None:
    model, _ = run("mlp", "sgd", "split", 3)
    _by_data(model[0].weight)
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.detach().float())


def test_restore_gives_fp32_weights_and_state_back() -> None:
    model, session = run("mlp", "adamw", "split", 5, state="8bit")
    before = weights_of(model)
    identity = list(model.parameters())
    session.restore()
    assert all(p is q for p, q in zip(model.parameters(), identity, strict=True))
    assert all(p.dtype is torch.float32 and p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in weights_of(model).items())
    for per_parameter in session._optimizers[0].state.values():
        assert {v.dtype for v in per_parameter.values()} == {torch.float32}
    F.cross_entropy(model(X[:32]), Y[:32]).backward()
    session._optimizers[0].step()


def test_restore_between_backward_and_step_keeps_the_gradient() -> None:
    model, session = run("mlp", "adamw", "split", 1)
    with session.autocast():
        loss = F.cross_entropy(model(X[:32]), Y[:32])
    session.backward(loss)
    session.restore()
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.float32
    session._optimizers[0].step()


def test_the_average_is_fp32_and_sees_all_bits() -> None:
    """Updates far below bf16's steps reach the average."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="bf16", emulate=True,
                      weights="split", ema=ema)  # fmt: skip
    for _ in range(20):
        with session.autocast():
            loss = (model(torch.eye(4)) * 2.0**-14).sum()
        session.step(loss)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((4, 4), 1 - 20 * 2.0**-14))
    average = next(ema.parameters())
    assert average.dtype is torch.float32
    assert (average < 1 - 18 * 2.0**-14).all() and (average > 1 - 20 * 2.0**-14).all()


def test_copies_and_pickles_of_the_model_stand_alone() -> None:
    model, session = run("mlp", "adamw", "split", 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin[0].weight, model[0].weight)
        assert twin.state_dict()["0.weight"].dtype is torch.bfloat16
    with session.autocast():
        loss = F.cross_entropy(model(X[:32]), Y[:32])
    session.step(loss)


# -- refused


def test_what_is_refused() -> None:
    def session(model: nn.Module, **kwargs: Any) -> Session:
        return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)

    with pytest.raises(SessionError, match="allowed: 'fp32', 'split', 'kahan', 'stochastic'"):
        session(model_of("mlp"), precision="bf16", weights="bf16")
    with pytest.raises(SessionError, match="allowed: 'fp32', '8bit'"):
        session(model_of("mlp"), precision="bf16", state="int8")
    for precision in ("fp32", "fp16"):
        model = model_of("mlp")
        with pytest.raises(FormatError, match="no trained weight is read in bf16"):
            session(model, precision=precision, emulate=precision == "fp16", weights="split")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not model._forward_pre_hooks and "forward" not in model.__dict__
    with pytest.raises(FormatError, match="weights='stochastic'"):
        session(model_of("mlp").bfloat16(), precision="bf16", emulate=True)
    model = model_of("mlp")
    with pytest.raises(SessionError, match="DataParallel, whose buckets are made for FP32"):
        Session(
            nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16",
            emulate=True, weights="split",
        )  # fmt: skip
    assert "forward" not in model[0].__dict__ and model[0].weight.dtype is torch.float32
    with pytest.raises(PolicyError, match="weights is 'bits'"):
        Plan.from_toml('schema = 1\npolicy = "bf16"\nweights = "bits"\n')


def test_a_closure_is_refused_and_nothing_is_lost() -> None:
    model, session = run("mlp", "adamw", "split", 1)
    before = weights_of(model)
    with pytest.raises(SessionError, match="evaluates the loss in the middle"):
        session.step(closure=lambda: F.cross_entropy(model(X[:8]), Y[:8]))
    assert all(torch.equal(v, before[k]) for k, v in weights_of(model).items())


def test_a_plan_pins_weights_and_state() -> None:
    _, session = run("mlp", "adamw", "kahan", 1, state="8bit")
    assert session.plan is not None
    plan = Plan.from_toml(session.plan.to_toml())
    assert (plan.weights, plan.state) == ("kahan", "8bit")
    model = model_of("mlp")
    Session(model, torch.optim.AdamW(model.parameters()), plan=plan)
    assert model[0].weight.dtype is torch.bfloat16
