"""The main path: a Plan at work in a user's training loop.

Enters: the user's model and optimizer, then a loss each step. Leaves: trained weights and a StepReport a
step.
Where: around each step. The data's way through a step is ``feed`` -> ``autocast`` (forward, loss) -> ``step``
(backward -> unscale -> agree on found_inf -> clip -> update -> zero -> schedule, EMA -> report).

Only :meth:`Session._apply` changes the user's objects, and :meth:`Session.restore` undoes all of it.
"""

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from html import escape
from typing import Any

import torch
from torch import nn

from . import ranks
from .errors import FormatError, NonFiniteError, PolicyError, SessionError, StallError
from .notice import PlanNotice
from .policy import Plan, as_policy
from .records import Choice, Decision, Origin, ReportSink, StepParts, StepReport
from .step import gradients
from .step.cast import (
    Casts,
    attention_of,
    castable,
    is_quantised,
    layer_formats,
    module_formats,
    one_root,
    refuse_taken,
)
from .step.feed import DeviceFeed
from .step.layout import ChannelsLast
from .step.narrow import Narrow, check_allowed
from .step.optim import Fused, can_fuse, distinct_optimizers, inner_optimizer, load_optimizer
from .step.overflow import Probe
from .step.scaler import LossScaler, NullScaler
from .step.update import Updater
from .watch.history import History
from .watch.rng import rng_state, set_rng_state
from .watch.stall import STALL_AFTER, StallWatch, layer_of, likely_cause

LAG = 2
"""Steps after which a skip flag is read from an accelerator: by then it has arrived, and nothing waits for
it."""

STATE_VERSION = 1

_STATE_KEYS = {
    "optimizers", "scaler", "plan", "lr_schedulers", "ema", "step_count", "taken_count", "owed", "history",
    "rng", "registered",
}  # fmt: skip

