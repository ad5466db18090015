"""Ways to keep an operator in FP32 under half: what each reaches, and what a call costs.

    python bench/mechanisms.py [--json]

Four ways are compared on a CPU under bf16 autocast: Python kernels at autocast's dispatch key (what Equipoise
does), a ``TorchFunctionMode``, forward hooks on modules, and rewriting the traced graph. For each: does
softmax come out in FP32 as function, tensor method and module, does a norm inside a function of torch's own
(``F.normalize``), in a worker thread that enters it, and under ``torch.compile(fullgraph=True)``; and the
microseconds of a call of a sensitive operator (softmax), of another one (relu), and of softmax under other
people's autocast at the same time. Times are the least of seven runs of 5,000 calls on 4x8 values.
"""

import argparse
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.plan.machine import host_facts
from equipoise.step.operators import Kernels, autocast

X = torch.randn(4, 8).bfloat16()
SOFTMAX = nn.Softmax(-1)
Context = Callable[[], AbstractContextManager[Any]]


def plain() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def kernels() -> Iterator[Context]:
    held = Kernels("cpu")
    yield lambda: autocast("cpu", torch.bfloat16, True)
    held.remove()


LISTED = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.Tensor.norm, torch.norm}


class _Widen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LISTED:
            args = tuple(a.float() if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))


@contextmanager
def function_mode() -> Iterator[Context]:
    @contextmanager
    def context() -> Iterator[None]:
        with plain(), _Widen():
            yield

    yield context


@contextmanager
def module_hooks() -> Iterator[Context]:
    def widen(module: nn.Module, args: Any) -> Any:
        return tuple(a.float() for a in args)

    handle = SOFTMAX.register_forward_pre_hook(widen)
    yield plain
    handle.remove()


def norm_inside(x: torch.Tensor) -> torch.Tensor:
    """FP32 only if the norm inside of F.normalize was taken in FP32."""
    return F.normalize(x, dim=-1)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": lambda x: torch.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "module": SOFTMAX,
    "inside": norm_inside,
}


def is_wide(call: Callable[[torch.Tensor], torch.Tensor], context: Context) -> bool:
    with context():
        return call(X).dtype is torch.float32


def in_thread(context: Context) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_wide(FORMS["function"], context)))
    thread.start()
    thread.join()
    return found[0]


def compiled(context: Context) -> bool:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return is_wide(torch.compile(FORMS["function"], backend="aot_eager", fullgraph=True), context)
        except Exception:  # a mechanism that torch.compile refuses
            return False


def call_us(call: Callable[[torch.Tensor], torch.Tensor], context: Context) -> float:
    best = float("inf")
    with context():
        for _ in range(7):
            began = time.perf_counter()
            for _ in range(5000):
                call(X)
            best = min(best, time.perf_counter() - began)
    return best / 5000 * 1e6


def rewritten(gm: Any, example_inputs: Any) -> Any:
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (torch.softmax, F.softmax):
            with gm.graph.inserting_before(node):
                node.replace_input_with(node.args[0], gm.graph.call_method("float", (node.args[0],)))
    gm.recompile()
    return gm.forward


@contextmanager
def nothing() -> Iterator[Context]:
    yield plain


def measure() -> list[dict[str, Any]]:
    rows = []
    ways: dict[str, Callable[[], AbstractContextManager[Context]]] = {
        "torch alone": nothing,
        "kernels": kernels,
        "function mode": function_mode,
        "module hooks": module_hooks,
    }
    for name, way in ways.items():
        with way() as context:
            row: dict[str, Any] = {"way": name, "reaches": {}}
            for form, call in FORMS.items():
                row["reaches"][form] = is_wide(call, context)
            row["reaches"] |= {"thread": in_thread(context), "compile": compiled(context)}
            listed = SOFTMAX if name == "module hooks" else FORMS["function"]
            row |= {
                "softmax_us": call_us(listed, context),
                "relu_us": call_us(F.relu, context),
                "others_softmax_us": call_us(FORMS["function"], plain),
            }
            rows.append(row)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = {form: is_wide(torch.compile(FORMS[form], backend=rewritten), plain) for form in FORMS}
    rows.append(
        {"way": "graph rewrite (compiled code alone)", "reaches": graph | {"compile": graph["function"]}}
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure()
    where = {"cpu": host_facts()["cpu"], "threads": torch.get_num_threads(), "torch": torch.__version__}
    if options.json:
        print(json.dumps({**where, "results": rows}))
        return
    print("{cpu}, {threads} threads, torch {torch}".format(**where))
    for row in rows:
        reaches = " ".join(f"{k}={'yes' if v else 'no'}" for k, v in row["reaches"].items())
        times = " ".join(
            f"{k}={row[k]:.2f}" for k in ("softmax_us", "relu_us", "others_softmax_us") if k in row
        )
        print(f"{row['way']:36s} {reaches}  {times}")


if __name__ == "__main__":
    main()
