"""DistributedDataParallel: one line registers the hook. Saves after each epoch; the same command again goes on.

torchrun --standalone --nproc-per-node 2 examples/with_ddp.py [FOLDER OF THE CHECKPOINT]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import dgc

EPOCHS, BATCH = 12, 32


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(x[:1500], y[:1500])
    sampler = torch.utils.data.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, sampler=sampler)

    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = dgc.warmup(steps=EPOCHS * len(loader), end=0.9)  # for fewer than 1,000 steps
    dgc.register_comm_hook(model, optimizer, dgc.Config(schedule, factor_masking=False))

    folder, begin = Path(sys.argv[1]) if len(sys.argv) > 1 else None, 0
    there = torch.tensor(folder is not None and (folder / "manifest.json").exists())
    torch.distributed.broadcast(there, 0)  # rank 0's disk counts
    if there:
        begin = dgc.load_checkpoint(folder, net, optimizer)["epoch"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if folder is not None:
            dgc.save_checkpoint(folder, net, optimizer, {"epoch": epoch + 1})  # on all ranks

    if begin == EPOCHS and torch.distributed.get_rank() == 0:
        print(f"all {EPOCHS} epochs were trained: move {folder} away to begin again")
    accuracy = (net(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if torch.distributed.get_rank() == 0:
        # Of this run; None if it exchanged nothing.
        sent = optimizer.report().as_dict().get("total_compression")
        print(f"accuracy {accuracy:.3f}" + (f", compression {sent:.1f}" if sent else ""))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
