"""The same plan again and again, with and without foreign load, or a plain "can't tell"."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from equipoise.policy import Plan
from equipoise.tasks import resolve
from equipoise.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@contextmanager
def foreign_load() -> Iterator[None]:
    """Another process that computes as hard as it can on every core."""
    code = "import torch\na = torch.randn(512, 512)\nwhile True: a @ a"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def plan(name: str) -> Plan:
    trainer = Trainer(resolve(name)(0, None), seed=0)
    made = trainer.prepare()
    trainer.session.restore()
    return made


def decisions(made: Plan) -> str:
    return f"{made.policy} {'fused' if made.fused_optimizer else ''} {made.memory_format}"


@pytest.mark.parametrize("name", ["breast-cancer", "digits", "text"])
def test_twenty_plannings_decide_alike(name: str) -> None:
    torch.set_num_threads(2)
    quiet = [plan(name) for _ in range(10)]
    with foreign_load():
        loaded = [plan(name) for _ in range(10)]
    seen = {
        label: Counter(f"{p.source}: {decisions(p)}" for p in plans)
        for label, plans in (("quiet", quiet), ("loaded", loaded))
    }
    print(name, seen)
    told = {decisions(p) for p in quiet + loaded if p.source == "auto"}
    assert len(told) == 1, seen
    assert all(p.source == "auto" or "can't tell" in p.note for p in quiet + loaded), seen
    assert sum(p.source == "auto" for p in quiet) >= 8, seen  # a quiet machine can tell
