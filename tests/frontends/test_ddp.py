"""The hook of DistributedDataParallel, over two and three processes: dgc.DistributedOptimizer is the reference."""

import contextlib
import math
import pickle
import warnings

import pytest
import torch
from launch import ran
from laws import (
    CONFIGS,
    DDP,
    flat,
    in_ddp,
    loss,
    model,
    overflowing,
    reference,
    same_end,
    scaled,
    train,
)
from torch import nn

import dgc
from dgc.transport import find


def ddp_trajectories():
    """As dgc.DistributedOptimizer, to the bit, with each configuration and in each of DDP's manners."""
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, config in CONFIGS.items():
            expected = train(range(5), config)
            for manner, arguments in (
                DDP.items() if name == "default" else [("views", DDP["views"])]
            ):
                results[name, manner] = same_end(
                    train(range(5), None, *in_ddp(model(), config, **arguments)), expected
                )
    return results


class Orders(nn.Module):
    """Parameters that do not lie in memory in the order of their dimensions; one is not used after two steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.late = (
            nn.Conv2d(8, 24, 3).to(memory_format=torch.channels_last) for _ in range(2)
        )
        self.transposed = nn.Parameter(torch.randn(24, 60).t())
        # Contiguous in both orders.
        self.single = nn.Conv2d(1, 24, 1).to(memory_format=torch.channels_last)

    def forward(self, x, step):
        y = self.first(x) + self.single(x[:, :1, 1:-1, 1:-1])
        return nn.functional.linear(
            (y + self.late(x) if step < 2 else y).mean((2, 3)), self.transposed
        )


def ddp_orders():
    """As dgc.DistributedOptimizer, in parameters and residuals, whatever looks at entries beside each other: an update
    that DDP leaves to the hook, flush(), AdamW's denominator, a clipped norm.
    """
    rank, results = find().world.rank, {}
    for name, settings in {
        "sgd": {},
        "clipped": {"clip_norm": 0.1},
        "adamw": {"sparsity": dgc.piecewise({0: 0.0, 2: 0.9}), "factor_masking": False},
    }.items():
        config, ends = dgc.Config(**{"sparsity": 0.9, "min_numel": 100, **settings}), []
        for ddp in (True, False):
            network = Orders()
            optimizer = (
                torch.optim.AdamW(network.parameters())
                if name == "adamw"
                else torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
            )
            called = network
            if ddp:
                called = nn.parallel.DistributedDataParallel(
                    network, find_unused_parameters=True, gradient_as_bucket_view=name == "clipped"
                )
                dgc.register_comm_hook(called, optimizer, config)
            else:
                optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
            for step in range(6):
                optimizer.zero_grad()
                x = torch.randn(
                    4, 8, 7, 7, generator=torch.Generator().manual_seed(10 * step + rank)
                )
                called(x.to(memory_format=torch.channels_last), step).square().mean().backward()
                optimizer.step()
            before = list(optimizer.residual_state_dict()["v"].values())
            if name != "adamw":
                optimizer.flush()
            ends.append([flat(network), *before])
        results[name] = all(map(torch.equal, *ends))
    return results


def ddp_accumulation():
    """no_sync() for the first of two backward passes, as backward_passes_per_step=2."""
    network, optimizer = in_ddp(model(), CONFIGS["default"])
    reference = model()
    wrapped = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    wrapped = dgc.DistributedOptimizer(
        wrapped, reference.named_parameters(), CONFIGS["default"], backward_passes_per_step=2
    )
    rank = find().world.rank
    for step in range(4):
        optimizer.zero_grad()
        with network.no_sync():
            loss(network, rank, 2 * step).backward()
        loss(network, rank, 2 * step + 1).backward()
        optimizer.step()
        wrapped.zero_grad()
        for i in range(2):
            loss(reference, rank, 2 * step + i).backward()
        wrapped.step()
    return same_end((network, optimizer), (reference, wrapped))


def ddp_exchanged_again():
    """The warnings of three steps of two passes each: all exchanged, the first dropped, the first within no_sync()."""
    told = []
    for way in ("exchanged", "dropped", "no_sync"):
        network, optimizer = in_ddp(model(), CONFIGS["default"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                with network.no_sync() if way == "no_sync" else contextlib.nullcontext():
                    loss(network, find().world.rank, 2 * step).backward()
                if way == "dropped":
                    optimizer.zero_grad()
                loss(network, find().world.rank, 2 * step + 1).backward()
                optimizer.step()
        told.append([str(warning.message) for warning in caught])
    return told


class Branches(nn.Module):
    """Rank 0 and the even steps use one branch, all ranks another for two steps only, and none a third."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 40, sparse=True)
        self.all, self.some, self.early, self.none = (nn.Linear(40, 40) for _ in range(4))
        self.rank = rank

    def forward(self, words, step):
        y = self.all(self.words(words))
        y = y + self.some(y) if self.rank == 0 and step % 2 == 0 else y
        return y + self.early(y) if step < 2 else y


