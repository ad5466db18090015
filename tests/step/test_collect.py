"""A collector counts what passes each layer in a watched step and nothing else; it goes without a trace."""

import pytest
import torch
from torch import nn

from equipoise.errors import SessionError
from equipoise.step.collect import KINDS, Collector
from equipoise.step.ranges import bin_of, exponent_counts


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def model_and_optimizer(**options: object) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), Doubled(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_each_kind_is_exactly_what_passed() -> None:
    model, optimizer = model_and_optimizer()
    collector = Collector(model, [optimizer])
    x = torch.randn(5, 4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with collector.watching():
        train(model, optimizer, x)
    found = collector.histograms()
    assert list(found) == ["0", "2", "3"]
    assert set(found["3"]) == set(KINDS)
    assert set(found["2"]) == {"activations", "activation_gradients"}
    twin, _ = model_and_optimizer()
    y = twin(x)
    y.square().sum().backward()
    head = twin[3]

    def both(*tensors: torch.Tensor) -> torch.Tensor:
        return sum((exponent_counts(t) for t in tensors), torch.zeros(279, dtype=torch.int64))

    assert found["3"]["activations"].equal(exponent_counts(y))
    assert found["3"]["activation_gradients"].equal(exponent_counts(2 * y))
    assert found["3"]["weights"].equal(both(before["3.weight"], before["3.bias"]))
    assert found["3"]["weight_gradients"].equal(both(head.weight.grad, head.bias.grad))
    now = dict(model.named_parameters())
    moved = [now[n].detach() - before[n] for n in ("3.weight", "3.bias")]
    assert found["3"]["updates"].equal(both(*moved))
    assert found["0"]["activations"].equal(exponent_counts(twin[0](x))), "before the ReLU that works in place"


def test_only_watched_steps_count() -> None:
    model, optimizer = model_and_optimizer()
    collector = Collector(model, [optimizer])
    x = torch.randn(5, 4)
    train(model, optimizer, x)
    assert collector.histograms() == {} and collector.steps == 0
    for _ in range(2):
        with collector.watching():
            train(model, optimizer, x)
    train(model, optimizer, x)
    assert collector.steps == 2
    assert collector.histograms()["0"]["activations"].sum() == 2 * 5 * 8


def test_a_collector_changes_no_bit_and_goes_without_a_trace() -> None:
    x = torch.randn(5, 4)
    plain, optimizer = model_and_optimizer()
    train(plain, optimizer, x)
    watched, optimizer = model_and_optimizer()
    collector = Collector(watched, [optimizer])
    with collector.watching():
        train(watched, optimizer, x)
    collector.remove()
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert p.equal(q)
    assert not any(m._forward_hooks for m in watched.modules())
    assert not any(p._post_accumulate_grad_hooks for p in watched.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    total = collector.histograms()["0"]["updates"].sum()
    train(watched, optimizer, x)
    assert collector.histograms()["0"]["updates"].sum() == total


def test_a_sampled_number_stands_for_those_left_out() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.fill_(4.0)
        model[0].bias.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    collector = Collector(model, [optimizer], sample=64)
    with collector.watching():
        train(model, optimizer, torch.randn(2, 64))
    counts = collector.histograms()["0"]["weights"]
    assert int(counts[bin_of(0)]) == 64
    assert int(counts[bin_of(2)]) == pytest.approx(64 * 64, rel=0.02)
    assert int(collector.histograms()["0"]["updates"][0]) == counts.sum(), "a step of zero is all zeros"


def test_updates_that_narrow_weights_swallow() -> None:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collector = Collector(model, [optimizer])
    with collector.watching():
        # bf16 keeps 1 - 2**-8 and not 1 - 2**-10; FP16 keeps both; FP8 neither
        (model.weight[:, 0] * torch.tensor([2.0**-8, 2.0**-10])).sum().backward()
        optimizer.step()
    assert collector.swallowed() == {"": {"fp16": 0.0, "bf16": 0.5, "fp8-e4m3": 1.0, "fp8-e5m2": 1.0}}


def test_shared_frozen_sparse_and_complex_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.frozen(self.table(x)) * self.phase).abs()

    model = Tied()
    optimizer = torch.optim.SGD([model.table.weight, model.phase], lr=0.1)
    collector = Collector(model, [optimizer])
    with collector.watching():
        model(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
    found = collector.histograms()
    assert found["table"]["weight_gradients"].sum() == 3 * 4, "the rows that were read, not the whole table"
    assert "head" not in found, "its weight belongs to the first layer that has it, and it never ran"
    assert set(found["frozen"]) == {"activations", "activation_gradients"}
    assert found[""]["updates"].sum() == 8, "a complex number is two"


def test_a_model_without_parameters_and_no_sample_are_refused() -> None:
    with pytest.raises(SessionError, match=r"the model \(ReLU\) has no parameters; give the model that"):
        Collector(nn.ReLU(), [])
    model, optimizer = model_and_optimizer()
    with pytest.raises(SessionError, match="sample is 0; at least 1 number"):
        Collector(model, [optimizer], sample=0)
