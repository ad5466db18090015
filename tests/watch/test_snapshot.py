"""Checkpoints: round trip bit for bit, nothing executed, nothing half-written, damage noticed."""

import collections
import errno
import hashlib
import json
import os
import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import RunError
from equipoise.watch import snapshot
from equipoise.watch.files import Disk, Rows, make_directories, put, put_json
from equipoise.watch.rng import rng_state, seed_everything, set_rng_state

DISK = Disk()


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def _same(a, b):
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.view(-1), b.view(-1))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    else:
        assert a == b or (a != a and b != b)


def test_every_kind_of_value_comes_back_as_it_was(tmp_path):
    state = {
        "tensors": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(0)],
        "nan": float("nan"),
        "big": 2**80,
        "text": "ä",
        "bytes": b"\0\xff",
        "pair": (1, None, True),
        "set": {1, 2},
        "counter": collections.Counter({5: 1}),
        "ordered": collections.OrderedDict(b=1, a=2),
        3: "an int key",
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "empty": np.zeros((0, 4), dtype=np.float16),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
    }
    path = tmp_path / "step-00000007.pt"
    snapshot.save(DISK, path, state, step=7)
    _same(snapshot.load(path), state)


def test_numpy_scalars_become_plain_numbers(tmp_path):
    # A LambdaLR whose lambda uses NumPy leaves np.float64 in its state.
    path = tmp_path / "step-00000001.pt"
    snapshot.save(DISK, path, {"lr": np.float64(0.1), "n": np.int32(3)}, step=1)
    assert snapshot.load(path) == {"lr": 0.1, "n": 3}


def test_layout_and_module_versions_survive(tmp_path):
    model = _model().to(memory_format=torch.channels_last)
    path = tmp_path / "step-00000001.pt"
    snapshot.save(DISK, path, {"model": model.state_dict()}, step=1)
    saved = snapshot.load(path)["model"]
    assert saved._metadata == model.state_dict()._metadata
    assert saved["0.weight"].is_contiguous(memory_format=torch.channels_last)


def test_what_needs_code_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(RunError, match=r"state\['session'\]\[0\] is a builtins\.function"):
        snapshot.save(DISK, tmp_path / "step-00000001.pt", {"session": [_model]}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_generators_go_on_as_if_nothing_had_happened(tmp_path):
    seed_everything(5)
    random.gauss(0, 1), np.random.randn()  # leave half of a pair in both generators' caches
    path = tmp_path / "step-00000001.pt"
    snapshot.save(DISK, path, rng_state(), step=1)
    expected = [random.gauss(0, 1), random.random(), np.random.randn(), float(torch.rand(1))]
    seed_everything(6)
    set_rng_state(snapshot.load(path))
    assert [random.gauss(0, 1), random.random(), np.random.randn(), float(torch.rand(1))] == expected


class _Attack:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_hostile_checkpoint_is_refused_and_not_run(tmp_path, monkeypatch, wrapped):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-00000001.pt"
    if wrapped:
        torch.save({"schema": 1, "step": 1, "state": _Attack()}, path)
    else:
        path.write_bytes(pickle.dumps(_Attack(), protocol=2))
    _vouch(path, 1)
    with pytest.raises(RunError, match="may run code, so it was not loaded") as caught:
        snapshot.load_newest(DISK, tmp_path)
    assert not isinstance(caught.value, snapshot.Damaged)
    assert not (tmp_path / "pwned").exists()


def _vouch(path, step, schema=1):
    data = path.read_bytes()
    manifest = {"schema": schema, "step": step, "bytes": len(data), "best": None}
    put_json(DISK, path.with_suffix(".json"), manifest | {"sha256": hashlib.sha256(data).hexdigest()})


def _three(folder):
    for step in (1, 2, 3):
        snapshot.save(DISK, folder / f"step-{step:08d}.pt", {"step": step}, step=step)
    return folder / "step-00000003.pt"


def _cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_cut, "has .* bytes instead of"),
        (_flip, "SHA-256"),
        (lambda p: p.with_suffix(".json").unlink(), "no readable manifest"),
        (lambda p: p.with_suffix(".json").write_text("{"), "no readable manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, harm, says):
    harm(_three(tmp_path))
    state, notes = snapshot.load_newest(DISK, tmp_path)
    assert state == {"step": 2}
    assert len(notes) == 1 and "step-00000003.pt" in notes[0]
    assert re.search(says, notes[0])
    assert (tmp_path / "step-00000003.pt.damaged").exists()
    assert snapshot.load_newest(DISK, tmp_path) == ({"step": 2}, [])


def test_when_all_are_damaged_the_run_is_not_started_over_in_silence(tmp_path):
    _three(tmp_path)
    for path in snapshot.checkpoints(tmp_path):
        _cut(path)
    with pytest.raises(RunError, match=r"no checkpoint in .* is complete"):
        snapshot.load_newest(DISK, tmp_path)
    assert len(snapshot.checkpoints(tmp_path)) == 3


def test_none_yet_is_no_error(tmp_path):
    assert snapshot.load_newest(DISK, tmp_path) == (None, [])


def test_another_schema_is_refused(tmp_path):
    path = _three(tmp_path)
    _vouch(path, 3, schema=2)
    with pytest.raises(RunError, match="schema 2, this version of Equipoise reads 1"):
        snapshot.load_newest(DISK, tmp_path)


def test_prune_keeps_two_their_best_and_foreign_files(tmp_path):
    for step in (1, 2, 3):
        snapshot.save(DISK, tmp_path / f"best-{step:08d}.pt", {}, step=step)
    for step, best in ((10, 1), (20, 2), (30, 2)):
        path = tmp_path / f"step-{step:08d}.pt"
        snapshot.save(DISK, path, {}, step=step, best=f"best-{best:08d}.pt")
    (tmp_path / "step-00000010.pt.new").write_bytes(b"")
    (tmp_path / ".step-00000030.json.part").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    snapshot.prune(DISK, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best-00000002.json", "best-00000002.pt", "notes.txt",
        "step-00000020.json", "step-00000020.pt", "step-00000030.json", "step-00000030.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("3.bias"), "has no '3.bias', which the model has"),
        (lambda s: s.update({"4.weight": torch.ones(1)}), "has '4.weight', which the model has not"),
        (lambda s: s.update({"3.weight": torch.ones(2, 9)}), r"'3.weight' is \(2, 9\) in c.pt and \(2, 12\)"),
    ],
)
def test_another_models_weights_are_refused_by_the_first_difference(change, says):
    model, saved = _model(), _model().state_dict()
    change(saved)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RunError, match=says):
        snapshot.load_weights(model, saved, "c.pt")
    _same(before, dict(model.state_dict()))


