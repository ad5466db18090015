"""TASK's text to a task function: shipped names and what is near them."""

import subprocess
import sys

import pytest
import torch
from training import evaluate, same_data, same_weights, train

from equipoise.errors import TaskError
from equipoise.tasks import names, resolve


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from equipoise.tasks import names\n"
        "listed = {name for name, _ in names()}\n"
        "assert listed == {'text', 'breast-cancer', 'digits', 'fashion-mnist', 'images:PATH'}\n"
        "assert all(about for _, about in names())\n"
        "assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("txt", "no task 'txt'. Did you mean 'text'?"),
        ("resnet152", r"Shipped: text, breast-cancer, .* your own: package.module:function"),
        ("text:", "a path is missing after the colon"),
        ("digits:here", "digits brings its own data and takes no path; write 'digits'"),
    ],
)
def test_a_text_that_names_nothing_says_what_there_is(text: str, said: str) -> None:
    with pytest.raises(TaskError, match=said.replace("?", r"\?")):
        resolve(text)


@pytest.mark.parametrize(
    ("text", "data", "said"),
    [
        ("images", None, "write images:PATH, or give --data PATH"),
        ("digits", "here", "'here' was given: leave it out"),
        ("text:here", "there", "give one of them"),
        ("text:no-such-place", None, "there is no file or folder no-such-place"),
        ("text", "no-such-place", "there is no file or folder no-such-place"),
    ],
)
def test_data_that_do_not_fit_are_refused(text: str, data: str | None, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        resolve(text)(0, data)


@pytest.mark.parametrize("name", [name for name, _ in names() if name in {"breast-cancer", "digits"}])
def test_the_small_tasks_learn_and_start_alike(name: str) -> None:
    before = torch.get_rng_state()
    task, again, other = resolve(name)(0, None), resolve(name)(0, None), resolve(name)(1, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(task, again)
    assert not same_weights(task, other)
    assert all(same_data(task, other, split) for split in ("train", "val", "test"))
    assert type(task.optimizer).__module__.startswith("torch.optim")
    assert not task.optimizer.defaults.get("fused")

    losses = train(task, 120)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    found = evaluate(task, "val")
    assert found[task.metric_name] > 0.94
    if name == "breast-cancer":
        assert 0.85 < found["sensitivity at 95 % specificity"] <= 1


def test_breast_cancer_is_standardised_by_train_alone_and_malignant_is_1() -> None:
    task = resolve("breast-cancer")(0, None)
    x, y = task.train.tensors  # type: ignore[attr-defined]
    assert torch.allclose(x.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(x.std(0, correction=0), torch.ones(30), atol=1e-4)
    assert not torch.allclose(task.val.tensors[0].mean(0), torch.zeros(30), atol=1e-3)  # type: ignore[attr-defined]
    assert sum(len(part) for part in (task.train, task.val, task.test)) == 569  # type: ignore[arg-type]
    assert 0.36 < y.mean() < 0.38  # 212 of 569 are malignant
    assert task.labels_of((x, y)).dtype == torch.int64


def test_the_schedule_goes_on_past_the_end_of_the_run() -> None:
    task = resolve("digits")(0, None)
    rates = []
    for _ in range(task.steps + 5):
        rates.append(task.optimizer.param_groups[0]["lr"])
        task.optimizer.step()
        task.lr_scheduler.step()
    assert max(rates) == rates[40] == pytest.approx(3e-3)
    assert rates[0] < rates[20] < rates[39]
    assert rates[-1] == rates[-3] == pytest.approx(0.02 * 3e-3)
