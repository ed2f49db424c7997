"""FSDP2: shards within a machine, dense and fast, and compresses between machines.

    torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py 1      two machines of one rank, on this one
    torchrun --standalone --nproc-per-node 4 examples/with_fsdp2.py 2      two machines of two ranks, on this one

The number is how many ranks share a model; on a real cluster that is LOCAL_WORLD_SIZE.
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dgc

STEPS, BATCH = 300, 32


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    in_node = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (size // in_node, in_node), mesh_dim_names=("across", "shard"))
    torch.manual_seed(0)  # all ranks begin with the same parameters
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(256, 10))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sparsity = dgc.warmup(epochs=0.2, stages=4, end=0.99, steps_per_epoch=STEPS)
    config, machines = dgc.Config(sparsity=sparsity), mesh["across"].get_group()
    optimizer = dgc.DistributedOptimizer(
        optimizer, model.named_parameters(), config, process_set=machines
    )

    draws = torch.Generator().manual_seed(rank)  # each rank has images of its own
    for _ in range(STEPS):
        batch = torch.randint(1500, (BATCH,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    sent = optimizer.report().as_dict()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}, compression {sent.get('total_compression', 1):.1f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