def ddp_unused():
    """Branches and an embedding with sparse gradients, as dgc.DistributedOptimizer; p.grad new each step, and kept."""
    rank, results = find().world.rank, {}
    for set_to_none in (True, False):
        for view in (True, False):
            ends = []
            for ddp in (True, False):
                network = Branches(rank)
                if ddp:
                    network, optimizer = in_ddp(
                        network,
                        dgc.Config(0.5),
                        momentum=0.9,
                        find_unused_parameters=True,
                        gradient_as_bucket_view=view,
                    )
                    network.module.words.weight.register_hook(lambda g: g)
                else:
                    optimizer = torch.optim.SGD(
                        network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2
                    )
                    optimizer = dgc.DistributedOptimizer(
                        optimizer, network.named_parameters(), dgc.Config(0.5)
                    )
                optimizer.param_groups[0]["weight_decay"] = (
                    0  # torch's SGD has none for sparse gradients
                )
                for step in range(6):
                    optimizer.zero_grad(set_to_none)
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    words = torch.randint(0, 50, (4,), generator=generator)
                    network(words, step).square().mean().backward()
                    optimizer.step()
                ends.append((network, optimizer))
            results[set_to_none, view] = same_end(*ends)
    return results


def ddp_static_sparse():
    """A static graph with an embedding of sparse gradients, in whose first pass torch does not number the buckets."""
    rank, ends = find().world.rank, []
    for ddp in (True, False):
        torch.manual_seed(1)
        network = nn.Sequential(
            nn.Embedding(50, 40, sparse=True), nn.Linear(40, 40), nn.Linear(40, 40)
        )
        if ddp:
            network, optimizer = in_ddp(network, dgc.Config(0.5), static_graph=True)
        else:
            optimizer = torch.optim.SGD(
                network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2
            )
            optimizer = dgc.DistributedOptimizer(
                optimizer, network.named_parameters(), dgc.Config(0.5)
            )
        optimizer.param_groups[0]["weight_decay"] = 0  # torch's SGD has none for sparse gradients
        for step in range(4):
            optimizer.zero_grad()
            words = torch.randint(
                0, 50, (4,), generator=torch.Generator().manual_seed(10 * step + rank)
            )
            network(words).square().mean().backward()
            optimizer.step()
        ends.append((network, optimizer))
    return same_end(*ends)


