"""Session's surface inside other libraries' loops, before it is frozen. Adapters are another matter: none is
needed.

What can't work yet: Lightning's automatic optimization and Hugging Face's own mixed precision scale and clip
by themselves, so a Session works under manual optimization and inside ``training_step``; Accelerate's
``accumulate`` is not told that a step was skipped.
"""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from equipoise.session import Session
from recorded import machine

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 8, generator=GENERATOR), torch.randint(0, 3, (64,), generator=GENERATOR)


@pytest.fixture(autouse=True)
def recorded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))


def by_hand(steps: int) -> list[torch.Tensor]:
    """The same training without any library."""
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows = slice(step * 16 % 64, step * 16 % 64 + 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(X[rows]), Y[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def assert_same_weights(model: nn.Module, steps: int) -> None:
    for a, b in zip(model.parameters(), by_hand(steps), strict=True):
        assert torch.equal(a, b)


@pytest.mark.extra("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_module_with_manual_optimization(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model()
            self.automatic_optimization = False

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def on_train_start(self) -> None:
            self.session = Session(self.model, self.optimizers(), precision="bf16")

        def training_step(self, batch: list[torch.Tensor], index: int) -> None:
            with self.session.autocast():
                loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.session.step(loss)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=16))
    assert module.session.step_count == 4 and trainer.global_step == 4
    assert_same_weights(module.model, 4)


@pytest.mark.extra("transformers", "accelerate")
def test_hugging_face_trainer_step(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Trainer, TrainingArguments

        class Ours(Trainer):
            session: Session | None = None

            def training_step(
                self, model: nn.Module, inputs: dict, num_items_in_batch: object = None
            ) -> torch.Tensor:
                if self.session is None:
                    self.session = Session(model, self.optimizer, precision="bf16")
                with self.session.autocast():
                    loss = F.cross_entropy(model(inputs["x"]), inputs["y"])
                # The gradients are gone after this, so the Trainer's own optimizer.step() changes nothing.
                self.session.step(loss)
                return loss.detach()

        rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
        model = small_model()
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=16,
            num_train_epochs=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            remove_unused_columns=False,
            max_grad_norm=0,
            disable_tqdm=True,
            logging_strategy="no",
        )
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(opt, factor=1.0)
        trainer = Ours(model=model, args=arguments, train_dataset=rows, optimizers=(opt, schedule))
        trainer._get_train_sampler = lambda *_: None  # in order, as by hand
        trainer.train()
    assert trainer.session is not None and trainer.session.step_count == 4
    assert_same_weights(model, 4)


@pytest.mark.extra("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_accelerate_prepared_objects() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt, loader = accelerator.prepare(model, opt, DataLoader(TensorDataset(X, Y), batch_size=16))
    session = Session(model, opt, precision="bf16")
    for x, y in loader:
        with session.autocast():
            loss = F.cross_entropy(model(x), y)
        session.step(loss)
    assert_same_weights(accelerator.unwrap_model(model), 4)
