"""The verdicts on recorded readings, and the probe's child, time box and cache with real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import EquipoiseError, UserError
from equipoise.plan._host import fingerprint, host_facts, threads_in_use
from equipoise.plan._judge import judge, trust
from equipoise.plan.machine import (
    SCHEMA,
    Findings,
    TimeBox,
    _load,
    _save,
    assemble,
    machine_from_dict,
    measure,
    probe,
)
from equipoise.records import Machine

DIRECTIONS = ("forward", "input-gradient", "weight-gradient")
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

Rows = dict[tuple[str, str], dict[str, tuple[float, ...]]]
"""(op, shape) -> format -> milliseconds in each direction."""


def readings(
    rows: Rows, *, threads: int = 2, share: float = 0.0, clock: str = "wall"
) -> list[dict[str, Any]]:
    common = {"threads": threads, "rounds": 5, "unit": "flop/s", "foreign_share": share, "clock": clock}
    return [
        {"op": op, "shape": shape, "direction": direction, "format": name, "work": _work(shape), **common}
        | {"low_s": ms / 1e3, "median_s": ms / 1e3, "high_s": ms / 1e3, "rate": 1e3 * _work(shape) / ms}
        for (op, shape), by_format in rows.items()
        for name, times_ms in by_format.items()
        for direction, ms in zip(DIRECTIONS, times_ms, strict=False)
    ]


def _work(shape: str) -> float:
    product = 1.0
    for side in shape.split("x"):
        product *= int(side)
    return product


# Times in ms of two threads, from the table of measured machines: products of 64 and 1024, 3x3 convolutions.
XEON_AMX: Rows = {
    ("gemm", "64x64x64"): {"fp32": (0.007,) * 3, "bf16": (0.026,) * 3, "fp16": (0.007,) * 3},
    ("gemm", "1024x1024x1024"): {"fp32": (5.8,) * 3, "bf16": (0.73,) * 3, "fp16": (5.8,) * 3},
    ("conv", "8x64x16x16"): {"fp32": (0.5, 0.6, 0.6), "bf16": (0.2, 0.25, 0.3), "fp16": (66.0, 120.0, 210.0)},
}
ZEN_4: Rows = {
    ("gemm", "1024x1024x1024"): {"fp32": (21.0, 21.5, 21.0), "bf16": (9.8, 9.9, 10.1)},
    ("gemm", "64x64x64"): {"fp32": (0.01,) * 3, "bf16": (0.012,) * 3, "fp16": (0.3, 0.9, 0.5)},
    ("conv", "8x64x16x16"): {"fp32": (0.8, 0.8, 0.9), "bf16": (0.5, 0.55, 0.8), "fp16": (9.0, 8.0, 9.0)},
    ("conv-depthwise-stride2", "4x144x16x16"): {"fp32": (0.1, 2.2, 0.1), "bf16": (0.1, 68.5, 0.1)},
}
AVX2_ONLY: Rows = {
    ("gemm", "256x256x256"): {
        "fp32": (0.16, 0.16, 0.16),
        "bf16": (1.7, 12.7, 0.84),
        "fp16": (1.6, 12.0, 3.9),
    },
    ("gemm", "1024x1024x1024"): {"fp32": (10.0,) * 3},
    ("conv", "4x32x16x16"): {"fp32": (0.2, 0.2, 0.2), "bf16": (1.6, 3.5, 0.9), "fp16": (1.6, 3.5, 2.0)},
}
FAST_FP16: Rows = {
    ("gemm", "1024x1024x1024"): {"fp32": (20.0,) * 3, "bf16": (19.8,) * 3, "fp16": (10.4, 10.5, 10.2)},
    ("conv", "8x64x16x16"): {"fp32": (0.9, 0.9, 0.9), "bf16": (0.9, 0.9, 1.0), "fp16": (0.5, 0.5, 0.6)},
}


def verdicts(rows: Rows, **claims: bool | None) -> dict[str, str]:
    return {name: v.verdict for name, v in judge(readings(rows), claims, {}).items()}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (XEON_AMX, {"fp32": "use", "bf16": "use", "fp16": "not-worth-it"}),
        (ZEN_4, {"fp32": "use", "bf16": "use", "fp16": "unusable"}),
        (AVX2_ONLY, {"fp32": "use", "bf16": "unusable", "fp16": "unusable"}),
        (FAST_FP16, {"fp32": "use", "bf16": "not-worth-it", "fp16": "use"}),
    ],
    ids=["xeon-amx", "zen-4", "avx2", "fast-fp16"],
)
def test_recorded_machines_are_judged_by_measurement(rows: Rows, expected: dict[str, str]) -> None:
    assert verdicts(rows) == expected


@pytest.mark.parametrize("claimed", [True, False, None])
def test_a_claim_never_changes_a_verdict(claimed: bool | None) -> None:
    assert verdicts(AVX2_ONLY, bf16=claimed)["bf16"] == "unusable"
    assert verdicts(FAST_FP16, fp16=claimed)["fp16"] == "use"


def test_a_claimed_but_emulated_format_is_called_so() -> None:
    found = judge(readings(AVX2_ONLY), {"bf16": True, "fp16": False}, {})
    assert found["bf16"].emulated
    assert found["bf16"].reason.startswith("claimed, but emulated")
    assert found["fp16"].reason.startswith("emulated")
    assert not judge(readings(XEON_AMX), {"fp16": True}, {})["fp16"].emulated


def test_speedups_are_of_the_largest_shape_that_both_formats_have() -> None:
    found = judge(readings(XEON_AMX), {}, {})["bf16"]
    assert found.gemm_speedup == pytest.approx(5.8 / 0.73, abs=1e-3)  # not the 0.27 of the small product
    assert found.conv_speedup == pytest.approx(1.7 / 0.75, abs=1e-3)
    assert judge(readings(AVX2_ONLY), {}, {})["bf16"].gemm_speedup == pytest.approx(0.16 / 1.7, abs=1e-3)


def test_a_fast_forward_does_not_hide_a_slow_backward() -> None:
    rows: Rows = {
        ("gemm", "1024x1024x1024"): {"fp32": (10.0,) * 3, "fp16": (2.0, 80.0, 80.0)},
        ("conv", "8x64x16x16"): {"fp32": (0.9,) * 3, "fp16": (0.3, 9.0, 9.0)},
    }
    found = judge(readings(rows), {}, {})["fp16"]
    assert found.gemm_speedup == pytest.approx(5.0)
    assert found.verdict == "unusable"


def test_one_slow_kernel_is_named_and_does_not_lose_the_format() -> None:
    found = judge(readings(ZEN_4), {}, {})["bf16"]
    assert found.verdict == "use"
    assert "conv-depthwise-stride2 input-gradient 4x144x16x16 (31x slower)" in found.reason
    assert "forward 4x144" not in found.reason


def test_each_format_is_taken_in_its_better_layout() -> None:
    rows: Rows = {
        ("conv", "8x64x16x16"): {"fp32": (2.0,) * 3, "bf16": (1.0,) * 3},
        ("conv-nchw", "8x64x16x16"): {"fp32": (0.8,) * 3, "bf16": (4.0,) * 3},
    }
    assert judge(readings(rows), {}, {})["bf16"].conv_speedup == pytest.approx(0.8)


def test_wrong_results_and_crashes_outweigh_any_speed() -> None:
    for fault in ("inexact", "crashed", "hung"):
        found = judge(readings(FAST_FP16), {}, {"fp16": [{"fault": fault, "text": "as seen"}]})["fp16"]
        assert found.verdict == "unusable"
        assert "as seen" in found.reason


def test_flushed_subnormals_are_said_and_forgiven() -> None:
    faults = {"fp16": [{"fault": "subnormals", "text": "products flush tiny numbers"}]}
    found = judge(readings(FAST_FP16), {}, faults)["fp16"]
    assert found.verdict == "use"
    assert found.reason.endswith("products flush tiny numbers")


def test_a_product_without_a_kernel_is_unusable() -> None:
    faults = {"fp16": [{"fault": "unsupported", "op": "gemm", "text": "not implemented for 'Half'"}]}
    found = judge([r for r in readings(XEON_AMX) if r["format"] != "fp16"], {}, faults)["fp16"]
    assert (found.verdict, found.gemm_speedup) == ("unusable", None)
    assert "not implemented for 'Half'" in found.reason


@pytest.mark.parametrize("kept", ["nothing", "fp32 alone", "forward alone"])
def test_incomplete_readings_prove_nothing_and_say_so(kept: str) -> None:
    keep = {"nothing": lambda r: False, "fp32 alone": lambda r: r["format"] == "fp32",
            "forward alone": lambda r: r["direction"] == "forward"}[kept]  # fmt: skip
    some = [r for r in readings(FAST_FP16) if keep(r)]
    found = judge(some, {"bf16": True, "fp16": True}, {})
    assert found["fp32"].verdict == "use"
    assert {found["bf16"].verdict, found["fp16"].verdict} == {"not-worth-it"}
    assert found["fp16"].reason.startswith("can't tell")
    trusted, note = trust(some, found)
    assert not trusted
    assert "fp16" in note


def test_one_thread_decides_too_when_time_ran_out_among_all_threads() -> None:
    begun = [r for r in readings(XEON_AMX) if r["shape"] == "64x64x64"]
    some = readings(FAST_FP16, threads=1, clock="processor") + begun
    found = judge(some, {}, {})
    assert {name: v.verdict for name, v in found.items()} == verdicts(FAST_FP16)
    assert "timed on one thread" in found["fp16"].reason
    trusted, note = trust(some, found)
    assert trusted
    assert note.startswith("time ran out before all threads were timed")


def test_calls_too_short_to_tell_prove_nothing() -> None:
    small = [
        r for r in readings(XEON_AMX) if r["shape"] == "64x64x64"
    ]  # bf16 looks 4x slower here, and isn't
    found = judge(small, {}, {})
    assert found["bf16"].reason.startswith("can't tell")
    assert not trust(small, found)[0]
    hopeless: Rows = {("gemm", "64x64x64"): {"fp32": (0.01,) * 3, "bf16": (0.9,) * 3}}
    assert judge(readings(hopeless), {}, {})["bf16"].verdict == "unusable"


def test_products_alone_decide_when_there_was_no_time_for_more() -> None:
    some = [r for r in readings(FAST_FP16) if r["op"] == "gemm"]
    found = judge(some, {}, {})
    assert found["fp16"].verdict == "use"
    assert "convolutions not measured" in found["fp16"].reason
    assert found["fp16"].conv_speedup is None
    assert trust(some, found) == (True, "")


COLLAPSED: Rows = {  # two threads beside a busy process: each barrier waits for 16 ms, whatever the format
    ("gemm", "1024x1024x1024"): {"fp32": (32.0, 31.9, 32.0), "bf16": (16.0, 15.9, 16.0), "fp16": (16.0,) * 3},
    ("conv", "8x64x16x16"): {"fp32": (16.0,) * 3, "bf16": (16.0,) * 3, "fp16": (16.0,) * 3},
}


def test_under_foreign_load_one_thread_decides() -> None:
    both = readings(COLLAPSED, share=0.5) + readings(FAST_FP16, threads=1, share=0.3, clock="processor")
    found = judge(both, {}, {})
    assert {name: v.verdict for name, v in found.items()} == verdicts(FAST_FP16)
    assert "timed on one thread" in found["fp16"].reason
    trusted, note = trust(both, found)
    assert trusted
    assert "50%" in note


@pytest.mark.parametrize("also_alone", [False, True])
def test_foreign_load_without_a_sound_reading_claims_nothing(also_alone: bool) -> None:
    some = readings(COLLAPSED, share=0.5)
    if also_alone:  # where a thread's own clock is too coarse, one thread is on the wall clock too
        some += readings(FAST_FP16, threads=1, share=0.4)
    found = judge(some, {}, {})
    assert "use" not in {found["bf16"].verdict, found["fp16"].verdict}
    assert found["bf16"].reason == "can't tell: other processes took 50% of the processors"
    trusted, note = trust(some, found)
    assert not trusted
    assert "probe again" in note


def test_a_reading_repeated_in_a_quiet_moment_counts() -> None:
    for order in (1, -1):
        both = [readings(COLLAPSED, share=0.5), readings(XEON_AMX)][::order]
        found = judge(both[0] + both[1], {}, {})
        assert found["bf16"].verdict == "use"
        assert "one thread" not in found["bf16"].reason
        assert trust(both[0] + both[1], found) == (True, "")


def test_a_spoiled_operator_beside_the_decisive_ones_is_left_out() -> None:
    beside: Rows = {("attention", "2x6x128x64"): {"fp32": (0.5,) * 3, "bf16": (16.0,) * 3}}
    some = readings(XEON_AMX) + readings(beside, share=0.5)
    found = judge(some, {}, {})["bf16"]
    assert found.verdict == "use"
    assert "attention" not in found.reason
    assert "attention" in judge(readings(XEON_AMX | beside), {}, {})["bf16"].reason


# The child, as real processes: a script stands in for it, says what it is told to and ends as it is told to.

STAND_IN = """
import json, os, sys, time
lines = json.loads({lines!r})
for line in lines:
    if line.get("format") in sys.argv[sys.argv.index("--until"):]:
        continue
    print(json.dumps(line) if isinstance(line, dict) else line, flush=True)
    if line.get("then") == "abort":
        os.abort()
    if line.get("then") == "hang":
        time.sleep(60)
    if line.get("then") == "exit":
        sys.exit("no room")
