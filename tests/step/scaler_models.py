"""Small models, their batches and optimizers for the tests of the scaler."""

from collections.abc import Callable
from typing import Any

import torch

INF, NAN = float("inf"), float("nan")
Parameter = torch.nn.Parameter
OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def batches(n: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(n)]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def spoil(model: torch.nn.Module, value: float = INF) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad.view(-1)[3] = value


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_parameter(grad: float = 1.0, n: int = 3) -> tuple[Parameter, torch.optim.Optimizer]:
    p = Parameter(torch.ones(n))
    p.grad = torch.full((n,), grad)
    return p, torch.optim.SGD([p], lr=1.0)


def window(scaler: Any, model: torch.nn.Module, optimizer: Any, batch: Any, bad: float | None = None) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, batch)).backward()
    if bad is not None:
        spoil(model, bad)
    scaler.step(optimizer)
    scaler.update()
