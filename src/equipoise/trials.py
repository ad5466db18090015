"""Trials: real steps of the user's model, after which everything is as it was; and the planning made of them.

Enters: a session's model, optimizers and what its first step showed. Leaves: a Plan; weights, buffers,
gradients, optimizer state and random generators bit for bit as before. Where: once, after the first step or
in ``prepare``.

The way of a planning: quick probe (cached) -> costs of the model's own layers -> arms -> race on real steps
-> decision. The race replays the first step: the same inputs through the model, the same output gradients
back, and the optimizer's update. Rounds are interleaved, and a round that foreign load disturbed is void.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from . import ranks
from .errors import FormatError, SessionError
from .foreign_load import ForeignLoad
from .plan import choose
from .plan.cost import LayerCall, gemm_volume, measure_layers, specs_of
from .plan.machine import probe
from .policy import Plan, Policy
from .records import Choice, LayerCost, Machine
from .step.cast import NARROWABLE, Casts, layer_formats, unwrapped
from .step.layout import ChannelsLast, has_conv_weights
from .step.optim import Fused, can_fuse, cloned_state, inner_optimizer
from .watch.rng import rng_state, set_rng_state

MAX_PLAN_S = 30.0
"""Planning takes at most this long unless the user gives another limit."""
COST_SHARE = 0.3
"""Share of the planning time that layers' costs may take; the race has the rest."""
MAX_ROUNDS = 15
READING_S = 0.02
"""A reading of the race lasts at least this long: short steps are timed several at a time."""
STOP_RATIO = 1.25
"""An arm this much slower than the best after the first rounds isn't run again."""
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


class Recorder:
    """Sees the first step: each layer's call, the root's inputs, and the gradients of its outputs."""

    def __init__(self, root: nn.Module) -> None:
        self.calls: dict[str, LayerCall] = {}
        self._root = root
        self._replays: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], list[torch.Tensor | None]]] = []
        self._handles: list[Any] = []
        for name, module in root.named_modules():
            if isinstance(module, NARROWABLE):
                self._handles.append(
                    module.register_forward_pre_hook(self._layer_hook(name), with_kwargs=True)
                )
        heads = list(root) if type(root) is nn.ModuleList else [root]
        self._handles += [head.register_forward_hook(self._root_hook, with_kwargs=True) for head in heads]

    def _layer_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self.calls and torch.is_grad_enabled():
                self.calls[name] = LayerCall(specs_of(args), specs_of(kwargs))

        return hook

    def _root_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or any(seen is module for seen, *_ in self._replays):
            return
        grads: list[torch.Tensor | None] = []
        for i, tensor in enumerate(_grad_tensors(output)):
            grads.append(None)
            tensor.register_hook(_keeper(grads, i))  # type: ignore[no-untyped-call]
        if grads:
            self._replays.append((module, args, kwargs, grads))

    def replay(self) -> "RunStep | None":
        """Forward and backward of the recorded step; None when it had no output that reached the loss."""
        recorded = [r for r in self._replays if any(g is not None for g in r[3])]
        if not recorded:
            return None

        def run(context: Context) -> None:
            for module, args, kwargs, grads in recorded:
                with context():
                    outputs = _grad_tensors(module(*args, **kwargs))
                pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
                torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs])

        return run

    def remove(self) -> None:
        """Take the hooks off and let go of the batch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._replays = []


def _keeper(grads: list[torch.Tensor | None], i: int) -> Callable[[torch.Tensor], None]:
    def keep(grad: torch.Tensor) -> None:
        grads[i] = grad.detach().clone()

    return keep


def _grad_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors inside nested containers and dataclass-like outputs that a gradient can reach, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _grad_tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _grad_tensors(v)]
    return []


@contextmanager
def restored(root: nn.Module, optimizers: list[Any]) -> Iterator[Callable[[], None]]:
    """Run anything on the model; afterwards weights, buffers, gradients, optimizer state and RNG are the same
    bits.

    The user's storages are put aside and copies trained on, so nothing is lost when a trial fails or is
    interrupted. Yields a function that puts the copies back to the start, for the next trial.
    """
    inner = [inner_optimizer(o) for o in optimizers]
    owned = {id(p): p for o in inner for g in o.param_groups for p in g["params"]}
    tensors = list({**{id(t): t for t in [*root.parameters(), *root.buffers()]}, **owned}.values())
    kept = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    states = [(o, dict(o.state), o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in inner]
    modes = [(m, m.training) for m in root.modules()]
    rng = rng_state()

    def start() -> None:
        for tensor, data, _, _ in kept:
            tensor.data = data.clone()
            tensor.grad = None
        for o, state, *_ in states:
            o.state.clear()
            o.state.update(state)
            copies = cloned_state(o)
            o.state.clear()
            o.state.update(copies)
            o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks = (
                type(o._optimizer_step_pre_hooks)(),
                type(o._optimizer_step_post_hooks)(),
            )

    try:
        start()
        yield start
    finally:
        for tensor, data, grad, requires_grad in kept:
            tensor.data = data
            tensor.grad = grad
            tensor.requires_grad_(requires_grad)
        for o, state, pre, post in states:
            o.state.clear()
            o.state.update(state)
            o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks = pre, post
        for module, training in modes:
            module.training = training
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
    before_first_step: bool = False
    """Whether the layers' calls must be recorded first, by running the step once in FP32."""
    progress: Callable[[float, str], None] = lambda share, what: None
    """Told how far planning is, between measurements."""
    timings: dict[str, Any] = field(default_factory=dict)
    """What was timed: ``layers``, one LayerCost each, and the ``race``, seconds a step by arm and round."""

    def format_names(self, policy: Policy) -> dict[str, str]:
        """Format of every module under ``policy``."""
        names = [name for name, _ in self.root.named_modules()]
        return {name: match.format for name, match in policy.resolve(names).items()}

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


