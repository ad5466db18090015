"""Ranks: who am I, how many are we, and agreeing before deciding.

Enters: a local finding. Leaves: the same finding on every rank. Where: before any decision that must be
alike. With one process nothing is sent. Torch is imported only when a process group may exist.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def _group_ready() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    dist = torch.distributed
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return sys.modules["torch"].distributed.get_world_size() if _group_ready() else 1


def rank() -> int:
    """This process's number; 0 without a process group."""
    return sys.modules["torch"].distributed.get_rank() if _group_ready() else 0


def agree_max(flag: "torch.Tensor") -> "torch.Tensor":
    """The largest ``flag`` (any shape) over all ranks, in place; one all-reduce, none with one process."""
    if _group_ready():
        dist = sys.modules["torch"].distributed
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def agree(value: T) -> T:
    """Rank 0's ``value`` on every rank (pickled; between steps only)."""
    if not _group_ready():
        return value
    box = [value]
    sys.modules["torch"].distributed.broadcast_object_list(box, src=0)
    return box[0]


def first_found(value: T | None) -> T | None:
    """The first rank's ``value`` that isn't None, on every rank (pickled); None where no rank has one."""
    if not _group_ready():
        return value
    values: list[T | None] = [None] * world_size()
    sys.modules["torch"].distributed.all_gather_object(values, value)
    return next((v for v in values if v is not None), None)


def from_first(make: Callable[[], T]) -> T:
    """What ``make()`` gives on rank 0, on every rank; an error that it raises there is raised on all.

    The others wait meanwhile, so ``make`` must not communicate.
    """
    if not _group_ready():
        return make()
    answer: tuple[T | None, Exception | None] = None, None
    if rank() == 0:
        try:
            answer = make(), None
        except Exception as error:
            answer = None, error
    value, failed = agree(answer)
    if failed is not None:
        raise failed
    return cast(T, value)
