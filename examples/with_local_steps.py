"""AdamW with local steps: each rank takes five steps of its own, and then all exchange how far they came.

torchrun --standalone --nproc-per-node 2 examples/with_local_steps.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import dgc

STEPS, BATCH, H = 300, 32, 5


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # All entries in 2 bits, every fifth step. Any optimizer of torch works like this.
    config = dgc.Config(sparsity=0.0, value_bits=2, local_steps=H)
    dgc.register_comm_hook(model, optimizer, config)

    draws = torch.Generator().manual_seed(rank)  # each rank has images of its own
    for step in range(STEPS):
        batch = torch.randint(1500, (BATCH,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        # Gradients have not left this rank: clip as on one GPU.
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            with torch.no_grad(), optimizer.averaged():  # the parameters that all ranks share
                loss = nn.functional.cross_entropy(net(x[1500:]), y[1500:]).item()
            if rank == 0:
                print(f"step {step + 1}: loss {loss:.3f}")

    optimizer.flush()  # on all ranks, so that nothing is left on any
    accuracy = (net(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if rank == 0:
        sent = optimizer.report().as_dict()["total_compression"]
        print(f"accuracy {accuracy:.3f}, compression {sent:.1f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
