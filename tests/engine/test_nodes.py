"""Gradients averaged within nodes, and compressed ones exchanged among them. The law: nodes take part as ranks do that
have the mean of their ranks' gradients.
"""

import contextlib
import functools
import os
from dataclasses import replace

import pytest
import torch
from launch import TIMEOUT, launch, ran
from laws import (
    CONFIGS,
    counted_sizes,
    current_rank,
    difference,
    flat,
    in_ddp,
    model,
    reference,
    same_end,
    train,
)
from torch import nn

import dgc
from dgc.engine.engine import engine_of
from dgc.plan import cost
from dgc.transport import find
from dgc.transport.bytes import node_size


def hierarchical():
    """Some configurations by node, on twice two processes. Horovod says first what process sets it needs."""
    configs = {
        name: replace(CONFIGS[name], hierarchical=True)
        for name in ("default", "reduced", "clipped", "warm-up", "dense fallback")
    }
    if find().__class__.__name__ == "Horovod":
        dynamic = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
        try:
            train(range(1), configs["default"])
        except ValueError as error:
            assert str(error).endswith(
                "(set HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks, or call hvd.init(process_sets=["
                "hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3]), hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]))"
            )
        else:
            raise AssertionError("nothing was said")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = (
            dynamic  # the first training makes the sets, the others find them
        )
        waited_for_between(configs["default"])
    if (
        find().__class__.__name__ == "TorchDistributed"
    ):  # rank 0 then knows fewer groups than the others
        some = torch.distributed.new_group([1, 2, 3])
        network = model()
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), 0.1),
            network.named_parameters(),
            configs["default"],
            process_set=some,
        )
        try:
            train(range(1), None, network, optimizer)
        except ValueError as error:
            assert (
                "the process group must have all ranks where hierarchical is True, got [1, 2, 3]"
                in str(error)
            )
        else:
            assert torch.distributed.get_rank() == 0
    results, groups = {}, []
    for name, config in configs.items():
        network, optimizer = train(range(6), config)
        residuals = optimizer.residual_state_dict()
        results[name] = flat(network), torch.cat([x.flatten() for x in residuals["v"].values()])
        if find().__class__.__name__ == "TorchDistributed":
            assert same_end(train(range(6), None, *in_ddp(model(), config)), (network, optimizer))
            groups.append(
                [
                    engine_of(optimizer).settings.transport._groups[group]
                    for group in ("intra_node", "inter_node")
                ]
            )
    for made in (
        groups
    ):  # once, as torch keeps them; and they wait as long as the group that they are made of
        assert made == groups[0]
        assert all(
            group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT for group in made
        )
    return results


def waited_for_between(config):
    """Rank 1 has no gradient for the layer in the middle, and waits for all ranks between backward() and step()."""
    import horovod.torch as hvd

    layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    optimizer = dgc.DistributedOptimizer(optimizer, layers.named_parameters(), config, groups=3)
    dgc.broadcast_parameters(layers.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        h = layers[0](torch.ones(4, 60))
        layers[2](h if hvd.rank() == 1 else layers[1](h)).square().mean().backward()
        hvd.barrier()
        optimizer.step()


def uneven_machines():
    """What is said of them."""
    try:
        train(range(1), dgc.Config(hierarchical=True))
    except ValueError as error:
        return str(error)
    return "nothing"


SHAPES = {"a": (30, 40), "b": (7, 11), "c": (90,), "d": (200, 13)}
SUM = {"op": dgc.Sum}


def gradient(rank, step, name):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64) ** 3


def trained(config, of_rank, steps=8, nesterov=False, weight_decay=0.01, load=None, **arguments):
    """With gradients given by ``of_rank``: the parameters, and the optimizer, after some steps."""
    torch.manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }
    optimizer = torch.optim.SGD(
        parameters.values(), lr=0.1, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov
    )
    optimizer = dgc.DistributedOptimizer(optimizer, parameters.items(), config, **arguments)
    if load is not None:
        optimizer.load_residual_state_dict(load[current_rank()])
    for step in range(steps):
        for name, p in parameters.items():
            p.grad = of_rank(current_rank(), step, name)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters.values()]), optimizer


def mean(g, rank, step, name):
    """Of a node's ranks."""
    return sum(gradient(r, step, name) for r in range(rank * g, (rank + 1) * g)) / g


def added(g, rank, step, name):
    return g * mean(g, rank, step, name)


def pending(optimizer):
    residuals = optimizer.residual_state_dict()
    return torch.cat([x.flatten() for letter in "uv" for x in residuals[letter].values()])


