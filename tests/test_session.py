"""The main path, against the loops that people write by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from equipoise.errors import FormatError, NonFiniteError, PolicyError, SessionError, StallError
from equipoise.planning import named_plan
from equipoise.policy import Plan, Policy
from equipoise.session import Session
from equipoise.step.scaler import LossScaler
from recorded import machine

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def recorded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's answers must not depend on the CPU that the tests run on."""
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))


def conv_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_equal_the_hand_written_loop_bit_for_bit(name: str, precision: str) -> None:
    by_hand, ours = small_model(), small_model()
    opt = OPTIMIZERS[name](by_hand.parameters())
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(by_hand(X), Y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    session = Session(ours, OPTIMIZERS[name](ours.parameters()), precision=precision, sensitive="torch")
    for _ in range(5):
        with session.autocast():
            loss = F.cross_entropy(ours(X), Y)
        report = session.step(loss, max_grad_norm=1.0)
    assert same(weights(by_hand), weights(ours))
    assert not report.skipped and report.loss == pytest.approx(loss.item())
    assert session.step_count == 5 and report.step == 5


def test_fp16_equals_the_grad_scaler_loop() -> None:
    by_hand, ours = small_model(), small_model()
    opt = torch.optim.SGD(by_hand.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)  # far too large: the first steps overflow
    skips = 0
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(by_hand(X), Y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skips += scaler.get_scale() < before
        opt.zero_grad()
    session = Session(
        ours,
        torch.optim.SGD(ours.parameters(), lr=0.05),
        precision="fp16",
        sensitive="torch",
        scaler=LossScaler("cpu", init_scale=2.0**26),
    )
    skipped = []
    for _ in range(40):
        with session.autocast():
            loss = F.cross_entropy(ours(X), Y)
        skipped.append(session.step(loss).skipped)
    assert skips >= 5 and sum(skipped) == skips
    assert session.scaler.get_scale() == scaler.get_scale()
    assert same(weights(by_hand), weights(ours))
    assert session.taken_count == 40 - skips


def test_accumulation_equals_one_large_batch() -> None:
    whole, parts = small_model(), small_model()
    s1 = Session(whole, torch.optim.SGD(whole.parameters(), lr=0.1), precision="fp32")
    s2 = Session(parts, torch.optim.SGD(parts.parameters(), lr=0.1), precision="fp32")
    for _ in range(3):
        s1.step(F.cross_entropy(whole(X), Y))
        s2.backward(F.cross_entropy(parts(X[:8]), Y[:8]) / 2)
        s2.step(F.cross_entropy(parts(X[8:]), Y[8:]) / 2)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums in another order: a few ulp


def test_closure_equals_plain_lbfgs_and_skips_what_is_not_finite() -> None:
    by_hand, ours = small_model(), small_model()
    opt = torch.optim.LBFGS(by_hand.parameters(), max_iter=4)

    def hand_closure() -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(by_hand(X), Y)
        loss.backward()
        return loss

    session = Session(ours, torch.optim.LBFGS(ours.parameters(), max_iter=4), precision="fp32")
    for _ in range(3):
        opt.step(hand_closure)
        report = session.step(closure=lambda: F.cross_entropy(ours(X), Y))
    assert same(weights(by_hand), weights(ours))
    assert not report.skipped
    before = weights(ours)
    calls = []

    def late_nan() -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(ours(X), Y) * (float("nan") if len(calls) == 3 else 1.0)

    report = session.step(closure=late_nan)
    assert report.skipped and len(calls) == 3
    assert same(before, weights(ours))


def test_gan_losses_reach_their_own_optimizer_alone() -> None:
    torch.manual_seed(0)
    g, d = nn.Linear(4, 12), nn.Linear(12, 1)
    g2, d2 = copy.deepcopy(g), copy.deepcopy(d)
    z = torch.randn(8, 4)
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (g, d))
    for _ in range(4):
        opt_d.zero_grad()
        (F.softplus(-d(X[:8])).mean() + F.softplus(d(g(z).detach())).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        F.softplus(-d(g(z))).mean().backward()
        opt_g.step()
    o1, o2 = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (g2, d2))
    session = Session([g2, d2], [o1, o2], precision="fp32")
    for _ in range(4):
        # Not detached: the gradient that reaches G from D's loss must not leak into G's step.
        session.step(F.softplus(-d2(X[:8])).mean() + F.softplus(d2(g2(z))).mean(), optimizer=o2)
        session.step(F.softplus(-d2(g2(z))).mean(), optimizer=o1)
    for a, b in zip(weights(g) + weights(d), weights(g2) + weights(d2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(SessionError, match="not made with"):
        session.step(d2(X).mean(), optimizer=torch.optim.SGD(d.parameters()))


def test_groups_added_later_and_frozen_parts() -> None:
    model = small_model()
    for p in model[0].parameters():
        p.requires_grad_(False)
    opt = torch.optim.SGD(model[3].parameters(), lr=0.1)
    session = Session(model, opt, precision="fp32")
    session.step(F.cross_entropy(model(X), Y))
    first, norm = model[0].weight.clone(), model[2].weight.clone()
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    session.step(F.cross_entropy(model(X), Y))
    assert torch.equal(first, model[0].weight)
    assert not torch.equal(norm, model[2].weight)


def test_schedule_ema_and_count_move_only_with_taken_steps() -> None:
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    ema = torch.optim.swa_utils.AveragedModel(model)
    session = Session(model, opt, precision="fp32", lr_scheduler=schedule, ema=ema)
    session.step(F.cross_entropy(model(X), Y))
    before = weights(model)
    report = session.step(F.cross_entropy(model(X), Y) * float("inf"))
    assert report.skipped and same(before, weights(model))
    assert opt.param_groups[0]["lr"] == 0.5
    assert int(ema.n_averaged) == 1
    assert (session.step_count, session.taken_count) == (2, 1)
    session.step(F.cross_entropy(model(X), Y))
    assert opt.param_groups[0]["lr"] == 0.25 and int(ema.n_averaged) == 2


def test_nonfinite_raise_names_the_parameter_and_keeps_the_weights() -> None:
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="bf16", nonfinite="raise")
    session.step(F.cross_entropy(model(X), Y))
    before = weights(model)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        session.step(F.cross_entropy(model(X), Y) * float("nan"))
    assert same(before, weights(model))
    assert not session.step(F.cross_entropy(model(X), Y)).skipped


def test_twenty_skips_in_a_row_are_a_stall_and_nineteen_are_not() -> None:
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    session.step(F.cross_entropy(model(X), Y))
    for _ in range(19):
        session.step(F.cross_entropy(model(X), Y) * float("nan"))
    session.step(F.cross_entropy(model(X), Y))
    for _ in range(19):
        session.step(F.cross_entropy(model(X), Y) * float("nan"))
    with pytest.raises(StallError, match=r"20 steps in a row"):
        session.step(F.cross_entropy(model(X), Y) * float("nan"))


def test_two_steps_inside_one_context_read_the_new_weights() -> None:
    inside, outside = small_model(), small_model()
    s1 = Session(inside, torch.optim.SGD(inside.parameters(), lr=0.5), precision="bf16")
    s2 = Session(outside, torch.optim.SGD(outside.parameters(), lr=0.5), precision="bf16")
    with s1.autocast():
        for _ in range(3):
            s1.step(F.cross_entropy(inside(X), Y))
    for _ in range(3):
        with s2.autocast():
            loss = F.cross_entropy(outside(X), Y)
        s2.step(loss)
    assert same(weights(inside), weights(outside))
    with s1.autocast():
        before = inside(X)
        with torch.no_grad():
            inside[3].weight.data.mul_(2.0)
        assert not torch.equal(before, inside(X))


def test_a_policy_gives_formats_by_layer() -> None:
    model = small_model()
    seen = {}
    for name in ("0", "3"):
        model[int(name)].register_forward_hook(
            lambda m, a, out, name=name: seen.__setitem__(name, (a[0].dtype, out.dtype))
        )
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16; 3=fp32")
    with session.autocast():
        loss = F.cross_entropy(model(X), Y)
    session.step(loss)
    assert seen["0"][1] is torch.bfloat16
    assert seen["3"][1] is torch.float32
    assert session.plan is not None and session.plan.formats == {"0": "bf16", "2": "fp32", "3": "fp32"}
    narrow = small_model()
    session = Session(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), precision="fp32; 0=bf16")
    outputs = []
    narrow[0].register_forward_hook(lambda m, a, out: outputs.append(out))
    with session.autocast():
        narrow(X)
    exact = outputs[0].detach()
    assert exact.dtype is torch.float32  # widened for its FP32 parent, but of bf16 values
    assert torch.equal(exact, exact.bfloat16().float())


def test_state_dict_identity_and_restore() -> None:
    model = conv_model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    strides = [p.stride() for p in parameters]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    defaults = dict(opt.defaults)
    plan = Plan(policy=Policy.parse("bf16; 5=fp32"), memory_format="channels_last", fused_optimizer=True)
    session = Session(model, opt, plan=plan)
    images = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        with session.autocast():
            loss = F.cross_entropy(model(images), Y[:4])
        session.step(loss)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert opt.param_groups[0]["fused"] is True
    assert list(model.state_dict()) == keys and type(model) is nn.Sequential
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    values = weights(model)
    session.restore()
    assert same(values, weights(model))
    assert [p.stride() for p in model.parameters()] == strides
    assert [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups] == groups
    assert opt.defaults == defaults and not hasattr(opt, "_step_supports_amp_scaling")
    assert "forward" not in model[5].__dict__ and not model._forward_pre_hooks
    with pytest.raises(SessionError, match="ended by restore"):
        session.step(F.cross_entropy(model(images), Y[:4]))
    copy.deepcopy(model)(images)


def test_a_copied_model_runs_its_own_weights() -> None:
    model = small_model()
    Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16; 3=fp32")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    assert torch.count_nonzero(model(X)) == 0
    assert torch.count_nonzero(copied(X)) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_session_state_goes_on_with_the_same_bits(precision: str) -> None:
    def make() -> tuple[nn.Module, Session]:
        model = nn.Sequential(*small_model(), nn.Dropout(0.5))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
        ema = torch.optim.swa_utils.AveragedModel(model)
        session = Session(model, opt, precision=precision, lr_scheduler=schedule, ema=ema)
        session.register("extra", ema)
        return model, session

    def run(model: nn.Module, session: Session, steps: int) -> None:
        for _ in range(steps):
            with session.autocast():
                loss = F.cross_entropy(model(X), Y)
            session.step(loss, max_grad_norm=1.0)

    model, session = make()
    run(model, session, 3)
    saved = copy.deepcopy((model.state_dict(), session.state_dict()))
    run(model, session, 4)
    again, resumed = make()
    torch.rand(7)  # the generators stand elsewhere
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    run(again, resumed, 4)
    assert same(weights(model), weights(again))
    assert resumed.step_count == 7
    for key in ("optimizers", "lr_schedulers", "ema"):
        torch.testing.assert_close(session.state_dict()[key], resumed.state_dict()[key], rtol=0, atol=0)


def test_optimizer_state_keeps_its_dtype_on_load() -> None:
    model = small_model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = Session(model, opt, precision="fp32")
    session.step(F.cross_entropy(model(X), Y))
    for state in opt.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    saved = copy.deepcopy(session.state_dict())
    session.load_state_dict(saved)
    assert all(state["exp_avg"].dtype is torch.float64 for state in opt.state.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_device_read_over_unsampled_steps(precision: str) -> None:
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)  # reads nothing by itself; AdamW reads its step counts
    session = Session(model, opt, precision=precision, lr_scheduler=torch.optim.lr_scheduler.StepLR(opt, 2))
    session.step(F.cross_entropy(model(X), Y))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(5):
            with session.autocast():
                loss = F.cross_entropy(model(X), Y)
            report = session.step(loss, max_grad_norm=1.0)
    assert "aten::addmm" in {e.name for e in seen.events()}
    assert not [e for e in seen.events() if e.name == "aten::_local_scalar_dense"]
    assert report.loss is not None


def test_reports_are_sampled_and_flat() -> None:
    model, rows = small_model(), []
    session = Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        precision="fp32",
        on_report=rows.append,
        report_every=3,
    )
    for _ in range(7):
        with session.autocast():
            loss = F.cross_entropy(model(X), Y)
        session.step(loss, max_grad_norm=5.0)
    assert [row["step"] for row in rows] == [3, 6]
    assert all(isinstance(v, (int, float)) for row in rows for v in row.values())
    assert all(rows[0][k] >= 0 for k in ("data_s", "forward_s", "backward_s", "optimizer_s", "machinery_s"))


