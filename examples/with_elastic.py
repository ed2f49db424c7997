"""An elastic Horovod job: dgc.elastic.TorchState in place of hvd.elastic.TorchState. Workers come and go.

    horovodrun --gloo -np 2 --min-np 1 -H localhost:1,127.0.0.1:1 python examples/with_elastic.py

Kill one of the two workers meanwhile: the other goes on from the last commit, with what it had pending.
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn

import dgc
import dgc.elastic

STEPS, BATCH = 300, 32
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


@hvd.elastic.run
def train(state) -> None:
    while state.step < STEPS:
        # Whoever is left.
        draws = torch.Generator().manual_seed(state.step * hvd.size() + hvd.rank())
        batch = torch.randint(1500, (BATCH,), generator=draws)
        state.optimizer.zero_grad()
        nn.functional.cross_entropy(state.model(x[batch]), y[batch]).backward()
        state.optimizer.step()
        state.step += 1
        if state.step % 20 == 0:
            if hvd.rank() == 0:
                print(f"step {state.step} of {hvd.size()} workers", flush=True)
            state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sparsity = dgc.warmup(epochs=0.2, stages=4, end=0.99, steps_per_epoch=STEPS)
    optimizer = dgc.DistributedOptimizer(
        optimizer, model.named_parameters(), dgc.Config(sparsity=sparsity)
    )
    train(dgc.elastic.TorchState(model=model, optimizer=optimizer, step=0))

    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f}, lost {optimizer.report().lost_residuals}", flush=True)


if __name__ == "__main__":
    main()
