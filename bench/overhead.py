"""What Equipoise adds to a step, against the same loop written by hand.

    python bench/overhead.py [--rounds 15] [--only tiny] [--json]

Both loops do the same arithmetic in the same format with the same optimizer kernel: FP32 or autocast,
backward, clipping where said, update, zeroing, schedule. Rounds are interleaved in one process, the order
turned round each time; the figure is the median over rounds of (ours - by hand) with a 95 % bootstrap
interval, as a time and as a share of the hand-written step. Rounds that foreign load disturbed are void.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from equipoise.evidence import bootstrap_median
from equipoise.foreign_load import ForeignLoad
from equipoise.plan.machine import host_facts
from equipoise.policy import Plan, Policy
from equipoise.session import Session


class Block(nn.Module):
    """A residual block of ResNet-18 for 32x32 images."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        if not changes:
            self.skip = nn.Sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, I, S, S) to (B, O, S / stride, S / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


def resnet18() -> nn.Module:
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [b for i, o, s in widths for b in (Block(i, o, s), Block(o, o, 1))]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def gpt() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(256, 256),
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        nn.Linear(256, 256),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 256, (8, 128))
    return x, x.flatten()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 30), torch.randint(0, 2, (32,))


# name: model, batch, format, clipping, steps in a reading
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, float | None, int]] = {
    "tiny": (mlp, rows, "fp32", None, 300),
    "tiny-clip": (mlp, rows, "fp32", 1.0, 300),
    "tiny-bf16": (mlp, rows, "bf16", None, 300),
    "resnet18": (resnet18, images, "fp32", None, 1),
    "resnet18-bf16": (resnet18, images, "bf16", None, 1),
    "gpt": (gpt, tokens, "fp32", 1.0, 1),
    "gpt-bf16": (gpt, tokens, "bf16", 1.0, 1),
}


def loops(case: str) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """The hand-written loop and ours, each on its own copy; seconds of a number of steps."""
    make, batch, fmt, clip, _ = CASES[case]
    x, y = batch()
    dtype = torch.bfloat16

    def setup() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = make()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)

    model, opt, schedule = setup()

    def by_hand(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            if fmt == "fp32":
                loss = F.cross_entropy(model(x).flatten(0, -2), y)
            else:
                with torch.autocast("cpu", dtype=dtype):
                    loss = F.cross_entropy(model(x).flatten(0, -2), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
            schedule.step()
        return (time.perf_counter() - began) / steps

    ours_model, ours_opt, ours_schedule = setup()
    session = Session(
        ours_model, ours_opt, plan=Plan(policy=Policy(fmt)), lr_scheduler=ours_schedule, report_every=50
    )

    def ours(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            with session.autocast():
                loss = F.cross_entropy(ours_model(x).flatten(0, -2), y)
            session.step(loss, max_grad_norm=clip)
        return (time.perf_counter() - began) / steps

    return by_hand, ours


def measure(case: str, rounds: int) -> dict[str, Any]:
    by_hand, ours = loops(case)
    steps = CASES[case][4]
    by_hand(steps), ours(steps)
    base: list[float] = []
    extra: list[float] = []
    voided = 0
    load = ForeignLoad(torch.get_num_threads())
    while len(base) < rounds and voided < 2 * rounds:
        if (len(base) + voided) % 2:
            a, b = by_hand(steps), ours(steps)
        else:
            b, a = ours(steps), by_hand(steps)
        if (load.share() or 0.0) > 0.15:
            voided += 1
            continue
        base.append(a)
        extra.append(b - a)
    if not base:
        return {"case": case, "proves_nothing": f"{voided} rounds disturbed by foreign load"}
    low, high = bootstrap_median(extra)
    hand = statistics.median(base)
    return {
        "case": case,
        "by_hand_us": hand * 1e6,
        "added_us": statistics.median(extra) * 1e6,
        "low_us": low * 1e6,
        "high_us": high * 1e6,
        "added_share": statistics.median(extra) / hand,
        "high_share": high / hand,
        "rounds": len(base),
        "voided": voided,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(case, options.rounds) for case in options.only or CASES]
    where = {"cpu": host_facts()["cpu"], "threads": torch.get_num_threads(), "torch": torch.__version__}
    if options.json:
        print(json.dumps({**where, "results": results}))
        return
    print("{cpu}, {threads} threads, torch {torch}".format(**where))
    for r in results:
        if "proves_nothing" in r:
            print(f"{r['case']:14s} proves nothing: {r['proves_nothing']}")
            continue
        print(
            f"{r['case']:14s} by hand {r['by_hand_us']:10.1f} us, ours {r['added_us']:+8.1f} us "
            f"({r['low_us']:+.1f} to {r['high_us']:+.1f}), {r['added_share']:+.2%} "
            f"(up to {r['high_share']:+.2%}), {r['rounds']} rounds, {r['voided']} void"
        )


if __name__ == "__main__":
    main()
