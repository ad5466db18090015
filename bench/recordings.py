"""Recordings of gradients: four small models trained in FP32, what FP16 would have to hold at each step.

Enters: data that every installation has (scikit-learn's digits, the Python standard library's source).
Leaves: for each model ``NAME.npz`` in a folder. Where: by hand, before ``bench/prediction.py`` replays loss
scales on them.

    python bench/recordings.py FOLDER [--only cnn] [--steps 40000]

Recorded are the numbers that FP16 autocast holds in half during backward: gradients of the outputs of linear,
convolution and recurrent layers and of activations, and gradients of these layers' weights, all of a loss
that is a mean and has no scale. A step is a few milliseconds on one core.

The file: ``amax_log2`` (N,) and ``weights_amax_log2`` (N,), log2 of the largest magnitude of all and of
weight gradients alone; ``counts`` (N, E), int32, numbers in [2**e, 2**(e + 1)) for e from ``lowest`` on,
zeros left out; ``loss`` (N,).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.step.ranges import LOWEST, exponent_counts
from equipoise.tasks import text
from equipoise.tasks._common import warmup_cosine

STEPS = 40_000
IN_HALF = (nn.Linear, nn.Conv2d, nn.LSTM, nn.ReLU, nn.SiLU, nn.MaxPool2d)
"""Modules whose outputs, and weights, autocast holds in half; norms and embeddings stay in FP32."""

Batch = Callable[[], Tensor]
"""Draws a batch and returns its loss."""


class Recorder:
    """Collects one step's gradients of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs: list[Tensor] = []
        modules = [m for m in model.modules() if isinstance(m, IN_HALF)]
        self._weights = [p for m in modules for p in m.parameters()]
        for module in modules:
            module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        out = output[0] if isinstance(output, tuple) else output
        out.register_hook(self._outputs.append)

    def take(self) -> tuple[float, float, np.ndarray]:
        """The largest magnitude of all and of the weights' gradients, and how many have each exponent."""
        weights = [p.grad.reshape(-1) for p in self._weights if p.grad is not None]
        n = sum(w.numel() for w in weights)
        flat = torch.cat([*weights, *(g.reshape(-1) for g in self._outputs)])
        self._outputs.clear()
        largest = flat.abs()
        return float(largest.amax()), float(largest[:n].amax()), exponent_counts(flat)[1:-1].numpy()


def digits() -> tuple[Tensor, Tensor]:
    """Grey values (1797, 1, 8, 8) in 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16).float().view(-1, 1, 8, 8), torch.from_numpy(labels)


def cnn(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, object, Batch]:
    """A classifier under SGD with momentum; images shifted and made noisy; the rate falls in three steps."""
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    drops = [steps * 4 // 10, steps * 7 // 10, steps * 9 // 10]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, gamma=0.2)

    def batch() -> Tensor:
        rows = torch.randint(len(x), (32,))
        dy, dx = torch.randint(-1, 2, (2,)).tolist()
        seen = torch.roll(x[rows], (dy, dx), (2, 3)) + 0.25 * torch.randn(32, 1, 8, 8)
        return F.cross_entropy(model(seen), y[rows])

    return model, optimizer, schedule, batch


def gpt(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, object, Batch]:
    """A byte-level GPT on source code: AdamW, warm-up and cosine."""
    windows = text.task(0, None).train
    model = text.GPT(layers=2, width=64, heads=4, window=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batch() -> Tensor:
        x, y = windows.get_batch(np.random.randint(len(windows), size=6))
        at = int(np.random.randint(64))
        return F.cross_entropy(model(x[:, at : at + 64]).flatten(0, 1), y[:, at : at + 64].flatten())

    return model, optimizer, warmup_cosine(optimizer, steps), batch


class CharLSTM(nn.Module):
    """Bytes (B, T) to logits (B, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 48), nn.LSTM(48, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte."""
        return self.head(self.lstm(self.embed(x))[0])


def lstm(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, object, Batch]:
    """A byte-level LSTM on source code: Adam, the rate halved in steps."""
    windows = text.task(0, None).train
    model = CharLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(steps // 6, 1), gamma=0.5)

    def batch() -> Tensor:
        x, y = windows.get_batch(np.random.randint(len(windows), size=12))
        at = int(np.random.randint(96))
        return F.cross_entropy(model(x[:, at : at + 32]).flatten(0, 1), y[:, at : at + 32].flatten())

    return model, optimizer, schedule, batch


class Denoiser(nn.Module):
    """Noisy images (B, 1, 8, 8) and the log of their noise (B,) to clean images."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(3)
        )

    def forward(self, x: Tensor, log_noise: Tensor) -> Tensor:
        """A residual network that is told the noise level."""
        h = self.first(x) + self.level(log_noise[:, None])[:, :, None, None]
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


def diffusion(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, object, Batch]:
    """Digits denoised at random levels of noise; each image's loss is weighted by min(1 / noise**2, 25)."""
    x, _ = digits()
    x = 2 * x - 1
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def batch() -> Tensor:
        clean = x[torch.randint(len(x), (16,))]
        log_noise = -1.2 + 1.2 * torch.randn(16)  # log-normal levels, as in Karras and others, 2022
        noise = log_noise.exp()[:, None, None, None]
        off = F.mse_loss(model(clean + noise * torch.randn_like(clean), log_noise), clean, reduction="none")
        return (off * (noise**-2).clamp(max=25.0)).mean()

    return model, optimizer, warmup_cosine(optimizer, steps), batch


MODELS = {"cnn": cnn, "gpt": gpt, "lstm": lstm, "diffusion": diffusion}


def record(name: str, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Train one of the models; the arrays of its file."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    model, optimizer, schedule, batch = MODELS[name](steps)
    recorder = Recorder(model)
    amax, weights_amax, losses = (np.zeros(steps, np.float32) for _ in range(3))
    counts = np.zeros((steps, 277), np.int32)
    for i in range(steps):
        loss = batch()
        optimizer.zero_grad()
        loss.backward()
        largest, weights_largest, counts[i] = recorder.take()
        amax[i], weights_amax[i], losses[i] = np.log2(largest), np.log2(weights_largest), loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    used = np.nonzero(counts.any(0))[0]
    return {
        "amax_log2": amax,
        "weights_amax_log2": weights_amax,
        "loss": losses,
        "counts": counts[:, used[0] : used[-1] + 1],
        "lowest": np.array(LOWEST + used[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=MODELS, help="this model alone")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in [args.only] if args.only else MODELS:
        start = time.perf_counter()
        arrays = record(name, args.steps)
        np.savez_compressed(args.folder / f"{name}.npz", **arrays)
        q = np.percentile(arrays["amax_log2"], [0, 50, 99, 100])
        first, last = arrays["loss"][:100].mean(), arrays["loss"][-1000:].mean()
        print(
            f"{name}: {args.steps} steps in {time.perf_counter() - start:.0f} s, loss {first:.3f} to"
            f" {last:.3f}; log2 of the largest gradient: least {q[0]:.1f}, median {q[1]:.1f}, 99 %"
            f" {q[2]:.1f}, largest {q[3]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
