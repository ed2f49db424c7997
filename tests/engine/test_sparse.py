"""Sparse gradients: those of an embedding, and what is kept of one whose gradients were dense before."""

import copy
import re

import pytest
import torch
from laws import DENSE, SPARSE, difference, flat, in_lockstep, rank, wrapped
from pairwise import pairwise
from torch import nn

import dgc


def test_sparse_gradients_with_momentum_are_saved_and_loaded():
    """And one that is dense for once."""

    def worker():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(50, 30, sparse=True), nn.Linear(30, 40))
        network, optimizer = wrapped(DENSE, network)
        words = torch.arange(5) * 7 + rank()

        def step(penalty=0.0):
            optimizer.zero_grad()
            value = network(words).square().mean()
            (value + penalty * network[0].weight.square().sum() if penalty else value).backward()
            optimizer.step()

        for penalty in (0.0, 0.0, 0.1):
            step(penalty)
        states = copy.deepcopy(
            [network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()]
        )
        step()
        expected = flat(network)
        del optimizer
        network, optimizer = wrapped(DENSE, network)
        network.load_state_dict(states[0])
        optimizer.load_residual_state_dict(states[2])
        optimizer.load_state_dict(states[1])
        step()
        assert torch.equal(flat(network), expected)
        return expected

    assert torch.equal(*in_lockstep(worker))


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_pending_goes_with_the_first_sparse_gradient(scaled):
    """A parameter may have dense gradients first, say the zeros that hvd.broadcast_optimizer_state makes."""

    def worker():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaled else None
        table = nn.Embedding(60, 40, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = dgc.DistributedOptimizer(
            optimizer, table.named_parameters(), SPARSE, grad_scaler=scaler
        )
        weights = torch.randn(60, 40, generator=torch.Generator().manual_seed(rank()))
        total = torch.zeros(60, 40)
        for step, dense in enumerate([True, False, False]):
            optimizer.zero_grad()
            own = (
                (table.weight * weights).sum()
                if dense
                else (table(torch.tensor([step, 5])) * weights[:2]).sum()
            )
            if scaler is None:
                own.backward()
                optimizer.step()
            else:
                scaler.scale(own).backward()
                scaler.step(optimizer)
                scaler.update()
            if dense:
                total += weights
                assert optimizer.residual_state_dict()["v"]["weight"].any()
            else:
                total.index_add_(0, torch.tensor([step, 5]), weights[:2])
        return table.weight.detach(), total, optimizer.residual_state_dict()["v"]["weight"]

    (weight, total, v), (same, other, v_other) = in_lockstep(worker)
    assert torch.equal(weight, same) and not v.any() and not v_other.any()
    assert torch.allclose(-weight, (total + other) / 2, rtol=1e-5, atol=1e-6)


def test_what_was_pending_is_kept_where_the_first_sparse_gradient_is_dropped():
    """step() does not follow its exchange: on average over the ranks, v is what it was."""

    def worker():
        table = nn.Embedding(60, 40, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), SPARSE)
        weights = torch.randn(60, 40, generator=torch.Generator().manual_seed(rank()))
        (table.weight * weights).sum().backward()
        optimizer.step()
        before = optimizer.residual_state_dict()["v"]["weight"]
        optimizer.zero_grad()
        (table(torch.tensor([5])) * 0).sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        dropped = optimizer.residual_state_dict()["v"]["weight"]
        (table(torch.tensor([5])) * 0).sum().backward()
        optimizer.step()
        return (
            before,
            dropped,
            table.weight.detach(),
            optimizer.residual_state_dict()["v"]["weight"],
        )

    first, second = in_lockstep(worker)
    assert first[0].any() and torch.allclose(first[0] + second[0], first[1] + second[1])
    assert torch.equal(first[2], second[2]) and not first[3].any() and not second[3].any()


def linear(table, step, r):
    """A loss whose gradient does not depend on where the parameters are meanwhile."""
    generator = torch.Generator().manual_seed(10 * step + r)
    return (
        table(torch.randint(0, 60, (8,), generator=generator))
        * torch.randn(8, 30, generator=generator)
    ).sum()


def embedding(sparse, settings):
    torch.manual_seed(0)
    table = nn.Embedding(60, 30, sparse=sparse)
    return table, torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, **settings)


