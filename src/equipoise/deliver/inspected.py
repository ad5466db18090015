"""What ``equipoise inspect`` found, as one HTML page and as lines for a terminal.

Enters: the figures of ``inspection.py``, a bisection among them. Leaves: a page that needs nothing else, rows
and sentences. Where: after the run; no torch, no network: the page's content security policy forbids loading
anything, and it has no script.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..errors import RunError
from ..formats import FORMATS
from ..watch.files import Disk, put
from . import words
from .heatmap import LEVELS, Row, Scale, heatmap, scale_of
from .words import FORMAT_LABELS

KINDS = {
    "weights": "weights",
    "activations": "activations",
    "activation_gradients": "activation gradients",
    "weight_gradients": "weight gradients",
    "updates": "updates",
}
ABOUT = {
    "weights": "The weights and biases of each layer, before a step.",
    "activations": "What each layer gives out.",
    "activation_gradients": "The gradient of what each layer gives out: what a loss scale lifts.",
    "weight_gradients": "The gradient of its weights, before clipping.",
    "updates": "What the optimizer adds to its weights. Wide weights take it; a format for it is of use only "
    "where updates themselves are sent or kept.",
}
IN_STEP = ("weights", "activations", "activation_gradients", "weight_gradients")
"""What mixed precision casts; updates are added to FP32 weights."""
FEW = 0.0005
"""A smaller share is told as none: it would round to 0.0 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """What a layer loses in a format: what overflows, else what most is flushed to zero of."""

    kind: str
    overflows: bool
    """Some number is beyond the largest: one is enough to make a loss infinite."""
    lost: float
    """Share beyond the largest number, or else flushed to zero."""
    after: float
    """The share that is still lost at the suggested scale."""
    scale: float
    sqnr_db: float | None
    """Least of its weights and activations."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Overflow first: a loss scale mends the rest."""
        return self.overflows, self.lost

    @property
    def any(self) -> bool:
        """Whether it is worth telling."""
        return self.overflows or self.lost >= FEW


def worst_of(layer: Mapping[str, Any], fmt: str) -> Worst | None:
    """None where the layer has no numbers of the kinds that are cast."""
    found = {k: v["formats"][fmt] for k, v in layer["kinds"].items() if k in IN_STEP}
    # Of what forward computes with.
    noise = [v["sqnr_db"] for k, v in found.items() if k in IN_STEP[:2] and v["sqnr_db"] is not None]
    all_kinds = [_loss_of(kind, loss, min(noise, default=None)) for kind, loss in found.items()]
    return max(all_kinds, key=lambda worst: worst.rank, default=None)


def _loss_of(kind: str, loss: Mapping[str, Any], sqnr_db: float | None) -> Worst:
    overflows = loss["overflow"] * loss["values"] >= 0.5  # of its numbers, one at the least
    return Worst(
        kind=kind,
        overflows=overflows,
        lost=loss["overflow"] if overflows else loss["underflow"],
        after=loss["scaled_underflow"],
        scale=loss["scale"],
        sqnr_db=sqnr_db,
    )


def lost_text(worst: Worst | None, *, short: bool = False) -> str:
    """``31 % of updates``, ``2 % of weights overflow`` or ``none``; short: ``31 % act. grads``."""
    if worst is None:
        return words.NOTHING
    if not worst.any:
        return "none"
    kind = KINDS[worst.kind]
    if short:
        kind = kind.replace("activation ", "act. ").replace("gradients", "grads")
        return f"{share_text(worst.lost)} {kind}{' over' if worst.overflows else ''}"
    return f"{share_text(worst.lost)} of {kind}{' overflow' if worst.overflows else ''}"


def share_text(part: float) -> str:
    """``31 %``; ``<0.1 %`` where it would round to nothing."""
    return words.share(part) if part >= FEW or part == 0 else "<0.1\N{NO-BREAK SPACE}%"


def db_text(value: float | None) -> str:
    """``31 dB``."""
    return words.NOTHING if value is None else f"{words.fixed(value, 0)}\N{NO-BREAK SPACE}dB"


def scale_text(scale: float) -> str:
    """A power of two: ``2¹⁴``."""
    return f"2{words.superscript(_log2(scale))}"


def _log2(scale: float) -> int:
    return math.frexp(scale)[1] - 1


def layer_name(name: str) -> str:
    """As it is shown: the root has no name of its own."""
    return name or "(root)"


