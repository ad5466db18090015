"""Torch's own lists of autocast operators against our table: one that a new torch adds fails by name."""

import re
from pathlib import Path

import pytest
import torch

from equipoise.sensitive import KINDS, OPERATORS
from equipoise.step.operators import overload

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
KIND_OF = {row.name: row.kind for row in OPERATORS}

ALLOWED = {
    "AT_FORALL_LOWER_PRECISION_FP": {"half"},
    "AT_FORALL_FP32": {"fp32"},
    "AT_FORALL_FP32_SET_OPT_DTYPE": {"fp32_out", "softmax"},
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": {"fp32"},
    "AT_FORALL_PROMOTE": {"promote"},
}
ENTRY = re.compile(r"_\((\w+)(?:, *(\w+))?\)")
REGISTERED = re.compile(r'_\(ADD_NS\(\w+\),\s*"([\w.]+)"')


def listed(macro: str) -> list[str]:
    """Schema names in one of the header's lists."""
    text = HEADER.read_text()
    found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", text)
    assert found, f"{HEADER} has no {macro}: torch has moved its lists"
    body = found[1].replace("\\\n", "\n")
    names = [base + (f".{which}" if which else "") for base, which in ENTRY.findall(body)]
    return names + REGISTERED.findall(body)


@pytest.mark.parametrize("macro", ALLOWED)
def test_every_operator_of_cudas_lists_has_its_row(macro: str) -> None:
    names = listed(macro)
    assert len(names) >= 2, "the list was not read"
    wrong = {n: KIND_OF.get(n, "no row") for n in names if KIND_OF.get(n) not in ALLOWED[macro]}
    assert not wrong, f"give these a row of kind {ALLOWED[macro]} in equipoise/sensitive.py"


def test_the_lists_are_read_whole() -> None:
    assert {"_convolution.deprecated", "einsum", "linear"} <= set(listed("AT_FORALL_LOWER_PRECISION_FP"))
    assert {"pow.Tensor_Scalar", "layer_norm", "mse_loss"} <= set(listed("AT_FORALL_FP32"))
    assert listed("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE") == ["norm.Scalar", "norm.ScalarOpt_dim"]
    assert len(listed("AT_FORALL_FP32")) > 50 > len(listed("AT_FORALL_PROMOTE")) > 9


def test_every_macro_of_the_header_is_known() -> None:
    """A list under a new name would be read by nobody."""
    macros = set(re.findall(r"#define (AT_FORALL_\w+)\(_\)", HEADER.read_text()))
    assert macros - {"AT_FORALL_DEPRECATED_AUTOCAST_BACKENDS"} == set(ALLOWED)


@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA"])
def test_every_operator_with_an_autocast_kernel_has_its_row(key: str) -> None:
    """What torch registers, CPU's list included, which no header holds."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, key)]
    assert len(names) > 100
    assert not sorted(n for n in names if n.removeprefix("aten::") not in KIND_OF)


def test_every_row_is_an_operator_of_this_torch_and_stands_once() -> None:
    assert len(KIND_OF) == len(OPERATORS)
    assert {row.kind for row in OPERATORS} == set(KINDS)
    absent = [row.name for row in OPERATORS if overload(row.name) is None]
    assert not [name for name in absent if not name.startswith("_upsample_lanczos2d_aa")]  # new in 2.13