@pairwise(
    settings=[{}, {"nesterov": True}, {"maximize": True}],
    sparsity=[0.0, 0.9],
    begins=["a dense gradient", "a momentum"],
    op=[dgc.Average, dgc.Sum],
)
def test_momentum_goes_on_with_the_first_sparse_gradient(begins, sparsity, settings, op):
    """Against torch's SGD on dense gradients. Unmasked, what is pending makes good for what was not sent."""

    def begin(table, optimizer):
        if begins == "a momentum":  # that the optimizer had before it was wrapped
            optimizer.state[table.weight]["momentum_buffer"] = torch.ones(60, 30)

    def worker():
        table, optimizer = embedding(True, settings)
        begin(table, optimizer)
        config = dgc.Config(sparsity, factor_masking=False)
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), config, op=op)
        if begins == "a dense gradient":
            # As hvd.broadcast_optimizer_state leaves it.
            table.weight.grad = torch.zeros_like(table.weight)
        for step in range(4):
            linear(table, step, rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        residuals = optimizer.residual_state_dict()
        assert not residuals["u"]["weight"].any() and not residuals["v"]["weight"].any()
        return table.weight.detach()

    table, optimizer = embedding(False, settings)
    begin(table, optimizer)
    for step in range(4):
        for r in range(2):
            (linear(table, step, r) / (2 if op == dgc.Average else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = in_lockstep(worker)
    assert torch.equal(*results) and difference(results[0], table.weight.detach()) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 1.0},
        {"clip_norm": 1.0, "clip_per_tensor": True},
        {"momentum_correction": False, "clip_norm": 1.0},
    ],
)
def test_what_is_pending_is_not_clipped_again(settings):
    """And waits for the next step if this one fails, on all ranks."""

    def worker():
        table, other = nn.Embedding(60, 40, sparse=True), nn.Parameter(torch.zeros(40, 40))
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD([table.weight, other], lr=1.0)
        optimizer = dgc.DistributedOptimizer(
            optimizer, [("table", table.weight), ("other", other)], dgc.Config(0.9, **settings)
        )
        weights = 0.01 * torch.randn(60, 40, generator=torch.Generator().manual_seed(rank()))
        (table.weight * weights).sum().backward()  # of a norm below 1
        optimizer.step()
        for factor in (torch.nan if rank() == 1 else 1.0, 100.0):
            optimizer.zero_grad()
            (0 * table(torch.tensor([1])).sum() + factor * other.sum()).backward()
            if factor == 100.0:
                optimizer.step()
            else:
                with pytest.raises(
                    FloatingPointError, match="rank 1 has a gradient that is not finite, in: other"
                ):
                    optimizer.step()
        return table.weight.detach(), weights

    (weight, weights), (same, others) = in_lockstep(worker)
    assert torch.equal(weight, same)
    assert torch.allclose(-weight, (weights + others) / 2, rtol=1e-3, atol=1e-7)


def test_momentum_goes_on_that_is_0_in_the_step_of_the_first_sparse_gradient():
    """torch's SGD keeps its buffer meanwhile."""

    def train(table, optimizer, gradients):
        for step in range(5):
            optimizer.param_groups[0]["momentum"] = 0.0 if step == 2 else 0.9
            optimizer.zero_grad()
            for r, share in gradients:
                (
                    share * linear(table, step, r) + (0 if step > 1 else table.weight.sum() * share)
                ).backward()
            optimizer.step()
        return table.weight.detach()

    def worker():
        table, optimizer = embedding(True, {})
        optimizer = dgc.DistributedOptimizer(
            optimizer, table.named_parameters(), dgc.Config(0.9, factor_masking=False)
        )
        return train(table, optimizer, [(rank(), 1.0)])

    expected = train(*embedding(False, {}), [(0, 0.5), (1, 0.5)])
    assert difference(in_lockstep(worker)[0], expected) < 1e-6


@pytest.mark.parametrize(
    ("rows", "settings"), [(20, {}), (60, {}), (60, {"momentum_correction": False})]
)
def test_nesterovs_momentum(rows, settings):
    """torch's SGD adds a sparse gradient to no dense momentum. A table of 20 rows travels dense."""

    def make(sparse):
        torch.manual_seed(0)
        table = nn.Embedding(rows, 40, sparse=sparse)
        return table, torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(table, optimizer, step, gradients):
        optimizer.zero_grad()
        for r, share in gradients:
            words = torch.randint(
                0, rows, (8,), generator=torch.Generator().manual_seed(10 * step + r)
            )
            (share * table(words).square().sum()).backward()
        optimizer.step()

    def worker():
        table, optimizer = make(True)
        optimizer = dgc.DistributedOptimizer(
            optimizer, table.named_parameters(), dgc.Config(**settings)
        )
        for i in range(3):
            step(table, optimizer, i, [(rank(), 1.0)])
        return table.weight.detach()

    table, optimizer = make(False)
    for i in range(3):
        step(table, optimizer, i, [(0, 0.5), (1, 0.5)])
    assert difference(in_lockstep(worker)[0], table.weight.detach()) < 1e-6


