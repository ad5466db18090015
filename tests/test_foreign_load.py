"""The load that others put on the machine: what doesn't fit beside us counts, and nothing else."""

from pathlib import Path

import pytest

from equipoise import foreign_load
from equipoise.foreign_load import Clocks, ForeignLoad, contention


@pytest.mark.parametrize(
    ("foreign", "cores", "threads", "share"),
    [(0, 2, 2, 0), (1, 2, 2, 0.5), (2, 2, 2, 1), (4, 8, 2, 0), (7, 8, 2, 0.5), (-0.1, 2, 2, 0)],
)
def test_only_the_cores_that_are_missed_count(foreign: float, cores: int, threads: int, share: float) -> None:
    assert contention(foreign, cores, threads) == pytest.approx(share)


def _proc(folder: Path, busy: int, sessions: dict[int, tuple[int, int]]) -> None:
    """A /proc whose machine was busy that many ticks, and processes of (session, ticks)."""
    folder.mkdir(exist_ok=True)
    half = busy // 2
    cores = "".join(f"cpu{i} {half} 0 0 2500 35 0 0 0 0 0\n" for i in range(2))
    (folder / "stat").write_text(f"cpu  {busy} 0 0 5000 70 0 0 0 0 0\n{cores}cpu2 9999 0 0 1 1 0 0 0 0 0\n")
    for pid, (session, ticks) in sessions.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        words = f"{pid} (a (b) c) S 1 {pid} {session} 0 -1 0 0 0 0 0 {ticks} 0 0 0 20"
        (folder / str(pid) / "stat").write_text(words)


def test_foreign_load_is_the_busy_time_that_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.1, 10.0])
    monkeypatch.setattr(foreign_load.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(foreign_load, "allowed_cpus", lambda: {0, 1})  # cpu2 is another container's
    monkeypatch.setattr(foreign_load.os, "sysconf", lambda name: 100)
    own = iter([1.5, 1.5, 2.5])
    monkeypatch.setattr(foreign_load.time, "process_time", lambda: next(own))
    proc = tmp_path / "proc"
    _proc(proc, 1000, {7: (7, 100), 8: (7, 50), 9: (9, 30)})
    load = ForeignLoad(2, [7], proc=str(proc))
    assert load.share() is None  # 0.1 s: too short for ticks of 10 ms
    # 20 s busy in 10 s: 12 s of session 7 are ours, process 9 and everything unseen are not.
    _proc(proc, 3000, {7: (7, 1100), 8: (7, 250), 9: (9, 400)})
    # This process's own second is taken off too: 7 foreign seconds in 10 s on 2 cores.
    assert load.share() == pytest.approx(0.35)


def test_without_counters_the_load_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(foreign_load.time, "perf_counter", lambda: next(clock))
    assert ForeignLoad(2, proc=str(tmp_path)).share() is None


def test_foreign_load_is_what_does_not_fit_beside_us() -> None:
    cpus = len(foreign_load.allowed_cpus())
    before = Clocks(wall_s=0.0, busy_s=100.0, own_s=0.0, main_s=0.0)

    def share(others_s: float, threads: int, main_s: float = 1.0) -> float:
        own_s = float(threads)
        after = Clocks(wall_s=1.0, busy_s=100.0 + own_s + others_s, own_s=own_s, main_s=main_s)
        return after.foreign_share(before, threads, computes_here=True)

    assert share(0.0, cpus) == 0
    assert share(0.5, cpus) == pytest.approx(0.5 / cpus)
    assert share(cpus * 2.0, cpus) == 1
    assert share(0.0, 1, main_s=0.4) == pytest.approx(0.6)
    assert share(cpus - 1.0, 1) == pytest.approx(0.0)
