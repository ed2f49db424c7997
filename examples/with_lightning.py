"""PyTorch Lightning: a strategy. Clipping, accumulation, precision and checkpoints are the Trainer's, as ever.

torchrun --standalone --nproc-per-node 2 examples/with_lightning.py
"""

import tempfile

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dgc
from dgc.integrations.lightning import DGCStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(256, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics(self.optimizers().report().as_dict(), self.global_step)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def main() -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=32)

    # Each of the two processes has half of the batches.
    sparsity = dgc.warmup(epochs=2, stages=4, end=0.99, steps_per_epoch=len(train) // 2)
    strategy = DGCStrategy(dgc.Config(sparsity=sparsity))
    how = {"accelerator": "cpu", "devices": 2, "max_epochs": 12, "precision": "bf16-mixed"}
    off = {"enable_checkpointing": False, "enable_progress_bar": False}
    log = TensorBoardLogger(tempfile.mkdtemp())
    trainer = lightning.Trainer(strategy=strategy, logger=log, gradient_clip_val=5.0, **how, **off)
    trainer.fit(Digits(), train, test)
    if trainer.is_global_zero:
        compression = trainer.optimizers[0].report().as_dict()["total_compression"]
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}, compression {compression:.1f}")


if __name__ == "__main__":
    main()
