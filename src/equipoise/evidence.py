"""The statistics of "not worse" and of "how much faster".

Enters: one number of the metric for each seed and arm; times of interleaved slices of training. Leaves: a
`Judgement` (is the plan not worse than FP32?), a `Ratio` (how much faster is it?) and both in a `Verdict`.
Where: after the run; no torch. Source: non-inferiority by a one-sided paired t bound (FDA, "Non-Inferiority
Clinical Trials", 2016; ICH E9); percentile bootstrap (Efron and Tibshirani, 1993).

With ``n`` seeds and differences ``d_i = plan_i - fp32_i``, signed so that positive is better (``s d_i``, with
``s`` = 1 where higher is better, else -1), mean ``m`` and standard error ``e = sd / sqrt(n)``:

- not worse: ``m - t(1 - alpha, n - 1) e >= -margin``;
- worse: ``m + t(1 - alpha, n - 1) e < -margin``;
- inconclusive: neither, or fewer than 3 seeds, or FP32 itself is not finite.

The interval that is shown, ``[low, high]``, is two-sided at 95 %, of ``plan - fp32`` as it is, in the
metric's units. Seeds are the unit: cases inside one test set say nothing about the next training run.
"""

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .errors import TaskError

MIN_SEEDS = 3
"""Fewer runs say nothing about a method: with two, the 95 % bound is 6.3 standard errors away."""
CONFIDENCE = 0.95
"""Of every interval shown."""
RESAMPLES = 2000
"""Bootstrap resamples: the interval's ends move by less than its third digit from seed to seed."""
FOREIGN_LIMIT = 0.25
"""A slice in which other processes took more than this share of the cores it needs proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Is the plan not worse than FP32? Made by `judge`."""

    verdict: str | None
    """``not-worse``, ``worse`` or ``inconclusive``; None without a margin."""
    fp32: float
    """Mean of FP32's metric over the seeds."""
    plan: float
    difference: float
    """Mean of plan - FP32, in the metric's units, sign as it is."""
    low: float | None
    """95 % interval of the difference; None where one seed or a NaN leaves it undefined."""
    high: float | None
    bound: float | None
    """The one-sided bound that was held against the margin, in units where positive is better."""
    margin: float | None
    alpha: float
    higher_is_better: bool
    seeds: int
    power: float | None
    """Chance that a plan truly equal to FP32 is found not worse, with this many seeds and this spread."""
    reason: str
    """One sentence."""


def judge(fp32: Sequence[float], plan: Sequence[float], *, margin: float | None,
          higher_is_better: bool = True, alpha: float = 0.05) -> Judgement:  # fmt: skip
    """Judge ``plan`` against ``fp32``: one number of the metric a seed, paired by position.

    Args:
        fp32: the metric of the FP32 runs, one a seed.
        plan: the metric of the plan's runs on the same seeds.
        margin: the largest loss, in the metric's own units, that still counts as not worse; None: no verdict.
        higher_is_better: the metric's direction.
        alpha: the accepted risk of calling a worse plan not worse.

    Raises:
        TaskError: lengths differ, nothing was given, or margin or alpha can't be.
    """
    _check(fp32, plan, margin, alpha)
    n = len(fp32)
    reference, candidate = np.asarray(fp32, dtype=float), np.asarray(plan, dtype=float)
    with np.errstate(invalid="ignore"):
        signed = (candidate - reference) * (1.0 if higher_is_better else -1.0)
        difference = float(np.mean(candidate - reference))
        means = float(reference.mean()), float(candidate.mean())
    clean = bool(np.isfinite(signed).all())
    low, high = _interval(difference, signed) if clean and n > 1 else (None, None)
    bound = _one_sided(signed, alpha) if clean and n > 1 else None
    verdict, reason = _decide(reference, candidate, signed, margin, alpha)
    return Judgement(
        verdict=verdict, fp32=means[0], plan=means[1], difference=difference, low=low, high=high,
        bound=None if bound is None else bound[0], margin=margin, alpha=alpha, seeds=n,
        higher_is_better=higher_is_better, reason=reason,
        power=_power(signed, margin, alpha) if clean else None,
    )  # fmt: skip


