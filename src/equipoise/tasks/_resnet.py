"""The residual network of the picture tasks.

Enters: pictures as bytes (B, C, H, W). Leaves: logits (B, K). Where: the model of ``fashion-mnist`` and
``images``. Source: He and others, 2016: basic blocks, here one to a stage.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """Three stages of one block: ``width``, twice and four times as many channels.

    Bytes are normalised here, not on the host: a quarter of what would cross the bus as FP32. ``mean`` and
    ``std`` are on the scale of a byte.
    """

    def __init__(
        self, channels: int, classes: int, *, width: int, mean: float, std: float, stem_stride: int = 2
    ) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stem_stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(
            _Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits (B, K) for bytes (B, C, H, W)."""
        x = (pictures.float() - self.mean) / self.std
        return self.head(self.stages(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]
