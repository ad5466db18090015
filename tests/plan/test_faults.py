"""Faulty arithmetic, made on purpose, is found; sound arithmetic is not accused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.plan._faults import faults_of
from equipoise.plan._workloads import Arithmetic

CPU = torch.device("cpu")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Products(TorchDispatchMode):
    """Computes matrix products by another rule, as a faulty unit would."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype is not torch.float64:
            return self._product(*args)
        return func(*args, **(kwargs or {}))


def found(name: str) -> set[str]:
    return {fault["fault"] for fault in faults_of(Arithmetic(name, CPU))}


def test_fp32_of_this_machine_is_sound() -> None:
    assert found("fp32") == set()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_small_products_are_exact_in_half_formats_of_this_machine(name: str) -> None:
    assert "inexact" not in found(name)


def test_flushed_subnormals_are_found() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormals")
    try:
        assert "subnormals" in found("fp32")
    finally:
        torch.set_flush_denormal(False)


def test_a_product_that_is_off_by_one_is_found() -> None:
    with Products(lambda a, b: (a.double() @ b.double() + 1).to(a.dtype)):
        assert "inexact" in found("bf16")


def test_an_accumulator_in_the_format_itself_is_found() -> None:
    def narrow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        for k in range(a.shape[1]):
            total = total + a[:, k : k + 1] * b[k : k + 1]
        return total

    for name in ("bf16", "fp16"):
        with Products(narrow):
            assert "accumulate" in found(name)
            assert "inexact" not in found(name)
        with Products(lambda a, b: (a.float() @ b.float()).to(a.dtype)):
            assert "accumulate" not in found(name)


def test_what_cannot_be_asked_is_said() -> None:
    def refuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Half'")

    with Products(refuse):
        assert found("fp16") == {"unchecked"}
