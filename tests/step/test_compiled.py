"""A policy under ``torch.compile``: eager's formats in forward and backward, no graph of our own."""

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn import functional as F

from equipoise.session import Session

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
MIXED = "bf16; blocks.1.down=fp32"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x)))).softmax(-1)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(depth: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(depth)


class Graphs:
    """A backend that runs graphs as they are and keeps the dtypes of their products."""

    def __init__(self) -> None:
        self.products: dict[str, list[list[torch.dtype]]] = {"forward": [], "backward": []}
        self.backend = aot_autograd(fw_compiler=self._see("forward"), bw_compiler=self._see("backward"))

    def _see(self, direction: str) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        def compile_graph(graph: Any, inputs: Any) -> Any:
            mms = [n for n in graph.graph.nodes if n.op == "call_function" and "mm" in str(n.target)]
            self.products[direction].append([n.meta["val"].dtype for n in mms])
            return make_boxed_func(graph.forward)

        return compile_graph


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # torch 2.13 warns about itself while it compiles
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield
    torch._dynamo.reset()


def train(session: Session, model: Callable[..., Any], steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        with session.autocast():
            loss = model(X).float().square().mean()
        losses.append(session.step(loss).loss)
    return losses


def session_of(model: nn.Module, called: nn.Module | None = None, precision: str = MIXED) -> Session:
    user_calls = model if called is None else called
    return Session(user_calls, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)


def whole(model: Net, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def in_place(model: Net, backend: Any) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def blocks_in_place(model: Net, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(model: Net, backend: Any) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("way", [whole, in_place, blocks_in_place, blocks_wrapped])
def test_f14_compiled_trains_as_eager_does_to_the_bit(way: Callable[..., nn.Module]) -> None:
    eager = net()
    expected = train(session_of(eager), eager)
    graphs, model = Graphs(), net()
    called = way(model, graphs.backend)
    policy = MIXED if way is not blocks_wrapped else r"bf16; re:blocks\.1\..*down=fp32"
    session = session_of(model, called, policy)
    assert train(session, called) == expected
    assert not counters["graph_break"]
    backward = [dtype for graph in graphs.products["backward"] for dtype in graph]
    # a Linear's backward has two products; the one of blocks.1.down is FP32 in both
    assert backward.count(torch.float32) == 2 and torch.bfloat16 in backward
    session.restore()


def test_one_graph_for_training_and_none_more_as_steps_go_on() -> None:
    model = net()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    session = session_of(model, called)
    train(session, called, 2)
    assert counters["stats"]["unique_graphs"] == 1
    train(session, called, 6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_twelve_compiled_blocks_share_their_graphs() -> None:
    model = net(12)
    session = session_of(model, blocks_in_place(model, "aot_eager"))
    train(session, model, 3)
    # the first block's input needs no gradient, and one block has an FP32 layer
    assert counters["stats"]["unique_graphs"] == 3


def test_autocast_inside_a_compiled_function() -> None:
    eager = net()
    expected = train(session_of(eager), eager)
    graphs, model = Graphs(), net()
    session = session_of(model)

    @torch.compile(backend=graphs.backend, fullgraph=True)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with session.autocast():
            return model(x).float().square().mean()

    assert [session.step(loss_of(X)).loss for _ in range(4)] == expected
    assert graphs.products["backward"][0].count(torch.float32) == 2


def test_a_function_entered_under_autocast_keeps_its_fp32_layer_out_of_the_graph() -> None:
    eager = net()
    expected = train(session_of(eager), eager)
    model = net()
    session = session_of(model)
    called = torch.compile(lambda x: model(x), backend="aot_eager")
    with pytest.warns(UserWarning, match="it runs uncompiled"):
        assert train(session, called) == expected


def test_compiled_before_the_session_under_plain_autocast() -> None:
    model = net()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        called(X)
    eager = net()
    expected = train(session_of(eager), eager)
    assert train(session_of(model, called), called) == expected


def test_restore_gives_the_compiled_model_back() -> None:
    model = net()
    called = torch.compile(model, backend="aot_eager")
    own = called.forward
    session = session_of(model, called)
    assert called.forward is not own
    session.restore()
    assert called.forward is own and "forward" not in vars(model)


SOFTMAX = """
    import sys, torch
    from torch import nn
    from equipoise.session import Session
    model = nn.Linear(4, 4)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    def f(x):
        return torch.softmax(x, -1), torch.nn.functional.layer_norm(x, (4,)), x.exp()
    compiled = torch.compile(f, fullgraph=True)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for way in sys.argv[1]:
        with session.autocast() if way == "o" else torch.autocast("cpu", dtype=torch.bfloat16):
            print(way, *{str(t.dtype)[6:] for t in compiled(x)})
"""


@pytest.mark.parametrize("orders", [("po", "op"), ("op", "po")])
def test_plain_and_ours_share_no_code_in_a_process_nor_on_disk(orders: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch._inductor")
    script = tmp_path / "softmax.py"
    script.write_text(textwrap.dedent(SOFTMAX))
    for order in orders:
        done = subprocess.run(
            [sys.executable, str(script), order],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if "No working C++ compiler" in done.stderr:
            pytest.skip("no C++ compiler on this machine")
        assert done.returncode == 0, done.stderr[-2000:]
        found = dict(line.split() for line in done.stdout.splitlines())
        assert found == {"p": "bfloat16", "o": "float32"}