def test_one_step_with_a_wrapped_optimizer_counts_once() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            self.optimizer.step()

    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Wrapper(inner)
    session = Session(model, [inner, wrapper], precision="fp32")
    before = weights(model)
    session.step(F.cross_entropy(model(X), Y))
    assert wrapper.steps == 1 and not same(before, weights(model))


def test_an_optimizer_without_gradients_is_no_skip() -> None:
    model, other = small_model(), nn.Linear(3, 3)
    idle = torch.optim.AdamW(other.parameters(), lr=1.0, weight_decay=0.5)
    before = weights(other)
    session = Session([model, other], [torch.optim.SGD(model.parameters(), lr=0.1), idle], precision="fp32")
    assert not session.step(F.cross_entropy(model(X), Y)).skipped
    assert same(before, weights(other))


def test_clipping_by_hand_and_dropping() -> None:
    a, b = small_model(), small_model()
    s1 = Session(a, torch.optim.SGD(a.parameters(), lr=0.1), precision="fp32")
    s2 = Session(b, torch.optim.SGD(b.parameters(), lr=0.1), precision="fp32")
    s1.step(F.cross_entropy(a(X), Y), max_grad_norm=0.01)
    s2.backward(F.cross_entropy(b(X), Y))
    s2.unscale()
    torch.nn.utils.clip_grad_norm_(b.parameters(), 0.01)
    s2.step()
    assert same(weights(a), weights(b))
    before = weights(b)
    s2.backward(F.cross_entropy(b(X), Y) * 100)
    s2.drop()
    assert all(p.grad is None for p in b.parameters()) and same(before, weights(b))
    assert s2.step_count == 1


