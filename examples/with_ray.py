"""Ray Train: in the training function, the line for DDP. Ray starts the workers and their torch.distributed.

python examples/with_ray.py
"""

import tempfile

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dgc

EPOCHS, BATCH = 12, 32


def train(settings: dict) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), BATCH, shuffle=True)
    loader = prepare_data_loader(loader)  # each worker has its own part
    hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Linear(256, 10))
    model = prepare_model(net)  # in DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sparsity = dgc.warmup(epochs=2, stages=4, end=settings["sparsity"], steps_per_epoch=len(loader))
    dgc.register_comm_hook(model, optimizer, dgc.Config(sparsity=sparsity))

    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        accuracy = (net(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(net.state_dict(), f"{folder}/model.pt")
            saved = Checkpoint.from_directory(folder) if torch.distributed.get_rank() == 0 else None
            ray.train.report({"accuracy": accuracy, **optimizer.report().as_dict()}, saved)


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"sparsity": 0.99},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    metrics = trainer.fit().metrics
    print(f"accuracy {metrics['accuracy']:.3f}, compression {metrics['total_compression']:.1f}")


if __name__ == "__main__":
    main()
