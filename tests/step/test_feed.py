"""The feed: positions, seeds, workers, and the way to the device."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict, namedtuple
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from equipoise.arm_plain import Loader, order
from equipoise.errors import TaskError
from equipoise.step.feed import DeviceFeed, Feed, _from_workers, epoch_order, sample_seed, to_device

Pair = namedtuple("Pair", "x y")


class Noisy(Dataset[dict[str, Any]]):
    """Samples that draw from all three generators."""

    def __init__(self, n: int = 11) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "draws": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]),
        }


class ByBatch(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read one by one")

    def get_batch(self, indices: np.ndarray) -> Any:
        return Pair(torch.from_numpy(indices) * 10, len(indices))


class Failing(Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error
        return index


def numbers(n: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(n).float()[:, None], torch.arange(n))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b))


def test_epoch_order_is_a_permutation_and_will_never_change() -> None:
    assert sorted(epoch_order(100, 3, 4)) == list(range(100))
    assert epoch_order(100, 3, 4).tolist() == epoch_order(100, 3, 4).tolist()
    others = [epoch_order(100, 3, 5), epoch_order(100, 4, 4), epoch_order(100, 3 + 2**32, 4)]
    assert all(other.tolist() != epoch_order(100, 3, 4).tolist() for other in others)
    # Runs of older versions are resumed in this order.
    assert epoch_order(10, 0, 0).tolist() == [8, 2, 4, 3, 6, 0, 9, 1, 5, 7]
    assert epoch_order(3, -1, 0).dtype == np.int64


def test_sample_seeds_do_not_collide() -> None:
    seeds = {sample_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**64 for seed in seeds)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 20), size=st.integers(1, 9), start=st.integers(0, 60), seed=st.integers(0, 3))
def test_any_start_gives_what_a_whole_run_would(n: int, size: int, start: int, seed: int) -> None:
    feed = Feed(numbers(n), batch_size=size, seed=seed)
    whole = list(islice(feed.batches(0), start + 4))
    assert same(list(islice(feed.batches(start), 4)), whole[start:])


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_visits_each_sample_once_and_keeps_the_short_last_batch(drop_last: bool) -> None:
    feed = Feed(numbers(10), batch_size=4, seed=1, drop_last=drop_last)
    assert feed.steps_per_epoch == (2 if drop_last else 3)
    for epoch in range(3):
        first = epoch * feed.steps_per_epoch
        labels = [y.tolist() for _, y in islice(feed.batches(first), feed.steps_per_epoch)]
        assert [len(batch) for batch in labels] == ([4, 4] if drop_last else [4, 4, 2])
        assert [label for batch in labels for label in batch] == epoch_order(10, 1, epoch).tolist()[
            : 8 if drop_last else 10
        ]


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    feed = Feed(numbers(5), batch_size=2, seed=1, shuffle=False)
    assert [y.tolist() for _, y in islice(feed.batches(), 6)] == [[0, 1], [2, 3], [4]] * 2


def test_workers_do_not_change_a_bit_and_leave_the_generators_alone() -> None:
    alone = Feed(Noisy(), batch_size=4, seed=5)
    shared = Feed(Noisy(), batch_size=4, seed=5, workers=2)
    expected = list(islice(alone.batches(), 8))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert same(list(islice(alone.batches(2), 6)), expected[2:])
    assert same(list(islice(shared.batches(), 8)), expected)
    assert same(list(islice(shared.batches(5), 3)), expected[5:])
    assert same(list(shared.ordered(3)), list(alone.ordered(3)))
    shared.close()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone() -> None:
    def draws(batch_size: int, seed: int, epoch: int) -> dict[int, list[float]]:
        feed = Feed(Noisy(6), batch_size=batch_size, seed=seed)
        found = {}
        for batch in islice(feed.batches(epoch * feed.steps_per_epoch), feed.steps_per_epoch):
            found |= dict(zip(batch["index"].tolist(), batch["draws"].tolist(), strict=True))
        return found

    one = draws(2, 0, 0)
    assert one == draws(5, 0, 0)
    others = [draws(2, 0, 1), draws(2, 1, 0)]
    for column in range(3):  # each of the three generators
        values = [found[index][column] for found in [one, *others] for index in range(6)]
        assert len(set(values)) == 18


def test_get_batch_is_used_where_there_is_one() -> None:
    batch = next(Feed(ByBatch(), batch_size=3, seed=0).batches())
    assert isinstance(batch, Pair)
    assert batch.x.tolist() == (epoch_order(7, 0, 0)[:3] * 10).tolist()
    inside = Feed(Subset(ByBatch(), [6, 0, 3]), batch_size=2, seed=0).ordered()
    assert [b.x.tolist() for b in inside] == [[60, 0], [30]]


def test_tensor_data_sets_give_what_a_data_loader_gives() -> None:
    data = numbers(7)
    for dataset in (data, Subset(data, [5, 1, 4]), Subset(Subset(data, [6, 5, 4]), [2, 0])):
        ours, theirs = list(Feed(dataset, batch_size=2, seed=0).ordered()), list(DataLoader(dataset, 2))
        assert same(ours, theirs)
        assert type(ours[0]) is type(theirs[0])


def test_a_tensor_data_sets_own_getitem_is_not_passed_over() -> None:
    class Negated(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return -self.tensors[0][index], self.tensors[1][index]

    x, _ = next(iter(Feed(Negated(*numbers(3).tensors), batch_size=3, seed=0).ordered()))
    assert x.flatten().tolist() == [0, -1, -2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_of_the_users_makes_the_batch(workers: int) -> None:
    feed = Feed(numbers(4), batch_size=2, seed=0, collate=lambda s: ("mine", len(s)), workers=workers)
    assert list(feed.ordered()) == [("mine", 2), ("mine", 2)]


def test_what_a_collate_draws_is_the_batchs_own() -> None:
    def mixed(samples: list[Any]) -> Any:
        return torch.rand(2), random.random()

    options: dict[str, Any] = {"batch_size": 3, "seed": 4, "collate": mixed}
    alone, shared = Feed(Noisy(), **options), Feed(Noisy(), workers=2, **options)
    random.seed(1)
    torch.manual_seed(1)
    expected = list(islice(alone.batches(), 9))
    assert len({draw for _, draw in expected}) == 9
    for found in (islice(alone.batches(4), 5), islice(shared.batches(4), 5)):
        assert all(torch.equal(a, x) and b == y for (a, b), (x, y) in zip(found, expected[4:], strict=True))


class Drawing(Dataset[float]):
    """Every sample draws from one of the generators; sample 0 alone does not."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        return float(self.draw()) if index else 0.0


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        random.gauss,
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(()),
        lambda: np.random.randint(2**60),
    ],
)
def test_each_generator_is_watched_and_put_back(draw: Callable[[], Any]) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    before = {float(draw()) for _ in range(4)}
    state = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    feed = Feed(Drawing(draw), batch_size=1, seed=0, shuffle=False)
    first = [batch.item() for batch in islice(feed.batches(), 5)]
    assert first == [batch.item() for batch in Feed(Drawing(draw), batch_size=1, seed=0).ordered()]
    assert random.getstate() == state[0]
    assert repr(np.random.get_state()) == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert not set(first) & before