def ddp_unused_scaled():
    """No rank uses one of two layers in half of the steps. Whether a loss scale changes nothing: unfused, and fused."""
    rank, results = find().world.rank, {}
    for fused in (False, True):
        for scale in (None, 2.0**14):
            torch.manual_seed(0)
            network = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
            network.forward = lambda x, both, layers=network: sum(
                layer(x).square().mean() for layer in (layers if both else layers[:1])
            )
            called = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
            dgc.register_comm_hook(called, optimizer, dgc.Config(0.9), grad_scaler=scaler)
            for step in range(6):
                optimizer.zero_grad()
                x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
                scaler.scale(called(x, step % 2 == 0)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            results[fused, scale] = flat(network)
    return [torch.equal(results[fused, None], results[fused, 2.0**14]) for fused in (False, True)]


def ddp_join():
    """Rank 0 has three batches, the others five: as if its gradient had been zero in the last two. Then all flush."""
    rank, config = find().world.rank, CONFIGS["default"]
    network, optimizer = in_ddp(model(), config)
    with network.join():
        for step in range(3 if rank == 0 else 5):
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            optimizer.step()
    reference, wrapped = train(range(3), config)
    for step in range(3, 5):
        wrapped.zero_grad()
        (loss(reference, rank, step) * (rank > 0)).backward()
        wrapped.step()
    residuals = [
        torch.equal(a, b)
        for a, b in zip(
            optimizer.residual_state_dict()["v"].values(),
            wrapped.residual_state_dict()["v"].values(),
            strict=True,
        )
    ]
    trained = torch.equal(flat(network), flat(reference))
    optimizer.flush()
    wrapped.flush()
    return trained and torch.equal(flat(network), flat(reference)), all(residuals)


def ddp_join_scaled():
    """The same with a loss scale, which grows and overflows meanwhile; and a step after it, in which all have data."""
    rank = find().world.rank
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    network, optimizer = in_ddp(model(), CONFIGS["default"], scaler=scaler)

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(loss(network, rank, step) * (1e38 if step == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    with network.join():
        train(range(1 if rank == 0 else 6))
    train([9])
    return flat(network), scaler.state_dict(), optimizer.report().skipped


def ddp_join_state():
    """Rank 0 has no batch, or two, the others five; then all have one: as if gradients had been zero, in parameters,
    residuals, and the state of torch's optimizer, of which AdamW's compressed steps begin meanwhile.
    """
    rank, results = find().world.rank, {}
    for few in (0, 2):
        for inner, settings in (
            (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}),
            (torch.optim.AdamW, {"lr": 0.01}),
        ):
            config = dgc.Config(dgc.piecewise({0: 0.0, 2: 0.9}), min_numel=100)
            network, wholes = nn.parallel.DistributedDataParallel(model()), model()
            optimizer = inner(network.parameters(), **settings)
            dgc.register_comm_hook(network, optimizer, config)
            wrapped = inner(wholes.parameters(), **settings)
            wrapped = dgc.DistributedOptimizer(wrapped, wholes.named_parameters(), config)

            def train(steps, network, optimizer, few):
                for step in steps:
                    optimizer.zero_grad()
                    (loss(network, rank, step) * (rank > 0 or step < few or step == 5)).backward()
                    optimizer.step()

            with network.join():
                train(range(few if rank == 0 else 5), network, optimizer, few)
            train([5], network, optimizer, few)
            train(range(6), wholes, wrapped, few)
            states = [
                [x for state in o.state_dict()["state"].values() for x in state.values()]
                for o in (optimizer, wrapped)
            ]
            results[few, inner.__name__] = (
                same_end((network, optimizer), (wholes, wrapped))
                and len(states[0]) == len(states[1]) > 0
                and all(map(torch.equal, *states))
            )
    return results


def ddp_user():
    """What a user takes away stays away; what DDP does not know of, or another config at a second time, is refused."""
    rank, results = find().world.rank, {}
    for view in (True, False):
        network, optimizer = in_ddp(model(), CONFIGS["default"], gradient_as_bucket_view=view)
        before = network.module[8].weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            network.module[8].weight.grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it was changed
                optimizer.step()
        results["cancelled", view] = torch.equal(before, network.module[8].weight)
    network, optimizer = in_ddp(
        Branches(rank), dgc.Config(0.5), momentum=0.9, find_unused_parameters=True
    )
    optimizer.param_groups[0]["weight_decay"] = 0  # torch's SGD has none for sparse gradients
    for step in range(5):
        before = flat(network)
        optimizer.zero_grad()
        network(torch.arange(4), step).square().mean().backward()
        if step == 4:  # in which rank 0 alone has used a branch
            optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    results["zeroed"] = torch.equal(flat(network), before)
    inner = model()
    inner[0].requires_grad_(False)
    network, optimizer = in_ddp(inner, CONFIGS["default"])
    train([0], None, network, optimizer)
    inner[0].requires_grad_(True)
    try:
        train([1], None, network, optimizer)
    except RuntimeError as error:
        results["thawed"] = str(error)
    network, optimizer = in_ddp(model(), dgc.Config(0.9))
    for wrong in (
        lambda: optimizer.set_backward_passes_per_step(2),
        lambda: dgc.register_comm_hook(
            nn.parallel.DistributedDataParallel(network.module),
            optimizer,
            dgc.Config(0.9, factor_masking=False),
        ),
        lambda: dgc.register_comm_hook(
            nn.parallel.DistributedDataParallel(network.module),
            optimizer,
            grad_scaler=torch.amp.GradScaler("cpu"),
        ),
    ):
        try:
            wrong()
        except ValueError as error:
            results.setdefault("refused", []).append(str(error))
    dgc.register_comm_hook(
        nn.parallel.DistributedDataParallel(network.module), optimizer, dgc.Config(0.5)
    )
    results["sparsity"] = optimizer._compression.sparsity
    return results


def ddp_pickled():
    """Pickled after three steps, loaded, registered anew, gone on: as if never stopped."""
    config = CONFIGS["default"]
    expected = train(range(6), None, *in_ddp(model(), config))
    network, optimizer = pickle.loads(pickle.dumps(train(range(3), None, *in_ddp(model(), config))))
    dgc.register_comm_hook(network, optimizer, config)
    return same_end(train(range(3, 6), None, network, optimizer), expected)


def ddp_scaled():
    """Loss scale and an overflow on rank 1, as `scaled`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    network, optimizer = in_ddp(model(), dgc.Config(sparsity=0.9), scaler=scaler)
    return overflowing(network, optimizer, scaler)


def ddp_unscaled():
    """The same with `unscale_` before each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    network, optimizer = in_ddp(model(), dgc.Config(sparsity=0.9), scaler=scaler)
    return overflowing(network, optimizer, scaler, unscale=True)


def ddp_skipped():
    """A NaN on rank 1 with nonfinite="skip": as if that step had not been."""
    config = dgc.Config(0.9, nonfinite="skip")
    network, optimizer = train(range(2), None, *in_ddp(model(), config))
    optimizer.zero_grad()
    (loss(network, find().world.rank, 2) * (math.nan if find().world.rank == 1 else 1)).backward()
    optimizer.step()
    gone = all(p.grad is None for p in network.parameters())
    train([3, 4], None, network, optimizer)
    return gone and same_end(
        (network, optimizer), train([0, 1, 3, 4], config)
    ), optimizer.report().skipped


def ddp_no_step():
    """What torch's optimizer does in a step without gradients: nothing. A schedule does not count it."""
    network, optimizer = in_ddp(model(), CONFIGS["default"])
    before = flat(network).clone()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer.step()
    scheduler.step()
    untouched = torch.equal(flat(network), before) and optimizer.param_groups[0]["dgc_step"] == 0
    loss(network, find().world.rank, 0).backward()
    optimizer.step()
    return untouched and same_end((network, optimizer), train(range(1), CONFIGS["default"]))


def ddp_refusals():
    """What a script is told that steps without an exchange, that leaves parameters out, or has a NaN on rank 1."""
    told, rank = [], find().world.rank

    def again():
        network, optimizer = in_ddp(model(), CONFIGS["default"])
        loss(network, rank, 0).backward()
        for _ in range(2):
            optimizer.step()

    def unused():
        network = nn.ModuleList([nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)])
        network.forward = lambda x: network[0](x)
        fresh, other = in_ddp(network, CONFIGS["default"])
        fresh(torch.ones(2, 40)).sum().backward()
        other.step()

    def unsynchronised():
        fresh, other = in_ddp(model(), CONFIGS["default"])
        with fresh.no_sync():
            loss(fresh, rank, 0).backward()
        other.step()

    def not_a_number():
        fresh, other = in_ddp(model(), CONFIGS["default"])
        (loss(fresh, rank, 0) * (math.nan if rank == 1 else 1)).backward()
        other.step()

    for wrong in (again, unused, unsynchronised, not_a_number):
        try:
            wrong()
            told.append(None)
        except (AssertionError, RuntimeError, FloatingPointError) as error:
            told.append((type(error).__name__, str(error)))
    return told


def ddp_goes_on():
    """A NaN on rank 1 in the third of six steps, caught: as without DDP, to the bit, in each of its manners."""
    rank = find().world.rank

    def trained(network, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            with contextlib.suppress(FloatingPointError) if step == 2 else contextlib.nullcontext():
                (
                    loss(network, rank, step) * (math.nan if rank == 1 and step == 2 else 1)
                ).backward()
                optimizer.step()
        return network, optimizer

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    expected = trained(
        network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), CONFIGS["default"])
    )
    assert torch.isfinite(flat(network)).all() and optimizer.param_groups[0]["dgc_step"] == 5
    return {
        manner: same_end(trained(*in_ddp(model(), CONFIGS["default"], **arguments)), expected)
        for manner, arguments in DDP.items()
    }