def headline(figures: Mapping[str, Any]) -> str:
    """The finding in one sentence: of the bisection, or of the first format."""
    found = figures["bisect"]
    if found is not None:
        label = FORMAT_LABELS[found["format"]]
        if not found["wide"]:
            return f"{label} holds: no module has to stay FP32."
        names = words.spoken([layer_name(n) for n in found["wide"][:3]])
        if len(found["wide"]) > 3:
            names = (
                f"{words.plural(len(found['wide']), 'module')}, {layer_name(found['wide'][0])} among them,"
            )
        return f"{label} holds if {names} {'stays' if len(found['wide']) == 1 else 'stay'} FP32."
    first = figures["formats"][0]
    label = FORMAT_LABELS[first]
    rows = [(worst_of(x, first), x["layer"]) for x in figures["layers"]]
    known = [(w, n) for w, n in rows if w is not None and w.any]
    if not known:
        return f"{label} holds nearly every number of every layer."
    worst, name = max(known, key=lambda pair: pair[0].rank)
    if worst.overflows:
        return f"In {label}, {lost_text(worst)} in {layer_name(name)}."
    return f"Without a scale, {label} loses up to {lost_text(worst)}, in {layer_name(name)}."


def sentences(figures: Mapping[str, Any]) -> list[str]:
    """What was looked at, what a scale would mend, what narrow weights would not feel."""
    return [_looked_at(figures), *_by_format(figures), *_swallowed(figures)]


def _looked_at(figures: Mapping[str, Any]) -> str:
    return (
        f"{words.plural(figures['steps'], 'step')} in FP32, {figures['watched']} of them watched: "
        f"{words.plural(len(figures['layers']), 'layer')}."
    )


def _by_format(figures: Mapping[str, Any]) -> list[str]:
    lines = []
    for fmt in figures["formats"]:
        lost = _lossy_layers(figures, fmt)
        over = sum(w.overflows for w in lost)
        if not lost:
            lines.append(f"{FORMAT_LABELS[fmt]}: no layer loses numbers.")
            continue
        still = max(w.after for w in lost)
        rest = f"all but {words.share(still)}" if still >= FEW else "nearly all"
        count = f"{len(lost)} of {words.plural(len(figures['layers']), 'layer')}"
        low, high = (scale_text(pick(w.scale for w in lost)) for pick in (min, max))
        scales = low if low == high else f"{low} to {high}"
        lines.append(
            f"{FORMAT_LABELS[fmt]}: {count} lose numbers{f', {over} by overflow' if over else ''}; a scale "
            f"for each ({scales}) keeps {rest} of them."
        )
    return lines


def _lossy_layers(figures: Mapping[str, Any], fmt: str) -> list[Worst]:
    return [w for x in figures["layers"] if (w := worst_of(x, fmt)) is not None and w.any]


def _swallowed(figures: Mapping[str, Any]) -> list[str]:
    swallowed = {
        fmt: max((x["swallowed"].get(fmt, 0.0) for x in figures["layers"]), default=0.0)
        for fmt in figures["formats"]
    }
    if all(part < FEW for part in swallowed.values()):
        return []
    parts = [f"{FORMAT_LABELS[f]} {words.share(part)}" for f, part in swallowed.items()]
    return [
        f"Updates too small for the weight they are added to, were it kept in the format, at most in one "
        f"layer: {', '.join(parts)}. Mixed precision keeps FP32 weights and loses none."
    ]


def bisect_sentences(found: Mapping[str, Any]) -> list[str]:
    """How it was judged, and what each module is needed for."""
    label = FORMAT_LABELS[found["format"]]
    half = "not finite" if found["half_loss"] is None else f"{found['half_loss']:.4g}"
    lines = [
        f"Loss after {words.plural(found['steps'], 'step')}: {found['fp32_loss']:.4g} in FP32, {half} with "
        f"every module in {label}; at most {found['margin']:.2g} more than FP32's counts as held."
    ]
    if found["wide"]:
        kept = "not finite" if found["loss"] is None else f"{found['loss']:.4g}"
        lines.append(
            f"With {words.plural(len(found['wide']), 'module')} in FP32 it is {kept}; none of them can be "
            f"left out ({words.plural(found['runs'], 'run')})."
        )
    return lines


def render(figures: Mapping[str, Any], path: Path, *, command: str = "") -> Path:
    """Write the page and give its path.

    Raises:
        RunError: the disk is full or the file can't be written.
    """
    put(Disk(), path, html_of(figures, command=command).encode("utf-8", errors="replace"))
    return path


