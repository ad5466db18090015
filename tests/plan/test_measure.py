"""How the child takes times: what it starts, what it leaves alone, and what it does with a missing kernel."""

import time
from typing import Any

import pytest
import torch

from equipoise.plan._measure import QUICK, Prober, _claims, _private_backend
from equipoise.plan._workloads import Arithmetic, Call, Family, Size, families

CPU = torch.device("cpu")


class Emitted(list[dict[str, Any]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self if line["kind"] == kind]


def prober(emitted: Emitted, *names: str, left_s: float = 60.0) -> Prober:
    return Prober(emitted, [Arithmetic(name, CPU) for name in names], QUICK, time.monotonic() + left_s)


def family(build: Any, sizes: tuple[Size, ...] = ((1,), (100,))) -> Family:
    return Family(op="work", sizes=sizes, build=build, work=lambda a, size, d: float(size[0]), show=str)


def spin(seconds: float) -> Call:
    def call() -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass

    return call


def test_a_size_that_would_burst_its_box_is_not_started() -> None:
    started: list[tuple[str, int]] = []

    def build(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
        slow = arithmetic.name == "fp16"

        def call() -> None:
            started.append((arithmetic.name, size[0]))
            spin(0.005 * size[0] if slow else 1e-5)()

        return {"forward": call}

    emitted = Emitted()
    prober(emitted, "fp32", "fp16").family(family(build), 1)
    assert ("fp32", 100) in started
    assert ("fp16", 100) not in started
    (stopped,) = emitted.of("stopped")
    assert stopped["format"] == "fp16"
    assert stopped["predicted_s"] == pytest.approx(0.5, rel=0.3)
    assert {(r["format"], r["shape"]) for r in emitted.of("reading")} == {
        ("fp32", "(1,)"), ("fp32", "(100,)"), ("fp16", "(1,)")}  # fmt: skip


def test_one_thread_is_timed_by_its_own_processor_time() -> None:
    emitted = Emitted()
    prober(emitted, "fp32").family(family(lambda a, size: {"forward": lambda: time.sleep(0.02)}, ((1,),)), 1)
    (reading,) = emitted.of("reading")
    assert reading["clock"] == "processor"
    assert reading["low_s"] < 0.01  # asleep, as when others have the processor


def test_a_format_without_the_kernel_is_left_out_and_named() -> None:
    def build(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
        def call() -> None:
            if arithmetic.name == "fp16":
                raise NotImplementedError("'work' not implemented for 'Half'\nat some line")

        return {"forward": call}

    emitted = Emitted()
    prober(emitted, "fp32", "fp16").family(family(build), 1)
    assert emitted.of("fault") == [{"kind": "fault", "format": "fp16", "fault": "unsupported", "op": "work",
                                    "text": "'work' not implemented for 'Half'"}]  # fmt: skip
    assert {r["format"] for r in emitted.of("reading")} == {"fp32"}


def test_running_out_of_memory_is_not_a_missing_kernel() -> None:
    def build(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
        if size[0] > 1:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return {"forward": lambda: None}

    emitted = Emitted()
    prober(emitted, "fp32").family(family(build), 1)
    assert [line["fault"] for line in emitted.of("fault")] == ["memory"]
    assert len(emitted.of("reading")) == 1


def test_the_private_names_of_torch_that_claims_are_read_from_are_there() -> None:
    claims = _claims(CPU)
    assert all(isinstance(claims[name], bool) for name in ("fp32", "bf16", "fp16"))
    assert _private_backend() is None or isinstance(_private_backend(), str)
    assert callable(torch._scaled_mm)


def test_nothing_is_started_after_the_time_is_over() -> None:
    emitted = Emitted()
    prober(emitted, "fp32", left_s=0.0).family(family(lambda a, size: {"forward": spin(1.0)}), 1)
    assert emitted == []


def test_what_is_begun_is_said_before_it_is_called() -> None:
    emitted = Emitted()

    def build(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
        def call() -> None:
            last = emitted.of("begin")[-1]
            assert last["format"] in (arithmetic.name, "")

        return {"forward": call}

    prober(emitted, "fp32", "bf16").family(family(build), 1)
    assert len(emitted.of("reading")) == 4


@pytest.mark.parametrize("work", families(quick=True, accelerator=False), ids=lambda f: f.op)
def test_every_call_of_the_smallest_size_runs_in_every_format_of_a_cpu(work: Family) -> None:
    for name in ("fp32", "bf16", "fp16"):
        arithmetic = Arithmetic(name, CPU)
        for direction, call in work.build(arithmetic, work.sizes[0]).items():
            assert work.work(arithmetic, work.sizes[0], direction) > 0
            call()


@pytest.mark.parametrize("op", ["conv", "conv-nchw", "conv-depthwise", "conv-depthwise-stride2"])
def test_both_gradients_of_a_convolution_are_those_of_autograd(op: str) -> None:
    (work,) = (f for f in families(quick=True, accelerator=False) if f.op == op)
    calls = work.build(Arithmetic("fp32", CPU), work.sizes[0])
    out = calls["forward"]()
    of_input, _, _ = calls["input-gradient"]()  # type: ignore[misc]
    _, of_weight, _ = calls["weight-gradient"]()  # type: ignore[misc]
    assert isinstance(out, torch.Tensor)
    channels = out.shape[1]
    assert of_input.shape[1] == channels
    assert of_weight.shape == (channels, 1 if "depthwise" in op else channels, 3, 3)
    layout = torch.contiguous_format if op == "conv-nchw" else torch.channels_last
    assert out.is_contiguous(memory_format=layout)


def test_the_square_product_comes_first_and_decides_with_the_convolution() -> None:
    for quick in (True, False):
        listed = families(quick=quick, accelerator=False)
        assert [f.op for f in listed if f.decisive] == ["gemm", "conv"]
        assert [f.op for f in listed[:2]] == ["gemm", "conv"]
        for f in listed:
            works = [f.work(Arithmetic("fp32", CPU), size, "forward") for size in f.sizes]
            assert works == sorted(works)