def ddp_changed():
    """Warnings: of clipping after the exchange; and none of a scheduler made before registering, which goes on."""
    network = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    dgc.register_comm_hook(network, optimizer, CONFIGS["default"])
    seen = []
    for clip in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss(network, find().world.rank, 0).backward()
            if clip:
                nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
            optimizer.step()
            scheduler.step()
        seen.append([str(warning.message) for warning in caught])
    return seen, optimizer.param_groups[0]["lr"]


CASES = (
    ddp_exchanged_again,
    ddp_trajectories,
    ddp_accumulation,
    ddp_unused,
    ddp_static_sparse,
    ddp_unused_scaled,
    ddp_join,
    ddp_pickled,
    ddp_scaled,
    ddp_unscaled,
    scaled,
    ddp_skipped,
    ddp_refusals,
    ddp_goes_on,
    ddp_changed,
    ddp_join_scaled,
    ddp_join_state,
    ddp_user,
    ddp_orders,
    ddp_no_step,
)
sizes = pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])


@sizes
@pytest.mark.parametrize("name", CONFIGS)
def test_as_distributed_optimizer(size, name):
    """Parameters and residuals, to the bit: each configuration, and each of DDP's manners; no warning."""
    for results in ran("torch", size, CASES)[ddp_trajectories]:
        assert {
            manner: same for (config, manner), same in results.items() if config == name
        } == dict.fromkeys(DDP if name == "default" else ["views"], True)


