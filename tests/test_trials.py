"""Planning on real steps: what it sees, and that nothing of it remains."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.session import Session
from equipoise.step.optim import inner_optimizer
from equipoise.trials import Recorder, restored
from recorded import machine

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


def conv_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """All bits that planning must leave alone."""
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "identity": [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "modes": [m.training for m in model.modules()],
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "forwards": [
            sorted(k for k in m.__dict__ if "forward" in k and m.__dict__[k]) for m in model.modules()
        ],
    }


def assert_same(before: dict, after: dict) -> None:
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name
    for key in ("grads", "optimizer"):
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=0)
    assert torch.equal(before["rng"][0], after["rng"][0])
    for key in ("identity", "modes", "forwards"):
        assert before[key] == after[key]
    assert before["rng"][1:] == after["rng"][1:]


@pytest.mark.parametrize("fails", [False, True])
def test_restored_puts_every_bit_back_even_when_a_trial_fails(fails: bool) -> None:
    model = conv_model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    F.cross_entropy(model(IMAGES), LABELS).backward()
    opt.step()
    before, hooks = everything(model, opt), len(calls)
    try:
        with restored(model, [opt]) as start:
            for _ in range(2):
                start()
                model.eval()
                F.cross_entropy(model(IMAGES), LABELS).backward()
                opt.step()
                random.random(), np.random.rand(), torch.rand(3)
                model[0].weight.requires_grad_(False)
            if fails:
                raise MemoryError("while a trial ran")
    except MemoryError:
        assert fails
    assert_same(before, everything(model, opt))
    assert len(calls) == hooks  # the user's own hooks didn't see the trials
    assert model[0].weight.requires_grad


def test_the_recorder_replays_the_first_step() -> None:
    model = conv_model()
    recorder = Recorder(model)
    torch.manual_seed(5)
    F.cross_entropy(model(IMAGES), LABELS).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8))  # an evaluation isn't the step
    replay = recorder.replay()
    assert replay is not None and sorted(recorder.calls) == ["0", "5"]
    assert recorder.calls["5"].args[0].shape == (4, 288)
    torch.manual_seed(5)
    from contextlib import nullcontext

    replay(nullcontext)
    for grad, p in zip(want, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-6, atol=1e-8)
    recorder.remove()
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


@pytest.mark.parametrize("half", ["use", "not-worth-it"])
def test_planning_after_the_first_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16=half))
    planned, plain = conv_model(), conv_model()
    opt = torch.optim.SGD(planned.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    session = Session(planned, opt, plan_time_s=3.0)
    assert "not planned yet" in session.explain()
    torch.manual_seed(3)
    with session.autocast():
        loss = F.cross_entropy(planned(IMAGES), LABELS)
    session.step(loss)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    F.cross_entropy(plain(IMAGES), LABELS).backward()
    other.step()
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b in zip(planned.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name  # values; a plan may have laid weights out anew
    plan = session.plan
    assert plan is not None and plan.source in ("auto", "static")
    if half == "not-worth-it":
        assert set(plan.formats.values()) == {"fp32"}
    assert session.setup_s > 0
    if plan.source == "auto":
        assert set(session.timings["race"]["s_per_step"]) >= {"fp32"}
    if half == "use":
        assert {row["layer"] for row in session.timings["layers"]} == {"0", "5"}
    session.restore()
    assert [p.stride() for p in planned.parameters()] == [p.stride() for p in plain.parameters()]


def test_prepare_plans_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = conv_model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = everything(model, opt)
    session = Session(model, opt, plan_time_s=3.0)
    plan = session.prepare((IMAGES, LABELS), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    session.restore()
    after = everything(model, opt)
    before["identity"] = [(i, s) for i, _, s in before["identity"]]
    after["identity"] = [(i, s) for i, _, s in after["identity"]]
    assert_same(before, after)
    assert plan is session.plan and set(plan.formats) == {"0", "1", "5"}
    assert len(inner_optimizer(opt).state) == 0


def test_no_time_to_plan_gives_the_static_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=0)
    session.step(model(torch.randn(256, 1024)).mean())
    assert session.plan is not None and session.plan.source == "static"
    assert str(session.plan.policy) == "bf16"  # the recorded machine gains at 256x256x256, and this is larger
    assert "can't tell" in session.explain()


def test_a_forward_that_is_not_one_call_of_the_model_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = conv_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    features = model[0](IMAGES)  # parts are called, the root never is
    session.step(features.mean())
    assert session.plan is not None and "wasn't one call of the model" in session.plan.note


def test_an_arm_without_a_kernel_is_taken_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            if out.dtype is not torch.float32:
                raise RuntimeError("this operator knows no half")
            return out

    model = Stubborn()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=2.0)
    session.step(model(torch.randn(4, 8)).mean())
    assert session.plan is not None and set(session.plan.formats.values()) == {"fp32"}
    assert not session.step(model(torch.randn(4, 8)).mean()).skipped


class Timed(nn.Linear):
    """A layer that takes as long as it is told in each format, whatever the CPU."""

    def __init__(self, wide_s: float, half_s: float) -> None:
        super().__init__(8, 8)
        self.wide_s, self.half_s = wide_s, half_s

    def extra_repr(self) -> str:
        return f"{self.wide_s}, {self.half_s}"  # layers that read alike are timed once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.half_s if torch.is_autocast_enabled("cpu") else self.wide_s)
        return super().forward(x)


def test_half_is_chosen_but_for_the_layer_that_is_slow_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = nn.Sequential(Timed(8e-3, 1e-3), Timed(1e-3, 8e-3), Timed(8e-3, 1e-3))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=8.0)
    session.step(model(torch.randn(4, 8)).mean())
    plan = session.plan
    assert plan is not None
    if plan.source == "static":
        assert "disturbed by foreign load" in plan.note
        return
    assert plan.formats == {"0": "bf16", "1": "fp32", "2": "bf16"}
    kept = next(c for c in plan.choices if c.where == "1")
    assert kept.evidence["slower_ratio"] > 3
    dtypes = []
    model[1].register_forward_hook(lambda m, args, out: dtypes.append((args[0].dtype, out.dtype)))
    with session.autocast():
        loss = model(torch.randn(4, 8)).mean()
    session.step(loss)
    assert dtypes == [(torch.bfloat16, torch.float32)]  # a half input, widened inside


class Busy(nn.Module):
    """A forward with every kind of side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.log = 0, []
        self.last = torch.zeros(4)
        self.own, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x.mul_(1.5))
        self.calls += 1
        self.log.append(self.calls)
        self.mean = 0.9 * self.mean + out.detach().mean(0)  # reassigned, not in place
        self.last += 1
        torch.rand(1, generator=self.own), self.numbers.random()
        return out


