"""Agreement without a process group: nothing is sent. With one: tests/distributed."""

import subprocess
import sys

import pytest
import torch

from equipoise import ranks


def test_alone_everyone_agrees_with_oneself() -> None:
    flag, value = torch.tensor([0.0, 1.0]), object()
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    assert ranks.agree_max(flag) is flag and flag.tolist() == [0.0, 1.0]
    assert ranks.agree(value) is value


def test_asking_loads_no_torch() -> None:
    code = (
        "import sys; from equipoise import ranks\n"
        "print(ranks.rank(), ranks.world_size(), ranks.agree('x'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "x", "False"]


def test_alone_one_makes_it_oneself_and_hears_ones_own_error() -> None:
    assert ranks.from_first(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        ranks.from_first(lambda: 1 / 0)
