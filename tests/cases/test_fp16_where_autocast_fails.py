"""The tasks of bench/fp16: plain FP16 autocast with GradScaler trains nothing there on a CPU, a plan does.

Whole runs are judged by ``equipoise compare`` (docs/LOG.md has the figures); here are their first steps.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.arm_plain import PlainArm, options
from equipoise.task import Task
from equipoise.trainer import Trainer

BENCH = Path(__file__).parents[2] / "bench" / "fp16"
STEPS = {"dice": 8, "qk_norm": 16}


def make(name: str) -> Task:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: Task = module.task(0, None)
    return task


def plain(name: str) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """Losses of plain autocast, and the weights before and after."""
    arm = PlainArm(options([f"{BENCH / name}.py:task", "--precision", "fp16", "--emulate"]))
    arm.setup(0)
    before = [p.detach().clone() for p in arm._task.model.parameters()]
    losses = [loss for _, _, loss in arm.advance(STEPS[name], 1)["losses"]]
    return losses, before, list(arm._task.model.parameters())


def ours(name: str, precision: str) -> list[float]:
    trainer = Trainer(make(name), seed=0, precision=precision, emulate=precision != "fp32")
    rows = trainer.advance(STEPS[name])
    assert all(bool(p.isfinite().all()) for p in trainer.task.model.parameters())
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("name", sorted(STEPS))
def test_plain_autocast_learns_nothing(name: str) -> None:
    losses, before, after = plain(name)
    if name == "dice":  # 1 minus the Dice of a sum that is infinite; its gradient is 0 or NaN
        assert all(loss is None or abs(loss - 1) < 1e-3 for loss in losses)
    else:  # NaN, which a row says as None
        assert all(loss is None or math.isnan(loss) for loss in losses)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_the_plan_learns_as_fp32_does(name: str) -> None:
    wide, half = ours(name, "fp32"), ours(name, "fp16")
    assert all(math.isfinite(loss) for loss in half)
    fallen = half[0] - half[-1]
    assert fallen > 0.3 * (wide[0] - wide[-1]) > 0
