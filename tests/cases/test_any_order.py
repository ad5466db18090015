"""Any order of calls of a Session and of a LossScaler: never a wrong scale on a gradient (rows S1-S3, S7).

The loss is linear in the weights with whole numbers, the learning rate is 1 and scales are powers of two, so
the true gradient and every weight are exact in FP32, and a scale too many or too few shows at once. Beside
the object a plain account is kept: what gradients should be, what a step should do. A call is either refused
with an error of ours, and then changes no weight, or does what the account says.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise import LossScaler, Session
from equipoise.errors import EquipoiseError, SessionError

Tensor = torch.Tensor
START = torch.tensor([64.0, -32.0, 7.0])


class Line(nn.Module):
    """A loss with a known gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(START.clone())

    def forward(self, slope: Tensor, bad: bool) -> Tensor:
        w = self.weight * 1.0
        if bad:  # an overflow in backward alone: the loss itself is fine
            w.register_hook(lambda grad: grad * math.inf)
        return (w * slope).sum()


class Account:
    """What weights, gradients and scale should be."""

    def __init__(self) -> None:
        self.weights = START.clone()
        self.grad: Tensor | None = None
        self.spoilt = False
        """Changed while it carries a scale: only giving it up helps."""
        self.unscaled = False
        self.closed = False
        """The scale was moved between unscale and step: what was found out of these gradients is gone."""
        self.backwards = 0
        self.scale, self.clean = 2.0**10, 0
        self.new_scale = False
        """Of the user's own, since the last step: gradients may carry the one before until the next."""

    def add(self, slope: Tensor) -> None:
        self.grad = slope.clone() if self.grad is None else self.grad + slope

    def end(self) -> bool:
        """The step's outcome: whether it is skipped."""
        grad = self.grad
        assert grad is not None
        skipped = not bool(grad.isfinite().all())
        if skipped:
            self.scale, self.clean = max(self.scale / 2, 2.0**-24), 0
        else:
            self.weights = self.weights - grad
            self.clean += 1
            if self.clean == 2:
                self.scale, self.clean = self.scale * 2, 0
        self.clear()
        self.new_scale = False
        return skipped

    def clear(self) -> None:
        self.grad, self.spoilt, self.unscaled, self.closed, self.backwards = None, False, False, False, 0


def new_scaler() -> LossScaler:
    return LossScaler("cpu", init_scale=2.0**10, growth_interval=2)


slopes = st.lists(st.integers(-4, 4).filter(bool), min_size=3, max_size=3)
SESSION_CALLS = [
    "backward",
    "bad",
    "unscale",
    "step",
    "loss",
    "drop",
    "plain",
    "half",
    "zero",
    "resume",
    "scale",
]


