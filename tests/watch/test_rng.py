"""Random generators: taken and put back bit for bit, and readable without running code."""

import io
import random

import numpy as np
import pytest
import torch

from equipoise.watch.rng import own_rng, rng_state, seed_everything, set_rng_state


def draws() -> tuple:
    return (
        [random.random(), random.gauss(0, 1)],
        [np.random.rand(), np.random.randn()],
        torch.randn(3).tolist(),
    )


@pytest.mark.parametrize("before", [0, 1, 623, 624], ids=lambda n: f"{n} drawn before")
def test_what_is_drawn_after_is_drawn_again(before: int) -> None:
    random.gauss(0, 1), np.random.randn()  # each keeps a second normal number back
    np.random.rand(before), torch.rand(before)
    state = rng_state()
    first = draws()
    draws()
    set_rng_state(state)
    assert draws() == first
    set_rng_state(state)  # a state is not used up
    assert draws() == first


def test_it_travels_through_a_checkpoint_that_runs_no_code() -> None:
    file = io.BytesIO()
    torch.save(rng_state(), file)
    first = draws()
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert draws() == first


def test_own_rng_gives_the_same_inside_and_changes_nothing_outside() -> None:
    seed_everything(1)
    expected = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    seed_everything(1)
    with pytest.raises(ZeroDivisionError), own_rng(9):
        first = float(torch.rand(1))
        raise ZeroDivisionError
    with own_rng(9):
        assert float(torch.rand(1)) == first
    assert [random.random(), float(np.random.rand()), float(torch.rand(1))] == expected
