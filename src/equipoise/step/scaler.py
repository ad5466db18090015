"""The loss scale: a factor that keeps FP16 gradients away from zero, found by overflowing and backing off.

Enters: a loss, then optimizers whose gradients are ``scale`` times too large. Leaves: gradients in their
own unit, ``found_inf`` (0 or 1, on the device), the optimizer's step or its skip, and the next scale.
Where: around backward and before the optimizer. Source: ``torch/amp/grad_scaler.py`` of torch 2.13, whose
rule is

    scale' = scale * backoff      when some gradient was not finite; the count of clean steps starts again
    scale' = scale * growth       after ``growth_interval`` clean steps in a row
    scale' = scale                otherwise

and which ours follows bit for bit, then holds ``min_scale <= scale' <= max_scale``. PyTorch's has no floor:
the scale becomes subnormal, 1/scale is inf, and a step that was checked *before* the multiplication writes
inf into the weights. A floor alone makes a failure of its own, a model that skips for ever: hence
``StallError``.

A *window* reaches from the first ``scale()`` after an ``update()`` to the next such ``scale()``. Its
gradients carry one scale, remembered until it ends: an optimizer stepped after ``update()`` moves as the
others.

Host reads ("syncs") on an accelerator; on a CPU none of these costs anything. ``scale``, ``unscale_``,
``found_inf`` and ``set_found_inf``: none. ``step``: torch's one for an optimizer that isn't fused, and one
for a fused SGD that has no momentum yet. ``update``: one when a skip below a scale of 1 is already known;
two when, for all the host knows, the scale stood at its floor for 20 skips: with a fused optimizer at 65536
once in 60 updates. ``get_scale()``: one, and that count starts anew.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from ..errors import SessionError, StallError
from ._scaling import (
    Closed,
    FloorWatch,
    Mark,
    Move,
    any_of,
    bounds,
    check_quotients,
    check_settings,
    default_device,
    known,
    lacks_momentum,
    read,
    unscale_gradients,
)
from .scale_options import Caps, Groups, Hysteresis, Prediction

_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OWN_STATE_KEYS = ("min_scale", "max_scale", "skips_at_floor", "overflows_left", "steps")


class LossScaler(GradScaler):
    """A ``torch.amp.GradScaler`` with a floor, a cap and a loud end.

    Drop-in: equal to torch's bit for bit between floor and cap, in scale, weights and state; a state of
    either loads into the other. Where torch's asserts, or unscales a gradient twice, this one does the safe
    thing or raises a ``SessionError`` that names the likely misuse and leaves the state as it was.

    Args:
        device: ``"cuda"``, ``"cpu"``, ...; by default the accelerator that is there, else the CPU.
        init_scale: first scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean steps in a row.
        backoff_factor: what the scale is multiplied by after a skipped step.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False turns every method into a no-op.
        min_scale: floor; the default is the smallest number that FP16 holds.
        max_scale: cap; the default leaves room for FP32 gradients up to 2**80.
        hysteresis: the scale backs off only with this overflow since it last grew; those before are skipped
            under the same scale.
        caps: (first step, cap) pairs: a cap that changes with time, such as ``[(0, 2**18), (5000, 2**15)]``.
        predict: a probability of overflow in one step, such as 1/8000: the scale is then the largest power of
            two that is predicted to stay below it, within floor and cap, and no longer grows by trial. See
            ``step/prediction.py``.
        predict_every: with it, every how many steps the largest gradient is looked at (the first 100 steps
            all are): one pass over the gradients, and on an accelerator two or three host reads.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**48,
        hysteresis: int = 1,
        caps: Sequence[tuple[int, float]] = (),
        predict: float | None = None,
        predict_every: int = 10,
    ) -> None:
        self._min_scale, self._max_scale = bounds(min_scale, max_scale)
        self._hysteresis = Hysteresis(hysteresis)
        self._caps = Caps(caps, self._min_scale, self._max_scale)
        self._groups = Groups()
        self._prediction: Prediction | None = None
        if predict is not None:
            if hysteresis != 1:
                raise SessionError(
                    "hysteresis and predict were both given; a predicted scale doesn't back off for a single "
                    "overflow anyway: leave hysteresis out"
                )
            self._prediction = Prediction(predict, init_scale, predict_every)
        if enabled:
            check_settings(growth_factor, backoff_factor, growth_interval)
            self._check_in_bounds("init_scale", init_scale)
            if init_scale > self._caps.now():
                raise SessionError(
                    f"init_scale is {init_scale!r}, above the first cap {self._caps.now():g}; lower it or "
                    "raise the cap"
                )
        super().__init__(
            device or default_device(), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._window_open = False
        self._loaded = False
        self._closed: Closed | None = None
        self._grad_scale: torch.Tensor | None = None  # what the gradients carry, where that isn't self._scale
        self._floor = FloorWatch(float(init_scale))

    @property
    def min_scale(self) -> float:
        """The floor of the scale."""
        return self._min_scale

    @property
    def max_scale(self) -> float:
        """The cap of the scale."""
        return self._max_scale

    def add_group(self, module: nn.Module, factor: float) -> None:
        """Give a module's gradients a scale of their own: ``factor`` times the global one.

        For a part of a model whose gradients are much smaller or larger than the others', or for a loss that
        is a module. The factor comes on at the module's output, which is widened to FP32, and goes off at
        its inputs; its weights lose it in ``unscale_``, so before a fused step. ``get_scale()`` stays the
        global scale.

        Args:
            module: all its weights are used inside it alone.
            factor: a power of two.
        """
        if self._enabled:
            self._groups.add(module, factor)

    def use_groups(self, model: nn.Module, on: bool) -> None:
        """For a Session: whether groups count, which they do where losses are scaled.

        Raises:
            SessionError: a group shares a weight with the rest of the model.
        """
        self._groups.check(model)
        self._groups.on = on

    def observe_amax(self, amax: float | torch.Tensor) -> None:
        """Tell the largest magnitude among this window's *unscaled* gradients, before ``update``.

        For prediction; from the first call on the scaler looks at no gradients itself, which sees weights'
        alone, after backward. Windows that nothing is told of are windows that weren't looked at. With
        several ranks each tells in the same windows; the largest counts. No host read.

        Args:
            amax: one number; infinite or NaN where a gradient is.
        """
        if not self._enabled or self._prediction is None:
            return
        if isinstance(amax, torch.Tensor) and amax.numel() != 1:
            raise SessionError(
                f"observe_amax() got a tensor of shape {tuple(amax.shape)}; pass one magnitude, such as "
                "grad.abs().amax()"
            )
        self._prediction.told = True
        self._prediction.take(torch.as_tensor(amax).abs())

    # ---- scale -------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each one in a nested iterable, by the window's scale."""
        if not self._enabled:
            return outputs
        if self._closed is not None or not self._window_open:
            self._open_window()
        if self._grad_scale is None:
            return super().scale(outputs)
        # a generator would be consumed later, under another scale
        eager = outputs if isinstance(outputs, torch.Tensor | list | tuple) else tuple(outputs)
        with self._gradients_scale():
            return super().scale(eager)

    def _open_window(self) -> None:
        """Forget what belonged to the window before."""
        self._window_open, self._closed, self._grad_scale = True, None, None
        if self._loaded:  # a step given up half-way, then a state loaded: the stages mean nothing any more
            self._per_optimizer_states.clear()
            self._loaded = False

    @contextlib.contextmanager
    def _gradients_scale(self) -> Iterator[None]:
        """Within it torch's code sees the scale that this window's gradients carry."""
        current, self._scale = self._scale, self._grad_scale
        try:
            yield
        finally:
            self._scale = current

    # ---- unscale and check -------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale and check them; at most once a window."""
        if not self._enabled:
            return
        stage = self._state_of(optimizer, "unscale_()")["stage"]
        if stage is OptState.UNSCALED:
            raise SessionError(
                "unscale_() has already been called for this optimizer in this window, and once is allowed:"
                " after the last backward pass. With gradient accumulation call it for the last micro-batch"
                " only; if a step was dropped after unscale_(), call update() before the next scale()."
            )
        if stage is OptState.STEPPED:
            raise SessionError(
                "unscale_() is being called after step(). Clip between unscale_() and step(); was update()"
                " forgotten at the end of the last iteration?"
            )
        if self._grad_scale is None:
            super().unscale_(optimizer)
        else:
            with self._gradients_scale():
                super().unscale_(optimizer)
        if self._groups:
            self._groups.undo(_parameters(optimizer))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Torch's hook: ``unscale_`` passes 1/scale; a fused optimizer's step 1, for a check alone.

        Beyond torch's: complex gradients as real pairs; sparse ones in memory of their own and coalesced;
        plain and distributed tensors in calls of their own; products checked too under a scale below 1.
        """
        check_only, below_one = allow_fp16, self._below_one()
        found = unscale_gradients(
            optimizer, inv_scale, found_inf, allow_fp16=allow_fp16, twice=below_one and not check_only
        )
        if check_only and below_one:
            check_quotients(optimizer, cast(torch.Tensor, self._scale), found)
        if self._prediction is not None and self._prediction.looks():
            self._prediction.look(optimizer, self._scale if check_only else None)
        return found

    def _below_one(self) -> bool:
        """Whether the gradients' scale may be below 1, so that unscaling makes them larger."""
        scale = self._scale if self._grad_scale is None else self._grad_scale
        if scale is not None and scale.device.type == "cpu":
            return read(scale) < 1.0
        return self._floor.least < 1.0

    def found_inf(self, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
        """1.0 where a gradient of these optimizers is not finite, else 0.0; 0-d, on the scale's device.

        May be asked from ``unscale_`` (or ``step``) to ``update``; the tensor stays as it is after that. To
        change the outcome use ``set_found_inf``.
        """
        if not self._enabled:
            return torch.zeros(())
        flags = []
        for optimizer in optimizers:
            state = self._per_optimizer_states.get(id(optimizer))
            if state is None or state["stage"] is OptState.READY or self._scale is None:
                raise SessionError(
                    "found_inf() was asked of an optimizer whose gradients were not checked in this window;"
                    " call unscale_() or step() with it first, and ask before update()."
                )
            flags.extend(state["found_inf_per_device"].values())
        return any_of(flags, self._scale.device if self._scale is not None else torch.device("cpu"))

    def set_found_inf(self, found_inf: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """Overrule the checks of these optimizers, between ``unscale_`` and ``step``.

        For ranks that agree: ``scaler.set_found_inf(agree(scaler.found_inf(a, b)), a, b)``.
        """
        if not self._enabled:
            return
        states = [self._per_optimizer_states.get(id(optimizer)) for optimizer in optimizers]
        for state in states:
            if state is None or state["stage"] is not OptState.UNSCALED or self._scale is None:
                raise SessionError(
                    "set_found_inf() counts between unscale_() and step(); call unscale_() with each of the"
                    " optimizers first."
                )
            # a rank may hold no gradient of an optimizer and must skip with the others all the same
            devices = list(state["found_inf_per_device"]) or [self._scale.device]
            state["found_inf_per_device"] = {
                d: found_inf.detach().to(d, torch.float32, copy=True).reshape(()) for d in devices
            }

    def forget(self, *optimizers: torch.optim.Optimizer) -> None:
        """Their gradients were dropped: what the checks found doesn't count; they may be unscaled again."""
        if not self._enabled:
            return
        for optimizer in optimizers:
            self._per_optimizer_states.pop(id(optimizer), None)
            if self._closed is not None:
                self._closed.unscaled.pop(id(optimizer), None)

    # ---- step --------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, then step, or skip where a gradient is not finite.

        An optimizer without any gradient takes its empty step and tells nothing of the scale.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if kwargs.get("closure") is not None or callable(next(iter(args), None)):
            raise SessionError(
                "step() got a closure; its backward pass would run without this scale, or its gradients"
                " would reach the optimizer scaled. Use Session.step(closure=...)."
            )
        kwargs.pop("closure", None)
        state = self._state_of(optimizer, "step()")
        if state["stage"] is OptState.STEPPED:
            raise SessionError(
                "step() has already been called for this optimizer since the last update(). Was update()"
                " forgotten at the end of the last iteration?"
            )
        if state["stage"] is OptState.READY and self._unscales_before_step(optimizer):
            self.unscale_(optimizer)
        if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"]:
            if Mark.of(optimizer) is not None:
                raise SessionError(
                    "unscale_() came before the backward pass of this optimizer, whose gradients are still"
                    " scaled and unchecked. Call unscale_() after the last backward pass."
                )
            state["stage"] = OptState.STEPPED
            return cast("float | None", optimizer.step(*args, **kwargs))
        if lacks_momentum(optimizer):
            flags = state["found_inf_per_device"] or self._check_inf_per_device(optimizer)
            if any([read(flag) != 0.0 for flag in flags.values()]):
                state.update(stage=OptState.STEPPED, skip=True)
                return None
        if self._grad_scale is None:
            return super().step(optimizer, *args, **kwargs)
        with self._gradients_scale():
            return super().step(optimizer, *args, **kwargs)

    def _unscales_before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """True but for a fused kernel with gradients, which divides them by itself."""
        return (
            not getattr(optimizer, "_step_supports_amp_scaling", False)
            or Mark.of(optimizer) is None
            or self._groups.has(_parameters(optimizer))
        )

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Torch's hook, with its one host read; the answer is kept."""
        skip = any([read(flag) != 0.0 for flag in optimizer_state["found_inf_per_device"].values()])
        optimizer_state["skip"] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def _state_of(self, optimizer: torch.optim.Optimizer, call: str) -> dict[str, Any]:
        """The optimizer's state in this window, which may be over for the others."""
        if self._scale is None:
            raise SessionError(
                f"{call} came before scale(): these gradients carry no scale. Call"
                " scaler.scale(loss).backward() first."
            )
        key, closed = id(optimizer), self._closed
        if closed is not None and key in closed.unscaled:
            self._per_optimizer_states[key] = closed.unscaled.pop(key)
        elif closed is not None and key in closed.stepped and key not in self._per_optimizer_states:
            then, now = closed.stepped[key][1], Mark.of(optimizer)
            if now is None or (then is not None and now.same(then)):
                raise SessionError(
                    f"{call} came again for this optimizer without a backward pass since its last step; its"
                    " gradients would be unscaled twice. Call scaler.scale(loss).backward() first."
                )
            self._open_window()  # a loss scaled by hand: under the present scale, as in torch
        state = self._per_optimizer_states[key]
        state["optimizer"] = optimizer
        return state

    # ---- update ------------------------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale; once at the end of an iteration.

        Called after each of several optimizers, it still makes one move a window.

        Args:
            new_scale: take this scale instead. In the middle of a window it holds from the next one on.

        Raises:
            StallError: 20 windows in a row overflowed at the floor.
        """
        if not self._enabled:
            return
        if self._scale is None:
            raise SessionError(
                "update() came before scale(): no step has used the scale. Call"
                " scaler.scale(loss).backward() and scaler.step(optimizer) first."
            )
        states = list(self._per_optimizer_states.values())
        if new_scale is not None:
            self._set_scale(self._scale, new_scale)
            if states:
                self._close_window(None)
            return
        if not states:
            if self._closed is not None:
                return  # once more at the end of the same window
            raise SessionError(
                "update() came without a step() since the last one; the window goes on under its scale."
                " With gradient accumulation call it after step(), not after each micro-batch."
            )
        checked = [state for state in states if state["found_inf_per_device"]]
        if checked:
            self._move_scale(checked)
        else:
            self._close_window(self._closed.update if self._closed is not None else None)

    def _move_scale(self, states: list[dict[str, Any]]) -> None:
        """Torch's rule, held between floor and cap; for a window's late optimizers, its whole move again."""
        scale, tracker = self._check_scale_growth_tracker("update")
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        found = any_of(flags, scale.device)
        skip = known(found, states)
        last = self._closed.update if self._closed is not None else None
        if last is None:
            move = Move(found, skip, scale.clone(), tracker.clone(), self._floor.copy())
        else:
            skip = last.skip or skip if None not in (last.skip, skip) else None
            move = Move(torch.maximum(found, last.found), skip, last.scale, last.tracker, last.floor)
            scale.copy_(last.scale)
            tracker.copy_(last.tracker)
            self._floor = last.floor.copy()
        self._close_window(move)
        torch._amp_update_scale_(
            scale, tracker, move.found, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        self._hysteresis.after(move, scale, tracker, again=last is not None)
        self._caps.steps += last is None
        value = None
        if self._prediction is not None:
            value = self._prediction.after(move, scale, again=last is not None)
        scale.clamp_(self._min_scale, self._caps.now())
        if value is not None:  # it may have fallen further than by the rule
            value = min(max(value, self._min_scale), self._caps.now())
            self._floor.least = min(self._floor.least, value)
        skips = self._floor.after(move, scale, self._min_scale, self._backoff_factor)
        if skips:
            raise StallError(
                f"the last {skips} steps were skipped, all at the smallest allowed scale {self._min_scale:g}:"
                " their gradients are not finite whatever the scale. Look for an inf or NaN in the loss, the"
                " data or a layer that overflows in FP16 (keep that one in FP32); if the model really needs a"
                " smaller scale, pass min_scale=."
            )

    def _close_window(self, move: Move | None) -> None:
        """Remember who stepped and what the gradients carry, for those who come after the update."""
        closed = self._closed or Closed()
        for key, state in self._per_optimizer_states.items():
            if state["stage"] is OptState.UNSCALED:
                closed.unscaled[key] = state
            else:
                optimizer = state.get("optimizer")
                closed.stepped[key] = (optimizer, Mark.of(optimizer))
        closed.update = move
        if self._grad_scale is None and self._scale is not None:
            self._grad_scale = self._scale.clone() if move is None else move.scale
        self._closed = closed
        self._per_optimizer_states.clear()

    def _set_scale(self, scale: torch.Tensor, new_scale: float | torch.Tensor) -> None:
        """The user's own scale; gradients that are under way keep theirs."""
        least = self._min_scale
        if isinstance(new_scale, torch.Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise SessionError(
                    f"update(new_scale) got a tensor of shape {tuple(new_scale.shape)} with"
                    f" requires_grad={new_scale.requires_grad}; pass a number or one value without gradient."
                )
        else:
            self._check_in_bounds("new_scale", new_scale)
            least = min(self._floor.least, float(new_scale))
        if self._window_open and self._grad_scale is None:
            self._grad_scale = scale.clone()
        if self._closed is not None:
            self._closed.update = None  # later checks of this window don't take it back
        if isinstance(new_scale, torch.Tensor):
            scale.copy_(new_scale.reshape(())).nan_to_num_(nan=self._min_scale)
            scale.clamp_(self._min_scale, self._max_scale)
        else:
            scale.fill_(new_scale)
        self._floor = FloorWatch(least)

    # ---- state -------------------------------------------------------------------------------------

    def get_scale(self) -> float:
        """The scale that the next window will use; 1.0 when disabled. One host read."""
        value = super().get_scale()
        if self._enabled and self._scale is not self._grad_scale:
            self._floor.least = value
            if value > self._min_scale:
                self._floor.most = 0
        return value

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, floor, cap and what is counted for them; empty when disabled."""
        state = super().state_dict()
        if self._enabled:
            state["min_scale"], state["max_scale"] = self._min_scale, self._max_scale
            state["skips_at_floor"] = int(read(self._floor.skips))
            state["overflows_left"] = int(read(self._hysteresis.left))
            state["steps"] = self._caps.steps
            if self._prediction is not None:
                state["prediction"] = self._prediction.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; the empty state of a disabled scaler changes nothing.

        A scale beyond floor or cap is taken to the nearer of them.
        """
        if not self._enabled or not state_dict:
            return
        missing = [key for key in _STATE_KEYS if key not in state_dict]
        if missing:
            raise SessionError(
                f"this scaler state lacks {', '.join(missing)}; it has {', '.join(map(str, state_dict))}."
                " Pass what state_dict() of a LossScaler or a torch.amp.GradScaler gave."
            )
        for key in (*_STATE_KEYS, *_OWN_STATE_KEYS):
            value = state_dict.get(key, 0)
            if not isinstance(value, (int, float)) and not (
                isinstance(value, torch.Tensor) and value.numel() == 1
            ):
                raise SessionError(
                    f"this scaler state has {value!r} as {key}, where a number is needed; nothing of it was"
                    " loaded. Load an earlier checkpoint."
                )
        low, high = bounds(
            state_dict.get("min_scale", self._min_scale), state_dict.get("max_scale", self._max_scale)
        )
        scale = float(state_dict["scale"])
        if math.isnan(scale):
            raise SessionError(
                "this scaler state has a scale of NaN; allowed is any number. Load an earlier checkpoint."
            )
        scale = min(max(scale, low), high)
        prediction = self._prediction
        if prediction is not None:
            prediction = Prediction(prediction.predictor.bound, scale, prediction.every)
            if state_dict.get("prediction") is not None:
                prediction.load_state_dict(state_dict["prediction"])
        if not self._caps.schedule:
            self._caps = Caps((), low, high)
        super().load_state_dict({**state_dict, "scale": scale})
        self._prediction = prediction
        self._min_scale, self._max_scale = low, high
        self._hysteresis.left = int(state_dict.get("overflows_left", self._hysteresis.patience))
        self._caps.steps = int(state_dict.get("steps", 0))
        skips = int(state_dict.get("skips_at_floor", 0))
        self._floor = FloorWatch(scale, skips, skips)
        self._window_open, self._closed, self._grad_scale, self._loaded = False, None, None, True

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: between iterations only, as torch's."""
        if self._enabled and self._per_optimizer_states:
            raise SessionError(
                "a LossScaler can be pickled or copied only between iterations; call update() first."
            )
        if self._groups:
            raise SessionError(
                "a LossScaler with groups belongs to its modules and can't be pickled or copied; keep its "
                "state_dict() and call add_group() again."
            )
        state = super().__getstate__()
        floor = replace(self._floor, skips=int(read(self._floor.skips)))
        state.update(_window_open=False, _closed=None, _grad_scale=None, _floor=floor)
        return state

    def _check_in_bounds(self, name: str, value: float) -> None:
        if not self._min_scale <= value <= self._max_scale:
            raise SessionError(
                f"{name} is {value!r}; allowed is {self._min_scale:g} to {self._max_scale:g}. Choose"
                " another, or construct LossScaler with min_scale= or max_scale=."
            )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


class NullScaler:
    """The scaler of formats that need none: same calls, no kernels, no state."""

    __slots__ = ()

    def scale(self, outputs: Any) -> Any:
        """``outputs`` itself."""
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to undo."""

    def found_inf(self, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
        """0: nothing is checked here."""
        return torch.zeros(())

    def set_found_inf(self, found_inf: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """Nothing to overrule."""

    def forget(self, *optimizers: torch.optim.Optimizer) -> None:
        """Nothing to forget."""

    def add_group(self, module: nn.Module, factor: float) -> None:
        """Nothing is scaled here."""

    def use_groups(self, model: nn.Module, on: bool) -> None:
        """Nothing is scaled here."""

    def observe_amax(self, amax: float | torch.Tensor) -> None:
        """Nothing is predicted here."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(...)``, with a closure too."""
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Nothing to move."""

    def get_scale(self) -> float:
        """Always 1.0."""
        return 1.0

    def is_enabled(self) -> bool:
        """Always False."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Empty, as a disabled ``GradScaler``'s."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts any state, as a disabled ``GradScaler`` does."""