def test_calls_in_a_wrong_order_are_named() -> None:
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    with pytest.raises(SessionError, match="without a loss"):
        session.step()
    with pytest.raises(SessionError, match="before backward"):
        session.unscale()
    session.backward(F.cross_entropy(model(X), Y))
    session.unscale()
    with pytest.raises(SessionError, match="twice"):
        session.unscale()
    with pytest.raises(SessionError, match="after unscale"):
        session.backward(F.cross_entropy(model(X), Y))
    session.drop()
    with pytest.raises(SessionError, match=r"\.mean\(\)"):
        session.step(F.cross_entropy(model(X), Y, reduction="none"))
    with pytest.raises(SessionError, match="above 0"):
        session.step(F.cross_entropy(model(X), Y), max_grad_norm=0.0)
    session.drop()
    with pytest.raises(SessionError, match="closure"):
        session.step(F.cross_entropy(model(X), Y), closure=lambda: F.cross_entropy(model(X), Y))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"precision": "int8"}, FormatError, "allowed: fp32, bf16, fp16"),
        ({"precision": "bf16-true"}, FormatError, "narrow weights"),
        ({"precision": "bf16; nose=fp32"}, PolicyError, "matches no module"),
        ({"precision": "fp32", "nonfinite": "ignore"}, SessionError, "'skip', 'raise'"),
        ({"precision": "fp32", "report_every": 0}, SessionError, "at least 1"),
        ({"plan_time_s": -1.0}, SessionError, "must be 0"),
        ({"plan": "nowhere.toml"}, PolicyError, "can't be read"),
        ({"plan": Plan(policy=Policy("bf16"), formats={"other": "bf16"})}, PolicyError, "doesn't fit"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: dict, error: type[Exception], says: str) -> None:
    model = small_model()
    with pytest.raises(error, match=says):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    assert "forward" not in model[0].__dict__ and not model._forward_hooks


