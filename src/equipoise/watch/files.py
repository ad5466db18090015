"""Files that are complete or absent: written aside, synced, renamed, the directory synced too.

Enters: bytes and paths. Leaves: files that survive a kill or a power loss at any moment. Where: between
steps, under everything that a run keeps. Source: fsync(2) and rename(2); Pillai et al., OSDI 2014.

A rename is atomic, but neither the data nor the name is on the disk until both are synced; so each new file
is synced before it gets its name, and its directory after. Rows that are appended (JSONL) may be cut
anywhere: whoever reads them keeps the length that a checkpoint vouches for.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import RunError

Content = bytes | Callable[["Writer"], None]
"""What to put into a file: the bytes, or a function that writes them piece by piece."""

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose a place that can be written with --out",
    errno.EACCES: "choose a place that can be written with --out",
    errno.EPERM: "choose a place that can be written with --out",
    errno.ENOTDIR: "choose a directory with --out",
}


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an error of the operating system into a :class:`RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk")
        raise RunError(f"can't {doing}: {error.strerror or error}; {advice}") from error


class Disk:
    """The few operations that change a disk; a test records them and replays a power loss."""

    def make_directory(self, path: Path) -> None:
        """Make one directory whose parent exists."""
        os.mkdir(path)

    def create(self, path: Path) -> BinaryIO:
        """A new empty file in place of whatever had that name."""
        return open(path, "wb", buffering=0)

    def extend(self, path: Path) -> BinaryIO:
        """An existing or new file, to be written at its end."""
        return open(path, "ab", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> int:
        """Write some of ``data``; the number of bytes that were taken."""
        return file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Wait until the file's content is on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk (Windows does that by itself)."""
        if os.name == "nt":
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name in the same directory; one that has it goes."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def cut(self, file: BinaryIO, size: int) -> None:
        """Cut a file to its first ``size`` bytes."""
        os.ftruncate(file.fileno(), size)


class Writer:
    """A file being written, as ``torch.save`` wants it: counts and digests what passes."""

    def __init__(self, disk: Disk, file: BinaryIO, digest: Any = None) -> None:
        self._disk, self._file, self._digest = disk, file, digest
        self.size = 0

    def write(self, data: Any) -> int:
        """Write all of ``data`` (bytes or a buffer)."""
        whole = memoryview(data).cast("B")
        rest = whole
        while rest:
            rest = rest[self._disk.write(self._file, rest) :]
        if self._digest is not None:
            self._digest.update(whole)
        self.size += len(whole)
        return len(whole)

    def flush(self) -> None:
        """Nothing is buffered here."""


def make_directories(disk: Disk, path: Path) -> None:
    """Make ``path`` and its missing parents, each name on the disk before the next."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with explained(f"make the directory {str(folder)!r}"):
            disk.make_directory(folder)
            disk.sync_directory(folder.parent)


def put(disk: Disk, path: Path, content: Content, digest: Any = None) -> int:
    """Write a file whole: after this it is complete on the disk; after a failure, what was there before.

    Args:
        disk: the operations.
        path: the file's final name.
        content: bytes, or a function that writes to the :class:`Writer` it is given.
        digest: a hashlib object that sees every byte.

    Returns:
        the file's size in bytes.

    Raises:
        RunError: the disk is full, read-only or broken.
    """
    aside = path.with_name(f".{path.name}.part")
    with explained(f"write {str(path)!r}"):
        try:
            with disk.create(aside) as file:
                writer = Writer(disk, file, digest)
                if callable(content):
                    content(writer)
                else:
                    writer.write(content)
                disk.sync(file)
            disk.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(aside)
            raise
        disk.sync_directory(path.parent)
    return writer.size


def put_json(disk: Disk, path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole."""
    put(disk, path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


class Rows:
    """A JSONL file that grows. Its rows are safe once :meth:`sync` has given their end."""

    def __init__(self, disk: Disk, path: Path, keep: int = 0) -> None:
        """Open the file and cut it to its first ``keep`` bytes.

        Raises:
            RunError: it is shorter than that, or can't be written.
        """
        self._disk, self.path = disk, path
        self._waiting: list[bytes] = []
        with explained(f"write {str(path)!r}"):
            self._file = disk.extend(path)
            size = os.fstat(self._file.fileno()).st_size
            if size < keep:
                self._file.close()
                raise RunError(
                    f"{str(path)!r} has {size} bytes; the checkpoint vouches for {keep}: rows were lost. "
                    "Restore the file, or start a new run"
                )
            if size > keep:
                disk.cut(self._file, keep)
            disk.sync(self._file)
            disk.sync_directory(path.parent)
        self._end = keep

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row; it is written at the next :meth:`write`."""
        self._waiting.append((json.dumps(row, ensure_ascii=False) + "\n").encode())

    def write(self) -> None:
        """Hand the rows to the operating system: a killed process doesn't lose them, a power loss may."""
        if self._waiting:
            with explained(f"write {str(self.path)!r}"):
                self._end += Writer(self._disk, self._file).write(b"".join(self._waiting))
            self._waiting.clear()

    def sync(self) -> int:
        """Put all rows on the disk; the file's length in bytes."""
        self.write()
        with explained(f"write {str(self.path)!r}"):
            self._disk.sync(self._file)
        return self._end

    def close(self) -> None:
        """Close the file; rows not written are dropped."""
        self._file.close()