def refuse_place(path: Path) -> None:
    """Refuse a place for the page before anything is trained.

    Raises:
        RunError: a folder, or a file in a folder that isn't there.
    """
    if path.is_dir():
        raise RunError(f"--out {str(path)!r} is a folder; give the page a name in it, such as ranges.html")
    if not path.parent.is_dir():
        raise RunError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")


def html_of(figures: Mapping[str, Any], *, command: str = "") -> str:
    """The page of the figures."""
    page: str = _template().render(f=figures, v=_View(figures), w=words, command=command)
    return page


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("inspect.html.j2")


class _View:
    """The figures arranged for the page."""

    kinds = KINDS
    labels = FORMAT_LABELS
    levels = LEVELS

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.f = figures
        self.headline = headline(figures)
        self.sentences = [_looked_at(figures), *_swallowed(figures)]
        self.bisect = bisect_sentences(figures["bisect"]) if figures["bisect"] else []
        self._scale = scale_of([row for kind in KINDS for row in self._rows(kind)])

    def _rows(self, kind: str) -> list[Row]:
        return [
            Row(
                label=layer_name(x["layer"]),
                counts={int(e): n for e, n in x["kinds"][kind]["histogram"].items()},
            )
            for x in self.f["layers"]
            if kind in x["kinds"]
        ]

    @property
    def maps(self) -> list[tuple[str, str, Markup]]:
        """(name, what it is, picture) of each kind that was seen."""
        scale = self._scale or Scale(-8, 8)
        found = []
        for kind, name in KINDS.items():
            rows = self._rows(kind)
            if not rows:
                continue
            picture = heatmap(
                rows,
                [FORMATS[f] for f in self.f["formats"]],
                scale,
                title=f"{words.capital(name)} over their magnitude",
                about=f"{words.plural(len(rows), 'layer')}; the tables below hold what follows from it.",
            )
            found.append((words.capital(name), ABOUT[kind], Markup(picture)))
        return found

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """(format, the most that a layer loses, of what and what a scale saves)."""
        found = []
        for fmt in self.f["formats"]:
            lost = _lossy_layers(self.f, fmt)
            if not lost:
                found.append((FORMAT_LABELS[fmt], "none lost", "no layer loses numbers"))
                continue
            most, rest = max(lost, key=lambda w: w.rank), max(w.after for w in lost)
            count = f"{len(lost)} of {words.plural(len(self.f['layers']), 'layer')}"
            note = f"of {KINDS[most.kind]}; {count}. Scaled: {words.share(rest)} lost"
            value = f"{share_text(most.lost)} {'overflow' if most.overflows else 'lost'}"
            found.append((FORMAT_LABELS[fmt], value, note))
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A layer each: its name, its type, and a cell a format."""
        return [
            {"name": layer_name(x["layer"]), "type": x["type"],
             "cells": [self._cell(worst_of(x, f)) for f in self.f["formats"]]}
            for x in self.f["layers"]
        ]  # fmt: skip

    @staticmethod
    def _cell(worst: Worst | None) -> dict[str, str]:
        if worst is None:
            return {"tone": "", "lost": words.NOTHING, "note": ""}
        note = f"{db_text(worst.sqnr_db)}"
        if worst.any and worst.scale != 1:
            note += f"; at {scale_text(worst.scale)}: {words.share(worst.after)}"
        tone = "bad" if worst.overflows or worst.lost >= 0.01 else "open" if worst.any else "good"
        return {"tone": tone, "lost": lost_text(worst), "note": note}

    @property
    def details(self) -> list[dict[str, Any]]:
        """A layer and kind each, with what every format loses of it."""
        return [
            {"name": layer_name(x["layer"]), "kind": KINDS[kind],
             "cells": [seen["formats"][f] for f in self.f["formats"]]}
            for x in self.f["layers"]
            for kind, seen in x["kinds"].items()
        ]  # fmt: skip

    @property
    def swallowed(self) -> list[tuple[str, list[str]]]:
        """A layer each: the share of its updates that weights in each format don't feel."""
        formats: Sequence[str] = self.f["formats"]
        return [
            (layer_name(x["layer"]), [words.share(x["swallowed"].get(f)) for f in formats])
            for x in self.f["layers"]
            if x["swallowed"]
        ]

    @property
    def wide(self) -> list[tuple[str, str]]:
        """(module, loss without it) of those that must stay FP32."""
        without = self.f["bisect"]["without"]
        return [(layer_name(n), "not finite" if x is None else f"{x:.4g}") for n, x in without.items()]

    share = staticmethod(words.share)
    db = staticmethod(db_text)
    scale = staticmethod(scale_text)