SETTINGS = {name: replace(config, min_numel=0) for name, config in CONFIGS.items()}
# Where sums are rounded, each rank keeps its own rest; and a level of few bits may turn on the last bit of a mean.
CASES = (
    [(name, 2, 2, {}) for name in SETTINGS if name not in ("rounded", "four bits")]
    + [
        (name, n, g, arguments)
        for name in ("default", "reduced", "clipped")
        for n, g, arguments in ((2, 3, {}), (3, 2, {}), (5, 4, {}), (3, 2, SUM))
    ]
    + [("clipped per tensor", 2, 4, SUM), ("dense fallback", 5, 2, {})]
)


@pytest.mark.parametrize("name, n, g, arguments", CASES)
def test_a_node_is_a_rank_with_the_mean_of_its_gradients(name, n, g, arguments):
    """Parameters, u and v; where ranks are added up, nodes' sums are."""
    nesterov, config = name == "clipped", SETTINGS[name]
    got = dgc.lockstep.run(
        lambda: trained(
            replace(config, hierarchical=True), gradient, nesterov=nesterov, **arguments
        ),
        n * g,
        g,
    )
    of_node = functools.partial(added if arguments else mean, g)
    expected = dgc.lockstep.run(lambda: trained(config, of_node, nesterov=nesterov, **arguments), n)
    assert all(torch.equal(parameters, got[0][0]) for parameters, _ in got)
    assert difference(got[0][0], expected[0][0]) < 1e-12
    for rank, (_, optimizer) in enumerate(got):
        assert torch.equal(pending(optimizer), pending(got[rank // g * g][1]))
        assert (
            difference(
                pending(optimizer) * (g if arguments else 1), pending(expected[rank // g][1])
            )
            < 1e-12
        )


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_mean_of_float16_gradients_is_one_where_their_sum_is_not(per_tensor):
    """Of parameters that travel dense, too, which are averaged within the node if they are clipped."""

    def worker():
        p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
        config = dgc.Config(clip_norm=1.0, clip_per_tensor=per_tensor, hierarchical=True)
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], config)
        p.grad = torch.full_like(p, 40000.0)
        optimizer.step()
        return p.tolist()

    clipped = 2**0.5 / 2  # to sqrt(2) for two nodes, in four equal entries
    assert dgc.lockstep.run(worker, 4, 2) == [pytest.approx([-clipped] * 4, rel=1e-2)] * 4


def test_with_nothing_kept_back_it_is_sgd_on_the_average_of_all_ranks():
    """Law 3; also on one machine, where it compresses nothing."""
    expected = flat(reference(range(8), 6)[0])
    for node, sparsity in ((2, 0.0), (3, 0.0), (6, 0.99)):
        config = dgc.Config(sparsity, hierarchical=True)
        with (
            pytest.warns(UserWarning, match="nothing is compressed")
            if node == 6
            else contextlib.nullcontext()
        ):
            results = dgc.lockstep.run(
                lambda config=config: flat(train(range(8), config)[0]), 6, node
            )
        assert all(difference(result, expected) < 1e-6 for result in results)


@pytest.mark.parametrize("node, hierarchical", [(1, True), (1, "auto"), (4, "auto")])
def test_it_is_the_flat_exchange_where_there_is_nothing_to_group(node, hierarchical):
    config = dgc.Config(0.95, hierarchical=hierarchical)
    got = dgc.lockstep.run(lambda: flat(train(range(4), config)[0]), 4, node)
    expected = dgc.lockstep.run(lambda: flat(train(range(4), dgc.Config(0.95))[0]), 4)
    assert torch.equal(got[0], expected[0])


def test_auto_groups_where_it_can():
    got, expected = (
        dgc.lockstep.run(
            lambda kind=kind: flat(train(range(4), dgc.Config(0.95, hierarchical=kind))[0]), 4, 2
        )[0]
        for kind in ("auto", True)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("n, g", [(2, 2), (4, 2), (4, 4), (2, 8), (8, 2)])
@pytest.mark.parametrize("sparsity", [0.99, 0.1])
def test_each_byte_crosses_the_network_once(sparsity, n, g):
    """What the ranks of a node send to other nodes is together what a rank alone would send among n; counted. The cost
    model knows what goes on within the node.
    """
    sizes, dense = counted_sizes(sparsity)
    config = dgc.Config(sparsity, hierarchical=True)
    reports = dgc.lockstep.run(lambda: train(range(2), config, model())[1].report(), n * g, g)
    small = 2 * (n * g - 1) / (n * g) * 4 * dense
    alone = (n - 1) * min(sizes.message, 2 / n * sizes.dense)
    padding = 4 * g * (n + 1)  # stripes are of one length
    assert alone <= sum(report.bytes_sent - small for report in reports[:g]) <= alone + padding
    inside = [step for step in cost.exchange("hierarchical", sizes, n, g) if not step.across]
    assert reports[0].node_bytes == pytest.approx(
        sum(s.times * s.nbytes for s in inside), abs=padding * n
    )


def level(optimizer):
    """What is done before an exchange."""
    engine = engine_of(optimizer)
    engine._gradients.group()
    engine._gradients.average_residuals()


def taken_up(config, states):
    """What is pending on this rank when it goes on from these residuals, saved by all ranks."""
    optimizer = trained(replace(config, hierarchical=True), gradient, steps=0, load=states)[1]
    level(optimizer)
    return pending(optimizer)


def test_residuals_of_ranks_become_those_of_their_node():
    """Saved by ranks that did not share theirs: what they are worth in total stays the same, to the last step."""
    apart = dgc.lockstep.run(lambda: trained(SETTINGS["default"], gradient), 4)
    states = [optimizer.residual_state_dict() for _, optimizer in apart]
    for rank, got in enumerate(
        dgc.lockstep.run(lambda: taken_up(SETTINGS["default"], states), 4, 2)
    ):
        both = [pending(apart[r][1]) for r in (rank // 2 * 2, rank // 2 * 2 + 1)]
        assert torch.equal(got, sum(both) / 2)


def test_residuals_that_differ_within_a_node_are_evened_out():
    """Rank 1 has rank 0's in another order, whose bits add up to the same; and nobody waits for rank 3, with none."""

    def worker():
        optimizer, rank = (
            trained(replace(SETTINGS["default"], hierarchical=True), gradient, steps=0)[1],
            current_rank(),
        )
        state = optimizer.residual_state_dict()
        for x in [x for letter in "uv" for x in state[letter].values()]:
            x.view(-1).copy_(torch.arange(x.numel()).roll(rank))
        if rank < 3:
            optimizer.load_residual_state_dict(state)
        before = pending(optimizer)
        for _ in range(2):  # flush(), and then a step
            level(optimizer)
        return before, pending(optimizer)

    results = dgc.lockstep.run(worker, 4, 2)
    for rank, (_, after) in enumerate(results):
        both = [before for before, _ in results[rank // 2 * 2 :][:2]]
        assert not torch.equal(*both) and torch.equal(after, sum(both) / 2)


def test_residuals_of_nodes_are_taken_up_to_the_bit():
    """Of three ranks, too, whose sum divided by 3 would be something else."""
    config = replace(SETTINGS["reduced"], hierarchical=True)
    states = [
        optimizer.residual_state_dict()
        for _, optimizer in dgc.lockstep.run(lambda: trained(config, gradient), 6, 3)
    ]
    for state, got in zip(
        states, dgc.lockstep.run(lambda: taken_up(config, states), 6, 3), strict=True
    ):
        assert torch.equal(
            got, torch.cat([x.flatten() for letter in "uv" for x in state[letter].values()])
        )


ROUNDED = replace(SETTINGS["clipped"], value_bits=8)


@pytest.mark.parametrize(
    "config, where",
    [
        (SETTINGS["default"], "a"),
        (SETTINGS["reduced"], "a"),
        (SETTINGS["clipped"], "a"),
        (dgc.Config(0.0, min_numel=0), "a"),
        (SETTINGS["default"], "c"),
        (SETTINGS["clipped"], "c"),
        (SETTINGS["clipped per tensor"], "c"),
        (ROUNDED, "c"),
    ],
    ids=[
        "gathered",
        "reduced",
        "clipped",
        "dense",
        "small",
        "small, clipped",
        "small, per tensor",
        "small, rounded",
    ],
)
def test_a_gradient_that_is_not_finite_is_laid_to_its_rank(config, where):
    """And has entered nothing: the training goes on."""

    def worker():
        told = []

        def of_rank(rank, step, name):
            g = gradient(rank, step, name)
            if step == 2 and rank == 3 and name == where and not told:
                g.view(-1)[34] = float("nan")
            return g

        parameters = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            for name, shape in SHAPES.items()
        }
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(parameters.values(), 0.1, 0.9),
            parameters.items(),
            replace(config, hierarchical=True),
        )
        for step in range(4):
            for name, p in parameters.items():
                p.grad = of_rank(current_rank(), step, name)
            try:
                optimizer.step()
            except FloatingPointError as error:
                told.append(str(error))
        return (
            told,
            pending(optimizer),
            torch.cat([p.detach().flatten() for p in parameters.values()]),
        )

    for told, left, parameters in dgc.lockstep.run(worker, 4, 2):
        assert told == [f"rank 3 has a gradient that is not finite, in: {where}"]
        assert left.isfinite().all() and parameters.isfinite().all()


def test_messages_leave_for_other_nodes_during_the_backward_pass():
    def worker():
        begun = []
        torch.manual_seed(0)
        network = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4)))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), 0.1),
            network.named_parameters(),
            dgc.Config(0.9, hierarchical=True),
            groups=4,
        )
        settings = engine_of(optimizer).settings
        start = settings.transport.start

        class Recording:
            world, by_node = settings.transport.world, settings.transport.by_node

            def start(self, collective, name):
                begun.append((collective.group, torch._C._current_graph_task_id() != -1))
                return start(collective, name)

        settings.transport = Recording()
        for _ in range(2):
            begun.clear()
            optimizer.zero_grad()
            network(torch.randn(3, 60)).square().mean().backward()
            optimizer.step()
        return begun.count(("intra_node", True)), begun.count(("inter_node", True))

    assert dgc.lockstep.run(worker, 4, 2) == [(4, 3)] * 4


