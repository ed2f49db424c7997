"""An elastic Horovod job for test_elastic.py: trains, and the worker of one host kills itself in an exchange."""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import dgc
import dgc.elastic

sys.path.insert(0, str(Path(__file__).parents[1]))
from laws import loss, model

FOLDER, LAST, FATAL = sys.argv[1], 8, 4  # the step at which a worker dies, in mid-exchange
LOCAL = sys.argv[2:] == ["local"]  # steps, of which every second one is committed


@hvd.elastic.run
def train(state):
    while state.step < LAST:
        rank, size = hvd.rank(), hvd.size()
        state.optimizer.zero_grad()
        value = loss(state.model, rank, 0)  # the same batch each time, so that the loss falls
        value.backward()
        if state.step == FATAL and size == 2 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.step()
        state.step += 1
        if not LOCAL or state.step % 2 == 0:
            state.commit()
        torch.save(
            {
                "loss": value.item(),
                "model": {k: p.detach() for k, p in state.model.named_parameters()},
                "lost": state.optimizer.report().lost_residuals,
                **state.optimizer.residual_state_dict(),
            },
            f"{FOLDER}/{state.step}-of{size}-rank{rank}.pt",
        )


hvd.init()
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
config = dgc.Config(0.0, value_bits=8, local_steps=3) if LOCAL else dgc.Config(sparsity=0.95)
optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
train(dgc.elastic.TorchState(model=network, optimizer=optimizer, step=0))
