"""A policy on modules: what reaches each layer in which format, and that nothing of it remains."""

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.errors import PolicyError, SessionError
from equipoise.formats import FORMATS
from equipoise.policy import Policy
from equipoise.session import Session
from equipoise.step.cast import Casts, dtype_of, layer_formats, layers, module_formats, one_root, unwrapped

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", "first second")


class Sees(nn.Module):
    """A layer that notes what it is given and under which autocast, and gives back what it is told to."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        return self.answer(args[0]) if self.answer else self.linear(args[0])


def casts(model: nn.Module, policy: str) -> Casts:
    return Casts(model, module_formats(model, Policy.parse(policy)), "cpu")


def test_nested_formats_each_hold_inside_the_other() -> None:
    inner, outer = Sees(), Sees()
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(outer, nn.Sequential(inner, nn.Linear(8, 8))))
    at_work = casts(model, "bf16; 1=fp32; 1.1=bf16")
    with at_work.context():
        out = model(X)
    assert (outer.autocast, inner.autocast) == (torch.float32, torch.bfloat16)
    assert outer.args[0].dtype is torch.float32  # the half output of the layer before was widened
    assert out.dtype is torch.float32  # half inside FP32 gives its parent what that expects


def test_one_half_inside_the_other() -> None:
    inner = Sees()
    model = nn.Sequential(nn.Linear(8, 8), inner)
    at_work = casts(model, "bf16; 1=fp16")
    with at_work.context():
        out = model(X)
    assert inner.autocast is torch.float16 and out.dtype is torch.float16
    assert at_work.needs_loss_scale and not casts(nn.Sequential(nn.Linear(8, 8)), "bf16").needs_loss_scale


def test_inputs_are_widened_wherever_they_stand_and_nothing_else_is_touched() -> None:
    model = nn.Sequential(Sees())
    casts(model, "bf16; 0=fp32")
    half, whole, mask = X.bfloat16(), torch.arange(3), torch.ones(2, dtype=torch.bool)
    model[0](half, [half, (half, whole)], pair=Pair(half, mask), named={"x": half, "n": 1}, text="a")
    (x, (y, (z, n))), kwargs = model[0].args, model[0].kwargs
    assert {t.dtype for t in (x, y, z, kwargs["pair"].first, kwargs["named"]["x"])} == {torch.float32}
    assert n is whole and kwargs["pair"].second is mask and kwargs["text"] == "a"
    assert type(kwargs["pair"]) is Pair and type(model[0].args[1]) is list


def test_outputs_of_half_inside_fp32_are_widened_in_their_containers() -> None:
    model = nn.Sequential(Sees(lambda x: Pair(x.bfloat16(), {"y": (x.bfloat16(), x.long())})))
    casts(model, "fp32; 0=bf16")
    out = model(X)
    assert type(out) is Pair and out.first.dtype is torch.float32
    assert [t.dtype for t in out.second["y"]] == [torch.float32, torch.int64]


def test_an_exception_inside_a_layer_leaves_autocast_as_it_was() -> None:
    def fail(x: torch.Tensor) -> None:
        raise ValueError("the layer's own")

    model = nn.Sequential(Sees(fail), Sees(fail))
    at_work = casts(model, "bf16; 0=fp32; 1=fp16")
    for layer in model:
        with at_work.context():
            with pytest.raises(ValueError, match="the layer's own"):
                layer(X)
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16 and torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_holds_in_backward_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    at_work = casts(model, "bf16; 1=fp32")
    with at_work.context():
        hidden = model[0](X)
        out = model[1](hidden)
    out.sum().backward()
    exact = torch.autograd.grad(model[1](hidden.detach().float()).sum(), model[1].weight)[0]
    assert torch.equal(model[1].weight.grad, exact)  # the FP32 product itself, not one of half inputs


def test_a_module_at_two_places_is_wrapped_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    at_work = casts(model, "bf16; 0=fp32")
    with at_work.context():
        assert model(X).dtype is torch.float32
    at_work.remove()
    assert "forward" not in shared.__dict__


def test_a_module_of_two_parents_keeps_its_format_under_both() -> None:
    shared = Sees()
    a, b = (nn.Sequential(nn.Linear(8, 8), shared) for _ in range(2))
    model = nn.Sequential(a, nn.Sequential(shared), b)
    at_work = casts(model, "bf16; 1=fp32")
    for parent, place in ((a, "a"), (model[1], "1"), (b, "b")):
        with at_work.context():
            parent(X)
        assert shared.autocast is torch.bfloat16, place


def test_a_shared_weight_can_not_have_two_half_formats() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(PolicyError, match=r"shared by 0\.weight \(bf16\) and 1\.weight \(fp16\)"):
        casts(model, "fp32; 0=bf16; 1=fp16")
    assert all("forward" not in m.__dict__ for m in model.modules())
    casts(model, "bf16; 1=fp32")  # one half and FP32: the FP32 layer reads the weight itself


def test_removing_gives_back_a_forward_that_the_user_had_put_there() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    own = model[0].forward
    model[0].forward = own
    before = copy.copy(model[0].__dict__), copy.copy(model[1].__dict__)
    at_work = casts(model, "bf16; 0=fp32; 1=fp32")
    assert model[0].forward is not own
    at_work.remove()
    at_work.remove()
    assert (model[0].__dict__, model[1].__dict__) == before
    assert not model._forward_pre_hooks


def test_a_weight_changed_by_hand_inside_a_context_is_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    at_work = casts(model, "bf16")
    with at_work.context():
        model(X)
        with torch.no_grad():
            model[0].weight.zero_()
        assert torch.count_nonzero(model(X)) == 0


def test_layers_own_parameters_and_norms_keep_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Sequential(nn.Linear(8, 2)))
    assert [name for name, _ in layers(model)] == ["0", "1", "3.0"]
    formats = dict.fromkeys([name for name, _ in model.named_modules()], "bf16")
    assert layer_formats(model, formats) == {"0": "bf16", "1": "fp32", "3.0": "bf16"}


def test_what_wraps_a_model_is_looked_through() -> None:
    inner = nn.Linear(8, 8)
    assert unwrapped(nn.DataParallel(inner)) is inner
    assert unwrapped(torch.compile(nn.DataParallel(inner), backend="eager")) is inner
    assert one_root([inner]) is inner and next(iter(one_root([inner, nn.ReLU()]))) is inner
    for bad, says in (([], "no model was given"), ([3], "model is int")):
        with pytest.raises(SessionError, match=says):
            one_root(bad)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_its_dtype(name: str) -> None:
    assert dtype_of(name).itemsize * 8 == FORMATS[name].bits


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.embed(x), self.head.weight)


def test_a_format_for_a_module_whose_forward_never_runs_is_named_after_the_first_step() -> None:
    model = TiedHead()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16; head=fp32")
    with session.autocast():
        loss = model(torch.arange(5)).float().square().mean()
    with pytest.warns(UserWarning, match="gives head a format of its own"):
        session.step(loss)
    assert "format head: no effect" in session.explain()
    with session.autocast():
        loss = model(torch.arange(5)).float().square().mean()
    session.step(loss)  # once is enough
    session.restore()
    assert not model.head._forward_pre_hooks
