"""What each of two ranks does, started under torchrun by the test beside it; rank 0 prints what both saw."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import equipoise.planning
from equipoise import ranks
from equipoise.errors import NonFiniteError
from equipoise.session import Session
from equipoise.step import gradients
from equipoise.step.scaler import LossScaler
from recorded import machine

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 64, generator=DATA), torch.randint(0, 8, (32,), generator=DATA)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 8))


def full(parameters) -> list[torch.Tensor]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in parameters]


def digest(parameters) -> float:
    return sum(float(p.double().abs().sum()) for p in full(parameters))


def train(session: Session, module: nn.Module, rank: int, bad_step: int | None, steps: int = 6) -> dict:
    skipped = []
    for step in range(steps):
        part = slice(rank * 16, rank * 16 + 16)
        with session.autocast():
            loss = F.cross_entropy(module(X[part]), Y[part])
        if step == bad_step and rank == 1:
            loss = loss * float("inf")
        skipped.append(session.step(loss, max_grad_norm=1.0).skipped)
    return {
        "skipped": skipped,
        "weights": digest(module.parameters()),
        "scale": session.scaler.get_scale(),
        "plan": None
        if session.plan is None
        else str(session.plan.policy) + str(session.plan.fused_optimizer),
    }


def ddp(rank: int, precision: str, bad: int | None) -> dict:
    module = nn.parallel.DistributedDataParallel(model())
    scaler = LossScaler("cpu", init_scale=2.0**10) if precision == "fp16" else None
    session = Session(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        precision=precision,
        scaler=scaler,
        plan_time_s=3.0,
    )
    return train(session, module, rank, bad)


def fsdp(rank: int, precision: str, bad: int | None) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    session = Session(
        module, torch.optim.AdamW(module.parameters(), lr=1e-2), precision=precision, plan_time_s=3.0
    )
    return train(session, module, rank, bad)


def sharded(rank: int, where: str, bad: int | None) -> dict:
    """FP16, some layers sharded, the others each rank's own; at step ``bad`` one rank alone overflows.

    Args:
        rank: this rank.
        where: ``plain`` (an own layer's gradient), ``shard`` (this rank's part of a sharded one) or ``loss``;
            ``-first`` lists the own layers before the sharded ones, ``-clip`` clips.
        bad: the step.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module[3], mesh=init_device_mesh("cpu", (2,)))
    plain = [*module[0].parameters(), *module[2].parameters()]
    parts = [plain, list(module[3].parameters())]
    parameters = [p for part in (parts if "first" in where else parts[::-1]) for p in part]
    scaler = LossScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    session = Session(module, optimizer, precision="fp16", scaler=scaler, emulate=True)
    clip = 0.1 if "clip" in where else None
    seen = {"skipped": [], "scales": [], "norms": []}
    for step in range(6):
        with session.autocast():
            # one batch for all: nobody reduces the gradients of the layers that aren't sharded
            loss = F.cross_entropy(module(X), Y)
        fault = step == bad and rank == 1
        session.backward(loss * float("inf") if fault and "loss" in where else loss)
        session.unscale()
        if fault and "loss" not in where:
            grad = (module[0] if "plain" in where else module[3]).weight.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = float("nan")
        report = session.step(max_grad_norm=clip)
        seen["skipped"].append(report.skipped)
        seen["scales"].append(report.scale)
        seen["norms"].append(None if report.skipped or clip is None else report.grad_norm)
    by_hand = None if bad is not None else digest(trained_alone(clip))
    return seen | {
        "weights": digest(module.parameters()),
        "scale": session.scaler.get_scale(),
        "alone": by_hand,
    }


