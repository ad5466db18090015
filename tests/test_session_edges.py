"""Off the beaten track: copies, pickles, second sessions, states from elsewhere, odd gradients."""

import copy
import io
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.errors import FormatError, PolicyError, SessionError
from equipoise.policy import Plan, Policy
from equipoise.session import Session
from recorded import machine

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(2))
LEVERS = Plan(policy=Policy("fp32"), fused_optimizer=True, memory_format="channels_last")


@pytest.fixture(autouse=True)
def recorded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))


def conv_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    # A large eps: the layouts' last digits then don't turn the sign of an update.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, **more)


def dtypes_of(model: nn.Sequential, session: Session) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    linears = [m for m in model if isinstance(m, nn.Linear)]
    hooks = [m.register_forward_hook(lambda m, a, out: seen.append(out.dtype)) for m in linears]
    with session.autocast():
        model(X)
    for hook in hooks:
        hook.remove()
    return seen


def through_a_file(value: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_a_second_session_on_modules_under_a_policy_is_refused_until_the_first_is_restored() -> None:
    model = small_model()
    first = Session(model, sgd(model), precision="bf16; 2=fp32")
    for precision in ("bf16; 0=fp32", "auto"):
        with pytest.raises(SessionError, match="'2' runs under another Session's policy"):
            Session(model, sgd(model), precision=precision)
    first.restore()
    second = Session(model, sgd(model), precision="bf16; 0=fp32")
    assert dtypes_of(model, second) == [torch.float32, torch.bfloat16]


def test_a_session_that_is_gone_is_in_nobodys_way() -> None:
    model = small_model()
    Session(model, sgd(model), precision="bf16; 2=fp32")
    second = Session(model, sgd(model), precision="bf16; 0=fp32")
    assert dtypes_of(model, second) == [torch.float32, torch.bfloat16]
    second.restore()
    assert not [key for m in model for key in vars(m) if key == "forward" or "equipoise" in key]


def test_a_copy_takes_a_policy_of_its_own() -> None:
    model = small_model()
    session = Session(model, sgd(model), precision="bf16; 2=fp32")
    copied = copy.deepcopy(model)
    other = Session(copied, sgd(copied), precision="bf16; 0=fp32")
    assert dtypes_of(copied, other) == [torch.float32, torch.bfloat16]
    assert dtypes_of(model, session) == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("precision", ["bf16; 2=fp32", "fp32; 2=bf16", "auto"])
def test_a_model_saved_whole_comes_back_with_its_own_forward(precision: str) -> None:
    model = small_model()
    session = Session(model, sgd(model), precision=precision)
    loaded = through_a_file(model, weights_only=False)
    assert torch.equal(loaded(X), small_model()(X))
    other = Session(loaded, sgd(loaded), precision="bf16; 0=fp32")
    assert dtypes_of(loaded, other) == [torch.float32, torch.bfloat16]
    session.restore()


@dataclass
class Output:
    logits: torch.Tensor
    kind: str = "logits"


def test_a_dataclass_from_half_inside_fp32_is_widened() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> Output:
            return Output(self.linear(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x).logits)

    model = Outer()
    session = Session(model, sgd(model), precision="fp32; inner=bf16")
    with session.autocast():
        loss = F.cross_entropy(model(X), Y)
    assert not session.step(loss).skipped
    assert model.inner(X).logits.dtype is torch.float32 and model.inner(X).kind == "logits"


def test_a_part_of_an_attention_has_no_format_of_its_own() -> None:
    model = nn.Sequential(nn.MultiheadAttention(12, 2))
    with pytest.raises(PolicyError, match=r"'0.out_proj' can't have a format of its own"):
        Session(model, sgd(model), precision="bf16; 0.out_proj=fp32")
    Session(model, sgd(model), precision="bf16; 0=fp32")


def train(session: Session, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        session.step(F.cross_entropy(model(IMAGES), Y))


def train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        F.cross_entropy(model(IMAGES), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # layouts sum in another order


@pytest.mark.parametrize("own", [None, True], ids=["as given", "the user's own fused"])
def test_states_go_between_a_plain_loop_and_a_plan_with_all_levers(own: bool | None) -> None:
    """Torch's fused update mixes numbers up when state and weight lie differently."""
    plain, planned = conv_model(), conv_model()
    by_hand, optimizer = adamw(plain, fused=own), adamw(planned, fused=own)
    plan = replace(LEVERS, fused_optimizer=own is None)
    session = Session(planned, optimizer, plan=plan)
    train(session, planned, 2)
    # ours -> plain
    state, weights = through_a_file((optimizer.state_dict(), planned.state_dict()))
    assert state["param_groups"][0]["fused"] is own and state["param_groups"][0]["foreach"] is None
    plain.load_state_dict(weights)
    by_hand.load_state_dict(state)
    train(session, planned, 2)
    train_by_hand(plain, by_hand, 2)
    assert_close(planned, plain)
    # plain -> ours, in the middle of a run
    train_by_hand(plain, by_hand, 2)
    state, weights = through_a_file((by_hand.state_dict(), plain.state_dict()))
    planned.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["fused"] is True
    moment = optimizer.state[planned[0].weight]["exp_avg"]
    assert moment.stride() == planned[0].weight.stride() != moment.contiguous().stride()
    train(session, planned, 2)
    train_by_hand(plain, by_hand, 2)
    assert_close(planned, plain)
    session.restore()
    assert optimizer.param_groups[0]["fused"] is own and optimizer.param_groups[0]["foreach"] is None
    train_by_hand(planned, optimizer, 1)
    train_by_hand(plain, by_hand, 1)
    assert_close(planned, plain)


def test_a_session_state_doesnt_switch_the_update_of_another_plan() -> None:
    model = conv_model()
    session = Session(model, adamw(model), plan=LEVERS)
    train(session, model, 1)
    state = through_a_file(session.state_dict()) | {"plan": None}
    state["optimizers"][0]["param_groups"][0]["fused"] = True  # as one that was fused by hand has it
    other = conv_model()
    optimizer = adamw(other)
    Session(other, optimizer, precision="fp32").load_state_dict(state)
    assert optimizer.param_groups[0]["fused"] is None


def test_a_user_who_said_fused_false_keeps_it() -> None:
    model = small_model()
    optimizer = adamw(model, fused=False)
    Session(model, optimizer, plan=LEVERS)
    assert optimizer.param_groups[0]["fused"] is False


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sparse_gradients_are_measured_and_clipped_at_their_true_size(precision: str) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(10, 12, sparse=True), nn.Linear(12, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(words).mean(1))

    words = torch.randint(0, 10, (16, 3), generator=torch.Generator().manual_seed(3))
    model, dense = Bag(), Bag()
    dense.embedding.sparse = False
    before = [p.detach().clone() for p in dense.parameters()]
    F.cross_entropy(dense(words), Y).backward()
    norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
    session = Session(model, sgd(model, lr=1.0), precision=precision)
    with session.autocast():
        loss = F.cross_entropy(model(words), Y)
    report = session.step(loss, max_grad_norm=0.1)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-2)
    for p, old, q in zip(model.parameters(), before, dense.parameters(), strict=True):
        torch.testing.assert_close(p, old - q.grad, rtol=0.05, atol=1e-3)


def test_restore_gives_gradients_that_wait_their_true_size() -> None:
    model, plain = small_model(), small_model()
    session = Session(model, sgd(model), precision="fp16")
    with session.autocast():
        loss = F.cross_entropy(model(X), Y)
    session.backward(loss)
    session.restore()
    session.restore()
    F.cross_entropy(plain(X), Y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=1e-3)


def test_a_schedule_that_needs_a_metric_is_refused_before_any_step() -> None:
    model = small_model()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(SessionError, match=r"ReduceLROnPlateau.step\(\) needs metrics"):
        Session(model, optimizer, precision="fp32", lr_scheduler=schedule)


def test_torchs_own_scaler_is_refused_with_the_way_to_hand_it_over() -> None:
    model = small_model()
    with pytest.raises(SessionError, match="scaler is GradScaler; a LossScaler is needed"):
        Session(model, sgd(model), precision="fp16", scaler=torch.amp.GradScaler("cpu"))


def test_a_closure_that_goes_backward_by_itself_is_named() -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    session = Session(model, optimizer, precision="bf16")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    with pytest.raises(SessionError, match=r"the closure called loss\.backward\(\) by itself"):
        session.step(closure=closure)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('policy = "bf16"', 'policy = "bf16; 2=fp32"', "contradicts itself.*layer '2' fp32"),
        ('0 = "bf16"', '0 = "fp32"', r"contradicts itself.*\[formats\] says 'fp32'"),
        ('0 = "bf16"', "0 = 3", r"contradicts itself.*\[formats\] says 3"),
        ('0 = "bf16"', 'zero = "bf16"', "layer '0' that the plan has not"),
    ],
)
def test_a_plan_edited_by_hand_says_what_is_wrong_with_it(old: str, new: str, says: str) -> None:
    model = small_model()
    session = Session(model, sgd(model), precision="bf16")
    assert session.plan is not None
    text = session.plan.to_toml()
    assert old in text
    session.restore()
    with pytest.raises(PolicyError, match=says):
        Session(model, sgd(model), plan=Plan.from_toml(text.replace(old, new)))


def test_a_pinned_plan_whose_format_isnt_there_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="unusable"))
    model = small_model()
    with pytest.raises(FormatError, match="'bf16' can't be used"):
        Session(model, sgd(model), plan=Plan(policy=Policy("bf16")))


def test_half_of_a_double_model_is_refused_and_auto_leaves_it_as_it_is() -> None:
    model = small_model().double()
    with pytest.raises(FormatError, match=r"layer '0' can't compute in bf16: its weight is torch\.float64"):
        Session(model, sgd(model), precision="bf16")
    session = Session(model, sgd(model), plan_time_s=0)
    session.step(F.cross_entropy(model(X.double()), Y))
    assert "only FP32 ones are cast" in session.explain()
