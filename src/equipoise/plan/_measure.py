"""The probe's child: measures, and prints each result as one line of JSON the moment it has it.

Enters: ``--device``, ``--threads``, ``--until`` (a reading of the system's monotonic clock), ``--quick``,
``--skip FORMAT``. Leaves: lines on stdout of the kinds ``facts``, ``begin`` (what is tried next),
``reading``, ``stopped``, ``fault``, ``decisive`` (all that a verdict needs is there), ``done`` or
``error``, so that a child which is killed has still delivered what it had. Where: before the first step, in
a process of its own: a format that hangs or crashes takes nobody with it.

How a time is taken: the formats take turns, round by round, so that a slow moment hits all alike; each
sample is long enough for the clock; the first call, in which libraries make their kernels, is not counted.
A format at one size predicts its time at the next, and a size that would not fit its box is not started:
that is how a format 100x slower than FP32 costs milliseconds here and not minutes.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..foreign_load import Clocks
from ..records import Timing
from ._faults import faults_of
from ._host import NOISY_SHARE
from ._workloads import Arithmetic, Call, Family, Size, families

Emit = Callable[..., None]
Clock = Callable[[], float]


HOPELESS_SHARE = 0.3
"""All threads are not timed on while others keep more than this from us: a call may wait for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long one measurement may take."""

    call_s: float
    """A size whose call is predicted to take longer is not started."""
    sample_s: float = 0.0005
    """A sample repeats the call until it lasts this long: 500 times the clock's resolution and more."""
    case_s: float
    """All samples of one format in one case; three times as long for the decisive families."""
    rounds: int
    family_s: float
    """One operator at all sizes. Only a family that foreign load holds up needs so long."""


QUICK = Limits(call_s=0.03, case_s=0.012, rounds=5, family_s=0.7)
FULL = Limits(call_s=0.25, case_s=0.06, rounds=9, family_s=4.0)