class Counting(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step(closure)


def test_side_effects_of_a_forward_and_an_optimizer_dont_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = Busy()
    opt = Counting(model.parameters(), lr=0.1)
    session = Session(model, opt, plan_time_s=0.5)
    x = torch.randn(4, 8)
    loss = F.cross_entropy(model(x), LABELS)
    mean, batch = model.mean.clone(), x.clone()
    states = model.own.get_state(), copy.deepcopy(model.numbers.bit_generator.state)
    session.step(loss)
    assert session.plan is not None and "can't be repeated" not in session.plan.note
    assert (model.calls, model.log) == (1, [1]) and torch.equal(model.mean, mean)
    assert torch.equal(model.last, torch.ones(4)) and torch.equal(x, batch)
    assert torch.equal(model.own.get_state(), states[0]) and model.numbers.bit_generator.state == states[1]
    assert (opt.steps, opt.param_groups[0]["k"]) == (1, 1)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_weight_computed_from_parameters_can_be_planned(monkeypatch: pytest.MonkeyPatch, norm) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model = nn.Sequential(norm(nn.Linear(8, 4)))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=0.5)
    for _ in range(2):
        session.step(F.cross_entropy(model(torch.randn(4, 8)), LABELS))
    assert session.plan is not None and "layers" in session.timings