def _check(fp32: Sequence[float], plan: Sequence[float], margin: float | None, alpha: float) -> None:
    if len(fp32) != len(plan) or len(fp32) == 0:
        raise TaskError(f"{len(fp32)} FP32 and {len(plan)} plan metrics: give one of each for every seed")
    if margin is not None and not 0 <= margin < math.inf:
        raise TaskError(f"margin is {margin}; it must be a finite number from 0 up, in the metric's units")
    if not 0 < alpha < 0.5:
        raise TaskError(f"alpha is {alpha}; it must lie between 0 and 0.5 (0.05 is usual)")


def _standard_error(signed: np.ndarray) -> float:
    # Equal differences have no spread, but rounding in their mean can leave one of 1e-17.
    if np.ptp(signed) == 0:
        return 0.0
    return float(signed.std(ddof=1) / math.sqrt(len(signed)))


def _mean(signed: np.ndarray) -> float:
    return float(signed[0]) if np.ptp(signed) == 0 else float(signed.mean())


def _interval(difference: float, signed: np.ndarray) -> tuple[float, float]:
    half = _t(0.5 + CONFIDENCE / 2, len(signed) - 1) * _standard_error(signed)
    return difference - half, difference + half


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % t interval of the mean; None where fewer than two finite values leave it undefined."""
    data = np.asarray(values, dtype=float)
    if len(data) < 2 or not np.isfinite(data).all():
        return None, None
    return _interval(float(data.mean()), data)


def _t(quantile: float, freedom: int) -> float:
    from scipy import stats  # a second to import

    return float(stats.t.ppf(quantile, freedom))


def _one_sided(signed: np.ndarray, alpha: float) -> tuple[float, float]:
    """Lower and upper bound of the mean signed difference, each at level ``alpha``."""
    reach = _t(1 - alpha, len(signed) - 1) * _standard_error(signed)
    return _mean(signed) - reach, _mean(signed) + reach


def _power(signed: np.ndarray, margin: float | None, alpha: float) -> float | None:
    n = len(signed)
    if margin is None or n < MIN_SEEDS:
        return None
    error = _standard_error(signed)
    if error == 0:
        return 1.0
    if margin / error > 40:  # the noncentral t has no digits left there, and the power is 1
        return 1.0
    from scipy import stats

    return float(stats.nct.sf(_t(1 - alpha, n - 1), n - 1, margin / error))


def _decide(reference: np.ndarray, candidate: np.ndarray, signed: np.ndarray, margin: float | None,
            alpha: float) -> tuple[str | None, str]:  # fmt: skip
    n = len(reference)
    if margin is None:
        return None, "No margin says what still counts as not worse, so there is an interval and no verdict."
    if n < MIN_SEEDS:
        return "inconclusive", (
            f"{n} seed{'s' * (n > 1)} can't tell a method's quality from chance; it takes {MIN_SEEDS}."
        )
    if not np.isfinite(reference).all():
        lost = n - int(np.isfinite(reference).sum())
        return "inconclusive", f"FP32's own metric is not finite for {lost} of {n} seeds: nothing to compare."
    if not np.isfinite(candidate).all():
        lost = n - int(np.isfinite(candidate).sum())
        return "worse", f"The plan's metric is not finite for {lost} of {n} seeds, FP32's always is."
    low, high = _one_sided(signed, alpha)
    level = f"one-sided {100 * (1 - alpha):g} % bound over {n} seeds"
    if low >= -margin:
        worst = f"At worst {_loss(low)}" if low <= 0 else f"Better by at least {_size(low)}"
        return "not-worse", f"{worst}, inside the margin of {margin:.4g} ({level})."
    if high < -margin:
        return "worse", f"At best {_loss(high)}, outside the margin of {margin:.4g} ({level})."
    return "inconclusive", (
        f"Between {_loss(low)} and {_loss(high)}, margin {margin:.4g} ({level}): more seeds would tell."
    )


def _loss(signed: float) -> str:
    return f"{_size(signed)} worse" if signed < 0 else f"{_size(signed)} better" if signed > 0 else "equal"


def _size(signed: float) -> str:
    return np.format_float_positional(abs(signed), precision=2, fractional=False, trim="-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times faster. Made by `paired_ratio`."""

    median: float
    low: float
    """95 % bootstrap interval of the median."""
    high: float
    rounds: int
    """Pairs of slices that count."""
    voided: int = 0
    """Pairs thrown away because other processes held the cores."""
    trusted: bool = True
    """False: so many pairs were voided that all were used, and the figure proves nothing."""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def paired_ratio(base_s: Sequence[float], other_s: Sequence[float],
                 void: Sequence[bool] | None = None) -> Ratio:  # fmt: skip
    """Median of ``base_s / other_s`` (above 1: the other is faster), over slices of the same work.

    Args:
        base_s: seconds of FP32's slices.
        other_s: seconds of the other arm's slices of the same rounds.
        void: whether other processes disturbed a round; those don't count unless fewer than half are left.

    Raises:
        TaskError: no slices, or not in pairs.
    """
    if len(base_s) != len(other_s) or not base_s:
        raise TaskError(f"{len(base_s)} and {len(other_s)} slices: give as many of each, at least one")
    ratios = np.asarray(base_s, dtype=float) / np.asarray(other_s, dtype=float)
    keep = ~np.asarray(void, dtype=bool) if void is not None else np.ones(len(ratios), dtype=bool)
    voided = int((~keep).sum())
    trusted = voided * 2 <= len(ratios)
    kept = ratios[keep] if trusted else ratios
    low, high = bootstrap_median(kept)
    note = ""
    if not trusted:
        note = f"other processes held the cores in {voided} of {len(ratios)} rounds: the speed proves nothing"
    elif voided:
        note = f"{voided} of {len(ratios)} rounds were left out: other processes held the cores"
    return Ratio(median=float(np.median(kept)), low=low, high=high, rounds=len(kept), voided=voided,
                 trusted=trusted, note=note)  # fmt: skip


