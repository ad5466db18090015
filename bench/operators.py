"""Every operator of torch's autocast lists under the policy, on a CPU: its format, its error, its gradient.

    python bench/operators.py [--write | --check | --json] [--only NAME ...]

Each call of ``operator_calls.py`` runs on the same inputs, which are exact in the half format: under
``Session.autocast()``, in FP32, in float64 (the truth), and in half by itself, which shows what the table is
for. An error is the largest of any number of the result, relative to that number where an operator takes
numbers one by one (exp, log ... softmax), else relative to the largest of them; ``inf`` is an overflow or
NaN where the truth is a number. Gradients are those of the half inputs, for one fixed gradient of the output.
Then the same again recomputed by a checkpoint, in a thread of its own, and compiled (``aot_eager``, the model
compiled whole): to the bit what eager gave, or what the compiled FP32 model gives.

``--write`` makes docs/operators.md; ``--check`` measures again and fails where the page says otherwise: its
formats and answers exactly, its errors within a factor of 4, since a kernel's order of sums is the CPU's own.
"""

import argparse
import json
import math
import sys
import threading
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from equipoise import Session
from equipoise.plan.machine import host_facts
from equipoise.sensitive import KINDS, OPERATORS
from equipoise.step.operators import Kernels, autocast
from operator_calls import RECIPES, ROWS, UNCALLED, Row, Tensors, form_of

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"
FORMS = ("function", "method", "operator", "module")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TABLE = {row.name: row for row in OPERATORS}
EACH_BY_ITSELF = ("grows or shrinks", "steep", "exponentials", "logarithms")
"""Beginnings of the reasons of operators that take numbers one by one, or give small ones that matter."""
SMALLEST = 2.0**-126
"""FP32's smallest normal number: a difference below is none."""


class Policy:
    """What ``Session.autocast()`` enters in a half format, without the session's watch over overflows.

    FP16 is by casts there and back, which run on every CPU.
    """

    def __init__(self, half: str) -> None:
        self._emulate, self._dtype = half == "fp16", HALVES[half]
        self._kernels = [Kernels("cpu", which) for which in ("table", "fp16", "emulate")[: 2 + self._emulate]]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        return autocast("cpu", self._dtype, True, self._emulate)

    def restore(self) -> None:
        """Take the kernels away."""
        for k in self._kernels:
            k.remove()


# -- a call ------------------------------------------------------------------------------------------------


def _pack(x: torch.Tensor) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor([5, 3, 2]))


def _module_and_arguments(call: str) -> tuple[str, str]:
    """``nn.Linear(6, 5)(x[0])`` as ``nn.Linear(6, 5)`` and ``(x[0])``: the bracket that closes first."""
    depth = 0
    for at, character in enumerate(call):
        depth += (character == "(") - (character == ")")
        if character == ")" and depth == 0:
            return call[: at + 1], call[at + 1 :]
    raise ValueError(f"{call} builds no module")


Call = Callable[[Tensors], Any]


def callable_of(call: str, tensors: Tensors, dtype: torch.dtype, half: torch.dtype) -> Call:
    """The text of a call as a function of its tensors; a module is built once, its weights exact in half.

    Args:
        call: text of ``operator_calls.py``.
        tensors: what it will be called with, for a module that takes one at its making.
        dtype: of the module's weights, and of results where a call names one.
        half: the format in which weights are exact.
    """
    names = {"torch": torch, "F": F, "nn": nn, "pack": _pack, "D": dtype}
    arguments = ", ".join(tensors)
    if form_of(call) == "module":
        build, call = _module_and_arguments(call)
        torch.manual_seed(0)
        module = eval(build, {**names, **tensors})
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p.to(half))
        samples = getattr(module, "_random_samples", None)
        names["module"] = module.to(dtype)
        if samples is not None:  # its input's format, as it draws them itself
            module._random_samples = samples
        call = "module" + call
    function = eval(f"lambda {arguments}: {call}", names)
    run: Call = lambda given: function(**given)  # noqa: E731
    if "module" in names:
        run.module = names["module"]  # type: ignore[attr-defined]
    return run


