"""Loss scales replayed on a recording; the replay itself beside torch's GradScaler and the scaler itself.

``cnn_gradients.npz``: the first 25,000 steps of the CNN of ``bench/recordings.py`` (digits, SGD), reduced.
log2 of the largest gradient is rounded to 1/256; of the exponents, all up to -46 are one column and all from
-37 on another, so that flushed shares are exact for scales from 2^12 to 2^20.
"""

import copy
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.step.prediction import FP16_OVERFLOW_LOG2, TAILS
from equipoise.step.scaler import LossScaler

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import prediction as bench
import recordings

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> bench.Recording:
    with np.load(HERE / "cnn_gradients.npz") as data:
        arrays = dict(data)
    path = tmp_path_factory.mktemp("recordings") / "cnn.npz"
    n = len(arrays["amax_log2"])
    np.savez(path, **arrays, weights_amax_log2=arrays["amax_log2"], loss=np.ones(n))
    return bench.Recording(path)


def replay_for_real(scaler: torch.amp.GradScaler, series: np.ndarray) -> tuple[list[float], list[bool]]:
    """A scaler at work: one weight whose gradient is 2**x times the scale, in FP16."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scales, skipped = [], []
    for x in series.tolist():
        scales.append(scaler.get_scale())
        scaler.scale(torch.zeros(()))
        over = x + math.log2(scales[-1]) >= FP16_OVERFLOW_LOG2
        p.grad = torch.full((1,), math.inf if over else 2.0**x * scales[-1])
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(bool((before == p).all()))
    return scales, skipped


@pytest.mark.parametrize(("patience", "interval"), [(1, 100), (1, 7), (2, 100)])
def test_the_replayed_rule_is_the_scalers(cnn: bench.Recording, patience: int, interval: int) -> None:
    series = cnn.amax_log2[:3000]
    if patience == 1:
        scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    else:
        scaler = LossScaler("cpu", growth_interval=interval, hysteresis=patience)
    scales, skipped = replay_for_real(scaler, series)
    rule = bench.GradScalerRule(16, interval, patience)
    for i, x in enumerate(series.tolist()):
        assert 2.0**rule.exponent == scales[i], i
        over = x + rule.exponent >= FP16_OVERFLOW_LOG2
        assert over == skipped[i], i
        rule.after(x, over)
    assert sum(skipped) > 10


def test_half_rounds_to_infinity_where_the_replay_says_so() -> None:
    for amax, over in ((65519.0, False), (65520.0, True)):
        assert bool(torch.tensor(amax).half().isinf()) == over == (math.log2(amax) >= FP16_OVERFLOW_LOG2)


def test_the_flushed_share_is_what_a_cast_flushes(tmp_path: Path) -> None:
    values = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 2.0**-22
    counts = np.stack([recordings.exponent_counts(v)[1:-1].numpy() for v in values])
    amax = np.log2(values.abs().amax(1).numpy())
    path = tmp_path / "x.npz"
    lowest = np.array(recordings.LOWEST)
    np.savez(path, amax_log2=amax, weights_amax_log2=amax, loss=np.ones(2), counts=counts, lowest=lowest)
    recording = bench.Recording(path)
    for exponent in range(-4, 5):
        true = ((values * 2.0**exponent).half() == 0).double().mean(1).numpy()
        assert recording.flushed(np.full(2, exponent)) == pytest.approx(true, abs=1e-9)


@pytest.mark.parametrize("tail", TAILS)
def test_prediction_skips_a_fifth_as_often_and_flushes_little_more(cnn: bench.Recording, tail: str) -> None:
    # docs/loss-scale.md: fewer skips are had, "no more flushed" is not. 1.2 keeps that from getting worse.
    for cell in bench.CELLS:
        reference = bench.grad_scaler(cnn, *cell)
        found = bench.predicted(cnn, tail, *cell, (100, 4000, 16))
        assert reference.skips >= 10, cell
        assert 5 * found.skips <= reference.skips, cell
        assert found.flushed <= 1.2 * reference.flushed, cell


def test_the_scaler_does_what_was_replayed(cnn: bench.Recording) -> None:
    series = cnn.amax_log2[:4000]
    bound = 1 / 1000
    scales, skipped = replay_for_real(LossScaler("cpu", predict=bound, predict_every=1), series)
    policy = bench.Predicted(bench.ScalePredictor(bound))
    for i, x in enumerate(series.tolist()):
        assert 2.0**policy.exponent == scales[i], i
        over = x + policy.exponent >= FP16_OVERFLOW_LOG2
        assert over == skipped[i], i
        policy.after(x, over)


def test_a_short_recording_holds_what_half_would_have_to(tmp_path: Path) -> None:
    arrays = recordings.record("cnn", 30)
    assert arrays["counts"].shape[0] == 30
    assert (arrays["weights_amax_log2"] <= arrays["amax_log2"]).all()
    # the largest magnitude lies in the last octave that is counted at that step
    columns = arrays["counts"].shape[1] - 1 - np.argmax(arrays["counts"][:, ::-1] > 0, axis=1)
    assert (np.floor(arrays["amax_log2"]) == arrays["lowest"] + columns).all()


def test_parameters_come_from_the_other_recordings(
    cnn: bench.Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recordings, each best with a setting of its own: the table uses the other's."""
    names = ["a", "b"]
    best = {"a": (30, 1000, 2), "b": (30, 1000, 4)}
    monkeypatch.setattr(bench, "GRID", tuple(best.values()))
    fakes = []
    for name in names:
        fake = copy.copy(cnn)
        fake.name = name
        fakes.append(fake)
    good, bad = (
        bench.Result(skips=0, flushed=1e-5, flushed_all=1e-5),
        bench.Result(skips=99, flushed=1.0, flushed_all=1.0),
    )
    reference = bench.Result(skips=10, flushed=1e-4, flushed_all=1e-4)
    monkeypatch.setattr(bench, "grad_scaler", lambda r, s, i: reference)
    monkeypatch.setattr(bench, "replay", lambda r, p: reference)
    monkeypatch.setattr(bench, "constant", lambda r, g: reference)
    monkeypatch.setattr(bench, "predicted", lambda r, m, s, i, p, every=1: good if p == best[r.name] else bad)
    rows = bench.table(fakes, lambda line: None)
    for name, tail in itertools.product(names, TAILS):
        (other,) = set(names) - {name}
        chosen = {tuple(w["parameters"]) for w in rows if w["recording"] == name and w["method"] == tail}
        assert chosen == {best[other]}
