"""A tiny task with everything that a resume could get wrong, and what to compare of two runs of it."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from equipoise.watch import snapshot

SOURCE = '''
import random, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from equipoise.task import Task

class Noisy(Dataset):
    """Draws from three generators for each sample, and takes its time."""
    def __init__(self, n, seed, pause_s=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 8, generator=generator)
        self.y = (self.x[:, 0] > 0).long()
        self.pause_s = pause_s
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        time.sleep(self.pause_s)
        noise = random.uniform(0.9, 1.1) + float(np.random.rand())
        return self.x[i] * noise + 0.1 * torch.randn(8), self.y[i]

def accuracy(labels, scores):
    return float((scores.argmax(1) == labels).mean())

def task(seed, data, hidden=16, steps={steps}):
    model = nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.3), nn.ReLU(), nn.Linear(hidden, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Task(
        name="tiny", model=model, optimizer=optimizer, train=Noisy(53, 0, {pause_s}), val=Noisy(40, 1), test=Noisy(40, 2),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        metric=accuracy, metric_name="accuracy", batch_size=8, steps=steps, eval_every={eval_every},
        max_grad_norm=1.0, lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )

def wider(seed, data):
    return task(seed, data, hidden=17)
'''  # noqa: E501

CLOCKS = {"time_s", "parts", "elapsed_s", "setup_s", "samples_per_s", "peak_mem_bytes", "resumes"}
"""What may differ between a run that was stopped and one that was not."""


def write_task(folder: Path, *, steps: int = 12, eval_every: int = 4, pause_s: float = 0.0) -> str:
    """Write the task's file; what to ask for on the command line."""
    path = folder / "tiny.py"
    text = SOURCE
    for name, value in (("steps", steps), ("eval_every", eval_every), ("pause_s", pause_s)):
        text = text.replace("{" + name + "}", str(value))
    path.write_text(text)
    return f"{path}:task"


def start(*words: Any, **options: Any) -> subprocess.Popen[str]:
    """``equipoise train`` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise", "train", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in CLOCKS}
    return [without_clocks(v) for v in value] if isinstance(value, list | tuple) else value


def result_of(run: Path) -> dict[str, Any]:
    """Everything that a run's bits decide."""
    newest = snapshot.checkpoints(run / "checkpoints")[-1]
    state = snapshot.load(newest)
    metrics = json.loads((run / "metrics.json").read_text())
    del state["trainer"]["session"]["history"]  # holds times; its content is that of steps.jsonl
    session = state["trainer"]["session"]
    session["plan"] = session["plan"].replace('source = "named"', 'source = "pinned"')  # the same decisions
    del state["offsets"]  # the rows of steps.jsonl differ in length by the digits of their times
    (table,) = (run / "predictions").glob("*-plan.csv")
    with table.open(newline="") as file:
        predictions = list(csv.reader(file))
    return {
        "checkpoint": without_clocks(state),
        "best": snapshot.load(run / metrics["best"]["file"]),
        "metrics": without_clocks(metrics),
        "rows": [without_clocks(json.loads(line)) for line in (run / "steps.jsonl").read_text().splitlines()],
        "predictions": predictions,
    }


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places where two results differ; tensors are compared bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        lone = [f"{where}[{k!r}] is in one only" for k in a.keys() ^ b.keys()]
        return lone + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}[{k!r}]")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]
