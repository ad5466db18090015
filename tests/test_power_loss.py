"""A power loss at any moment of a run's writes: what is left can be resumed, and ends with the same bits.

The run's own operations are recorded (``watch.files.Disk`` is where all of them pass), then for every prefix
the directory is built as a disk might hold it that lost its power there, and ``resume`` goes on in it.
"""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from equipoise import run, tasks
from equipoise.config import RunConfig
from equipoise.errors import RunError
from equipoise.rundir import refuse_used
from equipoise.watch.files import Disk
from tiny_runs import differences, result_of, write_task


class Recorder(Disk):
    """Does everything, and notes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple] = []

    def _note(self, what: str, path: Path, *more: object) -> None:
        self.log.append((what, str(Path(path).relative_to(self.root)), *more))

    def make_directory(self, path):
        super().make_directory(path)
        self._note("mkdir", path)

    def create(self, path):
        file = super().create(path)
        self._note("create", path)
        return file

    def extend(self, path):
        there = path.exists()
        file = super().extend(path)
        if not there:
            self._note("create", path)
        return file

    def write(self, file, data):
        taken = super().write(file, data)
        self._note("write", Path(file.name), bytes(data[:taken]))
        return taken

    def sync(self, file):
        super().sync(file)
        self._note("sync", Path(file.name))

    def sync_directory(self, path):
        super().sync_directory(path)
        if path != self.root.parent:
            self._note("syncdir", path)

    def rename(self, old, new):
        super().rename(old, new)
        self._note("rename", old, str(new.relative_to(self.root)))

    def remove(self, path):
        there = path.exists()
        super().remove(path)
        if there:
            self._note("remove", path)

    def cut(self, file, size):
        super().cut(file, size)
        self._note("cut", Path(file.name), size)


@dataclass(eq=False)
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class _Folder:
    names: dict[str, "_File | _Folder"] = field(default_factory=dict)
    synced: dict[str, "_File | _Folder"] = field(default_factory=dict)
    newest: dict[str, "_File | _Folder"] = field(default_factory=dict)
    """What was synced, and the last change alone: a disk may write names in any order."""

    def change(self, gone: str | None, name: str | None, node: "_File | _Folder | None") -> None:
        self.newest = dict(self.synced)
        for names in (self.names, self.newest):
            if gone is not None:
                names.pop(gone, None)
            if name is not None:
                names[name] = node


class Model:
    """A disk that knows what was synced."""

    def __init__(self) -> None:
        self.root = _Folder()

    def _at(self, path: str):
        node = self.root
        for part in Path(path).parts:
            node = node.names[part]
        return node

    def apply(self, what: str, path: str, *more) -> None:
        folder, name = self._at(str(Path(path).parent)), Path(path).name
        if what == "mkdir":
            folder.change(None, name, _Folder())
        elif what == "create":
            folder.change(None, name, _File())
        elif what == "write":
            folder.names[name].data += more[0]
        elif what == "cut":
            folder.names[name].data = folder.names[name].data[: more[0]]
        elif what == "sync":
            folder.names[name].synced = folder.names[name].data
        elif what == "syncdir":
            node = self._at(path)
            node.synced, node.newest = dict(node.names), dict(node.names)
        elif what == "rename":
            assert Path(more[0]).parent == Path(path).parent
            folder.change(name, Path(more[0]).name, folder.names[name])
        elif what == "remove":
            folder.change(name, None, None)

    def left(self, names: str, content: Callable[[_File], bytes]) -> dict[str, bytes | None]:
        """Path -> content of what is left (None for a directory)."""

        def walk(folder: _Folder, at: str) -> Iterator[tuple[str, bytes | None]]:
            for name, node in getattr(folder, names).items():
                if isinstance(node, _Folder):
                    yield f"{at}{name}", None
                    yield from walk(node, f"{at}{name}/")
                else:
                    yield f"{at}{name}", content(node)

        return dict(walk(self.root, ""))


def _half(file: _File) -> bytes:
    """Half of what was written since the last sync."""
    pairs = zip(file.data, file.synced, strict=False)
    shorter = min(len(file.data), len(file.synced))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return file.data[: same + (len(file.data) - same) // 2]


LOSSES = {
    "kill: all is left": ("names", lambda f: f.data),
    "all that was not synced is gone": ("synced", lambda f: f.synced),
    "of the names that were not synced only the last is left": ("newest", lambda f: f.synced),
    "names are left, data that were not synced are gone": ("names", lambda f: f.synced),
    "names are left, half of the data": ("names", _half),
}


def _build(root: Path, left: dict[str, bytes | None]) -> None:
    root.mkdir()
    for path, data in left.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _record(task: str, root: Path, start: Callable[..., run.RunResult]) -> list[tuple]:
    disk = Recorder(root)

    def on_event(kind, facts):
        if kind == "saved":
            disk.log.append(("mark", facts["step"]))

    assert start(on_event=on_event, disk=disk).finished
    return disk.log


def _replay(log: list[tuple], model: Model, done: int) -> Iterator[tuple[str, int, dict[str, bytes | None]]]:
    """(name, last step saved, what is left) after each operation and each kind of loss, without repeats."""
    seen = set()
    for index, (what, *more) in enumerate([("mark", done), *log]):
        if what == "mark":
            done = more[0]
            continue
        model.apply(what, *more)
        for loss, (names, content) in LOSSES.items():
            left = model.left(names, content)
            # Unfinished files are never read: their content makes no new case.
            key = frozenset((p, d) for p, d in left.items() if not p.endswith((".part", ".new")))
            if key not in seen:
                seen.add(key)
                yield f"operation {index} ({what} {more[0]}), {loss}", done, left


def _check(root: Path, left, done: int, expected) -> bool:
    """Resume in what is left; whether there was a run to resume."""
    _build(root, left)
    if "run.toml" not in left:
        refuse_used(root)  # the same command can be given again
        assert done == 0
        return False
    steps = []

    def on_event(kind, facts):
        if kind == "start":
            steps.append(facts["step"])

    result = run.resume(root, tasks.resolve, on_event=on_event)
    assert result.finished
    assert result.was_finished or steps[0] >= done, "a complete checkpoint was lost"
    assert differences(expected, result_of(root)) == []
    return True


def test_every_prefix_of_the_writes_can_be_resumed(tmp_path):
    task = write_task(tmp_path, steps=5, eval_every=2)
    make = tasks.resolve(task)
    config = RunConfig(task=task, precision="fp32", checkpoint_every=1e-9)
    whole = tmp_path / "whole"
    log = _record(task, whole, lambda **how: run.train(make, config, whole, **how))
    assert sum(entry[0] == "mark" for entry in log) >= 3
    expected = result_of(whole)
    resumed = fresh = 0
    for name, done, left in _replay(log[1:], Model(), 0):
        root = tmp_path / f"case-{resumed + fresh}"
        try:
            found = _check(root, left, done, expected)
        except BaseException:
            print("lost power after", name)
            raise
        resumed += found
        fresh += not found
    print(f"{len(log)} operations: {resumed} different remains resumed, {fresh} to start anew")
    assert resumed > 30 and fresh >= 1


def test_power_lost_again_while_it_resumes(tmp_path):
    """The same for the writes of a resume, from a directory with rows beyond its checkpoint."""
    task = write_task(tmp_path, steps=5, eval_every=2)
    make = tasks.resolve(task)
    config = RunConfig(task=task, precision="fp32", checkpoint_every=1e-9)
    whole = tmp_path / "whole"
    log = _record(task, whole, lambda **how: run.train(make, config, whole, **how))[1:]
    expected = result_of(whole)
    second_save = [i for i, entry in enumerate(log) if entry[0] == "mark"][1]
    # On to the next row: it is in the file, and no checkpoint counts it.
    row = next(i for i in range(second_save, len(log)) if log[i][:2] == ("write", "steps.jsonl"))
    model = Model()
    for entry in log[: row + 1]:
        if entry[0] != "mark":
            model.apply(*entry)
    half = tmp_path / "half"
    _build(half, model.left("names", lambda f: f.data))
    again = _record(task, half, lambda **how: run.resume(half, tasks.resolve, **how))
    assert any(entry[0] == "cut" for entry in again)
    assert differences(expected, result_of(half)) == []
    count = 0
    for name, done, left in _replay(again, model, log[second_save][1]):
        count += 1
        try:
            assert _check(tmp_path / f"case-{count}", left, done, expected)
        except BaseException:
            print("lost power again after", name)
            raise
    assert count > 10


class _FullDisk(Disk):
    """A disk with room for ``room`` more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(file, data[: self.room])
        self.room -= taken
        return taken


def test_a_disk_that_fills_up_loses_nothing(tmp_path):
    """Whatever write finds it full: a clear error, no half file, and the run goes on when there is room."""
    task = write_task(tmp_path, steps=5, eval_every=2)
    make = tasks.resolve(task)
    config = RunConfig(task=task, precision="fp32", checkpoint_every=1e-9)
    whole = tmp_path / "whole"
    log = _record(task, whole, lambda **how: run.train(make, config, whole, **how))
    expected, written = result_of(whole), sum(len(entry[2]) for entry in log if entry[0] == "write")
    # Not up to the last bytes: how many digits the times have differs from run to run.
    for room in range(0, written * 9 // 10, written // 8):
        out = tmp_path / f"full-{room}"
        with pytest.raises(RunError, match="No space left on device; free some space"):
            run.train(make, config, out, disk=_FullDisk(room))
        assert not list(out.rglob("*.part"))
        if not (out / "run.toml").exists():
            run.train(make, config, out)
        else:
            assert run.resume(out, tasks.resolve).finished
        assert differences(expected, result_of(out)) == []
