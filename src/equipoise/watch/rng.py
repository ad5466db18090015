"""Random generators: seeded, lent, taken and put back bit for bit.

Enters: Python's, NumPy's and torch's generators. Leaves: plain values and tensors that
``torch.load(weights_only=True)`` reads. Where: between steps, in the session's state, in trials and around
evaluations.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, accelerators too."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
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


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_rng(seed: int) -> Iterator[None]:
    """Run under generators of its own; the caller's are put back as they were."""
    state = rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(state)