def test_another_kind_of_numpy_generator_does_no_harm() -> None:
    users = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(1))
        feed = Feed(Drawing(lambda: 2), batch_size=2, seed=0)
        assert [batch.tolist() for batch in feed.ordered()] == [[0, 2], [2, 2], [2]]
    finally:
        np.random.mtrand.set_bit_generator(users)


class Seldom(Dataset[float]):
    """One sample in twenty draws."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return random.random() if index == 13 else float(index)


def test_a_sample_that_seldom_draws_is_found_out() -> None:
    def drawn(batches: Any) -> dict[int, float]:
        """Step -> what sample 13 drew in it."""
        values = {
            step: set(batch.tolist()) - set(map(float, range(20))) for step, batch in enumerate(batches)
        }
        return {step: found.pop() for step, found in values.items() if found}

    random.seed(0)
    whole = drawn(islice(Feed(Seldom(), batch_size=3, seed=0).batches(), 28))
    assert len(whole) == len(set(whole.values())) == 4
    before = random.getstate()
    for step, value in whole.items():
        random.setstate(before)
        assert drawn(islice(Feed(Seldom(), batch_size=3, seed=0).batches(step), 1)) == {0: value}
        assert random.getstate() == before


@pytest.mark.parametrize("dataset", [Noisy(), numbers(), Subset(numbers(), [4, 2, 7])])
@pytest.mark.parametrize("collate", [None, lambda samples: [torch.rand(3), torch.tensor(len(samples))]])
def test_the_hand_written_arms_read_the_same_batches(dataset: Any, collate: Any) -> None:
    ours = Feed(dataset, batch_size=4, seed=9, collate=collate)
    theirs = Loader(dataset, collate, 9)
    assert same(
        list(islice(ours.batches(), 7)), [theirs[key] for key in islice(order(len(dataset), 4, 9), 7)]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_ordered_can_be_gone_through_again_even_after_half_a_pass(workers: int) -> None:
    feed = Feed(numbers(10), batch_size=4, seed=3, workers=workers)
    ordered = feed.ordered(3)
    assert len(ordered) == 4
    assert [y.tolist() for _, y in islice(iter(ordered), 2)] == [[0, 1, 2], [3, 4, 5]]
    for _ in range(2):
        assert [y.tolist() for _, y in ordered] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    feed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_error_arrives_as_it_was_raised(workers: int) -> None:
    feed = Feed(Failing(TaskError("cat.png can't be read")), batch_size=4, seed=0, workers=workers)
    with pytest.raises(TaskError, match=r"^cat.png can't be read$"):
        list(feed.ordered())
    with pytest.raises(TaskError, match=r"^cat.png can't be read$"):
        next(feed.batches())


def test_another_error_in_a_worker_keeps_its_type() -> None:
    feed = Feed(Failing(ZeroDivisionError("two")), batch_size=4, seed=0, workers=1)
    with pytest.raises(ZeroDivisionError, match="two"):
        next(feed.batches())


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), EOFError("end"), FileNotFoundError("no")])
def test_a_worker_that_ends_while_it_hands_over_is_a_worker_that_ended(error: Exception) -> None:
    def loader():
        yield 1
        raise error

    batches = _from_workers(loader())
    assert next(batches) == 1
    with pytest.raises(RuntimeError, match="DataLoader worker ended amid a batch"):
        next(batches)
    # The data set's own error of that kind stays what it is.
    feed = Feed(Failing(error), batch_size=4, seed=0, workers=1)
    with pytest.raises(type(error)):
        next(feed.batches())


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (0, {"batch_size": 2}, "the data set is empty"),
        (3, {"batch_size": 4, "drop_last": True}, "use a smaller one"),
        (3, {"batch_size": 0}, "batch_size=0"),
        (3, {"batch_size": 1, "workers": -1}, "workers=-1"),
    ],
)
def test_what_makes_no_batch_is_refused(n: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Feed(numbers(n), seed=0, **options)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals of Unix")
def test_killing_the_parent_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, threading, time\n"
        "from equipoise.step.feed import Feed\n"
        "class Slow:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): time.sleep(600)\n"
        "batches = Feed(Slow(), batch_size=1, seed=0, workers=2).batches()\n"
        "threading.Thread(target=next, args=(batches,)).start()\n"
        "while len(children := multiprocessing.active_children()) < 2: time.sleep(0.05)\n"
        "time.sleep(1)\n"  # the workers begin their first sample
        "print(*(child.pid for child in children), flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while (left := [pid for pid in workers if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc").is_dir()
    return state != "Z"


def test_to_device_goes_through_everything_and_keeps_its_types() -> None:
    tensor = torch.ones(2)
    batch = {
        "pair": Pair(tensor, "name"),
        "list": [tensor, (tensor, 3)],
        "more": defaultdict(list, a=tensor),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
    }
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].y == "name"
    assert isinstance(moved["list"][1], tuple)
    assert moved["list"][1][1] == 3
    assert moved["more"].default_factory is list
    everything = [
        moved["pair"].x,
        moved["list"][0],
        moved["list"][1][0],
        moved["more"]["a"],
        moved["packed"].data,
    ]
    assert {t.device.type for t in everything} == {"meta"}
    assert batch["list"][0] is tensor, "the loader's own batch was changed"


def test_what_is_on_the_device_passes_as_it_is() -> None:
    batch = {"x": [torch.ones(2), {"y": Pair(torch.ones(1), None)}]}
    assert to_device(batch, torch.device("cpu")) is batch


def test_a_device_feed_is_as_long_as_its_loader_and_starts_again() -> None:
    feed = DeviceFeed(DataLoader(numbers(5), 2), "cpu")
    assert len(feed) == 3
    assert [len(list(feed)) for _ in range(2)] == [3, 3]
    endless = DeviceFeed(iter([torch.ones(1)]), "meta")
    assert [batch.device.type for batch in endless] == ["meta"]
    with pytest.raises(TypeError):
        len(endless)