_NO_CONTEXT = nullcontext()
_REAL = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class Session:
    """One training loop under a plan.

    Args:
        model: the FP32 model, or several (a GAN's two); wrapped in DDP, FSDP2 or ``torch.compile`` as well.
        optimizer: one optimizer or a list.
        precision: ``"auto"`` (measure, then choose), a format (``"bf16"``), policy text, a Policy or a torch
            dtype.
        plan: a Plan or the path of a ``plan.toml``; pins everything, ``precision`` is then not read.
        lr_scheduler: one or a list with ``step()``; advanced only when a step was taken.
        ema: one or a list with ``update_parameters(model)``; updated only when a step was taken.
        scaler: the LossScaler for FP16; a default one is made where it is needed.
        sensitive: ``"equipoise"`` keeps the operators of ``equipoise.sensitive`` in FP32 on every device,
            ``"torch"`` those of torch's own autocast list for this device.
        emulate: compute a named half format by casts there and back, on a CPU without its kernels: its
            numbers, not its speed.
        weights: how weights of bf16 layers are kept between steps: ``"fp32"``, ``"split"`` (bf16 and the 16
            bits below: FP32 training, bit for bit), ``"kahan"`` (bf16 and a bf16 compensation) or
            ``"stochastic"`` (bf16 alone, rounded stochastically). Updates are FP32 arithmetic in each.
        state: how the optimizer's state is kept between steps: ``"fp32"`` or ``"8bit"``.
        nonfinite: ``"skip"`` leaves the weights alone when a gradient is not finite, ``"raise"`` raises.
        on_stall: after 20 skipped steps in a row ``"raise"`` raises a StallError, ``"record"`` adds to
            :attr:`decisions`, warns and goes on.
        on_overflow: a layer whose forward leaves its half format's range goes to FP32 (``"widen"``), or is
            only named (``"record"``); both add to :attr:`decisions` and warn.
        on_report: called with flat scalars on sampled steps.
        report_every: steps between two sampled ones, whose values are read from the device.
        plan_time_s: most seconds that planning may take; 0 = static default; None = 30. The race ends as soon
            as its answer is clear.

    Raises:
        FormatError: a format that this device doesn't have or emulates, a model whose weights are narrow
            already, or narrow weights for a policy without bf16 layers.
        PolicyError: a pattern that matches nothing, or a plan that doesn't fit the model.
        SessionError: no parameters to train, or an argument of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        precision: Any = "auto",
        plan: Plan | str | None = None,
        lr_scheduler: Any = None,
        ema: Any = None,
        scaler: LossScaler | None = None,
        sensitive: str = "equipoise",
        emulate: bool = False,
        weights: str = "fp32",
        state: str = "fp32",
        nonfinite: str = "skip",
        on_stall: str = "raise",
        on_overflow: str = "widen",
        on_report: ReportSink | None = None,
        report_every: int = 50,
        plan_time_s: float | None = None,
    ) -> None:
        self._models = _as_list(model)
        self._root = one_root(self._models)
        self._optimizers = distinct_optimizers(_as_list(optimizer))
        self._schedulers = _as_list(lr_scheduler)
        self._emas = _as_list(ema)
        _check_choice("sensitive", sensitive, ("equipoise", "torch"))
        _check_choice("weights", weights, ("fp32", "split", "kahan", "stochastic"))
        _check_choice("state", state, ("fp32", "8bit"))
        _check_choice("nonfinite", nonfinite, ("skip", "raise"))
        _check_choice("on_stall", on_stall, ("raise", "record"))
        _check_choice("on_overflow", on_overflow, ("widen", "record"))
        _check_numbers(report_every, plan_time_s)
        _check_helpers(self._schedulers, scaler)
        _check_wide(self._root)
        self.device = _device_of(self._optimizers)
        """Where the parameters are, and batches go."""
        self._nonfinite = nonfinite
        self._on_stall = on_stall
        self._on_overflow = on_overflow
        self._on_report = on_report
        self._report_every = report_every
        self._plan_time_s = plan_time_s
        self._sensitive = sensitive
        self._emulate = emulate
        self._weights, self._state = weights, state
        self._user_scaler = scaler
        self.history = History()
        self.step_count = 0
        """Steps taken or skipped."""
        self.taken_count = 0
        """Steps that changed the weights, as far as the host knows."""
        self.setup_s = 0.0
        """Seconds spent planning."""
        self.timings: dict[str, Any] = {}
        """What was timed to make the plan, plain data; empty where nothing was, and on ranks but 0."""
        self.plan: Plan | None = None
        """What was decided; None until it is."""
        self.decisions: list[Decision] = []
        """What was changed or found while training, in order."""
        parallel = all(isinstance(m, nn.parallel.DistributedDataParallel) for m in self._models)
        self._updater = Updater(self.device, alike=parallel or ranks.world_size() == 1)
        self._device_type = self.device.type
        self._untouched = gradients.Untouched()
        self._late_flags: list[torch.Tensor] = []
        self._owed = 0
        self._registered: dict[str, Any] = {}
        self._stall = StallWatch()
        self._probe: Probe | None = None
        self._casts: Casts | None = None
        self._narrow: Narrow | None = None
        self._undo: list[Callable[[], None]] = []
        self._recorder: Any = None
        self._first_planned = 0
        self._closed = False
        self._backwards = 0
        self._plain = False
        """Whether the next step has nothing to scale, watch, sample, gather or keep narrow."""
        # Clocks of a sampled step, seconds: end of the step before, start of forward.
        self._sampled = False
        self._clock = (0.0, 0.0)
        self._begin(precision, plan)

    @property
    def scaler(self) -> LossScaler | NullScaler:
        """The loss scaler at work; a null object where no format needs one."""
        return self._updater.scaler

    # -- before the first step

    def _begin(self, precision: Any, plan: Plan | str | None) -> None:
        from .planning import named_plan, refuse_unavailable
        from .trials import Recorder

        refuse_taken(self._root)
        if plan is not None:
            plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            if not plan.emulate:
                refuse_unavailable(plan.policy.formats, self.device)
            self._apply(plan.pinned())
        elif isinstance(precision, str) and precision.strip().lower() == "auto":
            if self._emulate:
                raise SessionError(
                    "emulate=True with precision='auto': auto measures what is fast, and emulation never is. "
                    "Name the format: precision='fp16'"
                )
            self._recorder = Recorder(self._root)
        else:
            policy = as_policy(precision)
            if not self._emulate:
                refuse_unavailable(module_formats(self._root, policy).values(), self.device)
            plan = named_plan(self._root, policy)
            plan = replace(plan, sensitive=self._sensitive, emulate=self._emulate)
            self._apply(self._with_narrow(plan))

    def _apply(self, plan: Plan) -> None:
        """The one place where a plan changes the user's objects."""
        resolved = module_formats(self._root, plan.policy)
        formats = layer_formats(self._root, resolved)
        if plan.formats:
            _check_plan_fits(plan, formats)
        _check_castable(self._root, formats)
        _check_not_quantised(self._root, resolved)
        check_allowed(plan.weights, self._models)
        self._plain = False
        self._undo_all()
        self._casts = Casts(
            self._root,
            resolved,
            self.device.type,
            table=plan.sensitive == "equipoise",
            emulate=plan.emulate,
            models=self._models,
        )
        self._undo.append(self._casts.remove)
        if plan.memory_format == "channels_last":
            inner = [inner_optimizer(o) for o in self._optimizers]
            self._undo.append(ChannelsLast(self._root, inner).remove)
        if plan.fused_optimizer:
            self._undo.extend(Fused(o).remove for o in self._optimizers if can_fuse(o))
        self._keep_narrow(plan, resolved)
        if not self._casts.needs_loss_scale:
            self._updater.use(NullScaler())
        elif not self.scaler.is_enabled():
            self._updater.use(self._user_scaler or LossScaler(self.device.type))
        if self._user_scaler is not None:
            self._user_scaler.use_groups(self._root, self._casts.needs_loss_scale)
        if self._casts.needs_loss_scale:
            self._watch_next_step()
        self.plan = plan
        self._first_planned = self.step_count + 1

    def _with_narrow(self, plan: Plan) -> Plan:
        """The plan with what was asked for weights and state."""
        return replace(plan, weights=self._weights, state=self._state)

    def _keep_narrow(self, plan: Plan, resolved: Mapping[str, str]) -> None:
        if (plan.weights, plan.state) == ("fp32", "fp32"):
            return
        narrow = Narrow(self._root, resolved, self._optimizers, plan.weights, plan.state)
        self._undo.append(narrow.remove)
        if plan.weights != "fp32" and not len(narrow):
            why = f"weights={plan.weights!r}: no trained weight is read in bf16 alone under {plan.policy}"
            if plan.source == "named":
                self._undo_all()
                raise FormatError(f"{why}. Ask for precision='bf16', or leave the weights in FP32")
            warnings.warn(f"{why}; they stay in FP32", stacklevel=4)
        self._narrow = self._updater.narrow = narrow

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._casts = None
        self._narrow = self._updater.narrow = None

    def prepare(self, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Plan:
        """Plan now, on ``batch``; leaves no trace in weights, buffers, gradients or generators.

        Args:
            batch: one training batch on the model's device.
            loss_fn: ``loss_fn(model, batch)`` gives the scalar loss.

        Raises:
            SessionError: gradients wait for their step.
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
            torch.autograd.backward(loss)

        return self._make_plan(run, before_first_step=True)

    def _make_plan(self, run_step: Any, *, before_first_step: bool = False) -> Plan:
        from .planning import plan_session
        from .trials import Recorder, Workbench

        began = time.perf_counter()
        recorder, self._recorder = self._recorder, None
        bench = Workbench(
            root=self._root,
            optimizers=self._optimizers,
            device=self.device,
            recorder=recorder,
            run_step=run_step,
            sensitive=self._sensitive,
            before_first_step=before_first_step,
        )
        with PlanNotice() as notice:
            bench.progress = notice.update
            try:
                plan = plan_session(bench, self._plan_time_s)
            except BaseException:  # an interrupt, or prepare()'s loss_fn: the next step or prepare() plans
                self._recorder = Recorder(self._root)
                raise
            finally:
                recorder.remove()
        plan = self._with_narrow(plan)
        self._apply(plan)
        self.timings = bench.timings
        spent_s = time.perf_counter() - began
        self.setup_s += spent_s
        notice.say(f"planned in {spent_s:.1f} s: {plan.note}")
        return plan

    # -- inside a step ------------------------------------------------------------------------------------

    def feed(self, loader: Iterable[Any]) -> DeviceFeed[Any]:
        """``loader``'s batches on the model's device; nested containers of tensors are kept as they are."""
        return DeviceFeed(loader, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward and loss run under, in training and evaluation."""
        if self._sampled:
            self._clock = (self._clock[0], time.perf_counter())
        context = _NO_CONTEXT if self._casts is None else self._casts.context()
        return context if self._probe is None else _both(context, self._probe)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool | None = None) -> None:
        """Backward of one micro-batch: n-1 times ``backward(loss / n)``, then ``step(loss / n)``.

        Raises:
            SessionError: the loss is not a scalar, or gradients were unscaled already in this window.
        """
        self._refuse_closed()
        self._plain = False
        if self._narrow is not None and not self._backwards:
            self._narrow.gradients_in_fp32(True)
        self._backward(loss, None, retain_graph)

    def _backward(
        self, loss: torch.Tensor, inputs: list[torch.Tensor] | None, retain_graph: bool | None
    ) -> None:
        _check_loss(loss)
        if self._updater.unscaled:
            raise SessionError(
                "backward after unscale(): these gradients would be scaled and the earlier ones not. Call "
                "unscale() once, after the last backward of the window"
            )
        if self._updater.scales:
            self._refuse_touched(self._optimizers)
        if not self.step_count and not self._backwards:
            self._check_first_loss(loss)
        scaled = self.scaler.scale(loss) if self.scaler.is_enabled() else loss
        context = _NO_CONTEXT if self._casts is None else self._casts.backward_context()
        try:
            with context if self._probe is None else _both(context, self._probe):
                torch.autograd.backward(scaled, retain_graph=retain_graph, inputs=inputs)
        except BaseException as error:
            self._explain_failed_backward(error)
            raise
        self._backwards += 1
        if self._updater.scales:
            self._untouched.remember(self._optimizers)

    def _explain_failed_backward(self, error: BaseException) -> None:
        """Drop what may be half a backward's gradients, and say so."""
        self.drop()
        if "through the graph a second time" in str(error):
            raise SessionError(
                "this loss went backward before. The session calls backward by itself: leave out "
                "loss.backward(), or say retain_graph=True there. The gradients of this window were "
                "dropped"
            ) from error
        error.add_note("The gradients of this window were dropped: they may hold half a backward.")

    def _refuse_touched(self, optimizers: list[Any]) -> None:
        """Refuse gradients that were changed while they carry a scale: a part of them wouldn't."""
        what = self._untouched.changed(optimizers)
        if what is not None:
            raise SessionError(
                f"a gradient {what}: gradients carry the loss scale from backward to step, and what is done "
                "to them by hand (clipping, adding, zero_grad, loss.backward(), another optimizer.step()) "
                "comes after session.unscale(). Call session.drop() to start anew"
            )

    def unscale(self) -> None:
        """Bring gradients to their true size, for clipping by hand; at most once a window.

        Raises:
            SessionError: no backward before, unscaled already, or gradients that were changed before.
        """
        self._refuse_closed()
        if not self._backwards:
            raise SessionError("unscale() before backward: there are no gradients of this session yet")
        if self._updater.unscaled:
            raise SessionError(
                "unscale() twice in a window: the second would divide true gradients by the scale"
            )
        if self._updater.scales:
            self._refuse_touched(self._optimizers)
        self._updater.unscale(self._optimizers)

    def drop(self) -> None:
        """Forget the gradients of this window without a step; nothing is counted."""
        self._refuse_closed()
        self._plain = False
        self.scaler.forget(*self._optimizers)
        self._updater.unscaled = False
        self._backwards = 0
        self._untouched.forget()
        _zero(self._optimizers)
        if self._narrow is not None:
            self._narrow.gradients_in_fp32(False)

    def step(
        self,
        loss: torch.Tensor | None = None,
        *,
        closure: Callable[[], torch.Tensor] | None = None,
        optimizer: Any = None,
        max_grad_norm: float | None = None,
        retain_graph: bool | None = None,
    ) -> StepReport:
        """Backward, unscale, check, clip, update, zero the gradients, advance schedule and EMA.

        Args:
            loss: the scalar loss of the (last) micro-batch; None when every backward was
                ``session.backward``.
            closure: for optimizers that evaluate more than once (L-BFGS): returns the loss, without backward.
            optimizer: the one optimizer to step (a GAN); the loss then reaches its parameters alone.
            max_grad_norm: clip true gradients to this global 2-norm.
            retain_graph: as in ``Tensor.backward``.

        Returns:
            A report whose ``loss`` and ``skipped`` are read from the device when asked for.

        Raises:
            NonFiniteError: a gradient is not finite under ``nonfinite="raise"``, or the very first loss is
                not; weights are as before.
            StallError: 20 skipped steps in a row; names the layer and the likely cause.
            SessionError: no loss and no backward of this session, no gradient at all, gradients that were
                changed while they carry a scale, or an unknown optimizer.
        """
        if self._plain and optimizer is None and closure is None and loss is not None:
            return self._plain_step(loss, max_grad_norm, retain_graph)
        sampled = self._sampled
        began = time.perf_counter() if sampled else 0.0
        if self._closed:
            self._refuse_closed()
        chosen = self._optimizers if optimizer is None else [self._known(optimizer)]
        if closure is not None:
            return self._step_closure(closure, chosen, loss, max_grad_norm)
        if loss is not None:
            if optimizer is None:
                self._backward(loss, None, retain_graph)
            else:
                self._backward_to(loss, chosen, retain_graph)
            loss = loss.detach()
        elif not self._backwards:
            raise SessionError(
                "step() without a loss and without session.backward(loss) before: gradients made by "
                "loss.backward() are not scaled or counted; pass the loss to step()"
            )
        after_backward = time.perf_counter() if sampled else 0.0
        updater = self._updater
        parameters, grads = self._true_gradients(chosen)
        # Clipping is the user's own work and counts as the optimizer's; a check alone is ours.
        before_update = time.perf_counter() if sampled else 0.0
        norm = updater.check_and_clip(chosen, parameters, grads, max_grad_norm)
        if sampled and norm is None:
            before_update = time.perf_counter()
        skipped = updater.update(chosen)
        after_update = time.perf_counter() if sampled else 0.0
        scale = self._end_step(skipped, chosen, parameters)
        parts = None
        if sampled:
            end_before, forward = self._clock
            now = time.perf_counter()
            parts = StepParts(
                data_s=forward - end_before,
                forward_s=began - forward,
                backward_s=after_backward - began,
                optimizer_s=after_update - before_update,
                machinery_s=now - after_update + before_update - after_backward,
            )
        return self._report(StepReport(self.step_count, loss, skipped, scale, norm, parts))

    def _plain_step(
        self, loss: torch.Tensor, max_grad_norm: float | None, retain_graph: bool | None
    ) -> StepReport:
        """:meth:`step` without the calls that find nothing to do in most steps, which a tiny step feels."""
        _check_loss(loss)
        optimizers, updater, casts = self._optimizers, self._updater, self._casts
        try:
            with _NO_CONTEXT if casts is None else casts.backward_context():
                torch.autograd.backward(loss, retain_graph=retain_graph)
        except BaseException as error:
            self._explain_failed_backward(error)
            raise
        self._backwards = 1
        parameters, grads = gradients.collect(optimizers)
        if not grads:
            self._refuse_no_gradient()
        loss = loss.detach()
        norm = None
        if max_grad_norm is None:
            skipped = updater.check(grads)
        else:
            norm = updater.check_and_clip(optimizers, parameters, grads, max_grad_norm)
            skipped = updater.check.on_host()
        if skipped:
            scale = self._end_step(True, optimizers, parameters)
            return self._report(StepReport(self.step_count, loss, True, scale, norm))
        optimizers[0].step()
        for p in parameters:
            p.grad = None
        if torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()  # as at the end of any window
        self._backwards = 0
        self.step_count += 1
        self.taken_count += 1
        for scheduler in self._schedulers:
            scheduler.step()
        for ema in self._emas:
            ema.update_parameters(self._models[0])
        report = StepReport(self.step_count, loss, False, 1.0, norm)
        self.history.append(report)
        if self.step_count % self._report_every == self._report_every - 1:
            self._sample_next_step()
        return report

    def _is_plain(self) -> bool:
        waiting = self._backwards or self._owed or self._late_flags or self._stall.skips
        watched = self._sampled or self._probe is not None or self._recorder is not None
        new = self.step_count < self._first_planned  # the first step under a plan says what never ran
        return not (watched or waiting or new) and self._updater.plain and len(self._optimizers) == 1

    def _end_step(self, skipped: Any, chosen: list[Any], parameters: list[torch.Tensor]) -> Any:
        scale = self._end_window(skipped, chosen)
        for p in parameters:
            p.grad = None
        self._advance(skipped, chosen)
        return scale

    def _true_gradients(self, chosen: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters of these optimizers that have a gradient, and those gradients, unscaled."""
        updater = self._updater
        if updater.scales and not updater.unscaled:
            self._refuse_touched(chosen)
            updater.unscale(chosen)
        parameters, grads = gradients.collect(chosen)  # after unscaling, which gives sparse ones anew
        if not grads:
            self._refuse_no_gradient()
        return parameters, grads

    def _refuse_no_gradient(self) -> None:
        if ranks.world_size() > 1:  # another rank may have one
            return
        self.drop()
        raise SessionError(
            "no parameter of the optimizer has a gradient: the loss doesn't depend on them, or "
            "zero_grad() came between backward and step. Was the optimizer made with this model's "
            "parameters?"
        )

    def _backward_to(self, loss: torch.Tensor, chosen: list[Any], retain_graph: bool | None) -> None:
        """Backward; where one optimizer of several was chosen, it reaches that one's parameters alone."""
        if len(chosen) == len(self._optimizers):
            return self._backward(loss, None, retain_graph)
        own = [p for o in chosen for g in o.param_groups for p in g["params"] if p.requires_grad]
        if ranks.world_size() == 1:
            return self._backward(loss, own, retain_graph)
        # Reducers of data-parallel models wait for every parameter: let all come, then put the others' back.
        mine = {id(p) for p in own}
        others = [
            p for o in self._optimizers for g in o.param_groups for p in g["params"] if id(p) not in mine
        ]
        kept = [(p, p.grad) for p in others]
        _zero(o for o in self._optimizers if o not in chosen)
        self._backward(loss, None, retain_graph)
        for p, grad in kept:
            p.grad = grad

    def _end_window(self, skipped: Any, chosen: list[Any]) -> Any:
        """Next scale, errors that a skip may be, and nothing left that remembers old weights."""
        error = self._error_of_skip() if skipped is True else None
        scale = self._updater.close(loud=self._on_stall == "raise") if self._updater.scales else 1.0
        self._updater.unscaled = False
        self._backwards = 0
        self._untouched.forget()
        if torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()  # the next forward in this context must read the new weights
        if error is not None:
            _zero(chosen)
            raise error
        return scale

    def _error_of_skip(self) -> NonFiniteError | None:
        """The error of a skipped step that the user wants raised, or that is the last of a stall."""
        skips = self._stall.skips + 1
        stalled = skips >= STALL_AFTER if self._on_stall == "raise" else skips == STALL_AFTER
        if self._nonfinite != "raise" and not stalled:
            return None
        named = [(n, p) for n, p in self._root.named_parameters() if p.grad is not None]
        where = gradients.first_nonfinite(named)
        if self._nonfinite == "raise":
            return NonFiniteError(
                f"step {self.step_count + 1}: the gradient of "
                f"{where or 'a parameter on another rank or outside the model'} is not finite; weights are "
                "as before. Look at the loss and the inputs, or give this layer 'fp32' in the policy"
            )
        return self._stalled(where, self.step_count + 1)

    def _stalled(self, parameter: str | None, step: int) -> StallError | None:
        """The error of a stall; under ``on_stall="record"`` a decision, once a stall, and None."""
        skips = max(STALL_AFTER, self._stall.skips)
        scale = self.scaler.get_scale()
        cause = likely_cause(self._stall.origin, parameter, scale)
        text = f"{skips} steps in a row were skipped (up to step {step}): {cause}"
        if self._on_stall == "raise":
            return StallError(text)
        where = layer_of(self._stall.origin, parameter)
        evidence = {"skips": skips, "scale": scale, "parameter": parameter or ""}
        self._decide("stall", where, "go on", text, evidence, step=step)
        return None

    def _decide(
        self, what: str, where: str, choice: str, reason: str, evidence: dict[str, Any], *, step: int
    ) -> None:
        decision = Decision(
            step=step, what=what, where=where, choice=choice, reason=reason, evidence=evidence
        )
        self.decisions.append(decision)
        warnings.warn(f"step {step}: {reason}", stacklevel=5)

    def _check_first_loss(self, loss: torch.Tensor) -> None:
        """Refuse a first loss that isn't finite, unless it is an overflow that a wider format mends."""
        flag = (~torch.isfinite(loss.detach())).any().float().reshape(())
        if not bool(ranks.agree_max(flag)):
            return
        origin = ranks.first_found(self._probe.origin if self._probe is not None else None)
        if origin is not None and origin.half and self._on_overflow == "widen":
            return
        bad = (n for n, p in self._root.named_parameters() if not bool(p.isfinite().all()))
        if origin is not None:
            cause = str(origin)
        elif (name := next(bad, None)) is not None:
            cause = f"weight {name} holds an inf or a NaN"
        else:
            cause = "the weights are finite: look at the inputs, the labels and the loss"
        raise NonFiniteError(
            f"the first loss is {float(loss.detach())}, and nothing was trained yet; weights are as before. "
            f"Cause: {cause}"
        )

    # -- a watched step

    def _watch_next_step(self) -> None:
        self._plain = False
        if self._probe is None:
            self._probe = Probe(self._root)

    def _after_watched(self, report: StepReport, probe: Probe) -> None:
        """What a watched step saw: a layer that needs a wider format, or the cause of a later stall."""
        self._probe = None
        probe.remove()
        origin = ranks.first_found(probe.origin)
        if origin is None:
            return
        if report.skipped:
            self._stall.origin = origin
        if origin.half and not origin.backward:
            self._overflowed(origin, report.step)

    def _overflowed(self, origin: Origin, step: int) -> None:
        """A forward left its half format's range: widen the layer, or say what was seen."""
        plan = self.plan
        if plan is None:
            return
        evidence = {"operator": origin.operator, "largest": origin.largest, "format": origin.format}
        layer = None if origin.module is None else attention_of(self._root, origin.module)
        before = module_formats(self._root, plan.policy)
        if self._on_overflow == "record" or layer is None or before[layer] == "fp32":
            self._decide("overflow", origin.module or "", "none", str(origin), evidence, step=step)
            return
        whole = layer != origin.module or isinstance(self._root.get_submodule(layer), nn.MultiheadAttention)
        policy = plan.policy.widened(layer, before, whole=whole)
        reason = f"{origin}; it computes in FP32 from now on"
        choice = Choice(what="format", where=layer or "*", choice="fp32", reason=str(origin))
        formats = layer_formats(self._root, module_formats(self._root, policy))
        scale = self._scale_before_skips()
        self._apply(replace(plan, policy=policy, formats=formats, choices=(*plan.choices, choice)))
        if scale is not None and self.scaler.is_enabled():
            self.scaler.update(scale)  # these skips were not its fault
        self._stall.skips = 0
        self._decide("widen", layer, "fp32", reason, evidence, step=step)

    def _scale_before_skips(self) -> float | None:
        """The loss scale of the first of the steps skipped in a row, as far back as reports are kept."""
        skipped = list(self.history)[-self._stall.skips :] if self._stall.skips else []
        return skipped[0].scale if skipped else None

    def _step_closure(
        self,
        closure: Callable[[], torch.Tensor],
        chosen: list[Any],
        loss: torch.Tensor | None,
        max_grad_norm: float | None,
    ) -> StepReport:
        if loss is not None:
            raise SessionError("step(loss, closure=...) got both; the closure returns the loss by itself")
        if len(chosen) != 1:
            raise SessionError("a closure goes with one optimizer: say which with optimizer=")
        if self._narrow is not None:
            raise SessionError(
                "step(closure=...) with narrow weights or state: the optimizer evaluates the loss in the "
                "middle of its update, where the weights are FP32; leave weights= and state= at 'fp32'"
            )
        self._plain = False
        first: list[torch.Tensor] = []

        def evaluate() -> torch.Tensor:
            _zero(chosen)
            self._backwards = 0
            self._untouched.remember(self._optimizers)  # those of other optimizers wait for their own step
            if torch.is_autocast_enabled(self._device_type):
                torch.clear_autocast_cache()
            with torch.enable_grad():
                value = closure()
            if not self._backwards:
                if gradients.collect(chosen)[1]:
                    raise SessionError(
                        "the closure called loss.backward() by itself; under a Session it returns the loss "
                        "alone (or calls session.backward(loss)), so that scaling and checks are right"
                    )
                self._backward(value, None, None)
            first.append(value.detach())
            return value.detach()

        skipped = self._updater.step_closure(chosen[0], evaluate, max_grad_norm)
        scale = self._end_window(skipped, chosen)
        _zero(chosen)
        self._advance(skipped, chosen)
        return self._report(StepReport(self.step_count, first[0] if first else None, skipped, scale))

    def _advance(self, skipped: Any, chosen: list[Any]) -> None:
        """Counters, schedule and average move only with a step that was taken."""
        self.step_count += 1
        if self._narrow is not None:
            self._narrow.gradients_in_fp32(False)
        if isinstance(skipped, torch.Tensor):
            self._late_flags.append(skipped)
            while len(self._late_flags) > LAG:
                self._settle()
        else:
            self._stall.after(skipped)
            if skipped:
                return
        self.taken_count += 1
        if self._owed:
            self._owed -= 1
        else:
            for scheduler in self._schedulers:
                if len(chosen) == len(self._optimizers) or _steers(scheduler, chosen):
                    scheduler.step()
        if self._emas:
            with self._narrow.wide() if self._narrow is not None else _NO_CONTEXT:
                for ema in self._emas:
                    ema.update_parameters(self._models[0])

    def _settle(self) -> None:
        """Read the oldest flag: a step that was skipped after all is taken back from counters and
        schedule.
        """
        skipped = bool(self._late_flags.pop(0).item())
        if skipped:
            self.taken_count -= 1
            self._owed += bool(self._schedulers)
        if self._stall.after(skipped) and (error := self._stalled(None, self.step_count - LAG)) is not None:
            raise error

    def _report(self, report: StepReport) -> StepReport:
        self.history.append(report)
        if self._probe is not None:
            self._after_watched(report, self._probe)
        if self._stall.wants_to_see:
            self._watch_next_step()
        if self.step_count == self._first_planned and self._casts is not None:
            self._say_what_never_ran(self._casts.never_ran())
        if self._sampled and self._on_report is not None:
            self._on_report(_flat(report))
        if self._recorder is not None:
            self._plan_after(report)
        self._sampled = False
        if self.step_count % self._report_every == self._report_every - 1:
            self._sample_next_step()
        self._plain = self._is_plain()
        return report

    def _sample_next_step(self) -> None:
        self._sampled, self._plain = True, False
        now = time.perf_counter()
        self._clock = (now, now)

    def _say_what_never_ran(self, names: list[str]) -> None:
        if not names or self.plan is None:
            return
        reason = "its forward didn't run in the first step: a format acts on a module's own forward"
        unused = [Choice(what="format", where=name, choice="no effect", reason=reason) for name in names]
        self.plan = replace(self.plan, choices=(*self.plan.choices, *unused))
        warnings.warn(
            f"the policy gives {', '.join(names)} a format of its own, and {reason}. Name the module that "
            "computes with its weight",
            stacklevel=4,
        )

    def _plan_after(self, report: StepReport) -> None:
        """Plan on the step that was recorded; one with gradients that aren't finite waits for the next."""
        from .trials import Recorder

        if report.skipped:
            self._recorder.remove()
            self._recorder = Recorder(self._root)
        else:
            self._make_plan(self._recorder.replay())

    # -- between steps and after

    def register(self, name: str, obj: Any) -> None:
        """Add an object with ``state_dict`` and ``load_state_dict`` to what the session's state holds.

        Raises:
            SessionError: the name is taken or the object has no state to save.
        """
        if self._registered.get(name, obj) is not obj:
            raise SessionError(f"register({name!r}): the name is taken by another object; choose another")
        if not (
            callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
        ):
            raise SessionError(
                f"register({name!r}): {type(obj).__name__} has no state_dict and load_state_dict"
            )
        self._registered[name] = obj

    def explain(self) -> str:
        """What was decided for each layer, and why."""
        if self.plan is None:
            return "not planned yet: the plan is made after the first step, or by prepare(batch, loss_fn)"
        narrow = "" if self._narrow is None else f"\n{self._narrow.describe()}"
        return self.plan.explain() + narrow

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.explain())}</pre>"

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: optimizers, scaler, plan, schedule, EMA, counters, RNG,
        registered.

        Plain values and tensors, so that ``torch.load(weights_only=True)`` reads it. Reads from the device.
        """
        while self._late_flags:
            self._settle()
        return {
            "version": STATE_VERSION,
            "optimizers": [o.state_dict() for o in self._optimizers],
            "scaler": self.scaler.state_dict(),
            "plan": None if self.plan is None else self.plan.to_toml(),
            "lr_schedulers": [s.state_dict() for s in self._schedulers],
            "ema": [e.state_dict() for e in self._emas],
            "step_count": self.step_count,
            "taken_count": self.taken_count,
            "owed": self._owed,
            "history": self.history.state_dict(),
            "decisions": [decision.as_dict() for decision in self.decisions],
            "narrow": None if self._narrow is None else self._narrow.state_dict(),
            "rng": rng_state(),
            "registered": {name: obj.state_dict() for name, obj in self._registered.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; the plan in it is pinned, and nothing is planned again.

        Raises:
            SessionError: another version, or not the same optimizers, schedules, averages or registered
            objects. PolicyError: the plan doesn't fit this model.
        """
        self._refuse_closed()
        self._check_fits(state)
        if state["plan"] is not None:
            self._pin(Plan.from_toml(state["plan"]))
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        if self._narrow is not None and state.get("narrow") is not None:
            self._narrow.load_state_dict(state["narrow"])
        self.scaler.load_state_dict(state["scaler"])
        for scheduler, saved in zip(self._schedulers, state["lr_schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for ema, saved in zip(self._emas, state["ema"], strict=True):
            ema.load_state_dict(saved)
        new = self.step_count < self._first_planned
        self.step_count, self.taken_count = state["step_count"], state["taken_count"]
        if new:
            self._first_planned = self.step_count + 1
        self._owed = state["owed"]
        self.history.load_state_dict(state["history"])
        self._stall.skips = self.history.skips_in_a_row
        self.decisions = [Decision(**row) for row in state.get("decisions", [])]
        for name, obj in self._registered.items():
            obj.load_state_dict(state["registered"][name])
        self._late_flags.clear()
        self.drop()
        self._sampled = False
        set_rng_state(state["rng"])

    def _pin(self, plan: Plan) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        if self.plan is None or not self.plan.same_decisions(plan):
            self._apply(plan)

    def _check_fits(self, state: dict[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise SessionError(
                f"session state of version {state.get('version')!r}; this Equipoise reads version "
                f"{STATE_VERSION}"
            )
        missing = sorted(_STATE_KEYS - set(state))
        if missing:
            raise SessionError(
                f"the session state lacks {', '.join(missing)}; it is not what state_dict() gave"
            )
        own = {"optimizers": self._optimizers, "lr_schedulers": self._schedulers, "ema": self._emas}
        for what, objects in own.items():
            if len(state[what]) != len(objects):
                raise SessionError(
                    f"the session state holds {len(state[what])} {what}, this session has {len(objects)}; "
                    "make the session as it was when the state was saved"
                )
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            theirs = [len(group["params"]) for group in saved["param_groups"]]
            ours = [len(group["params"]) for group in optimizer.param_groups]
            if theirs != ours:
                raise SessionError(
                    f"the state of {type(optimizer).__name__} has groups of {theirs} parameters, this "
                    f"optimizer of {ours}; make the optimizer as it was when the state was saved"
                )
        _check_scaler_state(state["scaler"])
        if set(state["registered"]) != set(self._registered):
            raise SessionError(
                f"the session state holds registered {sorted(state['registered'])}, this session has "
                f"{sorted(self._registered)}; register the same names before loading"
            )

    def restore(self) -> None:
        """Undo every change to the user's objects: forwards, layouts, optimizer settings. Ends the
        session. Gradients that wait for their step get their true size.
        """
        if self._backwards and not self._updater.unscaled:
            self._updater.unscale(self._optimizers)
        self._backwards = 0
        self._plain = False
        self._untouched.forget()
        self._undo_all()
        if self._probe is not None:
            self._probe.remove()
            self._probe = None
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SessionError("this session was ended by restore(); make a new Session")

    def _known(self, optimizer: Any) -> Any:
        for own in self._optimizers:
            if own is optimizer or inner_optimizer(own) is inner_optimizer(optimizer):
                return own
        raise SessionError(
            f"step(optimizer=...) got a {type(optimizer).__name__} that this session was not made with; it "
            f"has {', '.join(type(o).__name__ for o in self._optimizers)}"
        )


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _zero(optimizers: Iterable[Any]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _steers(scheduler: Any, chosen: list[Any]) -> bool:
    """Whether a schedule belongs to one of these optimizers; one that doesn't say belongs to all."""
    own = getattr(scheduler, "optimizer", None)
    return own is None or any(inner_optimizer(own) is inner_optimizer(o) for o in chosen)


def _device_of(optimizers: list[Any]) -> torch.device:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                return torch.device(p.device)
    raise SessionError("the optimizer holds no parameters; there is nothing to train")


def _check_scaler_state(state: Any) -> None:
    """Refuse what a scaler couldn't read, before anything is loaded."""
    try:
        LossScaler("cpu").load_state_dict(state)
    except (TypeError, ValueError) as error:
        raise SessionError(
            f"the scaler's state can't be read ({error}); was it written by another version? Load a state "
            "that LossScaler or torch.amp.GradScaler gave"
        ) from error


def _check_loss(loss: Any) -> None:
    if type(loss) is torch.Tensor and loss.numel() == 1 and loss.dtype in _REAL and loss.requires_grad:
        return
    if callable(loss) and not isinstance(loss, torch.Tensor):
        raise SessionError(
            f"the loss is a {type(loss).__name__}; a closure is passed by name: session.step(closure=...)"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SessionError(f"the loss is {what}; one number is needed: reduce it with .mean() or .sum()")
    if not loss.is_floating_point():
        raise SessionError(
            f"the loss is {loss.dtype}; a real number is needed: a float, or .abs() of a complex"
        )
    if not loss.requires_grad:
        raise SessionError(
            "the loss has no gradient: its forward ran under no_grad() or inference_mode(), it was detached "
            "(.detach(), .item(), a new tensor made of it), or every parameter is frozen"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SessionError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def _check_numbers(report_every: int, plan_time_s: float | None) -> None:
    if report_every < 1:
        raise SessionError(f"report_every is {report_every}; it must be at least 1")
    if plan_time_s is not None and not 0 <= plan_time_s < float("inf"):
        raise SessionError(f"plan_time_s is {plan_time_s}; it must be 0 (static default) or more seconds")


def _check_helpers(schedulers: list[Any], scaler: Any) -> None:
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if not callable(getattr(scheduler, "step", None)):
            raise SessionError(f"lr_scheduler is {name}; something with step() is needed")
        needed = [
            p.name
            for p in inspect.signature(scheduler.step).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if needed:
            raise SessionError(
                f"{name}.step() needs {', '.join(needed)}, which a training step doesn't have; leave it out "
                f"of lr_scheduler= and call {name}.step(...) by yourself after an evaluation"
            )
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise SessionError(
            f"scaler is {type(scaler).__name__}; a LossScaler is needed. It takes over a GradScaler's state: "
            "scaler = LossScaler(); scaler.load_state_dict(old.state_dict())"
        )


def _check_plan_fits(plan: Plan, formats: Mapping[str, str]) -> None:
    """Whether the plan's table has this model's layers, in the formats that the plan's policy gives them."""
    strange = sorted(set(plan.formats) ^ set(formats))
    if strange:
        where = "the plan has and the model has not" if strange[0] in plan.formats else "the plan has not"
        raise PolicyError(
            f"the plan doesn't fit this model: there is a layer {strange[0]!r} that {where}. It was made for "
            "another model; plan again"
        )
    for name, fmt in formats.items():
        if plan.formats[name] != fmt:
            raise PolicyError(
                f"the plan contradicts itself: its policy {str(plan.policy)!r} gives layer {name!r} {fmt}, "
                f"its table [formats] says {plan.formats[name]!r}. The policy decides: edit it, and make the "
                "table alike or leave it out"
            )


def _check_castable(root: nn.Module, formats: Mapping[str, str]) -> None:
    modules = dict(root.named_modules())
    for name, fmt in formats.items():
        for key, p in modules[name]._parameters.items():
            if p is not None and fmt != "fp32" and not castable(p):
                raise FormatError(
                    f"layer {name!r} can't compute in {fmt}: its {key} is {p.dtype}, and only FP32 weights "
                    "are cast. Give the layer 'fp32', which leaves it as it is, or hand over an FP32 model"
                )


def _check_not_quantised(root: nn.Module, formats: Mapping[str, str]) -> None:
    for name, module in root.named_modules():
        if formats[name] != "fp32" and is_quantised(module):
            raise FormatError(
                f"layer {name!r} is quantised ({type(module).__name__}) and can't compute in "
                f"{formats[name]}: it has its own format and takes FP32. Give it 'fp32', which leaves it as "
                "it is"
            )


def _check_wide(root: nn.Module) -> None:
    for name, p in root.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4:
            raise FormatError(
                f"parameter {name!r} is {p.dtype}; a Session takes FP32 weights and casts them by itself. "
                "Leave out .half() or .bfloat16() and name the format: precision='bf16'. With "
                "weights='stochastic', 'kahan' or 'split' the session keeps them in bf16 and loses no update"
            )


def _flat(report: StepReport) -> dict[str, Any]:
    """Flat scalars for a logger: ``step``, ``loss``, ``skipped``, ``scale``, ``grad_norm``, ``data_s``,
    ...
    """
    row = report.as_dict()
    row.update(row.pop("parts", {}))
    return row
