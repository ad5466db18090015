"""Times as the command line takes them: ``90``, ``90s``, ``10m``, ``1.5h``.

Enters: the words of an option. Leaves: seconds. Where: before a verb starts; no torch.
"""

import re

from ..errors import RunError

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|)")
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def seconds(option: str, text: str | None) -> float | None:
    """The seconds that ``text`` says; None where the option was not given."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise RunError(f"{option} is {text!r}; write a time above 0 such as 90, 90s, 10m or 1.5h")
    return float(found[1]) * _SECONDS[found[2]]
