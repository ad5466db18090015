"""What the tests of tasks share: a few plain FP32 steps, and the metric after them."""

from itertools import islice

import torch

from equipoise.step.feed import Feed
from equipoise.task import Task


def train(task: Task, steps: int, *, workers: int = 0) -> list[float]:
    """The losses of ``steps`` steps."""
    losses = []
    feed = Feed(task.train, batch_size=task.batch_size, seed=0, workers=workers, collate=task.collate)
    for batch in islice(feed.batches(), steps):
        loss = task.loss(task.model, batch)
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        if task.lr_scheduler is not None:
            task.lr_scheduler.step()
        losses.append(loss.item())
    return losses


def evaluate(task: Task, split: str, *, workers: int = 0) -> dict[str, float]:
    """Each metric of the task on ``split``."""
    feed = Feed(getattr(task, split), batch_size=100, seed=0, workers=workers, collate=task.collate)
    task.model.eval()
    with torch.no_grad():
        seen = [(task.labels_of(batch), task.scores_of(batch)) for batch in feed.ordered()]
    task.model.train()
    labels, scores = (torch.cat(parts).numpy() for parts in zip(*seen, strict=True))
    metrics = {task.metric_name: task.metric, **(task.extra_metrics or {})}
    feed.close()
    return {name: metric(labels, scores) for name, metric in metrics.items()}


def same_weights(a: Task, b: Task) -> bool:
    """Whether two tasks' models hold the same bits."""
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def same_data(a: Task, b: Task, split: str) -> bool:
    """Whether two tasks' splits begin with the same samples."""
    ours, theirs = getattr(a, split), getattr(b, split)
    first = [next(iter(Feed(data, batch_size=50, seed=0).ordered())) for data in (ours, theirs)]
    return len(ours) == len(theirs) and all(torch.equal(x, y) for x, y in zip(*first, strict=True))
