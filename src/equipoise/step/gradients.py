"""Gradients between backward and the update: are they finite, how long are they, clip them.

Enters: parameters after backward, gradients unscaled or never scaled. Leaves: a flag (0 or 1, float32, on the
device) and gradients clipped to a norm. Where: inside a step, after unscaling, before the optimizer.

The check is torch's own unscale kernel with a factor of 1, which leaves every bit and costs one pass
(docs/LOG.md has it beside norms, sums and ``isfinite().all()``, with the commands).
Source: ``torch.amp.GradScaler._unscale_grads_``.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from .. import ranks

Tensor = torch.Tensor

_SUMMED_IN_FP32 = (torch.bfloat16, torch.float32)


def collect(optimizers: Iterable[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that have a gradient, and those gradients; groups added since are seen."""
    parameters: list[Tensor] = []
    grads: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is not None:
                    parameters.append(p)
                    grads.append(g)
    return parameters, grads


class Untouched:
    """Notices gradients that somebody else made, changed or took away while they carry a scale.

    A gradient is recognised by its tensor and by torch's count of changes in place: no kernel, no read.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int]] = {}

    def remember(self, optimizers: Iterable[Any]) -> None:
        """The gradients as they are now, after a backward of ours."""
        parameters, grads = collect(optimizers)
        self._known = {id(p): (g, g._version) for p, g in zip(parameters, grads, strict=True)}

    def forget(self) -> None:
        """None is known: the window is over. Keeps no gradient alive."""
        self._known.clear()

    def changed(self, optimizers: Iterable[Any]) -> str | None:
        """What happened to a gradient of these optimizers since, in words; None when nothing did."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    grad, known = p.grad, self._known.get(id(p))
                    if known is None:
                        if grad is not None:
                            return "is there that no backward of this session made"
                    elif grad is None:
                        return "is gone"
                    elif grad is not known[0] or grad._version != known[1]:
                        return "was changed"
        return None


class FiniteCheck:
    """Whether any gradient holds an infinity or a NaN.

    On the CPU the answer lies in host memory and reading it costs nothing; elsewhere it stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # A view of the same memory: no operator runs when it is read.
        self._host = self.found.numpy() if device.type == "cpu" else None

    def __call__(self, grads: list[Tensor]) -> bool | None:
        """Set :attr:`found` to 1 where a gradient is not finite, else to 0; returns :meth:`on_host`."""
        host = self._host
        if host is None:
            self.found = torch.zeros_like(self.found)  # the last step's flag may not have been read yet
        elif host:
            host[...] = 0.0
        # Exact type: subclasses such as DTensor bring their own arithmetic and take the other way.
        together = all([type(g) is Tensor for g in grads])
        if together:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, self.found, self._one)
            except (RuntimeError, NotImplementedError):
                together = False  # sparse, complex, or on several devices
        if not together:
            for g in grads:
                self._check_odd(g)
        return None if host is None else bool(host)

    def of_norm(self, norm: Tensor) -> None:
        """The same from the gradients' norm, which is finite only where every one of them is."""
        if self._host is None:
            self.found = (~torch.isfinite(norm)).to(torch.float32)
        else:
            self._host[...] = not math.isfinite(norm.numpy())

    def _check_odd(self, g: Tensor) -> None:
        values = dense_values(g)
        bad = (~torch.isfinite(values).all()).to(device=self.found.device, dtype=torch.float32)
        self.found.copy_(torch.maximum(self.found, bad))

    def on_host(self) -> bool | None:
        """The answer where it can be read for nothing; None elsewhere."""
        return None if self._host is None else bool(self._host)


def dense_values(g: Tensor) -> Tensor:
    """A gradient's numbers: this rank's shard, a sparse one's coalesced values, a complex one's pairs."""
    if hasattr(g, "to_local"):
        g = g.to_local()
    if g.layout is torch.sparse_coo:
        g = g.coalesce().values()
    return torch.view_as_real(g) if g.is_complex() else g


