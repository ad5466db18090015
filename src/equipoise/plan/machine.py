"""What this machine claims, and what it measurably does in each number format.

Enters: nothing but the machine. Leaves: a :class:`~equipoise.records.Machine`: a verdict on each format
with its reason, the readings behind it, facts for people, and whether foreign load left anything to trust.
Where: before the first step. This process stays free of torch: one child (``_measure``) measures inside a
time box and prints what it has line by line; ``_judge`` turns the lines into verdicts; the result is kept
under the machine's fingerprint.
Source: claims are not measurements, see pytorch#146508 (bf16 products 44-500x slower than FP32 on some
CPUs).
"""

import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import EquipoiseError, UserError
from ..records import FormatVerdict, Machine
from ._host import NOISY_SHARE, fingerprint, host_facts
from ._judge import REFERENCE, judge, trust

__all__ = ["cache_dir", "host_facts", "judge", "machine_from_dict", "probe"]

SCHEMA = 1
"""Raised when the measurements or the records change: older cached probes are then measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBox:
    """How long a probe may take, seconds from the call of :func:`probe`."""

    measure_s: float
    """The child starts nothing new after this."""
    kill_s: float
    """The child is killed at this; the rest is left for reading its lines."""


QUICK = TimeBox(measure_s=3.5, kill_s=4.1)
"""Inside 5 s on two cores, the child's import of torch (up to 2.5 s) and the command's own start included."""
FULL = TimeBox(measure_s=17.0, kill_s=18.5)
"""Inside 20 s."""

CHILD = (sys.executable, "-P", "-m", "equipoise.plan._measure")
"""``-P``: a user's ``random.py`` in the current directory must not stand in for the library's."""


def probe(
    *, quick: bool = False, fresh: bool = False, device: str = "auto", cache_dir: str | Path | None = None
) -> Machine:
    """Measure this machine, or read the cached answer for exactly this machine and these settings.

    Args:
        quick: at most 5 s instead of 20; fewer sizes and operators. A cached full probe answers too.
        fresh: measure again, whatever is cached.
        device: ``auto`` (an accelerator that torch sees, else the CPU), ``cpu``, ``cuda``, ``xpu``, ``mps``.
        cache_dir: where results are kept; default :func:`cache_dir`. Not writable is no error.

    Returns:
        The machine. ``trusted`` is False, and ``note`` says why, when the measurement proves nothing.

    Raises:
        UserError: torch doesn't see the device asked for.
        EquipoiseError: the measuring process can't start at all.
    """
    start_s = time.monotonic()
    host = host_facts()
    key = fingerprint(host, device, SCHEMA)
    file = _cache_file(cache_dir, key)
    if not fresh and (cached := _load(file, key, quick)) is not None:
        return replace(cached, facts={**cached.facts, **host, "from_cache": True})
    box = QUICK if quick else FULL
    findings = measure(device, host["threads"], quick, start_s, box)
    machine = assemble(key, host, findings, quick, device)
    if machine.trusted and findings.decided:
        _save(file, machine)
    return machine


def cache_dir() -> Path:
    """The folder for what is measured once per machine: ``~/.cache/equipoise``."""
    return Path.home() / ".cache" / "equipoise"


@dataclass(slots=True)
class Findings:
    """What came from the child, or from several when one crashed."""

    facts: dict[str, Any] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stopped: list[dict[str, Any]] = field(default_factory=list)
    trying: dict[str, Any] = field(default_factory=dict)
    """What the child had begun and not finished."""
    error: str = ""
    decided: bool = False
    """All that a verdict needs was measured."""
    done: bool = False
    remarks: list[str] = field(default_factory=list)

    def take(self, text: str) -> None:
        """Sort the child's lines; what a library printed in between or a kill cut off is left out."""
        for line in text.splitlines():
            try:
                fields = json.loads(line)
                kind = fields.pop("kind")
            except (ValueError, AttributeError, KeyError, TypeError):
                continue
            self.trying = fields if kind == "begin" else {}
            if kind == "facts":
                self.facts = fields
            elif kind == "reading":
                self.readings.append(fields)
            elif kind == "fault":
                self.blame(fields.pop("format"), fields)
            elif kind == "stopped":
                self.stopped.append(fields)
            elif kind == "error":
                self.error = fields["text"]
            elif kind == "decisive":
                self.decided = True
            elif kind == "done":
                self.done = fields["complete"]

    def blame(self, name: str, fault: dict[str, Any]) -> None:
        """Note a fault of one format."""
        self.faults.setdefault(name, []).append(fault)


