"""A mixed policy under ``torch.compile``, against compiled autocast with the same casts written by hand.

    python bench/compiled.py [--rounds 9] [--json]

A stack of GPT blocks in bf16, with its last product and the norms in FP32. By hand: the model enters autocast
inside its forward, leaves it around the FP32 layer and widens the norms' inputs. Ours: the plain model,
compiled, under a Session. Both are compiled by inductor; forward and backward are timed, interleaved, and
rounds that foreign load disturbed are void. Prints the ratio of the times with a 95 % bootstrap interval, the
graphs and graph breaks of each, and the dtype of the output.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from equipoise.evidence import bootstrap_median
from equipoise.foreign_load import ForeignLoad
from equipoise.plan.machine import host_facts
from equipoise.session import Session

WIDTH, HEADS, DEPTH, VOCABULARY = 256, 4, 4, 256
BATCH, TIME = 8, 128


class Block(nn.Module):
    """A pre-norm transformer block; ``by_hand`` casts as ours does."""

    def __init__(self, by_hand: bool, wide: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.by_hand, self.wide = by_hand, wide

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            return self.norm(x)
        with torch.autocast("cpu", enabled=False):
            return self.norm(x.float())

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.by_hand and self.wide):
            return self.down(x)
        with torch.autocast("cpu", enabled=False):
            return self.down(x.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        q, k, v = self.qkv(self._norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self._down(F.gelu(self.up(self._norm(x))))


class Gpt(nn.Module):
    """Tokens to logits."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(by_hand, i == DEPTH - 1) for i in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.by_hand = by_hand

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) to (B, T, V)."""
        if not self.by_hand:
            return self._run(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self._run(x)


def loop(by_hand: bool, x: torch.Tensor) -> tuple[Callable[[int], float], dict[str, Any]]:
    """The loop, and what compiling it took."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Gpt(by_hand)
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    policy = f"bf16; blocks.{DEPTH - 1}.down=fp32"
    session = None if by_hand else Session(compiled, optimizer, precision=policy)
    seen: dict[str, Any] = {}

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            if session is None:
                out = compiled(x)
                F.cross_entropy(out.flatten(0, 1).float(), x.flatten()).backward()
                optimizer.zero_grad()
            else:
                with session.autocast():
                    out = compiled(x)
                    loss = F.cross_entropy(out.flatten(0, 1), x.flatten())
                session.backward(loss)
                session.drop()
            seen["output"] = str(out.dtype)[6:]
        return (time.perf_counter() - began) / steps

    run(3)
    seen["graphs"] = counters["stats"]["unique_graphs"]
    seen["graph_breaks"] = sum(counters["graph_break"].values())
    return run, seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    x = torch.randint(0, VOCABULARY, (BATCH, TIME))
    hand, hand_seen = loop(True, x)
    ours, ours_seen = loop(False, x)
    hand(2), ours(2)  # the reset before ours took the compiled code along
    ratios: list[float] = []
    times: list[float] = []
    load, voided = ForeignLoad(torch.get_num_threads()), 0
    while len(ratios) < options.rounds and voided < 2 * options.rounds:
        if len(ratios) % 2:
            a, b = hand(3), ours(3)
        else:
            b, a = ours(3), hand(3)
        if (load.share() or 0.0) > 0.15:
            voided += 1
            continue
        ratios.append(b / a)
        times.append(a)
    where = {"cpu": host_facts()["cpu"], "threads": torch.get_num_threads(), "torch": torch.__version__}
    result: dict[str, Any] = {
        "by_hand": hand_seen,
        "ours": ours_seen,
        "rounds": len(ratios),
        "voided": voided,
    }
    if ratios:
        low, high = bootstrap_median(ratios)
        result |= {"ratio": statistics.median(ratios), "low": low, "high": high}
        result |= {"by_hand_ms": statistics.median(times) * 1e3}
    if options.json:
        print(json.dumps({**where, **result}))
        return
    print("{cpu}, {threads} threads, torch {torch}".format(**where))
    for name, seen in (("by hand", hand_seen), ("ours", ours_seen)):
        print(f"{name:8s} {seen['graphs']} graphs, {seen['graph_breaks']} breaks, output {seen['output']}")
    if not ratios:
        print(f"proves nothing: {voided} rounds disturbed by foreign load")
        return
    print(
        f"ours / by hand {result['ratio']:.3f} ({result['low']:.3f} to {result['high']:.3f}), by hand "
        f"{result['by_hand_ms']:.1f} ms, {len(ratios)} rounds, {voided} void"
    )


if __name__ == "__main__":
    main()
