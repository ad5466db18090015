"""Curves: means over seeds, bins, gaps."""

import math

from equipoise.deliver.curves import POINTS, curve


def rows(values, start=1):
    return [{"step": k, "time_s": k * 0.5, "loss": v} for k, v in enumerate(values, start)]


def test_the_mean_is_over_the_steps_that_all_seeds_have():
    found = curve({"0": rows([1.0, 2.0, 3.0]), "1": rows([3.0, 4.0])}, "loss")
    assert found["mean"] == [[1, 0.5, 2.0], [2, 1.0, 3.0]]
    assert set(found["seeds"]) == {"0", "1"}


def test_a_seed_that_diverged_leaves_a_gap_in_the_mean_and_is_counted():
    found = curve({"0": rows([1.0, math.nan]), "1": rows([1.0, 1.0])}, "loss")
    assert [row[2] for row in found["mean"]] == [1.0, None]
    assert found["non_finite"] == 1
    found = curve({"0": rows([1.0, None]), "1": rows([1.0, 1.0])}, "loss")
    assert found["non_finite"] == 1


def test_seeds_that_share_fewer_than_two_steps_have_no_mean():
    found = curve({"0": rows([1.0, 2.0]), "1": rows([3.0, 4.0], start=2)}, "loss")
    assert found["mean"] == [] and len(found["seeds"]["1"]) == 2


def test_many_steps_are_averaged_without_loss_of_level():
    found = curve({"0": rows([float(k % 2) for k in range(10_000)])}, "loss")
    assert len(found["mean"]) <= POINTS
    assert found["steps_a_point"] == math.ceil(10_000 / POINTS)
    assert all(abs(row[2] - 0.5) < 0.02 for row in found["mean"])
    assert found["mean"][-1][0] == 10_000
    assert found["seeds"] == {}


def test_no_rows_no_curve():
    assert curve({}, "loss") is None
    assert curve({"0": []}, "loss") is None
    assert curve({"0": [{"step": None, "loss": 1.0}, {"step": 1}]}, "loss") is None
