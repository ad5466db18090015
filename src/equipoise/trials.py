"""Trials: real steps of the user's model, after which everything is as it was.

Enters: a session's model, optimizers and what its first step showed. Leaves: the times of a race; weights,
buffers, gradients, optimizer state and random generators bit for bit as before. Where: under ``planning``.

The race replays the first step: the same inputs through the model, the same output gradients back, and the
optimizer's update. Rounds are interleaved, and a round that foreign load disturbed is void.
"""

import copy
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from .foreign_load import ForeignLoad
from .plan import choose
from .plan.cost import LayerCall, first_line, specs_of
from .step.cast import (
    NARROWABLE,
    Casts,
    map_tensors,
    module_formats,
    unwrapped,
)
from .step.layout import ChannelsLast
from .step.optim import Fused, cloned_state, inner_optimizer
from .watch.rng import rng_state, set_rng_state

MAX_ROUNDS = 15
READING_S = 0.02
"""A reading of the race lasts at least this long: short steps are timed several at a time."""
MAX_FOREIGN = 0.15
"""A round in which other processes took more than this share of the machine is void."""


Context = Callable[[], AbstractContextManager[Any]]
RunStep = Callable[[Context], None]
"""Forward under the context, backward outside of it."""


GIVE_UP = 6
"""Void rounds, with none kept, after which a race proves nothing and ends ..."""
GIVE_UP_SHARE = 0.4
"""... or fewer, once this share of the time is spent: rounds that take long are few."""
SETTLE_ROUNDS = 7
"""Rounds after which a clear answer ends the race: before that an interval of the median says little."""


CALLS_KEPT = 4
"""Latest calls of a model that are kept until a backward shows which of them make the step."""


def _nothing(*_: Any) -> None:
    """What a recorder's hook becomes in a copy of the model."""


def _no_hook() -> Callable[..., None]:
    return _nothing


class _Hook:
    """A hook of the recorder; a copy or a pickle of the model doesn't report to it."""

    def __init__(self, see: Callable[..., None]) -> None:
        self._see = see

    def __call__(self, *args: Any) -> None:
        if torch.is_grad_enabled():
            self._see(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


@dataclass(slots=True)
class _RootCall:
    """One call of the model, and the gradients that came back to what it gave."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: list[torch.Tensor | None]


class Recorder:
    """Sees the first step: each layer's call, the root's inputs, and the gradients of its outputs.

    What the first backward reaches is the step; calls before it that no gradient reaches (a dry run, an
    evaluation) aren't part of it, nor are later ones (further micro-batches).
    """

    def __init__(self, root: nn.Module) -> None:
        self.calls: dict[str, LayerCall] = {}
        self._replays: list[_RootCall] = []
        self._handles: list[Any] = []
        for name, module in root.named_modules():
            if isinstance(module, NARROWABLE):
                hook = _Hook(partial(self._see_layer, name))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        heads = list(root) if type(root) is nn.ModuleList else [root]
        for head in heads:
            self._handles.append(head.register_forward_hook(_Hook(self._see_root), with_kwargs=True))

    @property
    def _complete(self) -> bool:
        return any(grad is not None for call in self._replays for grad in call.grads)

    def _see_layer(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in self.calls or not self._complete:
            self.calls[name] = LayerCall(specs_of(args), specs_of(kwargs))

    def _see_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        outputs = _grad_tensors(output)
        if not outputs or self._complete:
            return
        earlier = [call for call in self._replays if call.module is module]
        if len(earlier) >= CALLS_KEPT:
            self._replays.remove(earlier[0])
        grads: list[torch.Tensor | None] = [None] * len(outputs)
        for i, tensor in enumerate(outputs):
            self._handles.append(tensor.register_hook(_keeper(grads, i)))  # type: ignore[no-untyped-call]
        self._replays.append(_RootCall(module, map_tensors(args, _own), map_tensors(kwargs, _own), grads))

    def replay(self) -> "RunStep | None":
        """Forward and backward of the recorded step; None when it had no output that reached the loss."""
        recorded = [call for call in self._replays if any(g is not None for g in call.grads)]
        if not recorded:
            return None

        def run(context: Context) -> None:
            for call in recorded:
                with context():
                    outputs = _grad_tensors(call.module(*call.args, **call.kwargs))
                pairs = [(o, g) for o, g in zip(outputs, call.grads, strict=True) if g is not None]
                torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs])

        return run

    def stop(self) -> None:
        """Take the hooks off; what was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def remove(self) -> None:
        """Take the hooks off and let go of the batch."""
        self.stop()
        self._replays = []


def _keeper(grads: list[torch.Tensor | None], i: int) -> Callable[[torch.Tensor], None]:
    def keep(grad: torch.Tensor) -> None:
        grads[i] = grad.detach().clone()

    return keep


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without history: a replay neither needs the graph before the model nor touches the batch."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _grad_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors inside nested containers and dataclasses that a gradient can reach, in order."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_leaf:  # a parameter that is handed out has no way back through the model
            found.append(tensor)
        return tensor

    map_tensors(value, see)
    return found


_PLAIN_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)


