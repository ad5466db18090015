"""What the histogram predicts against what casting does: torch's dtypes are the judge."""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.formats import FORMATS
from equipoise.step.collect import Collector
from equipoise.step.ranges import LOSSY, exponent_counts, ranges_of

N = 40_000


class Truth(NamedTuple):
    underflow: float
    overflow: float
    sqnr_db: float


def true_losses(values: torch.Tensor, format_name: str, scale: float = 1.0) -> Truth:
    """By casting. Beyond the largest number some versions of torch saturate E4M3 and some give a NaN, so the
    border of rounding decides there, and what is beyond it is cut before the cast."""
    fmt = FORMATS[format_name]
    x = values[(values != 0) & values.isfinite()].double()
    dtype = getattr(torch, fmt.torch_name)
    scaled = (x * scale).float()
    exponent = math.frexp(fmt.largest)[1] - 1
    border = fmt.largest + 2.0 ** (exponent - fmt.mantissa_bits - 1)
    cast = scaled.clamp(-fmt.largest, fmt.largest).to(dtype).double() / scale
    noise = float(((x - cast) ** 2).sum())
    over = scaled.double().abs() > border if format_name == "fp8-e4m3" else scaled.double().abs() >= border
    return Truth(
        underflow=float((cast == 0).double().mean()),
        overflow=float(over.double().mean()),
        sqnr_db=10 * math.log10(float((x**2).sum()) / noise) if noise else math.inf,
    )


def spread() -> Iterator[tuple[str, torch.Tensor]]:
    """Distributions whose bulk crosses each border of each format."""
    torch.manual_seed(0)
    for shift in range(-32, 20, 4):
        size = 2.0**shift
        yield f"normal at {size}", torch.randn(N) * size
        yield f"log-normal at {size}", torch.exp(4 * torch.randn(N)) * size
        yield f"evenly spread below {size}", torch.rand(N) * size
        yield f"Student's t at {size}", torch.distributions.StudentT(1.5).sample((N,)) * size
    for base in (-151, -140, -134, -130, 118, 126):  # the borders of bf16
        yield f"log-normal at 2**{base}", (torch.exp2(6 * torch.randn(N).double() + base)).float()


def adversarial() -> Iterator[tuple[str, torch.Tensor]]:
    """Numbers at the borders: one step of FP32 to either side, alone in their octave, or nothing else."""
    one = torch.ones(100)
    up, down = torch.tensor(math.inf), torch.tensor(0.0)
    for name in LOSSY:
        fmt = FORMATS[name]
        for what, at in (
            ("half the least", fmt.smallest_subnormal / 2),
            ("the least", fmt.smallest_subnormal),
            ("the least normal", fmt.smallest_normal),
            ("the largest", fmt.largest),
        ):
            border = one * at
            yield f"just above {what} of {name}", torch.nextafter(border, up)
            yield f"just below {what} of {name}", torch.nextafter(border, down)
    yield "half of FP32's subnormals", torch.exp2(torch.rand(N).double() * 11 - 137).float()
    yield "zeros, infinities and NaNs beside", torch.cat([
        torch.zeros(N), torch.full((9,), math.inf), torch.full((9,), math.nan), torch.randn(N) * 2.0**-24,
    ])  # fmt: skip
    yield "one outlier", torch.cat([torch.randn(N) * 2.0**-20, torch.tensor([2.0**30])])
    yield "two humps", torch.cat([torch.randn(N) * 2.0**-26, torch.randn(N) * 2.0**10])


