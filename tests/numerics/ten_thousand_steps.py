"""10,000 steps of a kind that loss scaling must survive; run by the test beside it, prints what is left.

    python ten_thousand_steps.py KIND [STEPS]
    torchrun --nproc-per-node=2 ten_thousand_steps.py one-bad-rank [STEPS]
"""

import json
import math
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from equipoise import Session

SMALLEST, LARGEST = 2.0**-24, 2.0**48
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 8, generator=DATA), torch.randn(16, 2, generator=DATA)


class Spoiled(nn.Module):
    """Identity whose gradient is infinite while ``bad``."""

    bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bad and x.requires_grad:
            x = x.clone()
            x.register_hook(lambda grad: torch.full_like(grad, math.inf))
        return x


def main(kind: str, steps: int) -> dict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    spoiled = Spoiled()
    inner = nn.Linear(8, 8)
    if kind == "one-bad-layer":
        nn.init.constant_(inner.bias, 1e5)  # no FP16 number
    model = nn.Sequential(inner, nn.Tanh(), spoiled, nn.Linear(8, 2))
    called: nn.Module = model
    if kind == "one-bad-rank":
        called = nn.parallel.DistributedDataParallel(model)
    # Gradients of 1e5 are beyond FP16 at any scale from 1 on.
    weight = 2e6 if kind == "fits-below-1" else 1.0
    session = Session(
        called,
        torch.optim.SGD(model.parameters(), lr=1e-2 / weight),
        precision="fp16",
        emulate=True,
        on_stall="record",
    )
    least, most, skipped, last = math.inf, 0.0, 0, 0
    for step in range(steps):
        spoiled.bad = {
            "always": True,
            "alternating": step % 2 == 0,
            "one-bad-rank": rank == 1 and (step % 7 == 3 or 200 <= step < 300),
        }.get(kind, False)
        with session.autocast():
            loss = nn.functional.mse_loss(called(X + rank).float(), Y) * weight
        report = session.step(loss)
        skipped += report.skipped
        last = step if report.skipped else last
        least, most = min(least, report.scale), max(most, report.scale)
    return {
        "least": least,
        "most": most,
        "scale": session.scaler.get_scale(),
        "skipped": skipped,
        "last_skip": last,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "weights": sum(float(p.double().abs().sum()) for p in model.parameters()),
        "moved": float(loss) < 0.9 * weight * float(nn.functional.mse_loss(torch.zeros_like(Y), Y)),
        "decisions": [(d.what, d.where, d.step) for d in session.decisions],
        "text": [d.reason for d in session.decisions],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        results: list = [None, None]
        dist.all_gather_object(results, main(asked, count))
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(results), flush=True)
        dist.destroy_process_group()
    else:
        print("RESULT " + json.dumps([main(asked, count)]), flush=True)