class _Kept:
    """The attributes of an object as they were; what plain containers and generators among them hold, too.

    A forward may count its calls, append to a list, reassign a buffer or draw from a generator of its own.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._before = dict(attributes)
        self._contents = [(v, copy.copy(v)) for v in self._before.values() if type(v) in _PLAIN_CONTAINERS]
        self._states = [pair for v in self._before.values() if (pair := _generator_state(v)) is not None]

    def put_back(self) -> None:
        self._attributes.clear()
        self._attributes.update(self._before)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if hasattr(container, "extend") else container.update(content)
        for set_state, state in self._states:
            set_state(state)


def _generator_state(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """A generator's own way to take a state, and its present one; None for anything else."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.set_state, value.get_state()
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state"), copy.deepcopy(value.bit_generator.state)
    return (value.setstate, value.getstate()) if isinstance(value, random.Random) else None


def _tensors_of(root: nn.Module, inner: list[Any]) -> list[torch.Tensor]:
    """Everything that a step may change in place: parameters, buffers, tensors kept as plain attributes."""
    owned = [p for o in inner for group in o.param_groups for p in group["params"]]
    loose = [v for m in root.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    tensors = {id(t): t for t in [*root.parameters(), *root.buffers(), *owned, *loose]}
    return [t for t in tensors.values() if not t.is_inference()]


@contextmanager
def restored(root: nn.Module, optimizers: list[Any]) -> Iterator[Callable[[], None]]:
    """Run anything on the model; afterwards weights, buffers, gradients, optimizer state, RNG and attributes
    of modules are the same bits.

    The user's storages are put aside and copies trained on, so nothing is lost when a trial fails or is
    interrupted. Yields a function that puts the copies back to the start, for the next trial.
    """
    inner = [inner_optimizer(o) for o in optimizers]
    kept = [
        (t, t.data, t.grad if t.is_leaf else None, t.requires_grad if t.is_leaf else None)
        for t in _tensors_of(root, inner)
    ]
    attributes = [_Kept(vars(m)) for m in root.modules()]
    attributes += [_Kept(group) for o in inner for group in o.param_groups]
    attributes += [_Kept(vars(o)) for o in inner]
    rng = rng_state()

    def put_back_attributes() -> None:
        for owner in attributes:
            owner.put_back()

    def start() -> None:
        put_back_attributes()
        for tensor, data, _, requires_grad in kept:
            tensor.data = data.clone()
            if requires_grad is not None:
                tensor.grad = None
        for o in inner:
            copies = cloned_state(o)
            o.state.clear()
            o.state.update(copies)
            # The user's own hooks don't see the trials.
            o._optimizer_step_pre_hooks = type(o._optimizer_step_pre_hooks)()
            o._optimizer_step_post_hooks = type(o._optimizer_step_post_hooks)()

    try:
        start()
        yield start
    finally:
        put_back_attributes()
        for tensor, data, grad, requires_grad in kept:
            tensor.data = data
            if requires_grad is not None:
                tensor.grad = grad
                tensor.requires_grad_(requires_grad)
        set_rng_state(rng)


@dataclass(slots=True)
class Workbench:
    """What planning works on; made by the session."""

    root: nn.Module
    optimizers: list[Any]
    device: torch.device
    recorder: Recorder
    run_step: RunStep | None
    """Forward and backward of one real step; None when the first step's couldn't be recorded."""
    sensitive: str = "equipoise"
    """Whose operator list is in force in each arm that computes in half."""
    before_first_step: bool = False
    """Whether the layers' calls must be recorded first, by running the step once in FP32."""
    progress: Callable[[float, str], None] = lambda share, what: None
    """Told how far planning is, between measurements."""
    timings: dict[str, Any] = field(default_factory=dict)
    """What was timed: ``layers``, one LayerCost each, and the ``race``, seconds a step by arm and round."""

    @property
    def sharded(self) -> bool:
        """Whether weights are spread over ranks."""
        return any(type(p.data) is not torch.Tensor for p in self.root.parameters())

    @property
    def why_not_raced(self) -> str:
        """Why whole steps can't be raced; empty when they can."""
        if self.run_step is None:
            return "the first step's forward wasn't one call of the model"
        if any(unwrapped(m) is not m for m in self.root.modules()):
            return "the model is compiled, and each arm would be compiled again"
        return ""


class _Runner:
    """One arm at work: applies it, runs steps, undoes it."""

    def __init__(self, bench: Workbench, arm: choose.Arm, start: Callable[[], None]) -> None:
        self.arm = arm
        self._bench = bench
        self._start = start
        self._formats = module_formats(bench.root, arm.policy)
        self.steps = 1

    def time(self, steps: int, warm_up: int) -> float:
        """Seconds a step over ``steps`` steps, after ``warm_up`` untimed ones."""
        bench = self._bench
        self._start()
        inner = [inner_optimizer(o) for o in bench.optimizers]
        table = bench.sensitive == "equipoise"
        casts = Casts(bench.root, self._formats, bench.device.type, table=table)
        undo = [casts.remove]
        try:
            if self.arm.memory_format == "channels_last":
                undo.append(ChannelsLast(bench.root, inner).remove)
            if self.arm.fused_optimizer:
                undo += [Fused(o).remove for o in inner]
            for _ in range(warm_up):
                self._step(casts, inner)
            self._synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self._step(casts, inner)
            self._synchronize()
            return (time.perf_counter() - began) / steps
        finally:
            for undone in reversed(undo):
                undone()

    def _step(self, casts: Casts, inner: list[Any]) -> None:
        bench = self._bench
        if bench.run_step is not None:
            bench.run_step(casts.context)
        for optimizer in inner:
            optimizer.step()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def _synchronize(self) -> None:
        if self._bench.device.type != "cpu":
            torch.accelerator.synchronize(self._bench.device)


def _runners(
    bench: Workbench,
    arms: list[choose.Arm],
    start: Callable[[], None],
    deadline: float,
    dropped: dict[str, str],
) -> dict[str, _Runner]:
    """Every arm run once, to warm it and to learn how long it takes; those that fail are dropped.

    Ends when the next arm would overrun the time.
    """
    runners: dict[str, _Runner] = {}
    for arm in arms:
        runner = _Runner(bench, arm, start)
        began = time.perf_counter()
        try:
            first = runner.time(1, 1 if not runners else 0)
        except Exception as error:  # the user's own code may raise anything when it is called again
            dropped[arm.name] = first_line(error)
            continue
        runner.steps = max(1, min(1000, int(READING_S / max(first, 1e-6))))
        runners[arm.name] = runner
        if 2 * time.perf_counter() - began > deadline:
            break
    return runners


def _round(runners: list[_Runner], deadline: float, dropped: dict[str, str]) -> dict[str, float]:
    """A reading of each; fewer when the time is over, or when an arm fails and is dropped."""
    readings: dict[str, float] = {}
    for runner in runners:
        if time.perf_counter() > deadline:
            break
        try:
            readings[runner.arm.name] = runner.time(runner.steps, int(runner.steps > 1))
        except Exception as error:
            dropped[runner.arm.name] = first_line(error)
    return readings


def race(
    bench: Workbench, arms: list[choose.Arm], start: Callable[[], None], began: float, limit_s: float
) -> choose.Race:
    """Interleaved rounds until the time is spent, or until more rounds wouldn't change the answer."""
    dropped: dict[str, str] = {}
    times: dict[str, list[float | None]] = {arm.name: [] for arm in arms}
    runners = _runners(bench, arms, start, began + limit_s, dropped)
    rounds = _Rounds(times)
    running = list(runners)
    for turn in range(2 * MAX_ROUNDS):
        spent = (time.perf_counter() - began) / limit_s
        bench.progress(max(spent, rounds.kept / MAX_ROUNDS), f"racing {len(running)} ways, round {turn + 1}")
        order = running[turn % len(running) :] + running[: turn % len(running)] if running else []
        readings = _round([runners[name] for name in order], began + limit_s, dropped)
        running = [name for name in running if name not in dropped]
        if len(readings) < len(running) or not running:
            break
        rounds.add(readings)
        if rounds.kept >= choose.MIN_ROUNDS:
            running = choose.still_in(running, times)
        hopeless = rounds.voided >= (GIVE_UP if spent < GIVE_UP_SHARE else choose.MIN_ROUNDS)
        if (hopeless and not rounds.kept) or rounds.kept >= MAX_ROUNDS:
            break
        if rounds.kept >= SETTLE_ROUNDS and choose.settled(running, times):
            break
    rounds.close()
    return choose.Race(arms=tuple(arms), times_s=times, dropped=dropped, voided=rounds.voided)


class _Rounds:
    """Rounds of a race; those that foreign load disturbed are counted and left out.

    The load's own clock ticks slowly, so short rounds wait until it has an answer for all of them.
    """

    def __init__(self, times: dict[str, list[float | None]]) -> None:
        self.kept = 0
        self.voided = 0
        self._times = times
        self._waiting: list[dict[str, float]] = []
        self._load = ForeignLoad(torch.get_num_threads())

    def add(self, readings: dict[str, float]) -> None:
        self._waiting.append(readings)
        share = self._load.share()
        if share is None:
            return
        if share > MAX_FOREIGN:
            self.voided += len(self._waiting)
            self._waiting.clear()
        self.close()

    def close(self) -> None:
        """Keep what waits: nothing speaks against it."""
        for readings in self._waiting:
            for name, column in self._times.items():
                column.append(readings.get(name))
        self.kept += len(self._waiting)
        self._waiting.clear()
