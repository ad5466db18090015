"""``equipoise probe``: what this machine claims and measurably does in each number format.

Enters: options. Leaves: a table and the machine's facts on stdout, or one JSON object and nothing else; with
``--out`` the object in a file too. Where: before any training; ``train`` and ``compare`` read the same cached
answer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ..errors import RunError
from ..plan.machine import probe as probe_machine
from ..records import FormatVerdict, Machine

_COLOURS = {"use": "green", "not-worth-it": "yellow", "unusable": "red"}


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="At most 5 s instead of 20.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is cached.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file that gets the JSON object too.")] = None,
) -> None:
    """Measure what each number format is worth on this machine."""
    waiting = Console(stderr=True)
    if waiting.is_terminal:
        with Status(f"Measuring, at most {5 if quick else 20} s ...", console=waiting):
            machine = probe_machine(quick=quick, fresh=fresh, device=device)
    else:
        machine = probe_machine(quick=quick, fresh=fresh, device=device)
    text = json.dumps(machine.as_dict())
    if out is not None:
        _write(out, text)
    if as_json:
        typer.echo(text)
    else:
        show(machine, Console())


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"can't write {str(file)!r}: {error.strerror}; --out needs a file in an existing, writable folder"
        ) from error


def show(machine: Machine, console: Console) -> None:
    """Print the verdicts, then the facts."""
    table = Table(title=Text(f"{machine.name} ({machine.device})"), title_justify="left")
    for heading in ("format", "claimed", "product x FP32", "convolution x FP32", "verdict"):
        table.add_column(heading, justify="right" if "x FP32" in heading else "left")
    for verdict in machine.formats.values():
        table.add_row(*_row(verdict))
    console.print(table)
    console.print(Text("product: of squares, forward; convolution: 3x3, forward and backward", style="dim"))
    for verdict in machine.formats.values():
        console.print(Text.assemble((verdict.format, "bold"), f": {verdict.reason}"))
    if machine.note:
        console.print(Text(f"note: {machine.note}", style="yellow"))
    facts = Table.grid(padding=(0, 2))
    for name, value in describe(machine):
        facts.add_row(Text(name, style="dim"), Text(value))
    console.print(facts)


def _row(verdict: FormatVerdict) -> list[Text]:
    claimed = {True: "yes", False: "no", None: "?"}[verdict.claimed]
    speeds = ("-" if s is None else f"{s:.2f}x" for s in (verdict.gemm_speedup, verdict.conv_speedup))
    colour = _COLOURS.get(verdict.verdict, "")
    said = Text(verdict.verdict, style=colour, no_wrap=True)
    return [Text(verdict.format), Text(claimed), *(Text(s) for s in speeds), said]


def describe(machine: Machine) -> Iterator[tuple[str, str]]:
    """(name, value) of the facts worth a person's time, in words."""
    facts = machine.facts
    if facts.get("gpu"):
        memory = _gib(facts.get("gpu_mem_total_bytes"), facts.get("gpu_mem_free_bytes"))
        yield "gpu", f"{facts['gpu']}, capability {facts['gpu_capability']}, {memory}"
    yield "processor", f"{facts.get('cpu', '?')}, {' '.join(facts.get('cpu_features', ()))}"
    quota = facts.get("cgroup_cpus")
    yield (
        "cores",
        (
            f"{facts.get('cores_physical')} physical, {facts.get('cores_logical')} logical, "
            f"{facts.get('threads')} threads used" + (f", quota {quota:g}" if quota else "")
        ),
    )
    yield "memory", _gib(facts.get("mem_total_bytes"), facts.get("mem_free_bytes"))
    yield "libraries", f"torch {facts.get('torch')}, Python {facts.get('python')}, {facts.get('os')}"
    if facts.get("cpu_capability"):
        yield "kernels", str(facts["cpu_capability"])
    if facts.get("isa_limits"):
        yield "limits", " ".join(f"{name}={value}" for name, value in facts["isa_limits"].items())
    drivers = [f"{name} {version}" for name, version in facts.get("drivers", {}).items()]
    yield "drivers", ", ".join(drivers) or "no accelerator's driver is loaded"
    seen = [facts.get("accelerator"), facts.get("private_backend"), *facts.get("plugins", ())]
    yield "accelerators", ", ".join(str(name) for name in seen if name) or "none that torch sees"
    if facts.get("governor"):
        yield "governor", facts["governor"]
    cached = ", read from the cache (--fresh measures again)" if facts.get("from_cache") else ""
    yield "measured", f"{facts.get('measured_at')}, {'quick' if facts.get('quick') else 'full'}{cached}"


def _gib(total: int | None, free: int | None) -> str:
    shown = ["?" if count is None else f"{count / 2**30:.1f} GiB" for count in (total, free)]
    return f"{shown[0]}, {shown[1]} free"
