"""Policy: which module gets which number format. Plan: everything decided before the first step.

Enters: text, TOML or what the planner chose. Leaves: frozen values that are matched, explained and written
out. Where: before the first step; no torch, so a plan can be read where no torch is.

Grammar of a policy: entries separated by ``;``. An entry without ``=`` is the default format, every other is
``pattern=format``. A pattern is a glob over dotted module names (``*`` crosses dots), or ``re:`` and a
regular expression for the whole name (without ``;``). An entry that names a module holds for everything
inside it. An exact name beats a pattern, a deeper exact name beats a shallower one, else the later entry
wins.
"""

import difflib
import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from .errors import FormatError, PolicyError, did_you_mean
from .formats import format_named
from .records import Choice

PLAN_SCHEMA = 1
"""Version of ``plan.toml``; a file of another version is refused."""

_GLOB_CHARACTERS = set("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The format of one module and the entry that decided it."""

    format: str
    pattern: str
    """The winning entry's pattern; empty for the default."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Module path -> format: a default and overrides, in order."""

    default: str = "fp32"
    entries: tuple[tuple[str, str], ...] = ()
    """(pattern, format name) pairs in the order written."""

    def __post_init__(self) -> None:
        """Bring format names to the ones that plans use.

        Raises:
            FormatError: a format is unknown.
            PolicyError: a pattern is empty or not a valid regular expression.
        """
        object.__setattr__(self, "default", format_named(self.default).name)
        entries = tuple((pattern.strip(), format_named(fmt).name) for pattern, fmt in self.entries)
        object.__setattr__(self, "entries", entries)
        for pattern, fmt in entries:
            if not pattern:
                raise PolicyError(f"policy entry '={fmt}' has no pattern; write 'name=format'")
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise PolicyError(
                        f"policy pattern {pattern!r} is not a regular expression: {error}"
                    ) from error

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """A policy from text such as ``"bf16; head=fp32; blocks.0.*=fp32"``.

        Raises:
            PolicyError: two defaults, or an entry that can't be read.
            FormatError: a format is unknown.
        """
        default: str | None = None
        entries: list[tuple[str, str]] = []
        for part in (p.strip() for p in str(text).split(";")):
            if not part:
                continue
            if "=" in part:
                pattern, _, fmt = part.rpartition("=")
                entries.append((pattern, fmt))
            elif default is not None:
                raise PolicyError(
                    f"policy {text!r} has two defaults, {default!r} and {part!r}; only one is allowed"
                )
            else:
                default = part
        if default is None and not entries:
            raise PolicyError(f"policy {text!r} is empty; write a format such as 'bf16' or 'bf16; head=fp32'")
        return cls(default or "fp32", tuple(entries))

    def __str__(self) -> str:
        return "; ".join([self.default, *(f"{pattern}={fmt}" for pattern, fmt in self.entries)])

    def resolve(self, names: Iterable[str]) -> dict[str, Match]:
        """The format of each module.

        Args:
            names: dotted names of all modules of the model, containers too; the root is ``""``.

        Raises:
            PolicyError: a pattern matches no module; the message offers the nearest names.
        """
        names = list(names)
        used: set[int] = set()
        found = {name: self._match(name, used) for name in names}
        for index, (pattern, fmt) in enumerate(self.entries):
            if index not in used and not any(_matches(pattern, name) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[1:4]
                raise PolicyError(
                    f"policy entry '{pattern}={fmt}' matches no module of the model. Modules are, for "
                    f"example: {', '.join(n for n in near if n) or 'none with a name'}"
                )
        return found

    def widened(self, name: str, names: Iterable[str], *, whole: bool = False) -> "Policy":
        """This policy with the module ``name`` in FP32 and every other module as it was.

        Args:
            name: dotted name of the module, the root ``""``.
            names: dotted names of all modules of the model.
            whole: everything inside the module goes to FP32 as well.

        Raises:
            PolicyError: the model has no such module.
        """
        names = list(names)
        if name not in names:
            raise PolicyError(f"there is no module {name!r} to widen" + did_you_mean(name, names))
        inside = f"{name}." if name else ""
        wanted = {n: match.format for n, match in self.resolve(names).items()}
        for n in names:
            if n == name or (whole and n.startswith(inside)):
                wanted[n] = "fp32"
        new = self
        for n in names:  # parents come first: what holds for one holds inside, until an entry says otherwise
            if new.resolve(names)[n].format != wanted[n]:
                entries = (*new.entries, (n, wanted[n]))
                new = replace(new, entries=entries) if n else replace(new, default="fp32")
        return new

    def _match(self, name: str, used: set[int]) -> Match:
        best = Match(format=self.default, pattern="")
        best_rank = (-1, -1, -1)
        for index, (pattern, fmt) in enumerate(self.entries):
            depth = _depth_of_match(pattern, name)
            if depth is None:
                continue
            used.add(index)
            rank = (1, depth, index) if _is_exact(pattern) else (0, 0, index)
            if rank > best_rank:
                best, best_rank = Match(format=fmt, pattern=pattern), rank
        return best

    @property
    def formats(self) -> tuple[str, ...]:
        """All formats that the policy names, the default first."""
        return tuple(dict.fromkeys([self.default, *(fmt for _, fmt in self.entries)]))


def _is_exact(pattern: str) -> bool:
    return not pattern.startswith("re:") and not _GLOB_CHARACTERS & set(pattern)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return name == pattern if _is_exact(pattern) else fnmatch.fnmatchcase(name, pattern)


def _depth_of_match(pattern: str, name: str) -> int | None:
    """How deep the module or ancestor lies that the pattern matches; None when it matches neither."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), 0, -1):
        if _matches(pattern, ".".join(parts[:depth])):
            return depth
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything decided before the first step, each choice with its reason and evidence."""

    policy: Policy
    formats: Mapping[str, str] = field(default_factory=dict)
    """Layer (a module that owns parameters) -> the format it computes in."""
    memory_format: str = "contiguous"
    """``contiguous`` or ``channels_last``: how 4-d weights lie in memory."""
    fused_optimizer: bool = False
    """Whether optimizers use torch's one-kernel update; False leaves each as the user made it."""
    sensitive: str = "equipoise"
    """Whose list of operators stays in FP32: ``equipoise``, the same on every device, or ``torch``."""
    emulate: bool = False
    """Whether half formats are computed by casts there and back: their numbers, not their speed."""
    weights: str = "fp32"
    """How weights of bf16 layers are kept between steps: ``fp32``, ``split``, ``kahan``, ``stochastic``."""
    state: str = "fp32"
    """How optimizer state is kept between steps: ``fp32`` or ``8bit``."""
    choices: Sequence[Choice] = ()
    source: str = "named"
    """``named`` (asked for by format), ``static`` (the default: nothing could be told apart), ``auto``
    (measured) or ``pinned`` (read from a file)."""
    note: str = ""
    """One sentence for people: what was decided, or why nothing could be."""

    def __post_init__(self) -> None:
        """Refuse a value that a step couldn't follow.

        Raises:
            PolicyError: an unknown memory format or source.
        """
        for what, value, allowed in (
            ("memory_format", self.memory_format, ("contiguous", "channels_last")),
            ("sensitive", self.sensitive, ("equipoise", "torch")),
            ("weights", self.weights, ("fp32", "split", "kahan", "stochastic")),
            ("state", self.state, ("fp32", "8bit")),
            ("source", self.source, ("named", "static", "auto", "pinned")),
        ):
            if value not in allowed:
                raise PolicyError(f"plan: {what} is {value!r}; allowed: {', '.join(allowed)}")

    def counts(self) -> dict[str, int]:
        """Number of layers in each format."""
        return dict(Counter(self.formats.values()))

    def to_toml(self) -> str:
        """The plan as text that :meth:`from_toml` reads back equal."""
        import tomli_w

        return tomli_w.dumps(
            {
                "schema": PLAN_SCHEMA,
                "policy": str(self.policy),
                "memory_format": self.memory_format,
                "fused_optimizer": self.fused_optimizer,
                "sensitive": self.sensitive,
                "emulate": self.emulate,
                "weights": self.weights,
                "state": self.state,
                "source": self.source,
                "note": self.note,
                "formats": dict(self.formats),
                "choices": [asdict(c) | {"evidence": dict(c.evidence)} for c in self.choices],
            }
        )

    @classmethod
    def from_toml(cls, text: str) -> "Plan":
        """A plan from its text.

        Raises:
            PolicyError: not TOML, another schema version, or an unknown key or value.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"a plan must be TOML: {error}") from error
        if data.pop("schema", None) != PLAN_SCHEMA:
            raise PolicyError(
                f"the plan has no 'schema = {PLAN_SCHEMA}'; it was written by another version: plan again"
            )
        known = list(cls.__dataclass_fields__)
        for key in data:
            if key not in known:
                hint = did_you_mean(key, known)
                raise PolicyError(f"unknown key {key!r} in the plan; allowed: {', '.join(known)}{hint}")
        _check_types(data)
        try:
            choices = tuple(Choice(**c) for c in data.pop("choices", ()))
            return cls(policy=Policy.parse(data.pop("policy", "fp32")), choices=choices, **data)
        except FormatError as error:
            raise PolicyError(f"the plan's policy can't be read: {error}") from error
        except (TypeError, AttributeError) as error:
            raise PolicyError(f"the plan can't be read: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write ``plan.toml``."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read ``plan.toml``.

        Raises:
            PolicyError: the file can't be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"the plan {str(path)!r} can't be read: {error}") from error
        return cls.from_toml(text)

    def pinned(self) -> "Plan":
        """The same plan, marked as not to be planned again."""
        return replace(self, source="pinned")

    def same_decisions(self, other: "Plan") -> bool:
        """Whether both decide alike; reasons and measured figures may differ."""

        def decisions(plan: "Plan") -> tuple[object, ...]:
            return (
                plan.policy, dict(plan.formats), plan.memory_format, plan.fused_optimizer, plan.sensitive,
                plan.emulate, plan.weights, plan.state,
            )  # fmt: skip

        return decisions(self) == decisions(other)

    def explain(self) -> str:
        """Every choice with its reason, for people."""
        counts = ", ".join(f"{n} in {fmt}" for fmt, n in sorted(self.counts().items())) or "no layers"
        lines = [
            f"plan ({self.source}): {self.policy}",
            f"layers: {counts}; weights {self.memory_format}; optimizer "
            + ("fused" if self.fused_optimizer else "as given"),
        ]
        if self.sensitive == "torch":
            lines.append("operators in FP32: torch's own autocast list for this device")
        if self.emulate:
            lines.append("half formats emulated: their numbers by casts there and back, not their speed")
        if (self.weights, self.state) != ("fp32", "fp32"):
            lines.append(f"between steps: weights of bf16 layers {self.weights}, state {self.state}")
        if self.note:
            lines.append(self.note)
        lines += [f"{c.what} {c.where}: {c.choice} because {c.reason}" for c in self.choices]
        matches = self.policy.resolve(["", *self.formats]) if self.formats else {}
        for name, fmt in self.formats.items():
            match = matches[name]
            why = (
                f"entry: {match.pattern or 'default'}"
                if fmt == match.format
                else "keeps FP32 weights and statistics"
            )
            lines.append(f"  {name or '(root)'}: {fmt} ({why})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.explain())}</pre>"


_TOML_TYPES = {
    "policy": str, "formats": dict, "memory_format": str, "fused_optimizer": bool, "choices": list,
    "sensitive": str, "emulate": bool, "weights": str, "state": str, "source": str, "note": str,
}  # fmt: skip


def _check_types(data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        if not isinstance(value, _TOML_TYPES[key]):
            raise PolicyError(
                f"the plan can't be read: {key} is {value!r}; it must be a {_TOML_TYPES[key].__name__}"
            )


def as_policy(precision: Any) -> Policy:
    """The policy that ``precision=`` means: a format's name, a torch dtype, policy text or a Policy.

    Raises:
        FormatError: an unknown format.
        PolicyError: text that is not a policy.
    """
    if isinstance(precision, Policy):
        return precision
    if isinstance(precision, str) and (";" in precision or "=" in precision):
        return Policy.parse(precision)
    return Policy(format_named(precision).name)
