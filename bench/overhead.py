"""What Equipoise adds to a step, against the same loop written by hand.

    python bench/overhead.py [--rounds 15] [--only tiny] [--json]

Both loops do the same arithmetic in the same formats with the same optimizer kernel: FP32, or autocast with
the operators that ours keeps in FP32 cast by hand, the loss among them; GradScaler where it is FP16;
backward, clipping where said, update, zeroing, schedule. A third loop is autocast alone: what it saves is
what FP32 itself costs. Rounds are interleaved in one process, the order turned round each time; a figure is
the median over rounds of the difference with a 95 % bootstrap interval, as a time and as a share of the
hand-written step. Rounds that foreign load disturbed are void. Steps of the tiny model are never sampled,
every 50th of the others is; its rounds are five times as many, of 60 steps.
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


class WideNorm(nn.LayerNorm):
    """A layer norm in FP32 under autocast, as one writes it by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) to (..., D), float32."""
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class Attention(nn.Module):
    """Self-attention with its softmax written out; ``wide`` casts by hand what ours keeps in FP32."""

    def __init__(self, width: int, heads: int, wide: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = WideNorm(width) if wide else nn.LayerNorm(width)
        self.heads, self.wide = heads, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, T, T)
        weights = scores.float().softmax(-1) if self.wide else scores.softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def attention(wide: bool = False) -> nn.Module:
    blocks = [Attention(256, 4, wide) for _ in range(4)]
    return nn.Sequential(nn.Embedding(256, 256), *blocks, nn.Linear(256, 256))


def gpt_cast_by_hand() -> nn.Module:
    model = gpt()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm):
                wide = WideNorm(child.normalized_shape)
                wide.load_state_dict(child.state_dict())
                setattr(parent, name, wide)
    return model


CAST_BY_HAND: dict[Callable[[], nn.Module], Callable[[], nn.Module]] = {
    gpt: gpt_cast_by_hand,
    attention: lambda: attention(wide=True),
}
"""Models with operators that ours keeps in FP32: the same with those cast by hand."""


# name: model, batch, format, clipping, steps in a reading
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, float | None, int]] = {
    "tiny": (mlp, rows, "fp32", None, 60),
    "tiny-clip": (mlp, rows, "fp32", 1.0, 60),
    "tiny-shrunk": (mlp, rows, "fp32", 1e-3, 60),
    "tiny-bf16": (mlp, rows, "bf16", None, 60),
    "resnet18": (resnet18, images, "fp32", None, 1),
    "resnet18-bf16": (resnet18, images, "bf16", None, 1),
    "gpt": (gpt, tokens, "fp32", 1.0, 1),
    "gpt-bf16": (gpt, tokens, "bf16", 1.0, 1),
    "gpt-fp16": (gpt, tokens, "fp16", 1.0, 1),
    "attention-bf16": (attention, tokens, "bf16", 1.0, 1),
}


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Loop = Callable[[int], float]
"""Takes a number of steps, returns seconds a step."""


def setup(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)


def hand_loop(
    case: str, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, wide_loss: bool = True
) -> Loop:
    _, _, fmt, clip, _ = CASES[case]
    model, opt, schedule = setup(make)
    scaler = torch.amp.GradScaler("cpu", enabled=fmt == "fp16")

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            if fmt == "fp32":
                loss = F.cross_entropy(model(x).flatten(0, -2), y)
            else:
                with torch.autocast("cpu", dtype=DTYPES[fmt]):
                    logits = model(x).flatten(0, -2)
                    loss = F.cross_entropy(logits.float() if wide_loss else logits, y)
            if fmt == "fp16":
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
            else:
                loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if fmt == "fp16":
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            opt.zero_grad()
            schedule.step()
        return (time.perf_counter() - began) / steps

    return run


def our_loop(case: str, x: torch.Tensor, y: torch.Tensor) -> Loop:
    make, _, fmt, clip, _ = CASES[case]
    model, opt, schedule = setup(make)
    plan = Plan(policy=Policy(fmt))
    every = 10**9 if case.startswith("tiny") else 50
    session = Session(model, opt, plan=plan, lr_scheduler=schedule, report_every=every)

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            with session.autocast():
                loss = F.cross_entropy(model(x).flatten(0, -2), y)
            session.step(loss, max_grad_norm=clip)
        return (time.perf_counter() - began) / steps

    return run


def loops(case: str) -> dict[str, Loop]:
    """``hand``, ``ours``, and ``autocast`` where that isn't the same arithmetic; each on its own copy."""
    make, batch, fmt, _, _ = CASES[case]
    x, y = batch()
    wide = make if fmt == "fp32" else CAST_BY_HAND.get(make, make)
    found = {"hand": hand_loop(case, wide, x, y), "ours": our_loop(case, x, y)}
    if fmt != "fp32":
        found["autocast"] = hand_loop(case, make, x, y, wide_loss=False)
    return found


def difference(name: str, extra: list[float], base_s: float) -> dict[str, float]:
    low, high = bootstrap_median(extra)
    middle = statistics.median(extra)
    return {
        f"{name}_us": middle * 1e6,
        f"{name}_low_us": low * 1e6,
        f"{name}_high_us": high * 1e6,
        f"{name}_share": middle / base_s,
        f"{name}_high_share": high / base_s,
    }


def measure(case: str, rounds: int) -> dict[str, Any]:
    runs = loops(case)
    steps = CASES[case][4]
    names = list(runs)
    rounds *= 5 if steps > 1 else 1  # short readings in turn: the clock of a core moves within a second
    for run in runs.values():
        run(5 * steps if steps > 1 else 1)
    times: dict[str, list[float]] = {name: [] for name in names}
    kept = voided = 0
    load = ForeignLoad(torch.get_num_threads())
    while kept < rounds and voided < 2 * rounds:
        turn = (kept + voided) % len(names)
        readings = {name: runs[name](steps) for name in names[turn:] + names[:turn]}
        if (load.share() or 0.0) > 0.15:
            voided += 1
            continue
        kept += 1
        for name, reading in readings.items():
            times[name].append(reading)
    if not kept:
        return {"case": case, "proves_nothing": f"{voided} rounds disturbed by foreign load"}
    hand = statistics.median(times["hand"])
    result: dict[str, Any] = {"case": case, "by_hand_us": hand * 1e6, "rounds": kept, "voided": voided}
    pairs = zip(times["ours"], times["hand"], strict=True)
    result |= difference("added", [a - b for a, b in pairs], hand)
    if "autocast" in times:
        pairs = zip(times["hand"], times["autocast"], strict=True)
        result |= difference("fp32_arithmetic", [a - b for a, b in pairs], hand)
    return result


def in_words(r: dict[str, Any]) -> str:
    if "proves_nothing" in r:
        return f"{r['case']:14s} proves nothing: {r['proves_nothing']}"
    text = (
        f"{r['case']:14s} by hand {r['by_hand_us']:10.1f} us, ours {r['added_us']:+8.1f} us "
        f"({r['added_low_us']:+.1f} to {r['added_high_us']:+.1f}), {r['added_share']:+.2%} "
        f"(up to {r['added_high_share']:+.2%}), {r['rounds']} rounds, {r['voided']} void"
    )
    if "fp32_arithmetic_us" in r:
        text += (
            f"\n{'':14s} FP32 arithmetic of the kept operators {r['fp32_arithmetic_us']:+.1f} us, "
            f"{r['fp32_arithmetic_share']:+.2%} (up to {r['fp32_arithmetic_high_share']:+.2%})"
        )
    return text


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
    for result in results:
        print(in_words(result))


if __name__ == "__main__":
    main()
