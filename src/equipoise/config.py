"""``run.toml``: what was asked of a run, enough to ask it again.

Enters: the options of ``equipoise train``. Leaves: one checked value and its TOML. Where: before the first
step, and at every resume; no torch. A key that isn't known is an error that names the nearest one.
"""

import tomllib
import types
import typing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import RunError, did_you_mean

RUN_SCHEMA = 1
"""Version of a run directory; one of another version is refused."""

EXACT = "exact"
NOT_EXACT = "resumes, not exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What was asked, and the surroundings that decide whether a resume can be exact."""

    task: str
    """As it can be resolved from anywhere: a file's path is absolute."""
    seed: int = 0
    data: str | None = None
    precision: str = "auto"
    emulate: bool = False
    """Whether half formats are computed by casts there and back."""
    plan: str | None = None
    """The plan file that was given; its content is in ``plan.toml``."""
    device: str = "auto"
    """In a run directory the device that was used, never ``auto``."""
    workers: int = 0
    """Processes that read the data."""
    steps: int = 0
    """Optimizer steps of the whole run; 0 asks for the task's own number, which then stands here."""
    max_time: float | None = None
    """Seconds after which training ends; with it a resume can't be exact."""
    checkpoint_every: float | None = None
    """Seconds between checkpoints; None: 30, or 1 % of a long run."""
    threads: int = 1
    """Sums are split by threads, so another number gives other last digits."""
    repeat: str = ""
    """The command that trains the same again."""
    resume: str = EXACT
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            RunError: a number out of its range.
        """
        for name, low in (("seed", 0), ("workers", 0), ("steps", 0), ("threads", 1)):
            if getattr(self, name) < low:
                raise RunError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.seed >= 2**64:
            raise RunError(f"seed is {self.seed}; it must be below 2**64, the most that torch takes")
        for name in ("max_time", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RunError(f"{name} is {value}; it must be a number of seconds above 0")

    def to_toml(self) -> str:
        """The text of ``run.toml``; what is None is left out."""
        import tomli_w

        values = {key: value for key, value in asdict(self).items() if value is not None}
        return tomli_w.dumps({"schema": RUN_SCHEMA, **values})

    @classmethod
    def load(cls, path: Path) -> "RunConfig":
        """Read ``run.toml``.

        Raises:
            RunError: another schema version, an unknown or missing key, a value of another type.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{str(path)!r} can't be read: {error}") from error
        schema = data.pop("schema", None)
        if schema != RUN_SCHEMA:
            raise RunError(
                f"{str(path.parent)!r} is a run directory of schema {schema}; this version of Equipoise "
                f"reads {RUN_SCHEMA}. Resume with the version that wrote it"
            )
        _check_keys(path, data, typing.get_type_hints(cls))
        return cls(**data)


def _check_keys(path: Path, data: dict[str, Any], hints: dict[str, Any]) -> None:
    for key, value in data.items():
        if key not in hints:
            hint = did_you_mean(key, hints)
            raise RunError(f"unknown key {key!r} in {str(path)!r}; allowed: {', '.join(hints)}{hint}")
        allowed = _plain_types(hints[key])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise RunError(f"{key!r} in {str(path)!r} is {value!r}; it must be a {names}")
    for key in ("task", "steps"):
        if key not in data:
            raise RunError(
                f"{str(path)!r} has no {key!r}; a run directory's file always has it: restore the file"
            )


def _plain_types(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        kinds = [
            kind for part in typing.get_args(hint) if part is not type(None) for kind in _plain_types(part)
        ]
    else:
        kinds = [typing.get_origin(hint) or hint]
    return tuple([*kinds, int] if float in kinds else kinds)