@pytest.mark.parametrize("at", [2, 30])
def test_a_model_that_fails_when_it_is_called_again_costs_the_race_alone(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine())

    class Queue(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls >= at:
                raise IndexError("the queue is empty")
            return super().forward(x)

    calls = 0
    model = Queue(nn.Linear(8, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=1.0)
    assert not session.step(F.cross_entropy(model(torch.randn(4, 8)), LABELS)).skipped
    assert session.plan is not None
    if at == 2:
        assert "can't be repeated: the queue is empty" in session.plan.note


def test_an_interrupted_planning_leaves_no_trace_and_the_next_step_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    model, plain = conv_model(), conv_model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    session = Session(model, opt, plan_time_s=1.0)
    torch.manual_seed(3)
    loss = F.cross_entropy(model(IMAGES), LABELS)
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    handle = model[5].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.step(loss)
    handle.remove()
    torch.manual_seed(3)
    F.cross_entropy(plain(IMAGES), LABELS).backward()
    other.step()
    other.zero_grad()
    hooks_and_places = {"identity": 0, "forwards": 0}  # the recorder is on again
    assert_same(everything(plain, other) | hooks_and_places, everything(model, opt) | hooks_and_places)
    assert "not planned yet" in session.explain()
    session.step(F.cross_entropy(model(IMAGES), LABELS))
    assert session.plan is not None and session.step_count == 2


def test_a_prepare_that_failed_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine())
    model = conv_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=0.5)
    with pytest.raises(KeyError, match="labels"):
        session.prepare({"x": IMAGES}, lambda m, batch: F.cross_entropy(m(batch["x"]), batch["labels"]))
    session.prepare((IMAGES, LABELS), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    assert session.plan is not None


def test_a_skipped_first_step_isnt_planned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine())
    model = nn.Sequential(nn.Linear(8, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=0.5)
    norm_of_zero = (model(torch.zeros(4, 8)) * 0).square().sum().sqrt()  # 0, and its gradient is NaN
    assert session.step(norm_of_zero).skipped
    assert session.plan is None
    session.step(F.cross_entropy(model(torch.randn(4, 8)), LABELS))
    assert session.plan is not None and not model._forward_hooks


def test_the_step_is_what_a_gradient_reaches() -> None:
    """A dry run before, an encoder outside the model, a dataclass, a parameter among the outputs."""
    from contextlib import nullcontext
    from dataclasses import dataclass

    @dataclass
    class Output:
        logits: torch.Tensor
        temperature: torch.Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Output:
            return Output(self.linear(x), self.temperature)

    model, encoder = Model(), nn.Linear(8, 8)
    recorder = Recorder(model)
    model(torch.randn(2, 8))
    out = model(encoder(torch.randn(4, 8)))
    F.cross_entropy(out.logits * out.temperature, LABELS).backward()
    model(torch.randn(3, 8))  # an evaluation after it
    want = [p.grad.clone() for p in model.linear.parameters()]
    assert recorder.calls["linear"].args[0].shape == (4, 8)
    replay = recorder.replay()
    assert replay is not None
    for _ in range(2):
        model.zero_grad()
        replay(nullcontext)
    for grad, p in zip(want, model.linear.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-7)
    recorder.remove()
    assert not model.temperature._backward_hooks


def test_an_autocast_around_the_step_doesnt_reach_the_races_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine())
    model = nn.Sequential(nn.Linear(8, 4))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_time_s=0.5)
    seen: set[torch.dtype] = set()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(torch.randn(4, 8)), LABELS)
        model[0].register_forward_hook(lambda m, a, out: seen.add(out.dtype))
        session.step(loss)
    assert seen == {torch.float32}