"""


def stand_in(folder: Path, lines: list[dict[str, Any]]) -> tuple[str, str]:
    script = folder / "child.py"
    script.write_text(STAND_IN.format(lines=json.dumps(lines)))
    return sys.executable, str(script)


def run(child: tuple[str, str], kill_s: float = 20.0) -> Findings:
    box = TimeBox(measure_s=kill_s, kill_s=kill_s)
    return measure("cpu", 2, True, time.monotonic(), box, child)


def spoken(rows: Rows, names: set[str]) -> list[dict[str, Any]]:
    return [{"kind": "reading", **r} for r in readings(rows) if r["format"] in names]


FACTS = {"kind": "facts", "device": "cpu", "claims": {"bf16": True, "fp16": True}}
DONE = [{"kind": "decisive"}, {"kind": "done", "complete": True}]


def test_a_format_that_crashes_the_child_is_unusable_and_the_rest_is_measured(tmp_path: Path) -> None:
    crash = {"kind": "begin", "op": "gemm", "direction": "forward", "format": "fp16", "then": "abort"}
    lines = [FACTS, *spoken(ZEN_4, {"fp32"}), crash, *spoken(ZEN_4, {"bf16"}), *DONE]
    findings = run(stand_in(tmp_path, lines))
    assert findings.decided
    found = judge(findings.readings, {}, findings.faults)
    assert (found["bf16"].verdict, found["fp16"].verdict) == ("use", "unusable")
    assert found["fp16"].reason.startswith("crashes: gemm forward ended the process (signal 6)")


def test_a_child_that_hangs_is_killed_and_its_finished_readings_count(tmp_path: Path) -> None:
    hang = {"kind": "begin", "op": "conv", "direction": "input-gradient", "format": "fp16",
            "at_s": time.monotonic() - 2, "then": "hang"}  # fmt: skip
    findings = run(stand_in(tmp_path, [FACTS, *spoken(ZEN_4, {"fp32", "bf16"}), hang]), kill_s=1.0)
    machine = assemble("key", host_facts(), findings, True)
    assert machine.formats["bf16"].verdict == "use"
    assert machine.formats["fp16"].verdict == "unusable"
    assert "conv input-gradient did not come back within" in machine.formats["fp16"].reason
    assert "stopped after 1 s" in machine.note
    assert not machine.facts["complete"]


def test_a_call_that_waits_under_foreign_load_is_not_called_a_hang(tmp_path: Path) -> None:
    hang = {"kind": "begin", "op": "conv", "format": "bf16", "at_s": time.monotonic() - 9, "then": "hang"}
    loaded = [{"kind": "reading", **r} for r in readings(COLLAPSED, share=0.5)]
    findings = run(stand_in(tmp_path, [FACTS, *loaded, hang]), kill_s=1.0)
    assert findings.faults == {}


def test_a_child_that_fails_in_fp32_leaves_what_it_had(tmp_path: Path) -> None:
    lines = [FACTS, *spoken(XEON_AMX, {"fp32", "bf16"}), {"kind": "begin", "format": "fp32", "then": "exit"}]
    machine = assemble("key", host_facts(), run(stand_in(tmp_path, lines)), True)
    assert machine.formats["bf16"].verdict == "use"
    assert "ended early (code 1; no room)" in machine.note


def test_lines_that_a_library_printed_or_a_kill_cut_off_are_left_out() -> None:
    findings = Findings()
    findings.take(
        'onednn_verbose,info\n7\n[1]\n{"no": "kind"}\n{"kind": "facts", "device": "cpu"}\n{"kind": "rea'
    )
    assert findings.facts == {"device": "cpu"}
    assert findings.readings == []


def test_a_child_that_cannot_begin_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"code 1 before it began: no room"):
        run(stand_in(tmp_path, [{"kind": "begin", "then": "exit"}]))
    with pytest.raises(EquipoiseError, match="can't start a process with '/nowhere/python'"):
        run(("/nowhere/python", "x"))


def test_an_absent_device_is_the_users_mistake_and_says_what_is_there() -> None:
    with pytest.raises(UserError, match=r"device 'tpu' was asked for; torch .* sees .*cpu"):
        probe(device="tpu")


def test_a_box_too_short_for_the_import_of_torch_ends_in_time_and_claims_nothing() -> None:
    start_s = time.monotonic()
    findings = measure("cpu", 1, True, start_s, TimeBox(measure_s=0.05, kill_s=0.1))
    assert time.monotonic() - start_s < 5
    machine = assemble("key", host_facts(), findings, True, "xpu")
    assert machine.device == "xpu"
    assert not machine.trusted
    assert machine.formats["fp32"].verdict == "use"
    assert machine.formats["bf16"].reason.startswith("can't tell")


# The real probe, once, and what the cache makes of it.


@pytest.fixture(scope="module")
def real() -> Machine:
    """The quick probe's own work, in a box that a busy machine can't burst."""
    host = host_facts()
    findings = measure("cpu", host["threads"], True, time.monotonic(), TimeBox(measure_s=20, kill_s=40))
    return assemble(fingerprint(host, "auto", SCHEMA), host, findings, True)


def test_a_quick_probe_gives_a_verdict_on_each_format(real: Machine) -> None:
    assert set(real.formats) >= {"fp32", "bf16", "fp16"}
    assert {v.verdict for v in real.formats.values()} <= {"use", "not-worth-it", "unusable"}
    assert real.formats["fp32"].verdict == "use"
    assert {r["direction"] for r in real.readings if r["op"] == "gemm"} == set(DIRECTIONS)
    assert all(0 < r["low_s"] <= r["median_s"] <= r["high_s"] and r["rate"] > 0 for r in real.readings)
    assert real.facts["mem_total_bytes"] >= real.facts["mem_free_bytes"] > 0
    assert all(claim in (True, False, None) for claim in (v.claimed for v in real.formats.values()))


def test_a_machine_survives_json(real: Machine) -> None:
    assert machine_from_dict(json.loads(json.dumps(real.as_dict()))) == real
    assert "<table>" in real._repr_html_()
    assert "&lt;b&gt;" in replace(real, name="<b>")._repr_html_()


@pytest.fixture
def filed(real: Machine, tmp_path: Path) -> Iterator[Path]:
    """A cache folder with a believable result, marked so that a test sees where an answer came from."""
    file = tmp_path / f"probe-{real.fingerprint}.json"
    file.write_text(json.dumps(replace(real, note="from the file").as_dict()))
    yield file


def test_a_cached_result_is_read_and_its_facts_are_todays(filed: Path) -> None:
    start_s = time.monotonic()
    machine = probe(quick=True, cache_dir=filed.parent)
    assert time.monotonic() - start_s < 1
    assert (machine.note, machine.facts["from_cache"]) == ("from the file", True)


def test_a_quick_result_does_not_answer_for_a_full_one(filed: Path) -> None:
    key = filed.stem.removeprefix("probe-")
    assert _load(filed, key, quick=True) is not None
    assert _load(filed, key, quick=False) is None
    full = json.loads(filed.read_text())
    full["facts"]["quick"] = False
    filed.write_text(json.dumps(full))
    assert _load(filed, key, quick=True) is not None
    assert _load(filed, key, quick=False) is not None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"formats": {}}', '{"formats": {"fp32": 7}}', "\x00\xff"]
)
def test_a_damaged_cache_file_counts_as_none(filed: Path, damage: str) -> None:
    filed.write_bytes(damage.encode("latin-1"))
    assert _load(filed, filed.stem.removeprefix("probe-"), quick=True) is None


def test_fresh_ignores_and_replaces_a_good_file_when_it_may_be_believed(filed: Path) -> None:
    machine = probe(quick=True, fresh=True, cache_dir=filed.parent)
    assert machine.note != "from the file"
    assert not machine.facts["from_cache"]
    kept = json.loads(filed.read_text())["note"]
    believed = machine.trusted and machine.facts["decided"]
    assert kept == (machine.note if believed else "from the file")
    assert [path.name for path in filed.parent.iterdir()] == [filed.name]


def test_an_unwritable_cache_is_no_error(real: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _save(tmp_path / "file" / "below" / "probe.json", real)
    _save(None, real)
    assert (tmp_path / "file").read_text() == ""


def test_the_fingerprint_changes_with_whatever_changes_the_answer() -> None:
    facts = host_facts()
    base = fingerprint(facts, "auto", 1)
    assert base == fingerprint(dict(facts), "auto", 1)
    changes: dict[str, Any] = {
        "torch": "9.9", "drivers": {"nvidia": "600"}, "threads": 99, "cpus_allowed": [0], "cgroup_cpus": 1.5,
        "governor": "powersave", "isa_limits": AVX2, "cpu_features": ["avx2"], "cores_physical": 77,
    }  # fmt: skip
    for name, value in changes.items():
        assert fingerprint({**facts, name: value}, "auto", 1) != base, name
    assert fingerprint(facts, "cpu", 1) != base
    assert fingerprint({**facts, "mem_free_bytes": 1}, "auto", 1) == base


def test_limits_of_the_instruction_set_are_seen_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(host_facts(), "auto", 1)
    for name, value in AVX2.items():
        monkeypatch.setenv(name, value)
    assert host_facts()["isa_limits"].items() >= AVX2.items()
    assert fingerprint(host_facts(), "auto", 1) != before


def test_threads_are_torchs_own_once_it_is_loaded() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert threads_in_use(64) == 1
    finally:
        torch.set_num_threads(before)


def test_the_parent_stays_free_of_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import equipoise.plan.machine, equipoise.plan._host as host, equipoise.cli.probe;"
        "host.host_facts(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_limited_to_avx2_the_verdict_on_bf16_changes_by_itself(tmp_path: Path) -> None:
    code = (
        "import sys; from equipoise.plan.machine import probe; m = probe(quick=True, cache_dir=sys.argv[1]);"
        "print(m.trusted, m.formats['bf16'].verdict)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **AVX2})
    assert said.stdout.split()[0] == "False" or said.stdout.split()[1] != "use"