def inputs(recipe: str, half: torch.dtype) -> Tensors:
    """A recipe's tensors in FP32, exact in half but for those named ``...32``."""
    return {
        name: t.to(half).float() if t.is_floating_point() and not name.endswith("32") else t
        for name, t in RECIPES[recipe]().items()
    }


def leaves(tensors: Tensors, dtype: torch.dtype, *, all_of_them: bool) -> Tensors:
    """Tensors in a dtype, those named ``...32`` only if ``all_of_them``; they require gradients.

    Targets (``t``) and random samples (``r``) don't: torch has no gradient for them.
    """
    found = {}
    for name, t in tensors.items():
        if t.is_floating_point():
            t = t.to(dtype) if all_of_them or not name.endswith("32") else t.clone()
            t.requires_grad_(name not in ("t", "r"))
        found[name] = t
    return found


def numbers(result: Any) -> list[torch.Tensor]:
    """The tensors of a result that hold numbers, complex ones as pairs."""
    if isinstance(result, PackedSequence):
        return [result.data]
    found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    if isinstance(result, tuple) and result and isinstance(result[0], PackedSequence):
        found = [result[0].data]
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in found]


def gradients(outputs: Sequence[torch.Tensor], tensors: Tensors) -> list[torch.Tensor] | None:
    """Gradients of the floating tensors for a fixed gradient of the outputs; None where there are none."""
    outputs = [t for t in outputs if t.requires_grad]
    at = [t for t in tensors.values() if t.requires_grad]
    if not outputs or not at:
        return None
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype) for t in outputs]
    try:
        found = torch.autograd.grad(outputs, at, given, allow_unused=True, materialize_grads=True)
    except (RuntimeError, NotImplementedError):  # torch has no gradient for it
        return None
    return [g.detach() for g in found]


@dataclass(slots=True)
class Ran:
    """What one call gave."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor] | None


def run(call: str, tensors: Tensors, dtype: torch.dtype, half: torch.dtype) -> Ran:
    """A call in one dtype throughout, without autocast."""
    given = leaves(tensors, dtype, all_of_them=True)
    outputs = numbers(callable_of(call, given, dtype, half)(given))
    return Ran([t.detach() for t in outputs], gradients(outputs, given))


# -- errors ------------------------------------------------------------------------------------------------


def error(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], *, to_largest: bool) -> float:
    """The largest relative error of any number."""
    worst = 0.0
    for out, ref in zip(found, truth, strict=True):
        if not out.is_floating_point() or not ref.numel():
            continue
        out, ref = out.double(), ref.double()
        # What FP32 can't hold either is no error: it must be the same infinity.
        beyond = ref.abs() > torch.finfo(torch.float32).max
        right = torch.where(beyond, ref.float().double() == out, out.isfinite()) | (ref.isnan() & out.isnan())
        if not bool(right.all()):
            return math.inf
        size = ref.abs()
        if to_largest:
            size = size[~beyond].amax() if bool((~beyond).any()) else size
        relative = (out - ref).abs() / torch.clamp(size, min=SMALLEST)
        # Differences that FP32's flush to zero makes too are none.
        relative = torch.where(beyond | ((out - ref).abs() < SMALLEST), 0.0, relative)
        worst = max(worst, float(relative.nan_to_num(0.0).amax()))
    return worst


def alike(name: str, a: Sequence[torch.Tensor] | None, b: Sequence[torch.Tensor] | None) -> bool:
    """Equal to the bit, NaN equal to NaN.

    LAPACK's results depend on addresses: within 2**-20. Products in half, which torch may compute by another
    kernel when it compiles: within four of half's digits.
    """
    row = TABLE[name]
    if a is None or b is None:
        return a is b
    for x, y in zip(a, b, strict=True):
        if x.dtype is not y.dtype or not torch.equal(x.isnan(), y.isnan()):
            return False
        x, y = x[~x.isnan()], y[~y.isnan()]
        if torch.equal(x, y):
            continue
        within = 2.0**-20 if row.reason.startswith("solving") else 0.0
        if row.kind == "half":
            within = 4 * torch.finfo(x.dtype).eps
        if float((x.double() - y.double()).abs().amax()) > within * float(y.abs().amax()):
            return False
    return True


# -- a row ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """What was measured of one operator under one half format."""

    name: str
    half: str
    dtypes: dict[str, str] = field(default_factory=dict)
    """Form -> dtype of the result."""
    ours: float = 0.0
    fp32: float = 0.0
    own: float | str = 0.0
    """Half's own error, or why there is none."""
    as_fp32: bool = True
    """Whether every form gives FP32's own bits."""
    grad_as_fp32: bool | None = True
    """Whether the gradient is FP32's, rounded to the input's format; None where there is none."""
    own_grad: float | str = 0.0
    checkpointed: bool = True
    threaded: bool = True
    compiled: bool | None = None
    """Whether compiled code gives eager's bits, forward and backward; None where it wasn't compiled."""


