"""Updates that come one step late, and an asynchronous parameter server: against transcriptions, and over processes."""

import io
import sys
from pathlib import Path

import numpy as np
import papers
import pytest
import torch
from launch import ran
from oracle import Network, Oracle

import dgc

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers
from peers.parameter_server import ParameterServer
from peers.stale import Stale

pytestmark = pytest.mark.long

LR, STEPS = 0.05, 7
CONFIGS = {"dense": None, "dgc": dgc.Config(0.9, min_numel=1000, value_bits=32)}


def trained(make, momentum, decay=0.0, steps=STEPS):
    """A rank's training of the oracle's network, by its gradient in float64: weights after it, and the driver."""
    network, rank = Network(), dgc.transport.find().world.rank
    weights = [torch.nn.Parameter(torch.from_numpy(w).clone()) for w in network.start]
    sgd = torch.optim.SGD(weights, LR, momentum, weight_decay=decay, nesterov=momentum > 0)
    peer = make(sgd, [(str(i), w) for i, w in enumerate(weights)])
    for t in range(steps):
        found = network.gradient([w.detach().double().numpy() for w in weights], rank, t)
        for w, g in zip(weights, found, strict=True):
            w.grad = torch.from_numpy(g).float()
        peer.step(last=t + 1 == steps)
    return [w.detach().double().numpy() for w in weights], peer


def assert_close(found, expected):
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=2e-6 * np.abs(other).max())


# -- one step late -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind, sparsity", [("dense", 0.0), ("dgc", 0.9)])
def test_stale_is_the_algorithm_one_step_late(kind, sparsity, momentum):
    """The second tensor, of 390 entries, travels dense. An oracle compresses all of them, or none: so there are two."""
    network = Network()
    oracles = [
        Oracle(
            network.start, network.gradient, 3, LR, momentum, share, momentum > 0, masking=share > 0
        )
        for share in (sparsity, 0.0)
    ]
    expected = papers.one_step_late(Mixed(*oracles), STEPS)
    for found, _ in dgc.lockstep.run(
        lambda: trained(lambda sgd, named: Stale(sgd, named, CONFIGS[kind]), momentum), 3
    ):
        assert_close(found, expected)


class Mixed:
    """The first tensor as one oracle has it, the second as another."""

    def __init__(self, first, second):
        self.oracles, self.weights = (first, second), first.weights

    def step(self, t):
        for oracle in self.oracles:
            oracle.weights = self.weights
            oracle.step(t)
        self.weights = [oracle.weights[i] for i, oracle in enumerate(self.oracles)]


def test_decay_of_what_is_compressed_has_torchs_momentum():
    """Without gradients, STEPS late steps are STEPS steps of torch's SGD."""

    def worker():
        p = torch.nn.Parameter(torch.ones(40, 50))
        peer = Stale(
            torch.optim.SGD([p], LR, 0.9, weight_decay=0.1, nesterov=True),
            [("p", p)],
            CONFIGS["dgc"],
        )
        for t in range(STEPS):
            p.grad = torch.zeros_like(p)
            peer.step(last=t + 1 == STEPS)
        return p.detach().double()

    p = torch.nn.Parameter(torch.ones(40, 50, dtype=torch.float64))
    sgd = torch.optim.SGD([p], LR, 0.9, weight_decay=0.1, nesterov=True)
    for _ in range(STEPS):
        p.grad = torch.zeros_like(p)
        sgd.step()
    for found in dgc.lockstep.run(worker, 2):
        torch.testing.assert_close(found, p.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_exchange_is_under_way_until_the_next_step(config):
    def worker():
        p, large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(40, 50))
        peer, moved = (
            Stale(torch.optim.SGD([p, large], 1.0), [("p", p), ("large", large)], config),
            [],
        )
        for t in range(3):
            p.grad, large.grad = torch.full((3,), 10.0**t), torch.zeros(40, 50)
            now = p.grad, large.grad
            peer.step()
            assert peer._under_way
            for gradient in now:
                gradient.fill_(torch.nan)  # as the next backward pass would
            moved.append(-p.detach()[0].item())
        return moved, large.detach().count_nonzero().item()

    assert dgc.lockstep.run(worker, 2) == [([0, 1, 11], 0)] * 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_stale_bytes_are_those_of_the_exchange(kind):
    _, peer = dgc.lockstep.run(
        lambda: trained(lambda sgd, named: Stale(sgd, named, CONFIGS[kind]), 0.9), 3
    )[0]
    if kind == "dense":
        assert peer.bytes_sent == pytest.approx(STEPS * 2 * 2 / 3 * 4 * (2700 + 390))
    else:  # 270 entries of a float32 and some 5 bits of place, to two others; and the small tensor
        dense = STEPS * 2 * 2 / 3 * 4 * 390
        assert STEPS * 2 * 270 * 4.5 < peer.bytes_sent - dense < STEPS * 2 * 270 * 5


