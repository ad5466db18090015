"""``text``: a byte-level GPT on source code that is on every user's disk.

Enters: the Python standard library's own source, or a file or folder of text. Leaves: a Task whose metric
is bits per byte. Where: ``equipoise train text``. Source: GPT-2's pre-norm blocks (Radford and others,
2019).

The split is by file and fixed: the hash of a file's relative path says where it goes, under every seed. A
case is a window of ``WINDOW`` bytes and the byte after each of them.

Shapes: B windows, T bytes, D channels, H heads, V = 256 bytes.
"""

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..errors import TaskError
from ..task import Task
from ._common import name_hash, seeded, warmup_cosine

WINDOW = 128
_LAYERS, _WIDTH, _HEADS = 4, 256, 4
_VAL_WINDOWS, _TEST_WINDOWS = 128, 256
"""Enough for a metric to a few per mille; an evaluation must not cost more than a few steps."""
_SKIPPED = frozenset({
    # not the library itself, or not on every system: packages, tests, and two folders of tables
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
})  # fmt: skip
_MARGIN = 0.01
_LOG2 = math.log(2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D/H)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A causal transformer over bytes.

    A byte is embedded together with the two before it, each by a table of its own: bytes alone say little,
    and 80 steps are too few to learn pairs and triples through attention.
    """

    def __init__(self, layers: int = _LAYERS, width: int = _WIDTH, heads: int = _HEADS, window: int = WINDOW):
        super().__init__()
        self.window = window
        self.byte = nn.ModuleList(nn.Embedding(256, width) for _ in range(3))
        self.place = nn.Embedding(window, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=width**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                # The residual stream grows with depth: GPT-2's remedy.
                nn.init.normal_(weight, std=(2 * layers * width) ** -0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (B, T, V) of the next byte, for bytes (B, T)."""
        if text.shape[1] > self.window:
            raise TaskError(f"the model reads windows of {self.window} bytes at most; {text.shape[1]} came")
        x = self.place.weight[: text.shape[1]] + self.byte[0](text)
        for back in (1, 2):
            seen = max(text.shape[1] - back, 0)
            x = x + F.pad(self.byte[back](text[:, :seen]), (0, 0, text.shape[1] - seen, 0))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a byte string: case i is ``text[start : start + T]`` and the same one byte further on."""

    def __init__(self, text: Tensor, starts: np.ndarray) -> None:
        self._text, self._starts = text, torch.from_numpy(starts)
        self._span = torch.arange(WINDOW + 1)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.get_batch(np.array([index]))
        return x[0], y[0]

    def get_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Bytes (B, T) and the byte after each (B, T), int64."""
        rows = self._starts[torch.from_numpy(indices)]
        windows = self._text[rows[:, None] + self._span].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def task(seed: int, data: str | None) -> Task:
    """A byte-level GPT on the standard library's source, or on the text under ``data``.

    Raises:
        TaskError: no text, or too little of it.
    """
    splits, files = _splits(_read(data))
    model = seeded(seed, GPT)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    steps = 80
    return Task(
        name="text",
        about=f"byte-level GPT, {_LAYERS} layers of {_WIDTH}, on "
        + (f"the text in {data}" if data else "the source of Python's standard library"),
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps),
        max_grad_norm=1.0,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        group=files,
        loss=_loss,
        predict=_bits_per_byte,
        labels=_bytes_judged,
        metric=mean_bits,
        metric_name="bits per byte",
        higher_is_better=False,
        margin=_MARGIN,
        margin_relative=True,
        batch_size=16,
        eval_batch_size=64,
        steps=steps,
        eval_every=20,
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


def _bits_per_byte(model: nn.Module, batch: Any) -> Tensor:
    """The score of a window: how many bits each of its bytes costs on average, (B,)."""
    logits = model(batch[0]).float().transpose(1, 2)  # (B, V, T)
    return F.cross_entropy(logits, batch[1], reduction="none").mean(1) / _LOG2


def _bytes_judged(batch: Any) -> Tensor:
    """The label of a window: over how many bytes its score is a mean, (B,)."""
    return torch.full((len(batch[1]),), batch[1].shape[1])


def mean_bits(labels: np.ndarray, scores: np.ndarray) -> float:
    """Bits per byte over all windows: labels are the bytes in each (N,), scores their bits per byte (N,)."""
    return float(np.average(scores.astype(np.float64), weights=labels))


def _read(data: str | None) -> dict[str, bytes]:
    """Relative path -> content, in the order of the paths."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        texts = {
            file.relative_to(root).as_posix(): file.read_bytes()
            for file in sorted(root.rglob("*.py"))
            if _SKIPPED.isdisjoint(file.relative_to(root).parts) and file.is_file()
        }
        if not texts:
            raise TaskError(f"task 'text': {root} holds no Python source; give text of your own as text:PATH")
        return texts
    root = Path(data)
    if root.is_file():
        return {root.name: root.read_bytes()}
    if not root.is_dir():
        raise TaskError(f"task 'text': there is no file or folder {data}; give one that holds text")
    texts = {}
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            content = file.read_bytes()
            if b"\0" not in content[:8192]:  # what git, too, takes for a binary file
                texts["/".join(parts)] = content
    if not texts:
        raise TaskError(
            f"task 'text': the folder {data} holds no text file; binary and hidden files don't count"
        )
    return texts


def _splits(texts: dict[str, bytes]) -> tuple[dict[str, Windows], dict[str, Sequence[str]] | None]:
    """Three data sets, and the file of each of their windows where files are not divided.

    A tenth of the files goes to test and a tenth to val. Where that leaves a split empty, there are too few
    files: each is divided by position instead, eight tenths, one, and one.
    """
    windows: dict[str, list[tuple[int, int]]] = {"train": [], "val": [], "test": []}
    names, at = list(texts), 0
    spans = []
    for number, name in enumerate(names):
        spans.append((number, at, at + len(texts[name])))
        at += len(texts[name])
    for number, start, end in spans:
        share = name_hash(names[number]) / 2**32
        split = "test" if share < 0.1 else "val" if share < 0.2 else "train"
        windows[split] += [(begin, number) for begin in range(start, end - WINDOW, WINDOW)]
    by_file = all(windows.values())
    if not by_file:
        windows = {"train": [], "val": [], "test": []}
        for number, start, end in spans:
            begins = [(begin, number) for begin in range(start, end - WINDOW, WINDOW)]
            cuts = (len(begins) * 8 // 10, len(begins) * 9 // 10)
            windows["train"] += begins[: cuts[0]]
            windows["val"] += begins[cuts[0] : cuts[1]]
            windows["test"] += begins[cuts[1] :]
    if not all(windows.values()):
        raise TaskError(
            f"task 'text': {at} bytes in {len(names)} files are too little text; one file of at least "
            f"{10 * (WINDOW + 1)} bytes is needed: add text"
        )
    for split, most in (("val", _VAL_WINDOWS), ("test", _TEST_WINDOWS)):
        windows[split] = _spread(windows[split], most)
    text = torch.frombuffer(bytearray(b"".join(texts.values())), dtype=torch.uint8)
    data = {
        split: Windows(text, np.array([begin for begin, _ in chosen], dtype=np.int64))
        for split, chosen in windows.items()
    }
    files: dict[str, Sequence[str]] = {
        split: [names[number] for _, number in chosen] for split, chosen in windows.items()
    }
    return data, files if by_file else None


def _spread(items: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most ``most`` items, evenly spread."""
    if len(items) <= most:
        return items
    return [items[int(place)] for place in np.linspace(0, len(items) - 1, most)]
