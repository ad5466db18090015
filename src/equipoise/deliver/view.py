"""The figures arranged for the page: charts, tiles, rows of tables, the stations of a step.

Enters: the figures of ``figures.py``. Leaves: texts and SVG for the template. Where: after the run; no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from . import charts, words
from .way import Station, skips, stations
from .words import FORMAT_LABELS, PART_LABELS, finite

TONES = {"not-worse": "good", "worse": "bad", "inconclusive": "open"}
VERDICTS = {"not-worse": "Not worse", "worse": "Worse", "inconclusive": "Inconclusive"}
PROBE = {"use": ("good", "Use"), "not-worth-it": ("open", "Not worth it"), "unusable": ("bad", "Unusable")}
NAME_LIMIT = 40
"""Letters of the metric's name in headings and on axes; the first sentence has it whole."""
FACT_LIMIT = 300
"""Letters of one fact about the machine; a list of CPU flags goes on for pages."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    note: str = ""


class View:
    """What the template asks for; every property leaves out what the figures don't have."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.f = figures
        self.arms: Sequence[Mapping[str, Any]] = figures["arms"]
        self.metric: Mapping[str, Any] = figures["metric"]
        m = self.metric
        width = m["high"] - m["low"] if m["high"] is not None and m["low"] is not None else None
        sizes = (m["margin"], m["difference"], width)
        self.decimals = words.decimals_for(*sizes)
        self.tone = TONES.get(figures["verdict"] or "", "none")
        self.verdict = VERDICTS.get(
            figures["verdict"] or "", "No verdict" if figures["kind"] == "comparison" else ""
        )
        self.comparison = figures["kind"] == "comparison"
        self.metric_name = m["name"] if len(m["name"]) <= NAME_LIMIT else f"{m['name'][:NAME_LIMIT]}…"

    def arm(self, name: str) -> Mapping[str, Any]:
        """An arm by its name; empty when it wasn't run."""
        return next((a for a in self.arms if a["arm"] == name), {})

    @property
    def half_share(self) -> str:
        """Share of the layers that compute in a narrow format, for the stripe of a mixed station."""
        counts = self.f["formats"]
        total = sum(counts.values())
        return f"{100 * (1 - counts.get('fp32', 0) / total):.0f}%" if total else "50%"

    def value(self, number: Any) -> str:
        """A value of the metric."""
        known = finite(number)
        return words.fixed(known, self.decimals) if self.comparison else words.number(known, 4)

    def ends(self, figure: Mapping[str, Any] | None, text: Any) -> str:
        """``low to high``, each by ``text``; empty without an interval."""
        if not figure or figure.get("low") is None or figure.get("high") is None:
            return ""
        return f"{text(figure['low'])} to {text(figure['high'])}"

    # Verdict and key figures

    @property
    def interval(self) -> Markup:
        """The difference of the metric on its scale; empty without a difference."""
        m = self.metric
        if not self.comparison or m["difference"] is None:
            return Markup()
        return Markup(
            charts.interval_chart(
                difference=m["difference"],
                low=m["low"],
                high=m["high"],
                margin=m["margin"],
                higher_is_better=m["higher_is_better"],
                metric=m["name"],
                decimals=self.decimals,
                tone=self.tone,
            )
        )

    @property
    def tiles(self) -> list[Tile]:
        """Key figures; one that wasn't measured has no tile."""
        plan, base = self.arm("plan"), self.arm("fp32")
        found = [self._speed_tile(), self._autocast_tile(), self._metric_tile()]
        for label, key, text in (
            ("Samples per second", "samples_per_s", words.number),
            ("Time to the metric", "time_to_metric_s", words.duration),
            ("Training time", "run_s", words.duration),
            ("Peak memory", "peak_mem_bytes", words.memory),
            ("Set-up", "setup_s", words.duration),
            ("Cost of one run", "cost", words.number),
        ):
            if plan.get(key) is None or (key == "run_s" and plan.get("time_to_metric_s") is not None):
                continue
            value = plan[key]["median"] if key == "samples_per_s" else plan[key]
            other = base.get(key)
            other = other["median"] if isinstance(other, Mapping) else other
            found.append(Tile(label, text(value), f"FP32: {text(other)}" if other is not None else ""))
        if not self.comparison and plan.get("steps"):
            skips = plan.get("skipped")
            note = "" if skips is None else f"{skips:,} skipped" if skips else "none skipped"
            found.insert(3, Tile("Steps", f"{plan['steps']:,}", note))
        return [t for t in found if t]

    def _speed_tile(self) -> Tile | None:
        speed = self.f["speedup"]
        if speed is None:
            return None
        return Tile("Speed against FP32", words.ratio(speed["median"]), self._interval_note(speed))

    def _autocast_tile(self) -> Tile | None:
        speed = self.arm("autocast").get("speedup")
        return (
            None
            if speed is None
            else Tile("Plain autocast’s speed", words.ratio(speed["median"]), self._interval_note(speed))
        )

    def _interval_note(self, speed: Mapping[str, Any]) -> str:
        ends = self.ends(speed, words.ratio)
        trusted = speed.get("trusted", True)
        return (
            f"95\N{NO-BREAK SPACE}%: {ends}"
            if ends and trusted
            else ""
            if trusted
            else "disturbed by other programs"
        )

    def _metric_tile(self) -> Tile | None:
        m = self.metric
        if self.comparison:
            return (
                None
                if m["plan"] is None
                else Tile(
                    words.capital(self.metric_name), self.value(m["plan"]), f"FP32: {self.value(m['fp32'])}"
                )
            )
        value, best = self.arm("plan")["metric"]["mean"], m.get("best")
        if value is not None:
            return Tile(words.capital(self.metric_name), self.value(value), "test data, read once")
        return (
            Tile(words.capital(self.metric_name), self.value(best["value"]), "validation data, best")
            if best
            else None
        )

    @property
    def extra(self) -> list[tuple[str, list[str]]]:
        """(metric, its value in each arm) of metrics that are shown and never decide."""
        names = dict.fromkeys(name for a in self.arms for name in a["extra"])
        return [(name, [words.number(a["extra"].get(name), 4) for a in self.arms]) for name in names]

    # Curves

    @property
    def loss_charts(self) -> list[Markup]:
        """Training loss over steps and over time."""
        return self._pair("loss", "training loss", markers=False)

    @property
    def metric_charts(self) -> list[Markup]:
        """The metric on the validation data over steps and over time."""
        return self._pair("metric", f"{self.metric_name}, validation", markers=True)

    def _pair(self, which: str, label: str, *, markers: bool) -> list[Markup]:
        curves = self.f["curves"][which]
        unit, size = _time_unit(
            [row[1] for c in curves for rows in (c["mean"], *c["seeds"].values()) for row in rows]
        )
        found = []
        for column, x_label, scale in ((0, "step", 1.0), (1, f"training time ({unit})", size)):
            series = [
                charts.Series(
                    arm=c["arm"],
                    label=self._label(c["arm"]),
                    points=_points(c["mean"], column, scale),
                    markers=markers,
                    faint=[_points(rows, column, scale) for rows in c["seeds"].values()],
                )
                for c in curves
            ]
            names = words.spoken([s.label for s in series])
            over = "steps" if column == 0 else "time"
            found.append(
                charts.line_chart(
                    series,
                    x_label=x_label,
                    y_label=label,
                    title=f"{label} over {over}".capitalize(),
                    about=f"Lines of {names}.",
                )
            )
        return [Markup(svg) for svg in found if svg]

    def curve_note(self, which: str) -> str:
        """What a point and a line stand for, and what is missing in them."""
        curves = self.f["curves"][which]
        seeds = max((len(c["seeds"]) for c in curves), default=0)
        together = f"Bold: the mean of {seeds} seeds; thin: each seed."
        apart = "A line is a seed; their steps differ, so there is no mean."
        texts = [(together if all(c["mean"] for c in curves) else apart) if seeds else ""]
        size = max((c["steps_a_point"] for c in curves), default=1)
        texts.append(f"A point averages {size} recorded values." if size > 1 else "")
        bad = [f"{self._label(c['arm'])}: {c['non_finite']:,}" for c in curves if c["non_finite"]]
        texts.append(f"Values that were not finite leave a gap ({', '.join(bad)})." if bad else "")
        return " ".join(t for t in texts if t)

    def _label(self, arm: str) -> str:
        return str(self.arm(arm).get("label", arm))

    # Speed

    @property
    def throughput(self) -> Markup:
        """Samples a second of each arm with its interval and its single readings."""
        bars = []
        for a in self.arms:
            speed = a["samples_per_s"]
            if speed is None:
                continue
            ends = self.ends(speed, words.number)
            text = f"{_per_second(speed['median'])}" + (f"  ({ends})" if ends else "")
            bars.append(
                charts.Bar(
                    arm=a["arm"],
                    label=a["label"],
                    value=speed["median"],
                    low=speed["low"],
                    high=speed["high"],
                    value_text=text,
                    dots=a["readings"],
                )
            )
        return Markup(
            charts.bar_chart(
                bars,
                x_label="samples per second",
                title="Throughput",
                about="; ".join(f"{b.label}: {b.value_text}" for b in bars),
            )
        )

    @property
    def parts(self) -> Markup:
        """Where a step's time goes: one stacked bar an arm, in milliseconds."""
        bars = []
        for a in self.parts_arms:
            total = sum(a["parts"].values())
            segments = [
                (
                    f"p-{part[:-2]}",
                    a["parts"].get(part, 0.0) * 1e3,
                    words.share(a["parts"].get(part, 0.0) / total),
                )
                for part in PART_LABELS
            ]
            bars.append(
                charts.Bar(
                    arm=a["arm"],
                    label=a["label"],
                    value=total * 1e3,
                    segments=segments,
                    value_text=f"{words.duration(total)} a step",
                )
            )
        return Markup(
            charts.bar_chart(
                bars,
                x_label="time of one step (ms)",
                title="Where a step's time goes",
                about="The table below has the same figures.",
            )
        )

    @property
    def parts_arms(self) -> list[Mapping[str, Any]]:
        """Arms whose steps were taken apart."""
        return [a for a in self.arms if a["parts"]]

    @property
    def part_rows(self) -> list[tuple[str, str, list[tuple[str, str]]]]:
        """(class, part, (time, share) of each arm)."""
        totals = [sum(a["parts"].values()) for a in self.parts_arms]
        return [
            (
                f"p-{part[:-2]}",
                label,
                [
                    (
                        words.duration(a["parts"].get(part)),
                        words.share(a["parts"][part] / total) if part in a["parts"] else "",
                    )
                    for a, total in zip(self.parts_arms, totals, strict=True)
                ],
            )
            for part, label in PART_LABELS.items()
        ]

    # The data's way

    @property
    def way(self) -> list[Station]:
        """The stations of one step of the plan, in the order in which a batch meets them."""
        return stations(self.f)

    @property
    def skips(self) -> str:
        """How many steps were skipped, as a sentence; empty when not recorded."""
        return skips(self.f)

    # Layers, machine

    @property
    def layer_total(self) -> int:
        """Number of layers in the map."""
        return len(self.f["layers"])

    def evidence(self, found: Mapping[str, Any]) -> str:
        """Measured figures of a choice: seconds end in ``_s``, ratios in ``_ratio``."""
        texts = []
        for key, value in found.items():
            known = finite(value)
            if key.startswith("share"):
                texts.append(f"share {words.share(known)}")
            elif key.endswith("_s"):
                texts.append(f"{self._figure(key[:-2])} {words.duration(known)}")
            elif key.endswith("_ratio"):
                texts.append(f"{self._figure(key[:-6])} {words.ratio(known)}")
            else:
                texts.append(f"{self._figure(key)} {words.number(known)}")
        return " · ".join(texts)

    def _figure(self, key: str) -> str:
        return FORMAT_LABELS.get(key, key.replace("_", " "))

    def probe(self, verdict: Any) -> tuple[str, str]:
        """(tone, text) of a format's verdict."""
        return PROBE.get(str(verdict), ("none", str(verdict)))

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is known of the machine, as name and text."""
        machine = self.f["machine"]
        return (
            [
                (k.removesuffix("_bytes").removesuffix("_s").replace("_", " "), text)
                for k, text in _flat(machine["facts"])
                if text
            ]
            if machine
            else []
        )

    def format_label(self, name: str) -> str:
        """A format's name as people write it."""
        return FORMAT_LABELS.get(name, name)

    def swatch(self, arm: str) -> Markup:
        """A piece of an arm's line with its marker, for legends."""
        return Markup(
            '<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true">'
            '<path class="line s-{}" d="M1 7H33"/>{}</svg>'
        ).format(arm, Markup(charts.marker(arm, 17, 7, 3.4)))


def _per_second(value: float | None) -> str:
    return f"{words.number(value)} samples/s"


def _points(rows: Sequence[Sequence[float | None]], column: int, size: float) -> list[charts.Point]:
    return [(row[column] / size, row[2]) for row in rows if row[column] is not None]  # type: ignore[operator]


def _time_unit(times_s: Sequence[float | None]) -> tuple[str, float]:
    longest = max((t for t in times_s if t is not None), default=0.0)
    return ("h", 3600.0) if longest > 3 * 3600 else ("min", 60.0) if longest > 300 else ("s", 1.0)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += _flat(value, f"{name} · ")
        elif isinstance(value, list | tuple):
            found.append((name, _short(", ".join(map(str, value)))))
        elif isinstance(value, bool):
            found.append((name, "yes" if value else "no"))
        elif finite(value) is not None:
            text = (
                words.memory
                if name.endswith("_bytes")
                else words.duration
                if name.endswith("_s")
                else lambda v: f"{v:,g}"
            )
            found.append((name, text(float(value))))
        elif value is not None:
            found.append((name, _short(str(value))))
    return found


def _short(text: str) -> str:
    return text if len(text) <= FACT_LIMIT else f"{text[:FACT_LIMIT]}… ({len(text):,} letters)"