class Driver:
    """A session and its account."""

    def __init__(self) -> None:
        self.account = Account()
        self.make()

    def make(self) -> None:
        self.model = Line()
        with torch.no_grad():
            self.model.weight.copy_(self.account.weights)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.session = Session(
            self.model,
            optimizer,
            precision="fp16",
            scaler=new_scaler(),
            emulate=True,
            on_stall="record",
            on_overflow="record",
        )

    def loss(self, slope: Tensor, bad: bool = False) -> Tensor:
        with self.session.autocast():
            out: Tensor = self.model(slope, bad)
        return out

    def call(self, name: str, slope: Tensor) -> None:
        """Make the call, or see it refused where the account says so."""
        refuses = getattr(self, f"refuses_{name}", lambda: False)()
        act: Callable[[Tensor], None] = getattr(self, f"do_{name}")
        if refuses:
            with pytest.raises(SessionError):
                act(slope)
        else:
            act(slope)
            getattr(self, f"count_{name}", lambda slope: None)(slope)
        assert torch.equal(self.model.weight, self.account.weights)
        account, grad = self.account, self.model.weight.grad
        if account.unscaled:
            expected = account.grad
            assert (grad is None) == (expected is None)
            assert grad is None or torch.equal(
                grad.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0)
            )
        assert self.session.scaler.get_scale() == account.scale

    # a backward, with a gradient that is finite or not

    def refuses_backward(self) -> bool:
        return self.account.unscaled or self.account.spoilt

    refuses_bad = refuses_backward

    def do_backward(self, slope: Tensor) -> None:
        self.session.backward(self.loss(slope))

    def do_bad(self, slope: Tensor) -> None:
        self.session.backward(self.loss(slope, bad=True))

    def count_backward(self, slope: Tensor) -> None:
        self.account.add(slope)
        self.account.backwards += 1

    def count_bad(self, slope: Tensor) -> None:
        self.count_backward(slope * math.inf)

    # unscale, step

    def refuses_unscale(self) -> bool:
        return not self.account.backwards or self.account.unscaled or self.account.spoilt

    def do_unscale(self, slope: Tensor) -> None:
        self.session.unscale()

    def count_unscale(self, slope: Tensor) -> None:
        self.account.unscaled = True

    def refuses_step(self) -> bool:
        account = self.account
        return not account.backwards or account.spoilt or account.closed or account.grad is None

    def do_step(self, slope: Tensor) -> None:
        gone = self.account.backwards > 0 and not self.account.spoilt and self.account.grad is None
        try:
            self.report = self.session.step()
        finally:
            if gone:  # nothing is left of this window, and it is over
                self.account.clear()

    def count_step(self, slope: Tensor) -> None:
        scale = None if self.account.new_scale else self.account.scale
        assert self.report.skipped == self.account.end() and self.report.scale == (scale or self.report.scale)

    def refuses_loss(self) -> bool:
        return self.refuses_backward()

    def do_loss(self, slope: Tensor) -> None:
        self.report = self.session.step(self.loss(slope))

    def count_loss(self, slope: Tensor) -> None:
        self.count_backward(slope)
        self.count_step(slope)

    # what the user does by hand

    def do_drop(self, slope: Tensor) -> None:
        self.session.drop()
        self.account.clear()

    def by_hand(self) -> None:
        if not self.account.unscaled:
            self.account.spoilt = True

    def do_plain(self, slope: Tensor) -> None:
        self.model(slope, False).backward()

    def count_plain(self, slope: Tensor) -> None:
        self.by_hand()
        self.account.add(slope)

    def do_half(self, slope: Tensor) -> None:
        if self.model.weight.grad is not None:
            self.model.weight.grad.mul_(0.5)

    def count_half(self, slope: Tensor) -> None:
        if self.account.grad is not None:
            self.by_hand()
            self.account.grad = self.account.grad * 0.5

    def do_zero(self, slope: Tensor) -> None:
        self.model.zero_grad()

    def count_zero(self, slope: Tensor) -> None:
        account = self.account
        account.grad = None
        if not account.unscaled:
            account.spoilt = account.backwards > 0  # without a backward of the session's it is as new

    def do_scale(self, slope: Tensor) -> None:
        """A scale of the user's own, from the next window on."""
        try:
            self.session.scaler.update(64.0)
        except SessionError:  # before the first backward there is no scale yet
            return
        self.account.scale, self.account.new_scale = 64.0, True
        self.account.closed = self.account.unscaled

    def do_resume(self, slope: Tensor) -> None:
        """A new session of the same state: what was under way is given up."""
        state = copy.deepcopy(self.session.state_dict())
        self.session.restore()
        self.make()
        self.session.load_state_dict(state)
        self.account.clear()
        self.account.new_scale = False


@pytest.mark.filterwarnings("ignore:step ")  # what a watched step and a stall say
@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls=st.lists(st.tuples(st.sampled_from(SESSION_CALLS), slopes), min_size=1, max_size=14))
def test_a_session_in_any_order(calls: list[tuple[str, list[int]]]) -> None:
    driver = Driver()
    for name, slope in calls:
        driver.call(name, torch.tensor(slope, dtype=torch.float32))
    driver.session.restore()


# ---- a scaler alone, with two optimizers ------------------------------------------------------------------

SCALER_CALLS = ["backward", "bad", "unscale", "step", "update", "zero", "resume", "forget"]


