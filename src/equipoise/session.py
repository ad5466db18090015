"""The main path: a Plan at work in a user's training loop.

Enters: the user's model and optimizer, then a loss each step. Leaves: trained weights and a StepReport a step.
Where: around each step. The data's way through a step is ``feed`` -> ``autocast`` (forward, loss) -> ``step``
(backward -> unscale -> agree on found_inf -> clip -> update -> zero -> schedule, EMA -> report).

Only this file changes the user's objects, and all of it is undone by :meth:`Session.restore`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from html import escape
from itertools import chain
from typing import Any

import torch
from torch import nn

from . import ranks
from .errors import FormatError, NonFiniteError, PolicyError, SessionError, StallError
from .policy import Plan, as_policy
from .records import ReportSink, StepParts, StepReport
from .step import gradients
from .step.cast import Casts, layer_formats, unwrapped
from .step.feed import DeviceFeed
from .step.layout import ChannelsLast
from .step.optim import Fused, can_fuse, inner_optimizer
from .step.scaler import LossScaler, NullScaler
from .watch.history import History
from .watch.state import cloned_state, load_optimizer, rng_state, set_rng_state

STALL_AFTER = 20
"""Skipped steps in a row that count as a stall."""

LAG = 2
"""Steps after which a skip flag is read from an accelerator: by then it has arrived, and nothing waits for it."""

_NO_CONTEXT = nullcontext()


class Session:
    """One training loop under a plan.

    Args:
        model: the FP32 model, or several (a GAN's two); wrapped in DDP, FSDP2 or ``torch.compile`` as well.
        optimizer: one optimizer or a list; one per model is not required.
        precision: ``"auto"`` (measure, then choose), a format (``"bf16"``), policy text, a Policy or a torch dtype.
        plan: a Plan or the path of a ``plan.toml``; pins everything, ``precision`` is then not read.
        lr_scheduler: one or a list with ``step()``; advanced only when a step was taken.
        ema: one or a list with ``update_parameters(model)``; updated only when a step was taken.
        scaler: the LossScaler for FP16; a default one is made where it is needed.
        nonfinite: ``"skip"`` leaves the weights alone when a gradient is not finite, ``"raise"`` raises.
        on_report: called with flat scalars on sampled steps.
        report_every: steps between two sampled ones, which read values from the device.
        plan_time_s: seconds that planning may take; 0 = static default; None = at most 30, and less where a run
            of this speed would not pay it back.

    Raises:
        FormatError: a format that this device doesn't have or emulates, or narrow weights.
        PolicyError: a pattern that matches nothing, or a plan that doesn't fit the model.
        SessionError: no parameters to train, or an argument of the wrong kind.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], optimizer: Any, *, precision: Any = "auto",
                 plan: Plan | str | None = None, lr_scheduler: Any = None, ema: Any = None,
                 scaler: LossScaler | None = None, nonfinite: str = "skip", on_report: ReportSink | None = None,
                 report_every: int = 50, plan_time_s: float | None = None) -> None:  # fmt: skip
        self._models = _as_list(model)
        self._root = _one_root([unwrapped(m) for m in self._models])
        self._optimizers = _distinct_optimizers(optimizer)
        self._schedulers = _as_list(lr_scheduler)
        self._emas = _as_list(ema)
        self._check_arguments(nonfinite, report_every, plan_time_s)
        self.device = self._device_of_parameters()
        self._nonfinite = nonfinite
        self._on_report = on_report
        self._report_every = report_every
        self._plan_time_s = plan_time_s
        self._user_scaler = scaler
        self.scaler: LossScaler | NullScaler = NullScaler()
        self.history = History()
        self.step_count = 0
        """Steps taken or skipped."""
        self.taken_count = 0
        """Steps that changed the weights, as far as the host knows."""
        self.setup_s = 0.0
        """Seconds spent planning."""
        self.plan: Plan | None = None
        self._check = gradients.FiniteCheck(self.device)
        self._one = torch.ones((), device=self.device)
        self._late_flags: list[tuple[torch.Tensor, list[Any]]] = []
        self._owed = 0
        self._registered: dict[str, Any] = {}
        self._casts: Casts | None = None
        self._undo: list[Callable[[], None]] = []
        self._recorder: Any = None
        self._closed = False
        self._open_window()
        # Clocks of a sampled step: (end of the step before, start of forward).
        self._sampled = False
        self._clock = (0.0, 0.0)
        self._begin(precision, plan)

    # -- before the first step ------------------------------------------------------------------------------------

    def _begin(self, precision: Any, plan: Plan | str | None) -> None:
        if plan is not None:
            plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            self._apply(plan.pinned())
        elif isinstance(precision, str) and precision.strip().lower() == "auto":
            from .trials import Recorder

            self._recorder = Recorder(self._root)
        else:
            from .trials import named_plan

            self._apply(named_plan(self._root, as_policy(precision), self.device))

    def _apply(self, plan: Plan) -> None:
        """The one place where a plan changes the user's objects."""
        names = [name for name, _ in self._root.named_modules()]
        resolved = {name: match.format for name, match in plan.policy.resolve(names).items()}
        formats = layer_formats(self._root, resolved)
        if plan.formats and dict(plan.formats) != formats:
            odd = sorted(set(plan.formats.items()) ^ set(formats.items()))[0]
            raise PolicyError(f"the plan doesn't fit this model: layer {odd[0]!r} ({odd[1]}) is not alike in both. "
                              "It was made for another model; plan again")  # fmt: skip
        self._undo_all()
        self._casts = Casts(self._root, resolved, self.device.type)
        self._undo.append(self._casts.remove)
        optimizers = [inner_optimizer(o) for o in self._optimizers]
        if plan.memory_format == "channels_last":
            self._undo.append(ChannelsLast(self._root, optimizers).remove)
        if plan.fused_optimizer:
            self._undo.extend(Fused(o).remove for o in optimizers if can_fuse(o))
        if self._casts.needs_loss_scale:
            if not self.scaler.is_enabled():
                self.scaler = self._user_scaler or LossScaler(self.device.type)
        else:
            self.scaler = NullScaler()
        self.plan = plan

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._casts = None

    def prepare(self, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Plan:
        """Plan now, on ``batch``; ``loss_fn(model, batch)`` gives the loss. Leaves no trace in the weights.

        Raises:
            SessionError: a plan is already at work, or gradients wait for their step.
        """
        self._refuse_closed()
        if self.plan is not None:
            return self.plan
        if self._backwards:
            raise SessionError("prepare() between backward and step would lose gradients; call it before")
        model = self._models[0] if len(self._models) == 1 else self._models

        def run(context: Callable[[], AbstractContextManager[Any]]) -> None:
            with context():
                loss = loss_fn(model, batch)
            loss.backward()

        return self._make_plan(run, before_first_step=True)

    def _make_plan(self, run_step: Any, *, before_first_step: bool = False) -> Plan:
        from .trials import Workbench, plan_session

        began = time.perf_counter()
        recorder, self._recorder = self._recorder, None
        bench = Workbench(root=self._root, optimizers=self._optimizers, device=self.device, recorder=recorder,
                          run_step=run_step, before_first_step=before_first_step)  # fmt: skip
        try:
            plan = plan_session(bench, self._plan_time_s)
        finally:
            recorder.remove()
        self._apply(plan)
        self.setup_s += time.perf_counter() - began
        return plan

    # -- inside a step ----------------------------------------------------------------------------------------------

    def feed(self, loader: Iterable[Any]) -> DeviceFeed:
        """``loader``'s batches on the model's device; nested containers of tensors are kept as they are."""
        return DeviceFeed(loader, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward and loss run under, in training and evaluation."""
        if self._sampled:
            self._clock = (self._clock[0], time.perf_counter())
        return _NO_CONTEXT if self._casts is None else self._casts.context()

    def backward(self, loss: torch.Tensor, *, retain_graph: bool | None = None) -> None:
        """Backward of one micro-batch: n-1 times ``backward(loss / n)``, then ``step(loss / n)``.

        Raises:
            SessionError: the loss is not a scalar, or gradients were unscaled already in this window.
        """
        self._backward(loss, None, retain_graph)

    def _backward(self, loss: torch.Tensor, inputs: list[torch.Tensor] | None, retain_graph: bool | None) -> None:
        if loss.numel() != 1:
            raise SessionError(f"the loss has shape {tuple(loss.shape)}; step and backward take one number: "
                               "reduce it with .mean() or .sum()")  # fmt: skip
        if self._unscaled:
            raise SessionError("backward after unscale(): these gradients would be scaled and the earlier ones not. "
                               "Call unscale() once, after the last backward of the window")  # fmt: skip
        self._backwards += 1
        scaled = self.scaler.scale(loss) if self.scaler.is_enabled() else loss
        if torch.is_autocast_enabled(self.device.type):
            # A backward inside the context would run its products in half, those of FP32 layers too.
            with torch.autocast(self.device.type, enabled=False):
                scaled.backward(retain_graph=retain_graph, inputs=inputs)
        else:
            scaled.backward(retain_graph=retain_graph, inputs=inputs)

    def unscale(self) -> None:
        """Bring gradients to their true size, for clipping by hand; at most once a window.

        Raises:
            SessionError: no backward before, or unscaled already.
        """
        if not self._backwards:
            raise SessionError("unscale() before backward: there are no gradients of this session yet")
        if self._unscaled:
            raise SessionError("unscale() twice in one window: the second would divide true gradients by the scale")
        self._unscale(self._optimizers)

    def _unscale(self, optimizers: Sequence[Any]) -> None:
        if self.scaler.is_enabled():
            for optimizer in optimizers:
                if gradients.collect([optimizer])[1]:
                    self.scaler.unscale_(optimizer)
        self._unscaled = True

    def drop(self) -> None:
        """Forget the gradients of this window without a step; nothing is counted."""
        self._refuse_closed()
        self.scaler.forget(*self._optimizers)
        _zero(self._optimizers)
        self._open_window()

    def _open_window(self) -> None:
        self._backwards = 0
        self._unscaled = False

    def step(self, loss: torch.Tensor | None = None, *, closure: Callable[[], torch.Tensor] | None = None,
             optimizer: Any = None, max_grad_norm: float | None = None,
             retain_graph: bool | None = None) -> StepReport:  # fmt: skip
        """Backward, unscale, check, clip, update, zero the gradients, advance schedule and EMA.

        Args:
            loss: the scalar loss of the (last) micro-batch; None when every backward was ``session.backward``.
            closure: for optimizers that evaluate more than once (L-BFGS): returns the loss, calls no backward.
            optimizer: the one optimizer to step (a GAN); the loss then reaches its parameters alone.
            max_grad_norm: clip true gradients to this global 2-norm.
            retain_graph: as in ``Tensor.backward``.

        Returns:
            A report whose ``loss`` and ``skipped`` are read from the device when asked for.

        Raises:
            NonFiniteError: a gradient is not finite under ``nonfinite="raise"``; weights are as before.
            StallError: 20 skipped steps in a row; names the first layer with a non-finite gradient.
            SessionError: no loss and no backward of this session, or an unknown optimizer.
        """
        sampled = self._sampled
        began = time.perf_counter() if sampled else 0.0
        self._refuse_closed()
        chosen = self._optimizers if optimizer is None else [self._known(optimizer)]
        if closure is not None:
            return self._step_closure(closure, chosen, loss, max_grad_norm)
        if loss is not None:
            if optimizer is None or len(self._optimizers) == 1:
                self._backward(loss, None, retain_graph)
            else:
                self._backward_to(loss, chosen, retain_graph)
            loss = loss.detach()
        elif not self._backwards:
            raise SessionError("step() without a loss and without session.backward(loss) before: gradients made by "
                               "loss.backward() are not scaled or counted; pass the loss to step()")  # fmt: skip
        after_backward = time.perf_counter() if sampled else 0.0
        parameters, grads = gradients.collect(chosen)
        if not self._unscaled:
            self._unscale(chosen)
        norm = self._check_and_clip(chosen, parameters, grads, max_grad_norm)
        skipped = self._check.on_host()
        before_update = time.perf_counter() if sampled else 0.0
        if skipped is None:
            skipped = self._update_unread(chosen)
        elif not skipped:
            for o in chosen:
                if any(p.grad is not None for group in o.param_groups for p in group["params"]):
                    o.step()
        after_update = time.perf_counter() if sampled else 0.0
        parts = None
        if skipped is True:
            self._refuse_nonfinite(chosen)
        scale: Any = 1.0
        if self.scaler.is_enabled():
            scale = self.scaler.scale(self._one)  # a copy, read only when the report is
            self.scaler.update()
        for p in parameters:
            p.grad = None
        self._open_window()
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()  # the next forward in this context must read the new weights
        self._advance(skipped, chosen)
        if sampled:
            end_before, forward = self._clock
            now = time.perf_counter()
            parts = StepParts(data_s=forward - end_before, forward_s=began - forward, backward_s=after_backward - began,
                              optimizer_s=after_update - before_update,
                              machinery_s=now - after_update + before_update - after_backward)  # fmt: skip
        return self._report(loss, skipped, scale, norm, parts)

    def _backward_to(self, loss: torch.Tensor, chosen: list[Any], retain_graph: bool | None) -> None:
        """Backward that reaches the chosen optimizer's parameters alone."""
        own = [p for o in chosen for g in o.param_groups for p in g["params"] if p.requires_grad]
        if ranks.world_size() == 1:
            return self._backward(loss, own, retain_graph)
        # Reducers of data-parallel models wait for every parameter: let all come, then put the others' back.
        mine = {id(p) for p in own}
        others = [p for o in self._optimizers for g in o.param_groups for p in g["params"] if id(p) not in mine]
        kept = [(p, p.grad) for p in others]
        for p in others:
            p.grad = None
        self._backward(loss, None, retain_graph)
        for p, grad in kept:
            p.grad = grad

    def _check_and_clip(self, chosen: list[Any], parameters: list[torch.Tensor], grads: list[torch.Tensor],
                        max_grad_norm: float | None) -> torch.Tensor | None:  # fmt: skip
        norm = None
        if max_grad_norm is not None:
            if not max_grad_norm > 0:
                raise SessionError(f"max_grad_norm is {max_grad_norm}; it must be above 0, or None for no clipping")
            if grads:
                norm = gradients.clip(parameters, grads, max_grad_norm)
        # The norm is finite only where every gradient is: one pass does both.
        self._check([norm] if norm is not None else grads)
        found = self._check.found
        if self.scaler.is_enabled() and grads:
            with_grads = [o for o in chosen if gradients.collect([o])[1]]
            found.copy_(torch.maximum(found, self.scaler.found_inf(*with_grads)))
        if self._needs_agreement():
            ranks.agree_max(found)
        if self.scaler.is_enabled() and grads:
            self.scaler.set_found_inf(found, *with_grads)
        return norm

    def _needs_agreement(self) -> bool:
        """Whether ranks may see different gradients: all but plain data-parallel ones, which are reduced already."""
        if ranks.world_size() == 1:
            return False
        return not all(isinstance(m, nn.parallel.DistributedDataParallel) for m in self._models)

    def _update_unread(self, chosen: list[Any]) -> torch.Tensor | bool:
        """Update on an accelerator: the fused kernel reads the flag by itself, any other costs one read."""
        found = self._check.found
        skipped: torch.Tensor | bool = found
        for o in chosen:
            if getattr(inner_optimizer(o), "_step_supports_amp_scaling", False):
                inner = inner_optimizer(o)
                inner.grad_scale, inner.found_inf = None, found
                try:
                    o.step()
                finally:
                    del inner.grad_scale, inner.found_inf
            else:
                if not isinstance(skipped, bool):
                    skipped = bool(found.item())
                if not skipped:
                    o.step()
        return skipped

    def _refuse_nonfinite(self, chosen: list[Any]) -> None:
        """A skipped step that the user wants raised, or the last of a stall."""
        stalled = self.history.skips_in_a_row + 1 >= STALL_AFTER
        if self._nonfinite != "raise" and not stalled:
            return
        where = gradients.first_nonfinite(self._root.named_parameters()) or "a parameter outside the model"
        step = self.step_count + 1
        if self.scaler.is_enabled():
            self.scaler.update()
        _zero(chosen)
        self._open_window()
        if self._nonfinite == "raise":
            raise NonFiniteError(f"step {step}: the gradient of {where} is not finite; weights are as before. "
                                 "Look at the loss and the inputs, or give this layer 'fp32' in the policy")  # fmt: skip
        raise StallError(f"{STALL_AFTER} steps in a row were skipped (up to step {step}): the gradient of {where} is not "
                         f"finite. Give this layer a wider format (precision='...; {where.rpartition('.')[0]}=fp32'), "
                         "or look at the data and the loss")  # fmt: skip

    def _advance(self, skipped: Any, chosen: list[Any]) -> None:
        """Counters, schedule and average move only with a step that was taken."""
        self.step_count += 1
        if isinstance(skipped, torch.Tensor):
            self._late_flags.append((skipped, chosen))
            while len(self._late_flags) > LAG:
                self._settle()
            skipped = False
        if skipped:
            return
        self.taken_count += 1
        if self._owed:
            self._owed -= 1
        else:
            for scheduler in self._schedulers:
                if len(chosen) == len(self._optimizers) or _steers(scheduler, chosen):
                    scheduler.step()
        for ema in self._emas:
            ema.update_parameters(self._models[0])

    def _settle(self) -> None:
        """Read the oldest flag; a step that was skipped after all is taken back from counters and schedule."""
        flag, _ = self._late_flags.pop(0)
        if bool(flag.item()):
            self.taken_count -= 1
            self._owed += len(self._schedulers) > 0

    def _report(self, loss: Any, skipped: Any, scale: Any, norm: Any, parts: StepParts | None) -> StepReport:
        report = StepReport(self.step_count, loss, skipped, scale, norm, parts)
        self.history.append(report)
        if self._sampled and self._on_report is not None:
            self._on_report(_flat(report))
        if self._recorder is not None:
            self._make_plan(self._recorder.replay())
        self._sampled = self.step_count % self._report_every == self._report_every - 1
        if self._sampled:
            now = time.perf_counter()
            self._clock = (now, now)
        return report

    def _step_closure(self, closure: Callable[[], torch.Tensor], chosen: list[Any], loss: Any,
                      max_grad_norm: float | None) -> StepReport:  # fmt: skip
        """A step whose optimizer evaluates the loss more than once, all under one scale."""
        if loss is not None:
            raise SessionError("step(loss, closure=...) got both; the closure returns the loss by itself")
        if len(chosen) != 1:
            raise SessionError("a closure goes with one optimizer: say which with optimizer=")
        saved = _Saved(chosen)
        first: list[torch.Tensor] = []

        def evaluate() -> torch.Tensor:
            _zero(chosen)
            self._open_window()
            self.scaler.forget(*chosen)
            with torch.enable_grad():
                value = closure()
            if self._backwards == 0:
                self._backward(value, None, None)
            first.append(value.detach())
            parameters, grads = gradients.collect(chosen)
            self._unscale(chosen)
            self._check_and_clip(chosen, parameters, grads, max_grad_norm)
            host = self._check.on_host()
            if host or (host is None and bool(self._check.found.item())):
                raise _NotFinite
            return value.detach()

        skipped = False
        try:
            chosen[0].step(evaluate)
        except _NotFinite:
            saved.restore()
            skipped = True
            self._refuse_nonfinite(chosen)
        scale: Any = 1.0
        if self.scaler.is_enabled():
            scale = self.scaler.scale(self._one)
            self.scaler.update()
        _zero(chosen)
        self._open_window()
        torch.clear_autocast_cache()
        self._advance(skipped, chosen)
        return self._report(first[0] if first else None, skipped, scale, None, None)

    # -- between steps and after ------------------------------------------------------------------------------------

    def register(self, name: str, obj: Any) -> None:
        """Add an object with ``state_dict`` and ``load_state_dict`` to what the session's state holds.

        Raises:
            SessionError: the name is taken or the object has no state to save.
        """
        if name in self._registered and self._registered[name] is not obj:
            raise SessionError(f"register({name!r}): the name is taken by another object; choose another")
        if not (callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))):
            raise SessionError(f"register({name!r}): {type(obj).__name__} has no state_dict and load_state_dict")
        self._registered[name] = obj

    def explain(self) -> str:
        """What was decided for each layer, and why."""
        if self.plan is None:
            return "not planned yet: the plan is made after the first step, or by prepare(batch, loss_fn)"
        return self.plan.explain()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.explain())}</pre>"

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: optimizers, scaler, plan, schedule, EMA, counters, RNG, registered.

        Plain values and tensors, so that ``torch.load(weights_only=True)`` reads it. Reads from the device.
        """
        while self._late_flags:
            self._settle()
        return {
            "version": 1,
            "optimizers": [o.state_dict() for o in self._optimizers],
            "scaler": self.scaler.state_dict(),
            "plan": None if self.plan is None else self.plan.to_toml(),
            "lr_schedulers": [s.state_dict() for s in self._schedulers],
            "ema": [e.state_dict() for e in self._emas],
            "step_count": self.step_count,
            "taken_count": self.taken_count,
            "owed": self._owed,
            "history": self.history.state_dict(),
            "rng": rng_state(),
            "registered": {name: obj.state_dict() for name, obj in self._registered.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; the plan in it is pinned, and nothing is planned again.

        Raises:
            SessionError: another version, or not the same optimizers, schedules, averages or registered objects.
            PolicyError: the plan doesn't fit this model.
        """
        self._refuse_closed()
        self._check_fits(state)
        if state["plan"] is not None:
            plan = Plan.from_toml(state["plan"])
            if self._recorder is not None:
                self._recorder.remove()
                self._recorder = None
            if self.plan is None or not self.plan.same_decisions(plan):
                self._apply(plan)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        self.scaler.load_state_dict(state["scaler"])
        for own, saved in chain(zip(self._schedulers, state["lr_schedulers"], strict=True),
                                zip(self._emas, state["ema"], strict=True)):  # fmt: skip
            own.load_state_dict(saved)
        self.step_count, self.taken_count, self._owed = state["step_count"], state["taken_count"], state["owed"]
        self.history.load_state_dict(state["history"])
        for name, obj in self._registered.items():
            obj.load_state_dict(state["registered"][name])
        self._late_flags.clear()
        _zero(self._optimizers)
        self._open_window()
        self._sampled = False
        set_rng_state(state["rng"])

    def _check_fits(self, state: dict[str, Any]) -> None:
        if state.get("version") != 1:
            raise SessionError(f"session state of version {state.get('version')!r}; this Equipoise reads version 1")
        for what, own in (("optimizers", self._optimizers), ("lr_schedulers", self._schedulers), ("ema", self._emas)):
            if len(state[what]) != len(own):
                raise SessionError(f"the session state holds {len(state[what])} {what}, this session has {len(own)}; "
                                   "make the session as it was when the state was saved")  # fmt: skip
        if set(state["registered"]) != set(self._registered):
            raise SessionError(f"the session state holds registered {sorted(state['registered'])}, this session has "
                               f"{sorted(self._registered)}; register the same names before loading")  # fmt: skip

    def restore(self) -> None:
        """Undo every change to the user's objects: forwards, layouts, optimizer settings. Ends the session."""
        self._undo_all()
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        self._closed = True

    # -- checks -------------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SessionError("this session was ended by restore(); make a new Session")

    def _known(self, optimizer: Any) -> Any:
        for own in self._optimizers:
            if own is optimizer or inner_optimizer(own) is inner_optimizer(optimizer):
                return own
        raise SessionError(f"step(optimizer=...) got {type(optimizer).__name__}, which this session was not made with")

    def _device_of_parameters(self) -> torch.device:
        for o in self._optimizers:
            for group in o.param_groups:
                for p in group["params"]:
                    return torch.device(p.device)
        raise SessionError("the optimizer holds no parameters; there is nothing to train")

    def _check_arguments(self, nonfinite: str, report_every: int, plan_time_s: float | None) -> None:
        if nonfinite not in ("skip", "raise"):
            raise SessionError(f"nonfinite is {nonfinite!r}; allowed: 'skip', 'raise'")
        if report_every < 1:
            raise SessionError(f"report_every is {report_every}; it must be at least 1")
        if plan_time_s is not None and not 0 <= plan_time_s < float("inf"):
            raise SessionError(f"plan_time_s is {plan_time_s}; it must be 0 (static default) or more seconds")
        for name, p in self._root.named_parameters():
            if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4:
                raise FormatError(f"parameter {name!r} is {p.dtype}; a Session takes FP32 weights and casts them by "
                                  "itself. Leave out .half() or .bfloat16() and name the format: precision='bf16'")  # fmt: skip