class Prober:
    """Times families of operators in several formats on one device."""

    def __init__(self, emit: Emit, arithmetics: Sequence[Arithmetic], limits: Limits, until_s: float) -> None:
        self._emit = emit
        self._arithmetics = {a.name: a for a in arithmetics}
        self._device = arithmetics[0].device
        self._limits = limits
        self._until_s = until_s
        self._dead: set[tuple[str, str]] = set()
        self._per_work_s: dict[tuple[str, str, str, int], float] = {}

    @property
    def left_s(self) -> float:
        """Seconds until this process has to be through."""
        return self._until_s - time.monotonic()

    def family(self, family: Family, threads: int) -> float:
        """Time one operator at growing sizes; returns the share that others kept from us meanwhile."""
        torch.set_num_threads(threads)
        since = Clocks.now()
        share = 0.0
        for size in family.sizes:
            for direction, calls in self._build(family, size, threads).items():
                times_s = self._interleaved(family, direction, calls, threads)
                share = self._foreign_share(since, threads)
                for name, samples_s in times_s.items():
                    self._report(family, size, direction, name, threads, samples_s, share)
                late = time.perf_counter() - since.wall_s > self._limits.family_s or self.left_s <= 0
                if late or (threads > 1 and share > HOPELESS_SHARE):
                    return share
        return share

    def _report(self, family: Family, size: Size, direction: str, name: str, threads: int,
                samples_s: Sequence[float], share: float) -> None:  # fmt: skip
        timing = Timing.of(samples_s)
        work = family.work(self._arithmetics[name], size, direction)
        self._per_work_s[family.op, name, direction, threads] = timing.low_s / work
        self._emit(
            "reading", op=family.op, shape=family.show(size), direction=direction, format=name,
            threads=threads, rounds=timing.rounds,
            median_s=timing.median_s, low_s=timing.low_s, high_s=timing.high_s,
            work=work, rate=work / timing.median_s, unit=family.unit, foreign_share=round(share, 3),
            clock="processor" if self._alone(threads) else "wall",
        )  # fmt: skip

    def _foreign_share(self, since: Clocks, threads: int) -> float:
        here = self._device.type == "cpu"
        return Clocks.now().foreign_share(since, threads if here else 1, computes_here=here)

    def _build(self, family: Family, size: Size, threads: int) -> dict[str, dict[str, Call]]:
        """The calls of one size by direction and format, without those that would burst their box."""
        calls: dict[str, dict[str, Call]] = {}
        for name, arithmetic in self._arithmetics.items():
            if (family.op, name) in self._dead or self.left_s <= 0:
                continue
            self._emit("begin", op=family.op, format=name, at_s=time.monotonic())
            try:
                built = family.build(arithmetic, size)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                self._give_up(family, name, error)
                continue
            for direction, call in built.items():
                predicted_s = self._predicted_s(family, name, direction, threads, size)
                if predicted_s > min(self._limits.call_s, self.left_s):
                    self._emit("stopped", op=family.op, format=name, direction=direction, threads=threads,
                               shape=family.show(size), predicted_s=round(predicted_s, 4))  # fmt: skip
                else:
                    calls.setdefault(direction, {})[name] = call
        return calls

    def _predicted_s(self, family: Family, name: str, direction: str, threads: int, size: Size) -> float:
        """Seconds of a call at the rate last seen; 0 when nothing is known yet.

        Many threads are not slower than one, whatever a barrier that waited for a busy processor made of the
        last size; one thread alone says nothing of itself but what it measured.
        """
        rates = [self._per_work_s.get((family.op, name, direction, n)) for n in {1, threads}]
        known = [rate for rate in rates if rate is not None]
        return min(known, default=0.0) * family.work(self._arithmetics[name], size, direction)

    def _interleaved(
        self, family: Family, direction: str, calls: Mapping[str, Call], threads: int
    ) -> dict[str, list[float]]:
        """Samples in seconds for each format, taken in turns."""
        clock = time.thread_time if self._alone(threads) else time.perf_counter
        box_s = self._limits.case_s * (3 if family.decisive else 1)
        repeats: dict[str, int] = {}
        rounds: dict[str, int] = {}
        times_s: dict[str, list[float]] = {}
        for name, call in calls.items():
            self._emit("begin", op=family.op, format=name, direction=direction, at_s=time.monotonic())
            try:
                first_s = self._time_s(name, call, 1, clock)
                one_s = first_s if first_s > box_s else self._time_s(name, call, 1, clock)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                self._give_up(family, name, error)
                continue
            repeats[name] = min(1000, max(1, math.ceil(self._limits.sample_s / one_s)))
            rounds[name] = min(self._limits.rounds, int(box_s / (one_s * repeats[name])))
            # A call that fills its box counts as it is; more of the same would tell nothing new.
            times_s[name] = [one_s] if rounds[name] < 1 else []
        self._emit("begin", op=family.op, format="", direction=direction, at_s=time.monotonic())
        for turn in range(self._limits.rounds):
            for name in times_s:
                if turn < rounds[name]:
                    times_s[name].append(
                        self._time_s(name, calls[name], repeats[name], clock) / repeats[name]
                    )
        return times_s

    def _alone(self, threads: int) -> bool:
        """Whether one thread can be timed by its own processor time, which others' turns don't lengthen."""
        fine = time.get_clock_info("thread_time").resolution <= 1e-6
        return threads == 1 and self._device.type == "cpu" and fine

    def _time_s(self, name: str, call: Call, repeats: int, clock: Clock) -> float:
        """Seconds of ``repeats`` calls, the device idle at both ends."""
        self._arithmetics[name].activate()
        self._wait()
        start_s = clock()
        for _ in range(repeats):
            call()
        self._wait()
        return max(clock() - start_s, 1e-9)  # a coarse clock may show nothing at all

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _give_up(self, family: Family, name: str, error: Exception) -> None:
        """No more of this operator in this format: there is no kernel, or no memory for this size."""
        self._dead.add((family.op, name))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        fault = "memory" if isinstance(error, torch.OutOfMemoryError) else "unsupported"
        self._emit("fault", format=name, fault=fault, op=family.op, text=lines[0][:200])


