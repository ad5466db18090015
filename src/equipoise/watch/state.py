"""State outside the weights: random generators and optimizer state, taken and put back bit for bit.

Enters: generators and optimizers. Leaves: plain values and tensors that ``torch.load(weights_only=True)`` reads.
Where: between steps, in the session's state, in trials and in rollback.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, accelerators too."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss),
                  float(cached)],
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back to :func:`rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    return [_cloned(v) for v in value] if isinstance(value, list) else value


def cloned_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Parameter -> a copy of its state, in memory of its own."""
    return {parameter: _cloned(state) for parameter, state in optimizer.state.items()}


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict`` that keeps each tensor's own dtype: torch casts state to the weights' dtype."""
    optimizer.load_state_dict(saved)
    by_index = saved.get("state", {})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved.get("param_groups", ()) for i in group["params"]]
    for parameter, index in zip(parameters, indices, strict=False):
        own = optimizer.state.get(parameter, {})
        for key, value in by_index.get(index, {}).items():
            if isinstance(value, torch.Tensor) and key in own and own[key].dtype != value.dtype:
                own[key] = value.detach().to(own[key].device, copy=True)
