"""Facts about the host that need no torch, and the fingerprint that a cached probe is filed under.

Enters: ``/proc``, ``/sys``, the environment and package metadata; whatever is missing becomes None or "".
Leaves: a plain dict of facts and a fingerprint.
Where: before the first step, in the probe's parent and in its child.
Source: ``proc(5)``, ``cgroups(7)``, the kernel's cpufreq documentation.
"""

import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..foreign_load import allowed_cpus

ISA_LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""Variables of torch's libraries that change what a format costs or which device is seen. None is ours."""

NOISY_SHARE = 0.1
"""While others keep more than this share from us, a time on the wall clock proves nothing."""

_FLAGS = frozenset(
    """
    sse4_2 avx avx2 fma f16c avx_vnni avx_ne_convert avx512f avx512bw avx512vl avx512_vnni avx512_bf16
    avx512_fp16 amx_tile amx_int8 amx_bf16 amx_fp16 avx10_1 avx10_2
    asimd asimdhp fphp bf16 i8mm sve sve2 svebf16 sme sme2
""".split()
)
"""The processor flags that say something about number formats."""


def host_facts() -> dict[str, Any]:
    """Everything about the host that a person or the fingerprint needs, in plain data."""
    processor = _cpuinfo()
    return {
        "cpu": processor["name"],
        "cpu_features": processor["features"],
        "cores_physical": processor["cores"],
        "cores_logical": os.cpu_count() or 1,
        "cpus_allowed": sorted(allowed_cpus()),
        "cgroup_cpus": _cgroup_quota(),
        "threads": threads_in_use(processor["cores"]),
        "governor": _governor(),
        **_memory(),
        "isa_limits": {name: os.environ[name] for name in ISA_LIMITS if name in os.environ},
        "drivers": _drivers(),
        "plugins": sorted({point.name for point in metadata.entry_points(group="torch.backends")}),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def fingerprint(facts: dict[str, Any], device: str, schema: int) -> str:
    """A short name for all that changes the answer: machines with the same one may share a cached probe."""
    decides = {
        name: facts[name]
        for name in (
            "cpu",
            "cpu_features",
            "cores_physical",
            "cores_logical",
            "cpus_allowed",
            "cgroup_cpus",
            "threads",
            "governor",
            "mem_total_bytes",
            "isa_limits",
            "drivers",
            "plugins",
            "torch",
            "os",
        )
    }
    text = json.dumps({**decides, "device": device, "schema": schema}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def threads_in_use(cores: int) -> int:
    """The threads that torch computes with: its own number when it is loaded, else what it would choose."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0]
        if first.isdigit() and int(first) > 0:
            return int(first)
    return cores


def _cpuinfo() -> dict[str, Any]:
    """Name, number-format features and usable physical cores, from ``/proc/cpuinfo`` where there is one."""
    name, flags, cores = platform.processor() or platform.machine(), set[str](), set[tuple[str, str]]()
    allowed = allowed_cpus()
    for block in _read("/proc/cpuinfo").split("\n\n"):
        entries = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in block.splitlines())
        }
        name = entries.get("model name", name)
        flags |= set(entries.get("flags", entries.get("Features", "")).split()) & _FLAGS
        if entries.get("processor", "").isdigit() and int(entries["processor"]) in allowed:
            core = entries.get("core id", "cpu" + entries["processor"])
            cores.add((entries.get("physical id", "0"), core))
    return {"name": name, "features": sorted(flags), "cores": len(cores) or len(allowed)}


def _memory() -> dict[str, int | None]:
    """Total and available bytes, the control group's limit included."""
    entries = {line.partition(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines()}
    if "MemTotal" in entries:
        total: int | None = int(entries["MemTotal"]) * 1024
        free: int | None = int(entries.get("MemAvailable", entries.get("MemFree", "0"))) * 1024
    else:
        total, free = _sysconf_bytes("SC_PHYS_PAGES"), _sysconf_bytes("SC_AVPHYS_PAGES")
    limits = [
        int(text)
        for text in _cgroup_values("memory", "memory.max", "memory.limit_in_bytes")
        if text.isdigit()
    ]
    if total is not None and limits and min(limits) < total:
        total = min(limits)
        free = None if free is None else min(free, total)
    return {"mem_total_bytes": total, "mem_free_bytes": free}


def _sysconf_bytes(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup_quota() -> float | None:
    """How many processors' worth of time the control group grants; None for no limit."""
    quotas = []
    for text in _cgroup_values("cpu", "cpu.max", ""):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    periods = _cgroup_values("cpu", "", "cpu.cfs_period_us")
    for quota, period in zip(_cgroup_values("cpu", "", "cpu.cfs_quota_us"), periods, strict=False):
        if quota.isdigit() and period.isdigit():  # "-1" is no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_values(controller: str, unified_file: str, legacy_file: str) -> list[str]:
    """The file's text in this process's control group and every group above it, version 2 or 1."""
    values = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and unified_file:
            root, wanted = Path("/sys/fs/cgroup"), unified_file
        elif controller in controllers.split(",") and legacy_file:
            root, wanted = Path("/sys/fs/cgroup") / controller, legacy_file
        else:
            continue
        # Inside a container the path may be the host's; the limit then stands at the root.
        inner = root / path.lstrip("/")
        folders = [inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]
        values += [_read(folder / wanted).strip() for folder in folders]
    return [value for value in values if value]


def _governor() -> str:
    """The frequency governors in use, most often one; "" where the kernel shows none."""
    paths = (f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor" for cpu in sorted(allowed_cpus()))
    return "+".join(sorted({text for path in paths if (text := _read(path).strip())}))


def _drivers() -> dict[str, str]:
    """Versions of the accelerator drivers that the kernel has loaded, and the GPUs behind them."""
    found = {}
    nvidia = _read("/proc/driver/nvidia/version").splitlines()
    if nvidia:
        found["nvidia"] = nvidia[0].removeprefix("NVRM version:").strip()
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [_field(_read(card), "Model") for card in cards]
    if models:
        found["nvidia_gpus"] = ", ".join(models)
    for module in ("amdgpu", "i915", "xe"):
        if text := _read(f"/sys/module/{module}/version").strip():
            found[module] = text
    return found


def _field(text: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)), "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: str | Path) -> str:
    """The file's text, or "" when it isn't there or may not be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