def measure(
    device: str,
    threads: int,
    quick: bool,
    start_s: float,
    box: TimeBox,
    child: Sequence[str] = CHILD,
) -> Findings:
    """Run the child until it is through or its time is over; once more without a format that crashed it.

    Raises:
        UserError: torch doesn't see the device asked for.
        EquipoiseError: the child can't start, or ends before it could say anything.
    """
    findings = Findings()
    skip: list[str] = []
    while True:
        command = [*child, "--device", device, "--threads", str(threads)]
        command += ["--until", repr(start_s + box.measure_s), *(["--quick"] if quick else [])]
        command += [word for name in skip for word in ("--skip", name)]
        output, errors, code = _child(command, start_s + box.kill_s)
        findings.take(output)
        if findings.error:
            raise UserError(
                f"{findings.error}; allowed: auto, cpu, or an accelerator that this torch was built for"
            )
        if code == 0:
            return findings
        said = (errors.strip().splitlines() or [""])[-1][:200]
        if code is None:
            _blame_a_hang(findings, box)
            return findings
        if not findings.facts:
            raise EquipoiseError(
                f"the process that measures ended with code {code} before it began: {said or 'no message'}. "
                f"Try: {sys.executable} -c 'import torch'"
            )
        name = findings.trying.get("format") or REFERENCE
        how = f"signal {-code}" if code < 0 else f"code {code}"
        if name == REFERENCE or name in skip:
            findings.remarks.append(f"the measuring process ended early ({how}; {said or 'no message'})")
            return findings
        findings.blame(
            name, {"fault": "crashed", "text": f"{_where(findings.trying)} ended the process ({how})"}
        )
        skip.append(name)


def _child(command: Sequence[str], until_s: float) -> tuple[str, str, int | None]:
    """(stdout, stderr, exit code); the code is None when the child had to be killed at ``until_s``."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=max(0.0, until_s - time.monotonic()),
        )
    except subprocess.TimeoutExpired as late:
        return _text(late.stdout), _text(late.stderr), None
    except OSError as error:
        raise EquipoiseError(f"can't start a process with {command[0]!r}: {error.strerror}") from error
    return _text(ended.stdout), _text(ended.stderr), ended.returncode


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def _blame_a_hang(findings: Findings, box: TimeBox) -> None:
    """A format hangs when its first call began long before the child had to be killed, on a quiet machine."""
    findings.remarks.append(f"stopped after {box.kill_s:g} s with what was measured until then")
    begun = findings.trying
    waited_s = time.monotonic() - begun.get("at_s", float("inf"))
    name = begun.get("format") or REFERENCE
    loaded = any(reading.get("foreign_share", 0.0) > NOISY_SHARE for reading in findings.readings)
    # Every call that is started was predicted to take a quarter of a second at most.
    if waited_s > 1.0 and name != REFERENCE and not loaded:
        text = f"{_where(begun)} did not come back within {waited_s:.1f} s"
        findings.blame(name, {"fault": "hung", "text": text})


def _where(begun: Mapping[str, Any]) -> str:
    return " ".join(part for part in (begun.get("op"), begun.get("direction")) if part)


def assemble(
    key: str, host: Mapping[str, Any], findings: Findings, quick: bool, device: str = "auto"
) -> Machine:
    """The record from what the host and the child told."""
    facts = {**host, **findings.facts}
    claims: dict[str, bool | None] = facts.pop("claims", {})
    verdicts = judge(findings.readings, claims, findings.faults)
    trusted, note = trust(findings.readings, verdicts)
    facts |= {
        "quick": quick,
        "decided": findings.decided,
        "complete": findings.done,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_cache": False,
        "faults": findings.faults,
        "stopped": findings.stopped,
    }
    return Machine(
        fingerprint=key,
        device=facts.get("device", device),
        name=facts.get("gpu") or facts["cpu"],
        formats=verdicts,
        facts=facts,
        readings=findings.readings,
        trusted=trusted,
        note="; ".join(part for part in (note, *findings.remarks) if part),
    )


def machine_from_dict(data: Mapping[str, Any]) -> Machine:
    """The record from :meth:`Machine.as_dict`, as in a cache file or a run's ``machine.json``.

    Raises:
        TypeError, KeyError, AttributeError: ``data`` isn't such a dict.
    """
    formats = {name: FormatVerdict(**fields) for name, fields in data["formats"].items()}
    return Machine(**{**data, "formats": formats})


def _cache_file(folder: str | Path | None, key: str) -> Path | None:
    try:
        return Path(folder if folder is not None else cache_dir()) / f"probe-{key}.json"
    except RuntimeError:  # a user without a home
        return None


def _load(file: Path | None, key: str, quick: bool) -> Machine | None:
    """The cached machine; None when there is none, it is damaged, or it is quick and a full one is wanted."""
    if file is None:
        return None
    try:
        machine = machine_from_dict(json.loads(file.read_text(encoding="utf-8")))
        usable = (
            machine.fingerprint == key
            and REFERENCE in machine.formats
            and (quick or not machine.facts["quick"])
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return machine if usable else None


def _save(file: Path | None, machine: Machine) -> None:
    """Write aside and rename, so that a reader never sees half; not writable is no error."""
    if file is None:
        return
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(machine.as_dict()), encoding="utf-8")
        aside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
