"""torch.distributed.checkpoint.state_dict with a fresh optimizer, which it has take a step so that there is a state."""

import torch
from launch import ran
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dgc

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
}


def resumed():
    """Optimizer, frontend -> whether a state is loaded into a fresh optimizer, and none of its steps is counted."""
    results = {}
    for kind, make in OPTIMIZERS.items():
        config = dgc.Config(0.9, min_numel=0, momentum_correction=kind in ("SGD", "AdamW"))
        for frontend in ("DDP", "Horovod's"):

            def fresh(make=make, config=config, frontend=frontend):
                torch.manual_seed(0)
                network = nn.Linear(32, 8)
                optimizer = make(network.parameters())
                if frontend == "DDP":
                    network = nn.parallel.DistributedDataParallel(network)
                    dgc.register_comm_hook(network, optimizer, config)
                else:
                    optimizer = dgc.DistributedOptimizer(
                        optimizer, network.named_parameters(), config
                    )
                return network, optimizer

            network, optimizer = fresh()
            for _ in range(3):
                optimizer.zero_grad()
                network(torch.randn(4, 32)).square().mean().backward()
                optimizer.step()
            saved = get_state_dict(network, optimizer)
            network, optimizer = fresh()
            before = [p.detach().clone() for p in network.parameters()]
            get_state_dict(network, optimizer)
            untouched = (
                all(map(torch.equal, before, network.parameters()))
                and optimizer.report().steps == 0
            )
            set_state_dict(network, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
            state = get_state_dict(network, optimizer)[1]["state"]
            same = all(
                torch.equal(value, saved[1]["state"][name][key])
                for name, entries in state.items()
                for key, value in entries.items()
            )
            optimizer.zero_grad()
            network(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            results[kind, frontend] = untouched, same and bool(state)
    return results


def test_a_fresh_optimizer_has_a_state_to_load_into():
    expected = {
        (kind, frontend): (True, True) for kind in OPTIMIZERS for frontend in ("DDP", "Horovod's")
    }
    assert ran("torch", 2, (resumed,))[resumed] == [expected] * 2