class _NotFinite(Exception):  # noqa: N818  (leaves an optimizer's own loop; never reaches the user)
    """A closure's gradient was not finite."""


class _Saved:
    """Weights and state of optimizers, to be put back."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = [inner_optimizer(o) for o in optimizers]
        self._weights = [(p, p.detach().clone()) for o in self._optimizers for g in o.param_groups for p in g["params"]]
        self._states = [cloned_state(o) for o in self._optimizers]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._weights:
                parameter.copy_(value)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)


def _zero(optimizers: Iterable[Any]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _distinct_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers without repeats; a wrapper and its inner optimizer count as one (the wrapper)."""
    kept: list[Any] = []
    for o in _as_list(optimizer):
        if not (hasattr(o, "param_groups") and callable(getattr(o, "step", None))):
            raise SessionError(f"optimizer is {type(o).__name__}; a torch.optim optimizer or a list of them is needed")
        same = [k for k in kept if inner_optimizer(k) is inner_optimizer(o)]
        if not same:
            kept.append(o)
        elif same[0] is inner_optimizer(o):
            kept[kept.index(same[0])] = o
    return kept


def _one_root(models: list[nn.Module]) -> nn.Module:
    """One module that holds all models; the model itself where there is one."""
    for m in models:
        if not isinstance(m, nn.Module):
            raise SessionError(f"model is {type(m).__name__}; a torch.nn.Module or a list of them is needed")
    if not models:
        raise SessionError("no model was given; a torch.nn.Module or a list of them is needed")
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def _steers(scheduler: Any, chosen: list[Any]) -> bool:
    """Whether a schedule belongs to one of these optimizers; one that doesn't say belongs to all."""
    own = getattr(scheduler, "optimizer", None)
    return own is None or any(inner_optimizer(own) is inner_optimizer(o) for o in chosen)


def _flat(report: StepReport) -> dict[str, Any]:
    """Flat scalars for a logger: ``loss``, ``skipped``, ``scale``, ``grad_norm``, ``data_s``, ..."""
    row = report.as_dict()
    row.update(row.pop("parts", {}))
    return row