def real() -> Iterator[tuple[str, torch.Tensor]]:
    """What a step of a small CNN and of a small transformer makes."""
    torch.manual_seed(1)
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 12 * 12, 10),
    )  # fmt: skip
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    text = nn.Sequential(nn.Embedding(50, 32), encoder, nn.Linear(32, 50))
    tokens = torch.randint(0, 50, (8, 24))
    for name, model, batch, labels in (
        ("CNN", cnn, torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))),
        ("transformer", text, tokens, tokens.roll(1, 1)),
    ):
        seen: dict[str, torch.Tensor] = {}

        def keep(what: str, values: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> None:
            seen[what] = values.clone()

        for at, module in model.named_modules():
            if not list(module.children()):

                def hook(
                    module: nn.Module,
                    args: object,
                    out: object,
                    at: str = at,
                    keep: Callable[..., None] = keep,
                ) -> None:
                    if isinstance(out, torch.Tensor) and out.is_floating_point():
                        keep(f"activation of {at}", out.detach())
                        out.register_hook(partial(keep, f"gradient of {at}"))

                module.register_forward_hook(hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        F.cross_entropy(model(batch).flatten(0, -2), labels.flatten()).backward()
        seen |= {
            f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        seen |= {f"weight {n}": p for n, p in before.items()}
        seen |= {f"update of {n}": (p.detach() - before[n]) for n, p in model.named_parameters()}
        for what, values in seen.items():
            if bool((values != 0).any()):
                yield f"{name}: {what}", values.flatten()
                yield f"{name}: {what}, as a sum loss of a larger batch has it", values.flatten() * 2.0**-14


def ties() -> Iterator[tuple[str, torch.Tensor]]:
    """Powers of two alone, as gradients of a mean are: what falls on a border is flushed unseen."""
    for base in range(-40, 10):
        yield f"all 2**{base}", torch.full((10,), 2.0**base)
    yield "each power of two of FP32", torch.exp2(torch.randint(-149, 127, (N,)).double()).float()


def share_of_ties(values: torch.Tensor) -> float:
    """Powers of two among the numbers: many in a gradient that is rounding noise, a bias before a norm."""
    kept = values[values != 0].double()
    return float((torch.frexp(kept).mantissa.abs() == 0.5).double().mean())


def errors(values: torch.Tensor) -> Iterator[tuple[str, Truth]]:
    counts = exponent_counts(values)
    for name in LOSSY:
        found, true = ranges_of(counts, name), true_losses(values, name)
        assert found.sqnr_db is not None
        yield (
            name,
            Truth(
                abs(found.underflow - true.underflow),
                abs(found.overflow - true.overflow),
                abs(found.sqnr_db - true.sqnr_db),
            ),
        )


def test_underflow_is_predicted_within_the_bound_in_the_mean() -> None:
    off = [e.underflow for _, x in [*spread(), *adversarial(), *real(), *ties()] for _, e in errors(x)]
    assert statistics.fmean(off) < 0.015
    assert len(off) > 800


@pytest.mark.parametrize("tensors", [spread, adversarial, real])
def test_underflow_is_exact_but_for_ties(tensors: "Callable[[], Iterator[tuple[str, torch.Tensor]]]") -> None:
    """No border of flushing lies inside an octave."""
    for what, values in tensors():
        for fmt, off in errors(values):
            assert off.underflow <= 1e-6 + share_of_ties(values), (what, fmt)


def test_underflow_is_predicted_from_a_sample() -> None:
    """As the collector samples: every n-th number, n odd."""
    off = []
    for _, values in spread():
        counts = exponent_counts(values[:: -(-N // 4096) | 1])
        off += [abs(ranges_of(counts, f).underflow - true_losses(values, f).underflow) for f in LOSSY]
    assert statistics.fmean(off) < 0.015
    assert max(off) < 0.05  # six deviations of a share of 4,096 numbers


def test_a_power_of_two_at_the_border_is_what_a_histogram_cannot_see() -> None:
    values = torch.full((10,), FORMATS["fp16"].smallest_subnormal / 2)
    assert true_losses(values, "fp16").underflow == 1
    assert ranges_of(exponent_counts(values), "fp16").underflow == 0


def test_overflow_is_predicted_inside_its_octave() -> None:
    off = [e.overflow for _, values in spread() for _, e in errors(values)]
    assert max(off) < 0.015


def test_noise_is_predicted() -> None:
    """A bit is worth 6 dB. Of a signal that is one single number, as in heavy tails, its octave is all that
    is known: it may be 12 dB off."""
    sizes = [(e.sqnr_db, len(v)) for _, v in real() for _, e in errors(v) if math.isfinite(e.sqnr_db)]
    large = [off for off, size in sizes if size >= 1000]
    assert len(large) > 400
    assert statistics.fmean(large) < 0.5
    assert max(large) < 4.0
    heavy = [e.sqnr_db for _, values in spread() for _, e in errors(values) if math.isfinite(e.sqnr_db)]
    assert statistics.fmean(heavy) < 0.75


def test_the_suggested_scale_keeps_what_its_promise_says() -> None:
    helped = 0
    for what, values in [*spread(), *real()]:
        counts = exponent_counts(values)
        for name in LOSSY:
            found = ranges_of(counts, name)
            assert math.frexp(found.scale)[0] == 0.5, "a power of two"
            if not 2.0**-126 <= found.scale <= 2.0**127:
                continue
            true = true_losses(values, name, found.scale)
            assert true.overflow == 0, (what, name, found)
            if values[values != 0].abs().min() >= 2.0**-126:  # FP32's own subnormals are ties, many of them
                off = abs(true.underflow - found.scaled_underflow)
                assert off <= 0.015 + share_of_ties(values), (what, name)
            helped += found.scaled_underflow < found.underflow - 0.01
    assert helped > 20


def test_a_collectors_shares_are_those_of_whole_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    collector = Collector(model, [optimizer], sample=8192)
    x = torch.randn(64, 256)
    with collector.watching():
        (model(x).square().mean() * 2.0**-8).backward()
        grad, before = model[0].weight.grad.clone(), model[0].weight.detach().clone()
        optimizer.step()
    kinds = collector.histograms()["0"]
    whole = {
        "weights": before, "weight_gradients": grad, "updates": model[0].weight.detach() - before,
    }  # fmt: skip
    for kind, values in whole.items():
        for name in LOSSY:
            assert ranges_of(kinds[kind], name).underflow == pytest.approx(
                true_losses(values.flatten(), name).underflow, abs=0.015
            ), (kind, name)