def run(
    device: torch.device, *, threads: int, quick: bool, until_s: float, skip: Sequence[str], emit: Emit
) -> None:
    """Measure everything that fits before ``until_s``, the most important first."""
    emit("facts", **_device_facts(device, threads))
    arithmetics = [Arithmetic(name, device) for name in _formats(device) if name not in skip]
    prober = Prober(emit, arithmetics, QUICK if quick else FULL, until_s)
    work = families(quick=quick, accelerator=device.type != "cpu")
    decisive = [family for family in work if family.decisive]
    others = [family for family in work if not family.decisive]
    # One thread goes first: a barrier can't spoil it, and it says which sizes all threads may try.
    alone = device.type == "cpu" and threads > 1
    for family in decisive if alone else ():
        prober.family(family, 1)
    noisy = [family for family in decisive if prober.family(family, threads) > NOISY_SHARE]
    for arithmetic in arithmetics:
        emit("begin", op="faults", format=arithmetic.name, at_s=time.monotonic())
        for fault in faults_of(arithmetic):
            emit("fault", format=arithmetic.name, **fault)
    emit("decisive")
    for family in others:
        prober.family(family, threads)
    _again(prober, noisy, threads)
    for family in others if alone and not quick else ():
        prober.family(family, 1)
    _again(prober, noisy, threads)
    emit("done", complete=prober.left_s > 0)


def _again(prober: Prober, noisy: list[Family], threads: int) -> None:
    """Take the decisive readings of all threads again until a quiet moment, up to five times."""
    for _ in range(5):
        for family in list(noisy):
            if prober.left_s < 0.5:
                return
            if prober.family(family, threads) <= NOISY_SHARE:
                noisy.remove(family)
        time.sleep(0.2 if noisy else 0)


def _formats(device: torch.device) -> list[str]:
    names = ["fp32", "bf16", "fp16"]
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        names += ["tf32"] if capability >= (8, 0) else []
        names += ["fp8-e4m3"] if capability >= (8, 9) else []
    return names


def _device_facts(device: torch.device, threads: int) -> dict[str, Any]:
    """What the device says of itself, as claims, and what torch sees beside it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    facts: dict[str, Any] = {
        "device": device.type,
        "claims": _claims(device),
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "accelerator": str(accelerator) if accelerator else None,
        "accelerators": torch.accelerator.device_count() if accelerator else 0,
        "private_backend": _private_backend(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "gpu_mem_total_bytes": total,
            "gpu_mem_free_bytes": free,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return facts


def _private_backend() -> str | None:
    """The name that an out-of-tree device (an NPU's plug-in) registered with torch; None for none."""
    name = str(torch._C._get_privateuse1_backend_name())
    return None if name == "privateuseone" else name


def _claims(device: torch.device) -> dict[str, bool | None]:
    """Whether device or library say that they have the format; None when they say nothing."""
    if device.type == "cuda":
        return {
            "fp32": True,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "fp16": True,
            **{name: True for name in _formats(device)[3:]},
        }
    if device.type != "cpu":
        return {"fp32": True, "bf16": None, "fp16": None}
    return {"fp32": True, "bf16": _onednn_says("bf16"), "fp16": _onednn_says("fp16")}


def _onednn_says(name: str) -> bool | None:
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return None


def _device_named(text: str) -> torch.device | None:
    """The device asked for, or the best one for ``auto``; None when torch doesn't see it."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if text == "cpu" or (text == "auto" and present is None):
        return torch.device("cpu")
    if present is None or text not in ("auto", present.type):
        return None
    return torch.device(present.type, torch.accelerator.current_device_index())


def _print_line(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The child's entry."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.plan._measure")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", action="append", default=[])
    asked = parser.parse_args(argv)
    device = _device_named(asked.device)
    if device is None:
        seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        _print_line(
            "error",
            text=f"device {asked.device!r} was asked for; torch {torch.__version__} sees "
            f"{f'cpu and {seen.type}' if seen else 'only cpu'}",
        )
        return
    run(
        device,
        threads=asked.threads,
        quick=asked.quick,
        until_s=asked.until,
        skip=asked.skip,
        emit=_print_line,
    )


if __name__ == "__main__":
    main()