def named_plan(root: nn.Module, policy: Policy, device: torch.device) -> Plan:
    """The plan of a policy that the user names: its formats and nothing else.

    Raises:
        FormatError: the probe found a format unusable or emulated on this device.
        PolicyError: a pattern matches nothing.
    """
    names = [name for name, _ in root.named_modules()]
    formats = {name: match.format for name, match in policy.resolve(names).items()}
    used = set(formats.values())
    if used != {"fp32"}:
        machine = (
            ranks.agree(probe(quick=True, device=device.type)) if ranks.rank() == 0 else ranks.agree(None)
        )
        for fmt in sorted(used - {"fp32"}):
            verdict = machine.formats.get(fmt) if machine is not None else None
            if verdict is not None and (verdict.verdict == "unusable" or verdict.emulated):
                what = "is emulated" if verdict.emulated else "can't be used"
                raise FormatError(
                    f"format {fmt!r} {what} on this {device.type}: {verdict.reason}. "
                    "Ask for 'fp32', or for 'auto' to let the measurement choose"
                )
    return Plan(policy=policy, formats=layer_formats(root, formats), source="named")


def plan_session(bench: Workbench, limit_s: float | None) -> Plan:
    """Plan within ``limit_s`` seconds (None: at most 30); rank 0 plans and every rank gets its plan."""
    answer: Plan | Exception | None = None
    if ranks.rank() == 0:
        try:
            answer = _plan(bench, MAX_PLAN_S if limit_s is None else limit_s)
        except Exception as error:
            if ranks.world_size() == 1:
                raise
            answer = error  # the others wait for it
    answer = ranks.agree(answer)
    if isinstance(answer, Plan):
        return answer
    raise answer or SessionError("rank 0 sent no plan")


def _plan(bench: Workbench, limit_s: float) -> Plan:
    began = time.perf_counter()
    machine = probe(quick=True, device=bench.device.type)
    half, reason = choose.half_to_try(machine)
    notes = [] if half else [Choice(what="format", where="*", choice="fp32", reason=reason)]
    if bench.before_first_step and bench.run_step is not None:
        with restored(bench.root, bench.optimizers):
            bench.run_step(nullcontext)
    formats_of = {
        f: layer_formats(bench.root, bench.format_names(Policy(f))) for f in {"fp32", half or "fp32"}
    }
    share = _share_that_gains(bench, machine, half)
    ratio: float | None = None
    raw_ratio: float | None = None

    def static(why: str) -> Plan:
        note = f"can't tell: static default ({why})"
        return choose.static_plan(half, share, ratio, formats_of, note, notes)

    if limit_s <= 0:
        return static("no time was given to plan")
    if bench.sharded:
        return static("the weights are sharded: neither a layer nor a step runs on one rank alone")
    kept: list[Choice] = []
    if half is not None:
        bench.progress(0.0, "timing layers")
        costs = _layer_costs(bench, half, COST_SHARE * limit_s)
        bench.timings["layers"] = [asdict(cost) for cost in costs]
        kept = choose.slow_layers(costs, half)
        raw_ratio = choose.cost_ratio(costs, half, [])
        ratio = choose.cost_ratio(costs, half, kept)
        if ratio is not None and ratio > choose.HOPELESS:
            notes.append(
                Choice(
                    what="format",
                    where="*",
                    choice="fp32",
                    evidence={"cost_ratio": ratio},
                    reason=f"the layers take {ratio:.2f} times as long in {half}",
                )
            )
            half = None
    if bench.why_not_raced:
        return static(bench.why_not_raced)
    arms = choose.arms_to_race(
        half,
        kept,
        plain_half=raw_ratio is None or raw_ratio <= choose.HOPELESS,
        can_fuse=all(can_fuse(o) for o in bench.optimizers),
        has_convs=has_conv_weights(bench.root),
    )
    with restored(bench.root, bench.optimizers) as start:
        race = _race(bench, arms, start, began, limit_s)
    bench.timings["race"] = {
        "s_per_step": race.times_s,
        "dropped": race.dropped,
        "voided_rounds": race.voided,
    }
    formats_of |= {a.name: layer_formats(bench.root, bench.format_names(a.policy)) for a in arms}
    plan = choose.decide(race, half, kept, formats_of, notes)
    if plan is None:
        return static(f"{race.rounds} undisturbed rounds, {race.voided} disturbed by foreign load")
    return plan


