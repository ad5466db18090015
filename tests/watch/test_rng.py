"""Random generators: taken and put back bit for bit, and readable without running code."""

import io
import random

import numpy as np
import pytest
import torch

from equipoise.watch.rng import rng_state, set_rng_state


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