@sizes
@pytest.mark.parametrize("name", [ddp_accumulation, ddp_pickled, ddp_no_step])
def test_to_the_bit(size, name):
    assert ran("torch", size, CASES)[name] == [True] * size


@sizes
def test_several_exchanges_for_a_step_are_told_once(size):
    for exchanged, dropped, within in ran("torch", size, CASES)[ddp_exchanged_again]:
        assert len(exchanged) == 1 and "within model.no_sync()" in exchanged[0]
        assert not within and not any("no_sync" in message for message in dropped)


@sizes
def test_parameters_in_any_order_in_memory(size):
    assert (
        ran("torch", size, CASES)[ddp_orders]
        == [dict.fromkeys(("sgd", "clipped", "adamw"), True)] * size
    )


@sizes
def test_parameters_that_some_or_no_rank_uses_and_sparse_ones(size):
    """What is pending of a branch that no rank uses any longer is applied all the same."""
    both = (True, False)
    assert (
        ran("torch", size, CASES)[ddp_unused] == [{(a, b): True for a in both for b in both}] * size
    )
    assert ran("torch", size, CASES)[ddp_unused_scaled] == [[True, True]] * size
    assert ran("torch", size, CASES)[ddp_static_sparse] == [True] * size


@sizes
def test_a_rank_that_has_no_more_data_joins(size):
    """It goes on sending what it has kept; in the end it has the parameters of the others."""
    for parameters, residuals in ran("torch", size, CASES)[ddp_join]:
        assert parameters and residuals


@sizes
def test_a_rank_joins_with_a_loss_scale(size):
    """Its scaler does what the others' do, so that the next step is right."""
    results = ran("torch", size, CASES)[ddp_join_scaled]
    for parameters, scaler, skipped in results:
        assert torch.equal(parameters, results[0][0]) and parameters.isfinite().all()
        assert scaler == results[0][1] and skipped == 1
    assert results[0][1]["scale"] == 2.0**12  # after 2 + 2 steps, an overflow, and 2 more