def bootstrap_median(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median, the same for the same values.

    Plain NumPy: scipy renamed the argument that seeds its own bootstrap between the versions we support.
    """
    data = np.asarray(values, dtype=float)
    picks = np.random.RandomState(0).randint(0, len(data), size=(RESAMPLES, len(data)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.median(data[picks], axis=1), [tail, 100 - tail])
    return float(low), float(high)


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of a figure over seeds; None unless most seeds have it."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if len(known) * 2 > len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison found. Made by `equipoise.comparison.compare`."""

    judgement: Judgement
    speed: Ratio
    autocast_speed: Ratio | None = None
    metric_name: str = "metric"
    result: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Everything: the content of ``comparison.json``."""
    out: str | None = None
    """The comparison's directory; None when none was asked for."""

    @property
    def verdict(self) -> str | None:
        """``not-worse``, ``worse`` or ``inconclusive``; None without a margin."""
        return self.judgement.verdict

    @property
    def difference(self) -> float:
        """Mean of plan - FP32 over the seeds, in the metric's units, sign as it is."""
        return self.judgement.difference

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval of the difference."""
        return self.judgement.low

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval of the difference."""
        return self.judgement.high

    @property
    def speedup(self) -> float:
        """Median of FP32's time / the plan's time on the same steps."""
        return self.speed.median

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.judgement.reason

    def as_json(self, report: str | None = None) -> dict[str, Any]:
        """What ``compare --json`` prints."""
        j = self.judgement
        ends = ("median", "low", "high")
        return {
            "verdict": j.verdict,
            "reason": j.reason,
            "speedup": {end: getattr(self.speed, end) for end in ends},
            "autocast_speedup": None if self.autocast_speed is None
            else {end: getattr(self.autocast_speed, end) for end in ends},
            "metric": {"name": self.metric_name, "fp32": _number(j.fp32), "plan": _number(j.plan),
                       "difference": _number(j.difference), "low": j.low, "high": j.high, "margin": j.margin},
            "formats": dict(self.result.get("formats", {})),
            "report": report,
        }  # fmt: skip

    def __str__(self) -> str:
        word = {None: "no verdict", "not-worse": "not worse"}.get(self.verdict, self.verdict)
        return f"{word}, {self.speedup:.2f}x FP32's speed. {self.reason}"

    def _repr_html_(self) -> str:
        j, name = self.judgement, html.escape(self.metric_name)
        interval = "" if j.low is None else f" (95 % interval {j.low:.4g} to {j.high:.4g})"
        return (
            f"<p><b>{html.escape(self.verdict or 'no verdict')}</b>: {html.escape(j.reason)}<br>"
            f"{name}: FP32 {j.fp32:.4g}, plan {j.plan:.4g}, difference {j.difference:+.4g}{interval}<br>"
            f"speed: {self.speed.median:.2f}x FP32 ({self.speed.low:.2f} to {self.speed.high:.2f})</p>"
        )


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