@pytest.mark.parametrize("scaled", [False, True])
def test_a_skipped_step_tells_that_gradients_are_sparse(scaled):
    """In the next one a rank has no gradient of the table."""

    def worker():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)
        table, other = embedding(True, {})[0], nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([table.weight, other], lr=0.1)
        optimizer = dgc.DistributedOptimizer(
            optimizer,
            [("table", table.weight), ("other", other)],
            dgc.Config(0.9, nonfinite="error" if scaled else "skip"),
            grad_scaler=scaler,
        )
        before = table.weight.detach().clone()
        for step in range(2):
            optimizer.zero_grad()
            value = (
                other.sum()
                if step == 1 and rank() == 1
                else linear(table, step, rank()) + other.sum()
            )
            scaler.scale(value * (torch.inf if step == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return table.weight.detach(), before

    (weight, before), (same, _) = in_lockstep(worker)
    assert torch.equal(weight, same) and weight.isfinite().all() and not torch.equal(weight, before)


def dense(table, step, r):
    generator = torch.Generator().manual_seed(100 * step + r)
    return (table.weight * torch.randn(60, 30, generator=generator)).sum()


def trains(table, optimizer, step, loss):
    optimizer.zero_grad()
    loss(table, step, rank()).backward()
    optimizer.step()


def test_a_state_from_before_the_first_sparse_gradient_goes_on_to_the_bit():
    """Loaded into an optimizer that has had one."""

    def worker(goes_further):
        table, optimizer = embedding(True, {})
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), SPARSE)
        for step in range(3):
            trains(table, optimizer, step, dense)
        states = copy.deepcopy(
            [table.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()]
        )
        if goes_further:
            trains(table, optimizer, 3, linear)
            table.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            optimizer.load_residual_state_dict(states[2])
        for step in range(4, 7):
            trains(table, optimizer, step, dense)
        return table.weight.detach(), optimizer.report().bytes_sent

    (weight, nbytes), (same, as_many) = (
        in_lockstep(lambda x=x: worker(x))[0] for x in (False, True)
    )
    assert torch.equal(weight, same) and nbytes == as_many


def test_a_copy_goes_on_after_a_state_was_loaded():
    """As a search for a learning rate loads the first one."""

    def worker(copies):
        table, optimizer = embedding(True, {})
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), SPARSE)
        first = copy.deepcopy((table.state_dict(), optimizer.state_dict()))
        for step in range(4):
            trains(table, optimizer, step, linear)
            if step == 1:
                table.load_state_dict(first[0])
                optimizer.load_state_dict(first[1])
        if copies:
            table, optimizer = copy.deepcopy((table, optimizer))
        for step in range(4, 6):
            trains(table, optimizer, step, linear)
        return table.weight.detach()

    assert torch.equal(*(in_lockstep(lambda x=x: worker(x))[0] for x in (False, True)))


@pytest.mark.parametrize("dense_steps", [1, 4])
def test_adamw_refuses_them_as_torch_does(dense_steps):
    """In its dense steps, and in those that are compressed; in torch's words, which differ by version."""
    p = nn.Parameter(torch.zeros(2, 1))
    p.grad = torch.sparse_coo_tensor([[0]], [[1.0]], (2, 1))
    with pytest.raises(RuntimeError) as refused:
        torch.optim.AdamW([p]).step()

    def worker():
        table, _ = embedding(True, {})
        optimizer = dgc.DistributedOptimizer(
            torch.optim.AdamW(table.parameters()),
            table.named_parameters(),
            dgc.Config(dgc.piecewise({0: 0.0, 2: 0.9})),
        )
        for step in range(dense_steps):
            trains(table, optimizer, step, dense)
        with pytest.raises(RuntimeError, match=re.escape(str(refused.value))):
            trains(table, optimizer, dense_steps, linear)

    in_lockstep(worker)