class TwoLines:
    """Two weights with an optimizer each under one scaler; the true gradient of each beside it.

    Left out, since a scaler by itself doesn't notice it (tests/test_bad_input.py has both): a backward that
    adds to gradients that were unscaled already, and such gradients kept over an update.
    """

    def __init__(self) -> None:
        self.scaler = new_scaler()
        self.weights = [nn.Parameter(START.clone()) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([w], lr=1.0) for w in self.weights]
        self.true: list[Tensor | None] = [None, None]
        self.expected = [START.clone(), START.clone()]
        self.scaled = [True, True]

    def call(self, name: str, which: int, slope: Tensor) -> None:
        before = [w.detach().clone() for w in self.weights]
        try:
            getattr(self, name)(which, slope)
        except EquipoiseError:
            assert all(torch.equal(a, b) for a, b in zip(before, self.weights, strict=True))
        for weight, expected in zip(self.weights, self.expected, strict=True):
            assert torch.equal(weight, expected)
        scale = self.scaler.get_scale()
        assert 2.0**-24 <= scale <= 2.0**48 and math.frexp(scale)[0] == 0.5

    def backward(self, which: int, slope: Tensor, factor: float = 1.0) -> None:
        if not self.scaled[which]:
            return  # see the class
        loss = (self.weights[which] * slope).sum() * factor
        self.scaler.scale(loss).backward()
        true, new = self.true[which], slope * factor
        self.true[which] = new if true is None else true + new

    def bad(self, which: int, slope: Tensor) -> None:
        self.backward(which, slope, math.inf)

    def unscale(self, which: int, slope: Tensor) -> None:
        self.scaler.unscale_(self.optimizers[which])
        true, grad = self.true[which], self.weights[which].grad
        if true is None:
            return
        assert grad is not None
        self.scaled[which] = False
        if bool(true.isfinite().all()):
            assert torch.equal(grad, true)  # once, by its own scale

    def step(self, which: int, slope: Tensor) -> None:
        self.scaler.step(self.optimizers[which])
        true = self.true[which]
        if true is not None and bool(true.isfinite().all()):
            self.expected[which] = self.expected[which] - true
        self.optimizers[which].zero_grad()
        self.true[which], self.scaled[which] = None, True

    def update(self, which: int, slope: Tensor) -> None:
        self.scaler.update()
        for i, optimizer in enumerate(self.optimizers):
            if not self.scaled[i]:  # see the class
                optimizer.zero_grad()
                self.true[i], self.scaled[i] = None, True

    def zero(self, which: int, slope: Tensor) -> None:
        if self.scaled[which]:  # else what comes next adds to an optimizer that counts as unscaled
            self.optimizers[which].zero_grad()
            self.true[which] = None

    def forget(self, which: int, slope: Tensor) -> None:
        """The way to give unscaled gradients up."""
        self.scaler.forget(self.optimizers[which])
        self.optimizers[which].zero_grad()
        self.true[which], self.scaled[which] = None, True

    def resume(self, which: int, slope: Tensor) -> None:
        state = copy.deepcopy(self.scaler.state_dict())
        self.scaler = new_scaler()
        self.scaler.load_state_dict(state)
        assert self.scaler.state_dict() == state
        for i, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            self.true[i], self.scaled[i] = None, True


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(SCALER_CALLS), st.integers(0, 1), slopes), min_size=1, max_size=20
    )
)
def test_a_scaler_in_any_order(calls: list[tuple[str, int, list[int]]]) -> None:
    both = TwoLines()
    for name, which, slope in calls:
        both.call(name, which, torch.tensor(slope, dtype=torch.float32))


def test_the_account_would_notice_a_scale_too_many() -> None:
    """A scaler that divides twice, as one without stages would."""
    both = TwoLines()
    slope = torch.tensor([1.0, 2.0, 3.0])
    both.call("backward", 0, slope)
    both.call("unscale", 0, slope)
    grad: Any = both.weights[0].grad
    grad.div_(2.0**10)
    with pytest.raises(AssertionError):
        both.call("step", 0, slope)
