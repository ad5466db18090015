"""Whose mistake an error is: the user's line in its traceback, and what to do about the usual ones.

Enters: an exception, or its kind, message and frames from another process. Leaves: one sentence, and whether
code of the user's took part. Where: wherever the user's functions are called; no torch.
"""

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

Frames = Sequence[tuple[str, int]]
"""File and line of each call, the innermost last."""

_LIBRARIES = (str(Path(__file__).parent), "<", *sysconfig.get_paths().values())
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_HINTS = (
    (
        "stack expects each tensor to be equal size",
        "the samples of a batch must have one shape: resize or pad them, or give the Task a collate",
    ),
    (
        "default_collate: batch must contain",
        "samples are made of tensors, arrays, numbers, text, tuples and dicts; for others give a collate",
    ),
    (
        "does not require grad and does not have a grad_fn",
        "the loss depends on no weight that is trained: make it from the model's output, without detach(), "
        "item() or no_grad()",
    ),
    ("DataLoader worker (pid", "a process that reads the data ended: use fewer --workers, or 0 to see why"),
    ("can be converted to Python scalars", "a metric gives one number"),
    ("float() argument must be", "a metric gives one number"),
)
"""What torch says of a user's mistake that shows no line of the user's, and what to do."""


def frames_of(error: BaseException) -> list[tuple[str, int]]:
    """The calls that an exception came through."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def sentence(kind: str, said: str, frames: Frames) -> tuple[str, bool]:
    """An error in one line, with the innermost line of code that is no library's; and whether one was found.

    A mistake that torch is known to notice in its own code counts as found too.
    """
    if "Original Traceback (most recent call last)" in said:  # torch's way to bring an error from a worker
        frames = [(file, int(line)) for file, line in _FRAME.findall(said)]
        kind, _, said = said.strip().splitlines()[-1].partition(": ")
    mine = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    place = f" ({mine[-1][0]}, line {mine[-1][1]})" if mine else ""
    hint = next((hint for text, hint in _HINTS if text in said), "")
    first = next((line for line in said.splitlines() if line.strip()), "")
    text = f"{kind}: {first}{place}" if first else f"{kind}{place}"
    return f"{text}; {hint}" if hint else text, bool(mine or hint)


def told(error: BaseException) -> str:
    """An error in one line, with the innermost line of the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    return sentence(type(error).__name__, str(error), frames_of(error))[0]


def is_users(error: BaseException) -> bool:
    """Whether code of the user's took part in an error."""
    return sentence(type(error).__name__, str(error), frames_of(error))[1]
