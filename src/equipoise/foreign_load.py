"""How much of the processors other processes take while something is measured.

Enters: ``/proc`` and this process' own clocks, read twice. Leaves: the share of the cores we need that others
kept from us. Where: beside everything that is timed: the probe, the race of plans, a comparison's slices. No
torch. Source: proc(5).

With ``c`` cores that we may use, ``n`` threads of ours and ``f`` cores' worth of others' work between the two
readings, others take ``max(0, f - max(0, c - n)) / n``: work on cores that would have been idle isn't missed.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_WINDOW_S = 0.2
"""The shortest time over which ``/proc/stat``, whose ticks are 10 ms, tells a share to 5 %."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks at one moment; two of them tell how much of the processors others took in between."""

    wall_s: float
    busy_s: float | None
    """Seconds that the allowed processors were busy or stolen since boot; None without ``/proc/stat``."""
    own_s: float
    """Processor seconds of this process, all threads, and of the sessions that count as ours."""
    main_s: float
    """Processor seconds of the calling thread."""

    @classmethod
    def now(cls, sessions: Sequence[int] = (), proc: Path = PROC) -> "Clocks":
        """Read all clocks; ``sessions`` are those of child processes whose work is ours."""
        own_s = time.process_time() + sum(_session_s(proc, {*sessions}))
        return cls(wall_s=time.perf_counter(), busy_s=_busy_s(proc), own_s=own_s, main_s=time.thread_time())

    def foreign_cores(self, since: "Clocks", least_s: float = MIN_WINDOW_S) -> float | None:
        """Cores' worth of others' work since then; None when unknown or ``least_s`` have not passed."""
        wall_s = self.wall_s - since.wall_s
        if self.busy_s is None or since.busy_s is None or wall_s < least_s:
            return None
        return max(0.0, self.busy_s - since.busy_s - (self.own_s - since.own_s)) / wall_s

    def foreign_share(self, since: "Clocks", threads: int, *, computes_here: bool) -> float:
        """The share of the ``threads`` wanted that others kept from us between ``since`` and now, 0 to 1.

        Where the calling thread itself computes, the time that it did not run is a second witness: it works
        without ``/proc`` and sees an OpenMP barrier that waits for a thread that others keep out.
        """
        wall_s = self.wall_s - since.wall_s
        if wall_s <= 0:
            return 0.0
        share = max(0.0, 1 - (self.main_s - since.main_s) / wall_s) if computes_here else 0.0
        others = self.foreign_cores(since, least_s=MIN_WINDOW_S / 2)
        if others is not None:
            share = max(share, contention(others, len(allowed_cpus()), threads))
        return min(1.0, share)


class ForeignLoad:
    """The share of the cores we need that other processes take, from answer to answer.

    Args:
        threads: cores that we need.
        sessions: process groups of one ``setsid`` (workers included) whose work is ours, beside this process.
        proc: where the kernel's figures lie.
    """

    def __init__(self, threads: int, sessions: Sequence[int] = (), *, proc: str | Path = PROC) -> None:
        self._threads, self._sessions, self._proc = max(1, threads), sessions, Path(proc)
        self._begin = Clocks.now(sessions, self._proc)

    def share(self) -> float | None:
        """The share since the last answer, from 0 up; None (the window goes on) when unknown or too short."""
        now = Clocks.now(self._sessions, self._proc)
        others = now.foreign_cores(self._begin)
        if others is None:
            return None
        self._begin = now
        return contention(others, len(allowed_cpus()), self._threads)


def contention(foreign_cores: float, cores: int, threads: int) -> float:
    """The share of ``threads`` cores that is missing when others keep ``foreign_cores`` of ``cores`` busy."""
    return max(0.0, foreign_cores - max(0, cores - threads)) / threads


def allowed_cpus() -> set[int]:
    """Numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _busy_s(proc: Path) -> float | None:
    """Seconds since boot in which the processors that this process may use worked, or were stolen from us."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    allowed = allowed_cpus()
    busy, seen = 0, False
    for line in lines:
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (
                int(c) for c in (*counts, "0", "0")[:8]
            )
            busy += user + nice + system + irq + softirq + steal
            seen = True
    return busy / ticks if seen else None


def _session_s(proc: Path, sessions: set[int]) -> Iterator[float]:
    """CPU seconds of each living process of the sessions, and of its children that ended."""
    for path in proc.glob("[0-9]*/stat") if sessions else ():
        try:
            # After the name, which may hold blanks: session is the 4th word, utime to cstime are 12 to 15.
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) in sessions:
                yield sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            continue