def _share_that_gains(bench: Workbench, machine: Machine, half: str | None) -> float:
    if half is None:
        return 0.0
    least = choose.smallest_gaining_volume(machine, half)
    modules = dict(bench.root.named_modules())
    volumes = [gemm_volume(modules[name], call) for name, call in bench.recorder.calls.items()]
    return sum(v for v in volumes if v >= least) / sum(volumes) if sum(volumes) else 0.0


def _layer_costs(bench: Workbench, half: str, budget_s: float) -> list[LayerCost]:
    modules = dict(bench.root.named_modules())
    # A layer inside another (an attention's projection) is part of the outer one's time.
    calls = {
        name: call
        for name, call in bench.recorder.calls.items()
        if not any(name.startswith(f"{outer}.") for outer in bench.recorder.calls)
    }
    dtypes = {"fp32": torch.float32, half: {"bf16": torch.bfloat16, "fp16": torch.float16}[half]}
    rng = rng_state()
    try:
        return measure_layers(modules, calls, dtypes, bench.device, budget_s)
    finally:
        set_rng_state(rng)


class _Runner:
    """One arm at work: applies it, runs steps, undoes it."""

    def __init__(self, bench: Workbench, arm: choose.Arm, start: Callable[[], None]) -> None:
        self.arm = arm
        self._bench = bench
        self._start = start
        self._formats = bench.format_names(arm.policy)
        self.steps = 1

    def time(self, steps: int, warm_up: int) -> float:
        """Seconds a step over ``steps`` steps, after ``warm_up`` untimed ones."""
        bench = self._bench
        self._start()
        inner = [inner_optimizer(o) for o in bench.optimizers]
        casts = Casts(bench.root, self._formats, bench.device.type)
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


def _race(
    bench: Workbench, arms: list[choose.Arm], start: Callable[[], None], began: float, limit_s: float
) -> choose.Race:
    """Interleaved rounds until the time is spent, or until more rounds wouldn't change the answer."""
    runners: dict[str, _Runner] = {}
    dropped: dict[str, str] = {}
    times: dict[str, list[float | None]] = {arm.name: [] for arm in arms}
    for arm in arms:
        runner = _Runner(bench, arm, start)
        try:
            first = runner.time(1, 1 if not runners else 0)
            runner.steps = max(1, min(1000, int(READING_S / max(first, 1e-6))))
            runners[arm.name] = runner
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            dropped[arm.name] = (str(error).splitlines() or [type(error).__name__])[0][:160]
    rounds = _Rounds(times)
    running = list(runners)
    for turn in range(2 * MAX_ROUNDS):
        spent = (time.perf_counter() - began) / limit_s
        bench.progress(max(spent, rounds.kept / MAX_ROUNDS), f"racing {len(running)} ways, round {turn + 1}")
        order = running[turn % len(running) :] + running[: turn % len(running)] if running else []
        readings: dict[str, float] = {}
        for name in order:
            if time.perf_counter() > began + limit_s:
                break
            runner = runners[name]
            readings[name] = runner.time(runner.steps, int(runner.steps > 1))
        if len(readings) < len(order) or not order:
            break
        rounds.add(readings)
        if rounds.kept >= choose.MIN_ROUNDS:
            running = _still_in(running, times)
        hopeless = rounds.voided >= (GIVE_UP if spent < GIVE_UP_SHARE else choose.MIN_ROUNDS)
        if (hopeless and not rounds.kept) or rounds.kept >= MAX_ROUNDS:
            break
        if rounds.kept >= SETTLE_ROUNDS and _settled(running, times):
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


def _still_in(running: list[str], times: Mapping[str, list[float | None]]) -> list[str]:
    """Arms that may still win: clearly slower ones aren't run again."""
    ratios = {(a, b): choose.paired_ratio(times[a], times[b]) for a in running for b in running if a != b}
    return [
        a
        for a in running
        if not any((r := ratios[a, b]) is not None and r.low > STOP_RATIO for b in running if b != a)
    ]


def _settled(running: list[str], times: Mapping[str, list[float | None]]) -> bool:
    """Whether every pair that is still running is told apart, or known to be alike within the tie."""
    for i, a in enumerate(running):
        for b in running[i + 1 :]:
            ratio = choose.paired_ratio(times[a], times[b])
            if ratio is None or (ratio.low < 1 - choose.TIE and ratio.high > 1 + choose.TIE):
                return False
    return True
