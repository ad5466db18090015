"""A GPT with normalised queries that start at zero: FP16 rounds the epsilon away and divides by zero.

muP and others start the query projection at zero, and RMS norm's first code has an epsilon of 1e-8, which
FP16 rounds to 0. Autocast on a CPU leaves the norm, written out in a user's forward, in half: 0 times 1/0 is
NaN, from the first step on, whatever the loss scale. (On CUDA ``pow`` and ``rsqrt`` are on autocast's FP32
list.) Sources: Tensor Programs V (Yang and others, 2022); RMS norm (Zhang and Sennrich, 2019); query-key
normalisation (Henry and others, 2020).

    equipoise compare bench/fp16/qk_norm.py:task --precision fp16 --emulate --with-autocast --repeats 5
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import Task
from equipoise.tasks import text
from equipoise.tasks._common import warmup_cosine

LAYERS, WIDTH, HEADS = 2, 128, 4
STEPS = 200


def rms_norm(x: Tensor) -> Tensor:
    """Over the last dimension, as LLaMA's code has it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)


class Block(nn.Module):
    """Pre-norm attention and MLP; queries and keys normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        nn.init.zeros_(self.q.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(b, t, HEADS, d // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            rms_norm(q).type_as(v), rms_norm(k).type_as(v), v, is_causal=True
        )
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def task(seed: int, data: str | None) -> Task:
    """The shipped ``text`` task with a smaller GPT of such blocks."""
    like = text.task(seed, data)
    torch.manual_seed(seed)
    model = text.GPT(LAYERS, WIDTH, HEADS)
    model.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    return replace(
        like,
        name="qk-norm",
        about=f"byte-level GPT with query-key norm, {LAYERS} layers of {WIDTH}",
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, STEPS),
        steps=STEPS,
        eval_every=STEPS // 2,
    )