@sizes
def test_a_rank_that_joins_keeps_up(size):
    for results in ran("torch", size, CASES)[ddp_join_state]:
        assert results == dict.fromkeys([(0, "SGD"), (0, "AdamW"), (2, "SGD"), (2, "AdamW")], True)


@sizes
def test_what_a_user_does_with_it(size):
    for results in ran("torch", size, CASES)[ddp_user]:
        assert results["cancelled", True] and results["cancelled", False] and results["zeroed"]
        assert results["thawed"].startswith(
            "DistributedDataParallel does not exchange 0.weight, 0.bias: when it was"
        )
        passes, config, scaler = results["refused"]
        assert "passes must be 1 with DistributedDataParallel" in passes
        assert "but for the sparsity, got" in config
        assert (
            scaler
            == "grad_scaler must be given for each model of an optimizer or for none, got both"
        )
        assert results["sparsity"] == 0.5


@sizes
@pytest.mark.parametrize("name", [ddp_scaled, ddp_unscaled])
def test_a_loss_scale(size, name):
    results = ran("torch", size, CASES)
    for (parameters, scales, skipped), (expected, *rest) in zip(
        results[name], results[scaled], strict=True
    ):
        assert torch.equal(parameters, expected) and [scales, skipped] == rest and skipped == 1


@sizes
def test_a_step_that_is_skipped_never_was(size):
    assert ran("torch", size, CASES)[ddp_skipped] == [(True, 1)] * size


@sizes
def test_what_goes_wrong_is_told_on_all_ranks(size):
    for told in ran("torch", size, CASES)[ddp_refusals]:
        again, unused, unsynchronised, bad = told
        assert again[0] == unsynchronised[0] == "RuntimeError" and again[1].startswith(
            "nothing was exchanged"
        )
        assert unsynchronised[1] == again[1]
        assert unused[0] == "RuntimeError" and "no gradient for 1.weight" in unused[1]
        assert "find_unused_parameters=True" in unused[1]
        assert bad == ("FloatingPointError", bad[1]) and bad[1].startswith(
            "rank 1 has a gradient that is not finite"
        )


@sizes
def test_whoever_catches_it_goes_on(size):
    assert ran("torch", size, CASES)[ddp_goes_on] == [dict.fromkeys(DDP, True)] * size


@sizes
def test_clipping_after_the_exchange_is_told_and_an_earlier_scheduler_goes_on(size):
    for (first, second), lr in ran("torch", size, CASES)[ddp_changed]:
        assert first == [] and lr == 0.25
        assert (
            len(second) == 1
            and ("was changed between its exchange, in backward() or synchronize(), and step()")
            in second[0]
        )


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_one_process_trains_as_ever(alone):
    network = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    dgc.register_comm_hook(network, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss(network, 0, step).backward()
        optimizer.step()
    assert torch.equal(flat(network), flat(reference(range(5), 1)[0]))


def test_errors_at_the_door(alone):
    network = model()
    parallel = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3, 5))], lr=0.1)
    for arguments, error, message in (
        ((network, optimizer), TypeError, "ddp_model must be a torch.nn.parallel"),
        ((parallel, "sgd"), TypeError, "optimizer must be a torch.optim.Optimizer, got 'sgd'"),
        (
            (parallel, torch.optim.RMSprop(network.parameters())),
            TypeError,
            "optimizer must be torch.optim.SGD or AdamW for momentum correction",
        ),
        (
            (parallel, foreign),
            ValueError,
            "must have a parameter of ddp_model that requires a gradient, got none",
        ),
    ):
        with pytest.raises(error, match=message):
            dgc.register_comm_hook(*arguments)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = nn.parallel.DistributedDataParallel(model())
    with pytest.raises(
        ValueError, match=r"ddp_model must have the reducer of C\+\+, .* 'python_reducer'"
    ):
        dgc.register_comm_hook(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    assert type(optimizer) is torch.optim.SGD and not optimizer.state
    dgc.register_comm_hook(parallel, optimizer)
    with pytest.raises(RuntimeError, match="once for a model and an optimizer"):
        dgc.register_comm_hook(parallel, optimizer)
