"""Horovod: dgc.DistributedOptimizer in place of hvd.DistributedOptimizer. Two workers learn handwritten digits.

horovodrun -np 2 python examples/with_horovod.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn

import dgc

EPOCHS, BATCH = 12, 32


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(x[:1500], y[:1500])
    sampler = torch.utils.data.DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, sampler=sampler)

    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    # optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sparsity = dgc.warmup(epochs=2, stages=4, end=0.99, steps_per_epoch=len(loader))
    optimizer = dgc.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=dgc.Config(sparsity=sparsity),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if hvd.rank() == 0:
        print(
            f"accuracy {accuracy:.3f}, compression {optimizer.report().as_dict().get('total_compression', 1):.1f}"
        )


if __name__ == "__main__":
    main()