def first_nonfinite(models: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first parameter whose gradient is not finite. Reads from the device."""
    for name, p in models:
        if p.grad is not None and not bool(torch.isfinite(dense_values(p.grad)).all()):
            return name
    return None


def clip(parameters: Sequence[Tensor], grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients down to a global 2-norm of ``max_norm``; returns the norm before.

    The norm is taken in FP32 or wider: neither half gradients nor FP32 ones whose squares overflow make it
    infinite.
    """
    norm = global_norm(grads)
    kinds = _by_kind(grads)
    if len(kinds) > 1:
        # Each rank may have gradients of its own beside shards: one factor, or shards would part ways.
        largest = ranks.agree_max(norm.clone())
        norm = torch.where(torch.isfinite(norm), largest, norm)  # a NaN of this rank's own stays one
    if len(kinds) > 1 or any(g.layout is not torch.strided for g in grads):
        factor = clip_factor(norm, max_norm)
        for g in grads:
            dense = g.to_local() if hasattr(g, "to_local") else g
            dense.mul_(factor.to(dense.device))
        return norm
    if norm.device.type != "cpu":
        # A NaN doesn't spread to the others, so that the one to blame can be told.
        safe = torch.where(norm.isnan(), 0.0, norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, safe)
    elif _shrinks(float(norm.numpy()), max_norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _shrinks(norm: float, max_norm: float) -> bool:
    """Whether clipping changes any bit: torch multiplies by 1 where the norm is below the limit. Not for a
    NaN, which would spread to gradients that aren't to blame.
    """
    return norm + 1e-6 > max_norm * (1 - 1e-6)  # 1e-6: more than FP32 rounds


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a global norm are multiplied by, 0-d; torch's own rule."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """2-norm over all gradients, 0-d float32; over all shards where gradients are sharded."""
    kinds = _by_kind(grads)
    if len(kinds) > 1:
        norms = [global_norm(kind) for kind in kinds]
        together = torch.stack([n.to(norms[0].device, torch.float64) for n in norms])
        return cast(Tensor, torch.linalg.vector_norm(together).to(torch.float32))
    if all([g.dtype is torch.float32 and g.layout is torch.strided for g in grads]):
        norm = _norm_in_fp32(grads)
        # On the CPU the answer is in host memory; elsewhere reading it would be a sync.
        if norm.device.type != "cpu" or norm.numpy() != float("inf"):
            return norm
    if all(type(g) is Tensor and g.dtype in _SUMMED_IN_FP32 and g.layout is torch.strided for g in grads):
        norms = [n.to(grads[0].device) for n in torch._foreach_norm(list(grads), 2, dtype=torch.float32)]
        norm = cast(Tensor, torch.linalg.vector_norm(torch.stack(norms)))
        if norm.device.type != "cpu" or norm.numpy() != float("inf"):
            return norm
    wide = [_wide_norm(g) for g in grads]
    total_hp = torch.linalg.vector_norm(torch.stack([w.to(wide[0].device) for w in wide]))
    return cast(Tensor, total_hp.to(torch.float32))


def _norm_in_fp32(grads: Sequence[Tensor]) -> Tensor:
    if all([type(g) is Tensor and g.is_cpu for g in grads]):  # torch's own, less its sorting by device
        return cast(Tensor, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads), 2))))
    total: Any = torch.nn.utils.get_total_norm(grads)
    return cast(Tensor, total.full_tensor() if hasattr(total, "full_tensor") else total)


def _wide_norm(g: Tensor) -> Tensor:
    """2-norm of one gradient, all its shards, in float64."""
    if hasattr(g, "full_tensor"):
        whole: Any = torch.linalg.vector_norm(g, dtype=torch.float64)
        return cast(Tensor, whole.full_tensor())
    return cast(Tensor, torch.linalg.vector_norm(dense_values(g), dtype=torch.float64))


def _by_kind(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Plain gradients, and sharded ones by the ranks they are spread over: no operator takes both at once."""
    if all([type(g) is Tensor for g in grads]):
        return [list(grads)]
    kinds: dict[Any, list[Tensor]] = {}
    for g in grads:
        kinds.setdefault(getattr(g, "device_mesh", None), []).append(g)
    return list(kinds.values())