def under(session: Policy, call: str, tensors: Tensors, half: torch.dtype) -> tuple[Ran, Call]:
    """A call on half inputs under the policy."""
    given = leaves(tensors, half, all_of_them=False)
    function = callable_of(call, given, torch.float32, half)
    with session.autocast():
        outputs = numbers(function(given))
    return Ran([t.detach() for t in outputs], gradients(outputs, given)), function


def recomputed(session: Policy, function: Call, tensors: Tensors, half: torch.dtype) -> tuple[Ran, set[Any]]:
    """The same in a checkpoint; the dtypes of the first and of the recomputed forward."""
    given = leaves(tensors, half, all_of_them=False)
    dtypes = []

    def forward(*values: torch.Tensor) -> Any:
        result = numbers(function(dict(zip(given, values, strict=True))))
        dtypes.append(tuple(t.dtype for t in result))
        return tuple(result)

    with session.autocast():
        outputs = checkpoint(forward, *given.values(), use_reentrant=False)
    return Ran([t.detach() for t in outputs], gradients(outputs, given)), set(dtypes)


def in_thread(session: Policy, function: Call, tensors: Tensors, half: torch.dtype) -> list[torch.Tensor]:
    """The same in a thread that enters the session's context."""
    found: list[torch.Tensor] = []

    def work() -> None:
        with session.autocast():
            found.extend(numbers(function(leaves(tensors, half, all_of_them=False))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return [t.detach() for t in found]


def to_largest(name: str) -> bool:
    """Whether errors of this operator count against the largest number of its result."""
    return not TABLE[name].reason.startswith(EACH_BY_ITSELF)


def _own(call: str, tensors: Tensors, half: torch.dtype, truth: Ran, whole: bool) -> tuple[Any, Any]:
    """Half's own error, forward and backward."""
    try:
        ran = run(call, tensors, half, half)
    except (RuntimeError, NotImplementedError):
        return "no kernel", "no kernel"
    grad: float | str = "none"
    if truth.grads is not None and ran.grads is not None:
        grad = error(ran.grads, truth.grads, to_largest=whole)
    return error(ran.outputs, truth.outputs, to_largest=whole), grad


def measure(row: Row, half_name: str, session: Policy) -> Found:
    """One operator under one half format, in all of its forms."""
    half, whole = HALVES[half_name], to_largest(row.name)
    tensors = inputs(row.recipe, half)
    found = Found(row.name, half_name)
    for at, call in enumerate(row.calls):
        truth = run(call, tensors, torch.float64, half)
        wide = run(call, tensors, torch.float32, half)
        ours, function = under(session, call, tensors, half)
        dtypes = {str(t.dtype).removeprefix("torch.") for t in ours.outputs if t.is_floating_point()}
        found.dtypes[form_of(call)] = "/".join(sorted(dtypes)) or str(ours.outputs[0].dtype)[6:]
        found.ours = max(found.ours, error(ours.outputs, truth.outputs, to_largest=whole))
        found.fp32 = max(found.fp32, error(wide.outputs, truth.outputs, to_largest=whole))
        unit = TABLE[row.name].unit  # FP32's own goes a last digit beyond 1
        as_wide = [t.clamp(-1, 1) for t in wide.outputs] if unit else wide.outputs
        found.as_fp32 &= alike(row.name, ours.outputs, as_wide)
        if wide.grads is None or ours.grads is None:
            found.grad_as_fp32 = None if wide.grads is ours.grads else False
        else:
            rounded = [g.to(o.dtype) for g, o in zip(wide.grads, ours.grads, strict=True)]
            found.grad_as_fp32 = bool(found.grad_as_fp32) and alike(row.name, ours.grads, rounded)
        again, dtypes_seen = recomputed(session, function, tensors, half)
        found.checkpointed &= len(dtypes_seen) == 1 and alike(row.name, again.outputs, ours.outputs)
        found.checkpointed &= ours.grads is None or alike(row.name, again.grads, ours.grads)
        threaded = in_thread(session, function, tensors, half)
        found.threaded &= alike(row.name, threaded, ours.outputs)
        if at == 0:
            found.own, found.own_grad = _own(call, tensors, half, truth, whole)
    return found


# -- compiled ------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Many calls as one model."""

    def __init__(self, functions: Sequence[Call]) -> None:
        super().__init__()
        self.functions = list(functions)
        self.built = nn.ModuleList(f.module for f in functions if hasattr(f, "module"))
        self.some_weight = nn.Parameter(torch.zeros(()))

    def forward(self, given: list[Tensors]) -> list[list[torch.Tensor]]:
        """Each call's numbers."""
        return [numbers(f(t)) for f, t in zip(self.functions, given, strict=True)]


def _trained(
    model: nn.Module, given: list[Tensors], half_name: str | None
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Outputs of each call, and the gradients of its tensors from one backward; None: without a session."""
    session = None
    if half_name is not None:
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=half_name)
    with nullcontext() if session is None else session.autocast():
        results = model(given)
    named = {f"{i}.{name}": t for i, tensors in enumerate(given) for name, t in tensors.items()}
    grads = iter(gradients([t for outputs in results for t in outputs], named) or [])
    if session is not None:
        session.restore()
    by_call = [[next(grads) for t in tensors.values() if t.requires_grad] for tensors in given]
    return [[t.detach() for t in outputs] for outputs in results], by_call


def compiled(
    rows: Sequence[Row], half_name: str, no_gradient: Container[str] = (), backend: str = "aot_eager"
) -> dict[str, bool]:
    """Whether a model that makes these calls gives the same compiled, forward and backward, by operator.

    The same as eager code under the policy; or, where torch takes an operator apart when it compiles, the
    same as the compiled FP32 model.

    Args:
        rows: operators.
        half_name: ``bf16`` or ``fp16``.
        no_gradient: operators that torch has no gradient for.
        backend: of torch.compile.

    Raises:
        Exception: torch.compile has a graph break in one of the calls.
    """
    half = HALVES[half_name]
    made = [(row, call, inputs(row.recipe, half)) for row in rows for call in row.calls]
    functions = [callable_of(call, t, torch.float32, half) for _, call, t in made]

    def way(compile_it: bool, wide: bool) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        torch._dynamo.reset()
        model: Any = Calls(functions)
        if compile_it:
            model = torch.compile(model, backend=backend, fullgraph=True)
        given = [leaves(t, torch.float32 if wide else half, all_of_them=wide) for _, _, t in made]
        for (row, _, _), tensors in zip(made, given, strict=True):
            for t in tensors.values():
                t.requires_grad_(t.requires_grad and row.name not in no_gradient)
        with torch._dynamo.config.patch(allow_rnn=True):
            return _trained(model, given, None if wide else half_name)

    outs, grads = way(True, False)
    same = dict.fromkeys(range(len(made)), False)
    for wide in (False, True):
        expected, expected_grads = way(wide, wide)
        for i, (row, _, _) in enumerate(made):
            rounded = [e.to(g.dtype) for e, g in zip(expected_grads[i], grads[i], strict=True)]
            same[i] |= alike(row.name, outs[i], expected[i]) and alike(row.name, grads[i], rounded)
        if all(same.values()):
            break
    return {row.name: all(same[i] for i, (r, _, _) in enumerate(made) if r is row) for row in rows}


def compiled_all(
    rows: Sequence[Row], half_name: str, no_gradient: Container[str] = (), backend: str = "aot_eager"
) -> dict[str, bool | None]:
    """As :func:`compiled`, in groups; None for an operator that torch.compile can't take whole."""
    answers: dict[str, bool | None] = {}
    todo = [list(rows[i : i + 24]) for i in range(0, len(rows), 24)]
    while todo:
        group = todo.pop()
        try:
            answers.update(compiled(group, half_name, no_gradient, backend))
        except Exception:  # which one it was: halve the group
            if len(group) == 1:
                answers[group[0].name] = None
            else:
                todo += [group[: len(group) // 2], group[len(group) // 2 :]]
    return answers


# -- the page ------------------------------------------------------------------------------------------------

HEAD = """# Operators that stay in FP32

Made by `python bench/operators.py --write`; `python bench/operators.py --check` measures again and
compares. torch {torch}, {cpu}, {threads} thread(s).

Every operator of torch's autocast lists for CPU and for CUDA, and more, under `Session.autocast()` on a
CPU, in bf16 and in FP16 (emulated). The list is the same on every device. Each operator is called as
function, method, Python operator and module, wherever such a form exists, on inputs that are exact in half
and hard for it: large and tiny numbers, masks, squares that overflow, differences that cancel.

- **Forms**: the format of the result. *half* is the policy's half format.
- **Errors** against float64: the largest of any number of the result, relative to that number (exp, log ...
  softmax) or to the largest number of the result (all others). *inf* is an overflow or NaN where the truth is
  a number. *ours* and *FP32* are the larger of two: the inputs differ in bf16 and FP16. *bf16* and *fp16* are
  what the operator gives in half by itself, which is why it has its row; *no kernel*: torch's CPU has none.
- **Gradient**: *FP32's* is that of FP32 to the bit, rounded to the input's format; *half's* is computed in
  half; *none*: torch has none. *bf16's* and *fp16's*: the error of the gradient in half by itself.
- **Elsewhere**: *same* means the same bits in a checkpoint's recomputed forward and in a thread of its own,
  and compiled (`aot_eager`, the model whole, in bf16) the bits of eager code, or those of the compiled FP32
  model where torch takes the operator apart. *not compiled*: `torch.compile` itself can't.

Products and recurrent layers may run in another kernel when they are compiled: there *same* means within four
of half's last digits. LAPACK's results depend on addresses in memory: *same* means within 2^-20.

Under `torch.func.vmap` the list holds as well, but for parts of six operators, which run in half there: the
products in `cov`, `corrcoef`, `dot`, `vdot` and `tensordot`, the log-sigmoid in
`binary_cross_entropy_with_logits`.

What no list can keep is a multiplication: `x * x` in FP16 overflows beyond 255, where `x ** 2`, `x.pow(2)`
and `x.square()` don't.
"""
COLUMNS = ("of torch", *FORMS, "ours", "FP32", "bf16", "fp16", "gradient", "bf16's", "fp16's", "elsewhere")
NUMBERS = ("ours", "FP32", "bf16", "fp16", "bf16's", "fp16's")


def _number(value: float | str) -> str:
    if isinstance(value, str) or value == 0 or not math.isfinite(value):
        return str(value) if value else "0"
    digits, exponent = f"{value:.0e}".split("e")
    return digits if int(exponent) == 0 else f"{digits}e{int(exponent)}"


def _format(found: Sequence[Found], form: str) -> str:
    dtypes = [f.dtypes.get(form, "") for f in found]
    if dtypes == ["bfloat16", "float16"]:
        return "half"
    return (
        {"": "", "float32": "FP32"}.get(dtypes[0], dtypes[0]) if len(set(dtypes)) == 1 else "/".join(dtypes)
    )


def _gradient(found: Sequence[Found], kind: str) -> str:
    if any(f.grad_as_fp32 is None for f in found):
        return "none"
    if kind == "half":
        return "half's"
    if all(f.grad_as_fp32 for f in found):
        return "FP32's"
    return "half's" if kind in ("follow", "inside") else "no"


def _elsewhere(found: Sequence[Found]) -> str:
    wrong = [
        what
        for what in ("checkpointed", "threaded", "compiled")
        if any(getattr(f, what) is False for f in found)
    ]
    if wrong:
        return "not " + ", ".join(wrong)
    return "same" if found[0].compiled else "same; not compiled"


def cells(found: Sequence[Found]) -> dict[str, str]:
    """A line of the page, by column."""
    kind = TABLE[found[0].name].kind
    ours = _number(max(f.ours for f in found))
    wide = kind not in ("half", "follow", "inside")
    if wide and not all(f.as_fp32 for f in found):
        ours += " (not FP32's)"
    return dict(
        zip(
            COLUMNS,
            (
                f"`{found[0].name}`",
                *(_format(found, form) for form in FORMS),
                ours,
                _number(max(f.fp32 for f in found)),
                *(_number(f.own) for f in found),
                _gradient(found, kind),
                *(_number(f.own_grad) for f in found),
                _elsewhere(found),
            ),
            strict=True,
        )
    )


def page(results: dict[str, list[Found]]) -> str:
    """docs/operators.md."""
    head = HEAD.format(torch=torch.__version__, cpu=host_facts()["cpu"], threads=torch.get_num_threads())
    lines = [head.rstrip()]
    sections: dict[tuple[str, str], list[str]] = {}
    for row in OPERATORS:
        sections.setdefault((row.kind, row.reason), []).append(row.name)
    for (kind, reason), names in sections.items():
        lines += ["", f"## {reason[0].upper()}{reason[1:]}", f"`{kind}`: {KINDS[kind]}.", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(cells(results[n]).values()) + " |" for n in names if n in results]
        uncalled = [f"`{n}` ({UNCALLED[n]})" for n in names if n in UNCALLED]
        if uncalled:
            lines += ["", f"Never called on a CPU by a user: {', '.join(uncalled)}."]
    return "\n".join(lines) + "\n"


def read_page(text: str) -> dict[str, dict[str, str]]:
    """The lines of the page by operator."""
    rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): dict(zip(COLUMNS, row, strict=True)) for row in rows}


def differences(results: dict[str, list[Found]], text: str) -> list[str]:
    """Where the page says something else: formats and answers exactly, errors within a factor of 4."""
    written, wrong = read_page(text), []
    for name, found in results.items():
        now = cells(found)
        for column in COLUMNS:
            then = written.get(name, {}).get(column, "nothing")
            if now[column] != then and not (column in NUMBERS and _near(now[column], then)):
                wrong.append(f"{name}: {column} is {now[column]!r}, the page says {then!r}")
    return wrong + [f"{name}: on the page alone" for name in written if name not in results]


def _near(a: str, b: str) -> bool:
    try:
        x, y = float(a), float(b)
    except ValueError:
        return False
    return max(x, y) < 1e-6 or (x > 0 and y > 0 and math.isfinite(x + y) and max(x / y, y / x) <= 4)


def measure_all(rows: Sequence[Row], compile_too: bool = True) -> dict[str, list[Found]]:
    """Each operator under bf16 and FP16."""
    results: dict[str, list[Found]] = {row.name: [] for row in rows}
    for half in HALVES:
        session = Policy(half)
        for row in rows:
            results[row.name].append(measure(row, half, session))
        session.restore()
    if compile_too:
        none = {name for name, found in results.items() if found[0].grad_as_fp32 is None}
        for name, same in compiled_all(rows, "bf16", none).items():
            results[name][0].compiled = same
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="make docs/operators.md")
    what.add_argument("--check", action="store_true", help="compare with docs/operators.md")
    what.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these operators alone")
    options = parser.parse_args()
    rows = [r for r in ROWS if not options.only or r.name in options.only]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's older and unfinished operators
        results = measure_all(rows)
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")
    elif options.json:
        print(json.dumps([asdict(f) for found in results.values() for f in found]))
    elif options.check:
        wrong = differences(results, PAGE.read_text(encoding="utf-8"))
        print(*wrong or [f"{PAGE.name} says what was measured: {len(results)} operators"], sep="\n")
        sys.exit(bool(wrong))
    else:
        print(page(results))


if __name__ == "__main__":
    main()