def norms(rank: int, size: str, bad: int | None) -> dict:
    """The global norm of gradients, some sharded and one each rank's own, and what clipping leaves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = [X[:, :3] * float(size), Y[:, None].float() * float(size)]
    parameters = [nn.Parameter(distribute_tensor(whole[0], mesh, [Shard(0)])), nn.Parameter(whole[1])]
    parameters.append(nn.Parameter(distribute_tensor(whole[0][:1], mesh, [Shard(0)])))  # nothing on rank 1
    for p in parameters:
        p.grad = p.detach().clone()
    grads = [p.grad for p in parameters]
    norm = gradients.clip(parameters, grads, 1.0)
    exact = sum(float(w.double().square().sum()) for w in (*whole, whole[0][:1])) ** 0.5
    left = sum(float(g.double().square().sum()) for g in full(grads)) ** 0.5
    assert isinstance(grads[0], DTensor)
    return {"norm": float(norm), "exact": exact, "left": left}


def trained_alone(clip: float | None) -> list[torch.Tensor]:
    """The same training in FP32 in one process, from which FP16 differs by rounding."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(module(X), Y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return list(module.parameters())


def local(rank: int, precision: str, bad: int | None) -> dict:
    """Gradients that nobody reduces: what ranks decide must still be alike."""
    module = model()
    session = Session(
        module, torch.optim.SGD(module.parameters(), lr=1e-2), precision=precision, plan_time_s=3.0
    )
    return train(session, module, rank, bad)


def gan(rank: int, precision: str, bad: int | None) -> dict:
    """Two data-parallel models, one loss at a time; each reaches its own model only."""
    g = nn.parallel.DistributedDataParallel(nn.Linear(4, 64))
    d = nn.parallel.DistributedDataParallel(nn.Linear(64, 1))
    og, od = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d))
    session = Session([g, d], [og, od], precision=precision)
    for _ in range(3):
        fake = g(X[rank * 16 : rank * 16 + 16, :4])
        session.step(F.softplus(d(fake.detach())).mean(), optimizer=od)
        session.step(F.softplus(-d(g(X[rank * 16 : rank * 16 + 16, :4]))).mean(), optimizer=og)
    return {"weights": digest([*g.parameters(), *d.parameters()])}


def overflow(rank: int, how: str, bad: int | None) -> dict:
    """From step ``bad`` on one rank's data leave FP16's range in the first layer."""
    module = model()
    if how == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    session = Session(module, torch.optim.SGD(module.parameters(), lr=1e-3), precision="fp16", emulate=True)
    skipped = []
    for step in range(9):
        x = X[rank * 16 : rank * 16 + 16]
        if rank == 1 and step >= bad:
            x = x * 6e4
        with session.autocast():
            loss = F.cross_entropy(module(x), Y[rank * 16 : rank * 16 + 16])
        skipped.append(session.step(loss, max_grad_norm=1.0).skipped)
    return {
        "skipped": skipped,
        "weights": digest(module.parameters()),
        "scale": session.scaler.get_scale(),
        "plan": str(session.plan.policy),
        "decisions": [(d.step, d.what, d.where) for d in session.decisions],
    }


def first_loss(rank: int, asked: str, bad: int | None) -> dict:
    """One rank's very first loss is not finite."""
    module = model()
    session = Session(module, torch.optim.SGD(module.parameters(), lr=1e-2), precision=asked)
    factor = float("nan") if rank == 1 else 1.0
    try:
        session.step(module(X).sum() * factor)
    except NonFiniteError as error:
        return {"error": str(error)}
    return {}


def first(rank: int, asked: str, bad: int | None) -> dict:
    """Rank 0 makes something for both, or fails for both."""

    def make() -> int:
        made.append(rank)
        return 7 // (asked == "value")

    made: list[int] = []
    try:
        return {"value": ranks.from_first(make), "made": made}
    except ZeroDivisionError as error:
        return {"error": str(error), "made": made}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # A recorded probe: each rank would otherwise read a machine that the other loads.
    equipoise.planning.probe = lambda **_: machine(bf16="use")
    for asked in sys.argv[1:]:
        scenario, precision, bad = asked.split(":")
        result = globals()[scenario](dist.get_rank(), precision, None if bad == "none" else int(bad))
        gathered: list = [None, None]
        dist.all_gather_object(gathered, result)
        if dist.get_rank() == 0:
            print(f"RESULT {asked} " + json.dumps(gathered), flush=True)
    dist.destroy_process_group()
