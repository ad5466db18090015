"""Pictures that lie in memory as bytes.

Enters: uint8 pictures (N, C, H, W) and their labels (N,). Leaves: a data set read by the batch. Where: the
data of ``fashion-mnist`` and of ``images`` from an ``.npz``.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Bytes (C, H, W) and a class for each of ``rows``; the arrays are shared between splits, not copied."""

    def __init__(self, pictures: Tensor, labels: Tensor, rows: np.ndarray | None = None) -> None:
        self._pictures, self._labels = pictures, labels
        self._rows = torch.arange(len(labels)) if rows is None else torch.from_numpy(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index]
        return self._pictures[row], self._labels[row]

    def get_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Bytes (B, C, H, W) and classes (B,)."""
        rows = self._rows[torch.from_numpy(indices)]
        return self._pictures[rows], self._labels[rows]
