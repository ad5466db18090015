"""The smallest set of modules that must stay FP32 for the loss to hold in a half format: found by running.

Enters: a task's function and a half format. Leaves: names of modules, a policy that can be pasted, and the
loss without each of them. Where: before a format is chosen.

What is run: short trainings from the same weights on the same batches under the same seeds, each with another
set of modules in FP32. *Holds*: every step can be taken, and the mean loss over the last quarter of the steps
is at most FP32's plus the margin. A step whose scaled gradients overflow is tried again at the next lower
scale, on the same batch, so that the runs stay side by side. On a CPU the format is emulated.

What is searched: each module's *own code*, apart from the modules inside it: a layer, a container whose
forward multiplies by itself, the root with the loss. All of them in FP32 is FP32 itself, which holds. Halving
finds k modules among n in about k log2(n) runs, if more in FP32 never harms. Delta debugging (Zeller and
Hildebrandt, 2002: ddmin) of what it found needs no such belief: it ends only after every single member was
left out in vain. That isn't always the smallest set of all: two sets may each be enough.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from torch import nn

from .errors import FormatError, NonFiniteError, TaskError
from .evaluation import seed_everything
from .inspection import STEPS, refuse_empty, refuse_steps
from .policy import Policy
from .session import Session
from .step.cast import unwrapped
from .step.feed import Feed
from .task import Task, TaskFunction
from .trainer import pick_device

HALVES = ("fp16", "bf16")
MARGIN = "2%"
"""Share of FP32's loss that counts as held unless the user says otherwise: rounding alone makes less over
some ten steps."""
TRIES = 18
"""Scales at which a step is tried: from 2**16 down to 1/2; before 20, which a Session calls a stall."""

Unit = TypeVar("Unit", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What must stay FP32, and how that was found."""

    format: str
    margin: float
    """In the loss's units: how far above FP32's it may lie."""
    steps: int
    fp32_loss: float
    half_loss: float | None
    """With every module in the format; None where a step couldn't be taken or the loss wasn't finite."""
    wide: tuple[str, ...]
    """Modules whose own code stays FP32, the root ``""``; without any one of them the loss doesn't hold."""
    loss: float | None
    """With these in FP32 and the rest in the format."""
    without: Mapping[str, float | None] = field(default_factory=dict)
    """Module of :attr:`wide` -> the loss when it is in the format too."""
    policy: str = ""
    """The policy that keeps them."""
    runs: int = 0
    """Short trainings that this took."""

    @property
    def holds(self) -> bool:
        """Whether nothing must stay FP32."""
        return not self.wide

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "wide": list(self.wide), "without": dict(self.without)}


def smallest(units: Sequence[Unit], holds: Callable[[frozenset[Unit]], bool]) -> list[Unit]:
    """A smallest part of ``units``, in their order, that holds: none of its members can be left out.

    Args:
        units: all of them together hold; the empty set doesn't.
        holds: asked once for each set.
    """
    asked: dict[frozenset[Unit], bool] = {frozenset(): False, frozenset(units): True}

    def ask(part: Iterable[Unit]) -> bool:
        key = frozenset(part)
        if key not in asked:
            asked[key] = holds(key)
        return asked[key]

    found = _halved(units, ask)
    return _ddmin([u for u in units if u in found], ask)


def _halved(units: Sequence[Unit], ask: Callable[[Iterable[Unit]], bool]) -> set[Unit]:
    """A part that holds: the last module needed of those before, again and again."""
    kept: list[Unit] = []
    rest = list(units)
    while not ask(kept):
        fails, works = 0, len(rest)  # kept and the first so many of the rest
        while works - fails > 1:
            middle = (fails + works) // 2
            if ask([*kept, *rest[:middle]]):
                works = middle
            else:
                fails = middle
        kept.append(rest[works - 1])
        rest = rest[: works - 1]
    return set(kept)


def _ddmin(units: list[Unit], ask: Callable[[Iterable[Unit]], bool]) -> list[Unit]:
    kept, parts = units, 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rests = [[u for u in kept if u not in chunk] for chunk in map(set, chunks)]
        if (smaller := next((c for c in chunks if ask(c)), None)) is not None:
            kept, parts = smaller, 2
        elif (smaller := next((r for r in rests if ask(r)), None)) is not None:
            kept, parts = smaller, max(len(chunks) - 1, 2)
        elif len(chunks) == len(kept):
            break
        else:
            parts = min(2 * len(chunks), len(kept))
    return kept


def bisect(
    make: TaskFunction,
    *,
    format_name: str = "fp16",
    steps: int | None = None,
    margin: float | str = MARGIN,
    seed: int = 0,
    data: str | None = None,
    device: str = "auto",
    on_run: Callable[[int, int, float | None], None] | None = None,
) -> Bisection:
    """Find the modules that must stay FP32 when the others compute in ``format_name``.

    Args:
        make: the task's function; it is called for each run.
        format_name: ``fp16`` or ``bf16``.
        steps: of each run; None: 50, or the task's own if that is less.
        margin: how far above FP32's the loss may lie, in its units, or a share of it such as ``"2%"``.
        seed: of the task and its training.
        data: as for the task's function.
        device: ``auto`` or torch's name of one.
        on_run: called after each run with its number, the count of modules in FP32 and the loss or None.

    Raises:
        FormatError: not a half format.
        TaskError: fewer than one step, a model without parameters, a margin that can't be, or a task whose
            FP32 loss isn't finite.
    """
    if format_name not in HALVES:
        raise FormatError(f"bisect looks for what {format_name!r} breaks; allowed: {', '.join(HALVES)}")
    refuse_steps(steps)
    margin_of(margin, 1.0)  # before anything runs
    runs = _Runs(make, format_name, steps, seed, data, device, on_run)
    fp32_loss = runs.loss(frozenset(runs.units))
    if not math.isfinite(fp32_loss):
        raise TaskError(
            f"task {runs.name!r}: its loss in FP32 isn't finite within {runs.steps} steps: no format can be "
            "held against it. Lower the learning rate, or look at the data"
        )
    allowed = fp32_loss + margin_of(margin, fp32_loss)
    half_loss = runs.loss(frozenset())
    wide = [] if half_loss <= allowed else smallest(runs.units, lambda part: runs.loss(part) <= allowed)
    return Bisection(
        format=format_name,
        margin=allowed - fp32_loss,
        steps=runs.steps,
        fp32_loss=fp32_loss,
        half_loss=_finite(half_loss),
        wide=tuple(wide),
        loss=_finite(runs.loss(frozenset(wide))),
        without={u: _finite(runs.loss(frozenset(wide) - {u})) for u in wide},
        policy=str(runs.policy(frozenset(wide))),
        runs=len(runs.losses),
    )