# -- the parameter server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.9, 0.01)])
def test_updates_come_in_turn_at_what_was_pulled_n_minus_1_updates_ago(momentum, decay):
    network = Network()
    workers, last = papers.pushes(network.start, network.gradient, 3, STEPS, LR, momentum, decay)
    results = dgc.lockstep.run(lambda: trained(lambda sgd, named: NotLast(sgd), momentum, decay), 3)
    for (found, _), expected in zip(results, workers, strict=True):
        assert_close(found, expected)
    assert not np.array_equal(results[0][0][0], results[1][0][0])  # each where it has pulled
    for found, _ in dgc.lockstep.run(
        lambda: trained(lambda sgd, named: ParameterServer(sgd), momentum, decay), 3
    ):
        assert_close(found, last)


class NotLast(ParameterServer):
    """One that is looked at in the middle of a training."""

    def step(self, last=False):
        super().step()


def test_the_servers_host_sends_what_all_others_pull():
    results = dgc.lockstep.run(lambda: trained(lambda sgd, named: ParameterServer(sgd), 0.9), 3)
    whole = STEPS * 4 * (2700 + 390)
    assert [peer.bytes_sent for _, peer in results] == [2 * whole, whole, whole]


# -- checkpoints, and over processes -----------------------------------------------------------------------------------


def over_processes(saved=True):
    """Parameters after a training late by one step with a checkpoint in it, and after one with a server whose gradients
    do not depend on the parameters; and bytes.
    """
    rank, found = dgc.transport.find().world.rank, {}
    for name in ("stale", "stale-dgc", "async"):
        draw = torch.Generator().manual_seed(rank)
        parameters = [torch.nn.Parameter(torch.ones(60, 50)), torch.nn.Parameter(torch.ones(7))]
        named = [(str(i), p) for i, p in enumerate(parameters)]

        def made(parameters=parameters, named=named, name=name):
            momentum = 0.0 if name == "async" else 0.9
            return peers.attach(name, torch.optim.SGD(parameters, LR, momentum), named, 0, 0.9)

        peer = made()
        for t in range(5):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=draw)
            peer.step(last=t == 4)
            if saved and t == 2 and name != "async":
                torch.save(peer.state_dict(), file := io.BytesIO())
                peer = made()
                peer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        found[name] = torch.cat([p.detach().view(-1) for p in parameters]), peer.bytes_sent
    return found


def test_a_checkpoint_changes_nothing():
    """Of what is under way, and what DGC keeps; the server's is tested in a whole training (test_peers.py)."""
    with_one, without = (
        dgc.lockstep.run(lambda saved=saved: over_processes(saved), 2) for saved in (True, False)
    )
    for own, other in zip(with_one, without, strict=True):
        for name in ("stale", "stale-dgc"):
            assert torch.equal(own[name][0], other[name][0]) and own[name][1] == other[name][1]


def test_processes_do_as_ranks_in_one_process():
    """The server's arrivals have no order; of gradients that do not depend on it, and without momentum, the sum has."""
    processes = ran("torch", 3, [over_processes], limit=150)[over_processes]
    here = dgc.lockstep.run(over_processes, 3)
    for name in ("stale", "stale-dgc", "async"):
        for own, other in zip(processes, here, strict=True):
            torch.testing.assert_close(own[name][0], other[name][0], rtol=1e-5, atol=1e-6)
            assert own[name][1] == pytest.approx(other[name][1])
            assert torch.equal(own[name][0], processes[0][name][0])