def test_machines_that_cannot_be_grouped():
    def told(machines):
        def worker():
            try:
                return node_size(
                    dgc.lockstep.current(), machines[current_rank()], torch.device("cpu")
                )
            except ValueError as error:
                return str(error)

        answer, *others = dgc.lockstep.run(worker, len(machines))
        assert set(others) <= {answer}
        return answer

    assert told(["a", "a", "b", "b"]) == 2 and told(["a", "b"]) == 1 and told(["a"] * 3) == 3
    assert "same number of ranks each where hierarchical is True, got 2, 1" in told(["a", "a", "b"])
    assert "numbered machine by machine where hierarchical is True, got a, b, a, b" in told(
        ["a", "b"] * 2
    )


def test_machines_of_horovod_that_differ_in_size():
    """Of one and of two ranks: it numbers these 0, 1, 0 across machines."""
    told = launch("horovod", 3, [uneven_machines], node_size=(1, 2))[0][uneven_machines]
    assert len(set(told)) == 1 and "where hierarchical is True, got 1, 2" in told[0]


def test_what_cannot_be_grouped_is_refused_at_each_step(monkeypatch):
    """Rather than going on as if it had not been asked for."""

    def by_node(*_):
        raise ValueError("the machines have 2, 1 ranks")

    def worker():
        network, optimizer = train(range(0), dgc.Config(hierarchical=True))
        for _ in range(2):
            with pytest.raises(ValueError, match="the machines have 2, 1 ranks"):
                train(range(1), None, network, optimizer)

    monkeypatch.setattr(dgc.lockstep.Lockstep, "by_node", by_node)
    dgc.lockstep.run(worker, 3)