def margin_of(margin: float | str, loss: float) -> float:
    """A margin in the loss's units; text such as ``"2%"`` is a share of ``loss``.

    Raises:
        TaskError: neither a number nor a share, below 0 or not finite.
    """
    text = str(margin).strip()
    try:
        value = float(text.removesuffix("%")) * (abs(loss) / 100 if text.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TaskError(
            f"margin is {margin!r}; write a number from 0 up in the loss's units, or a share as '2%'"
        )
    return value


class _Runs:
    """Short trainings of one task, each remembered by the set of modules that it kept in FP32."""

    def __init__(
        self,
        make: TaskFunction,
        format_name: str,
        steps: int | None,
        seed: int,
        data: str | None,
        device: str,
        on_run: Callable[[int, int, float | None], None] | None,
    ) -> None:
        self._make, self._format, self._seed, self._data = make, format_name, seed, data
        self._device = pick_device(device)
        self._on_run = on_run
        task = make(seed, data)
        refuse_empty(task)
        self.name = task.name
        self.steps = steps or min(STEPS, task.steps)
        root = unwrapped(task.model)
        self.units = list(_units(root))
        """Modules whose own code can have a format, in the model's order."""
        self._names = [name for name, _ in root.named_modules()]
        self.losses: dict[frozenset[str], float] = {}

    def policy(self, wide: frozenset[str]) -> Policy:
        """The half format with ``wide`` in FP32; what is no unit goes with the module around it."""
        if wide == frozenset(self.units):
            return Policy("fp32")
        units, formats = set(self.units), {"": self._format}
        entries = []
        for name in self._names:  # parents come first
            around = formats[_nearest(name, formats)]
            formats[name] = ("fp32" if name in wide else self._format) if name in units else around
            if name and formats[name] != around:
                entries.append((name, formats[name]))
        return Policy(formats[""], tuple(entries))

    def loss(self, wide: frozenset[str]) -> float:
        """Mean loss over the last quarter of the steps; inf where one can't be taken."""
        if wide not in self.losses:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that modules overflow, or never run, is what is found out
                self.losses[wide] = self._run(self.policy(wide))
            if self._on_run is not None:
                self._on_run(len(self.losses), len(wide), _finite(self.losses[wide]))
        return self.losses[wide]

    def _run(self, policy: Policy) -> float:
        task = self._make(self._seed, self._data)
        task.model.to(self._device)
        if not task.model.training:
            task.model.train()
        session = Session(
            task.model, task.optimizer, precision=policy, lr_scheduler=task.lr_scheduler, on_stall="record",
            emulate=self._device.type == "cpu" and policy.formats != ("fp32",), on_overflow="record",
        )  # fmt: skip
        try:
            losses = list(self._losses(task, session))
        except NonFiniteError:  # of the very first loss
            return math.inf
        finally:
            session.restore()
        if len(losses) < self.steps:
            return math.inf
        mean = statistics.fmean(losses[-max(1, self.steps // 4) :])
        return mean if math.isfinite(mean) else math.inf

    def _losses(self, task: Task, session: Session) -> Iterator[float]:
        """A loss each step; ends early at one that can't be taken."""
        feed = Feed(task.train, batch_size=task.batch_size, seed=self._seed, collate=task.collate)
        for step, batch in zip(range(self.steps), session.feed(feed.batches(0)), strict=False):
            loss = self._take(task, session, batch, step)
            if loss is None:
                return
            yield loss

    def _take(self, task: Task, session: Session, batch: Any, step: int) -> float | None:
        """Take one step, at a lower scale if need be; its loss, or None where that isn't finite or no scale
        helps.
        """
        for _ in range(TRIES):
            seed_everything(self._seed + step)  # dropout draws alike in every run and try
            with session.autocast():
                loss = task.loss(task.model, batch)
            report = session.step(loss, max_grad_norm=task.max_grad_norm)
            if report.loss is None or not math.isfinite(report.loss):
                return None
            if not report.skipped:
                return report.loss
        return None


def _units(root: nn.Module) -> Iterator[str]:
    """Modules with code of their own: all but plain containers, and the insides of an attention, which
    computes with their weights by itself.
    """
    attentions: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(outer) for outer in attentions):
            continue
        if isinstance(module, nn.MultiheadAttention):
            attentions.append(f"{name}." if name else "")
        if not name or not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield name


def _nearest(name: str, known: Mapping[str, str]) -> str:
    """The nearest module around ``name`` in ``known``; the root for itself."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