@pytest.mark.parametrize(("verdict", "emulated"), [("unusable", False), ("not-worth-it", True)])
def test_a_format_that_is_not_there_or_emulated_raises(
    monkeypatch: pytest.MonkeyPatch, verdict: str, emulated: bool
) -> None:
    reading = machine(bf16=verdict)
    formats = dict(reading.formats) | {"bf16": replace(reading.formats["bf16"], emulated=emulated)}
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: replace(reading, formats=formats))
    model = small_model()
    with pytest.raises(FormatError, match="a recorded reading"):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")


def test_bad_models_and_optimizers() -> None:
    with pytest.raises(FormatError, match="FP32 weights"):
        half = small_model().bfloat16()
        Session(half, torch.optim.SGD(half.parameters(), lr=0.1), precision="bf16")
    with pytest.raises(SessionError, match=r"torch\.nn\.Module"):
        Session(lambda x: x, torch.optim.SGD(small_model().parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="optimizer is str"):
        Session(small_model(), "adam", precision="fp32")


def test_registered_objects_must_match_on_load() -> None:
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    state = session.state_dict()
    session.register("thing", nn.Linear(1, 1))
    with pytest.raises(SessionError, match="registered"):
        session.load_state_dict(state)
    with pytest.raises(SessionError, match="taken"):
        session.register("thing", nn.Linear(1, 1))
    with pytest.raises(SessionError, match="no state_dict"):
        session.register("other", object())
    with pytest.raises(SessionError, match="version"):
        session.load_state_dict({"version": 99})


def test_a_loop_under_torch_compile_keeps_the_policy() -> None:
    pytest.importorskip("torch._dynamo")
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    compiled = torch.compile(model, backend="aot_eager")
    with session.autocast():
        out = compiled(X)
    assert out.dtype is torch.bfloat16
    assert not session.step(F.cross_entropy(out.float(), Y)).skipped


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_short_way_through_a_step_is_the_long_one(precision: str, limit: float | None) -> None:
    """A sampled step goes the long way: weights, reports, schedule, average and skips are the same."""
    runs = []
    for every in (1, 10**6):
        torch.manual_seed(0)
        model = small_model()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        ema = torch.optim.swa_utils.AveragedModel(model)
        session = Session(
            model, opt, precision=precision, lr_scheduler=schedule, ema=ema, report_every=every
        )
        reports = []
        for step in range(12):
            x = X * float("inf") if step in (5, 6) else X
            with session.autocast():
                loss = F.cross_entropy(model(x), Y)
            report = session.step(loss, max_grad_norm=limit)
            reports.append((report.step, report.loss, report.skipped, report.scale, report.grad_norm))
            assert all(p.grad is None for p in model.parameters())
        counts = session.step_count, session.taken_count, schedule.last_epoch, int(ema.n_averaged)
        runs.append((weights(model) + weights(ema), repr(reports), counts))
        session.restore()
    (long, long_reports, long_counts), (short, short_reports, short_counts) = runs
    assert same(long, short) and long_reports == short_reports
    assert long_counts == short_counts == (12, 10, 10, 10)


class ReadsItsHead(nn.Module):
    """Computes with its head's weight, whose own forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(x).relu(), self.head.weight)


def _train(session: Session, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        with session.autocast():
            loss = F.cross_entropy(model(X), Y)
        session.step(loss)


@pytest.mark.parametrize("when", ["named", "planned after the first step", "resumed"])
def test_a_format_on_a_forward_that_never_runs_is_said_once(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = ReadsItsHead()
    plan = named_plan(model, Policy.parse("bf16; head=fp32"))
    monkeypatch.setattr("equipoise.planning.plan_session", lambda *_: plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto = when == "planned after the first step"
    session = Session(model, optimizer, **({"precision": "auto"} if auto else {"plan": plan}))
    if when == "resumed":
        with pytest.warns(UserWarning, match="gives head a format of its own"):
            _train(session, model, 7)
        state = session.state_dict()
        session.restore()
        session = Session(model, optimizer, plan=plan)
        session.load_state_dict(state)
    with pytest.warns(UserWarning, match="gives head a format of its own") as said:
        _train(session, model, 4)
    assert len(said) == 1
    session.restore()


def test_gradients_that_have_a_graph_are_clipped() -> None:
    model = small_model()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    for _ in range(2):  # the long way through a step, then the short one
        loss = F.cross_entropy(model(X), Y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad * 1.0
        report = session.step(F.cross_entropy(model(X), Y), max_grad_norm=1e-3)
        assert report.grad_norm > 1e-3 and not report.skipped