class _FullDisk(Disk):
    """A disk with room for ``room`` more bytes."""

    def __init__(self, room):
        self.room = room

    def write(self, file, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(file, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 100, 1500])
def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path, room):
    state = {"model": _model().state_dict()}
    path = tmp_path / "step-00000001.pt"
    snapshot.save(DISK, path, state, step=1)
    with pytest.raises(RunError, match="No space left on device; free some space"):
        snapshot.save(_FullDisk(room), tmp_path / "step-00000002.pt", state, step=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001.json", "step-00000001.pt"]
    _same(snapshot.load(path)["model"]["0.weight"], state["model"]["0.weight"])


def test_a_full_disk_between_a_checkpoint_and_its_manifest(tmp_path):
    size = _size_of_checkpoint(tmp_path)
    with pytest.raises(RunError, match="free some space"):
        snapshot.save(_FullDisk(size + 5), tmp_path / "step-00000002.pt", {"a": 1}, step=2)
    assert snapshot.load_newest(DISK, tmp_path)[0] == {"a": 1}


def _size_of_checkpoint(folder):
    path = folder / "step-00000001.pt"
    snapshot.save(DISK, path, {"a": 1}, step=1)
    return path.stat().st_size


def test_put_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    put(DISK, path, b"old")
    with pytest.raises(RunError, match="free some space"):
        put(_FullDisk(2), path, b"newer")
    assert path.read_bytes() == b"old"
    put(DISK, path, b"newer")
    assert path.read_bytes() == b"newer" and len(list(tmp_path.iterdir())) == 1


def test_rows_are_cut_to_what_a_checkpoint_vouches_for(tmp_path):
    path = tmp_path / "steps.jsonl"
    rows = Rows(DISK, path)
    rows.add({"step": 1})
    end = rows.sync()
    rows.add({"step": 2})
    rows.write()
    rows.close()
    assert path.stat().st_size > end
    again = Rows(DISK, path, keep=end)
    again.add({"step": 2, "b": "ä"})
    again.sync()
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2, "b": "ä"},
    ]
    with pytest.raises(RunError, match="rows were lost"):
        Rows(DISK, path, keep=10_000)


def test_a_directory_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose a directory with --out"):
        make_directories(DISK, tmp_path / "file" / "run")