def test_what_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="hierarchical must be one of True, False, auto, got 'yes'"
    ):
        dgc.Config(hierarchical="yes")
    with pytest.raises(ValueError, match="node_size must be a divisor of size, which is"):
        dgc.lockstep.run(current_rank, 4, 3)

    def embedded():
        torch.manual_seed(0)
        network = torch.nn.Embedding(100, 30, sparse=True)
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), 0.1),
            network.named_parameters(),
            dgc.Config(0.9, hierarchical=True, clip_norm=1.0),
        )
        network(torch.arange(5)).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"weight must be dense, got .*sparse_as_dense=True"):
        dgc.lockstep.run(embedded, 4, 2)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match=r"hierarchical must be False, .* in an elastic job"):
        dgc.lockstep.run(lambda: train(range(1), dgc.Config(hierarchical=True)), 2)


@pytest.mark.parametrize("launcher", [pytest.param("horovod", marks=pytest.mark.long), "torch"])
def test_transports_give_the_same(launcher):
    """Law 7: two machines of two processes each, beside lockstep; Horovod as its error says how to begin it."""
    results = ran(launcher, 4, [hierarchical], node_size=2)[hierarchical]
    expected = dgc.lockstep.run(hierarchical, 4, 2)
    for rank, ranks in enumerate(results):
        assert all(torch.equal(ranks[name][0], results[0][name][0]) for name in ranks)
        for name, (parameters, left) in ranks.items():
            # A ring of four adds up in its own order.
            assert difference(parameters, expected[rank][name][0]) < 1e-5
            assert left.any() and torch.equal(left, results[rank // 2 * 2][name][1])
