"""Collectives between real processes: bytes, process sets, limits, and failing together."""

import contextlib
import copy
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import launch, ran
from laws import difference, flat, loss, model, train
from torch import nn

import dgc
from dgc.collective import Collective
from dgc.transport import find

EXCHANGES = (0.0, "as it is"), (0.9, "rounded"), (0.9, "allgather"), (0.9, "reduce")


def socket_bytes():
    """Bytes that this process sent over TCP in six steps, and what the report says."""
    world, results = find().world, {}
    for sparsity, exchange in EXCHANGES:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(500, 600, bias=False), nn.Linear(600, 400, bias=False))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        config = dgc.Config(sparsity=sparsity)
        if exchange == "rounded":  # all of them are so small that they travel dense
            config = dgc.Config(sparsity=sparsity, value_bits=8, min_numel=10**9)
        elif sparsity:
            config = dgc.Config(sparsity=sparsity, exchange=exchange)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
        everybody_is_here = torch.zeros(1)
        # Made beforehand, as Horovod also negotiates by the clock.
        g = [
            [
                torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(100 * step + world.rank)
                )
                for p in network.parameters()
            ]
            for step in range(2)
        ]
        for step in range(8):
            if step == 2:
                dgc.broadcast_parameters([everybody_is_here])
                before, reported = sent_over_tcp(), optimizer.report().total_bytes_sent
            for p, gradient in zip(network.parameters(), g[step % 2], strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        dgc.broadcast_parameters([everybody_is_here])
        results[sparsity, exchange] = (
            sent_over_tcp() - before,
            optimizer.report().total_bytes_sent - reported,
        )
    return results


def sent_over_tcp():
    """What the kernel has counted, over all sockets of this process."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not a TCP socket
            with socket.socket(fileno=os.dup(int(number))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def process_set():
    """Three ranks, of which 1 and 2 exchange gradients; roots are counted within the set."""
    import horovod.torch as hvd
    from launch import PROCESS_SETS

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.0), process_set=PROCESS_SETS[0]
    )
    number = torch.tensor([hvd.rank()])
    dgc.broadcast_parameters([number], root_rank=1, process_set=PROCESS_SETS[0])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # to all processes, also those outside
    train(range(5), None, network, optimizer)
    return flat(network), number.item(), optimizer.report().steps


def plain(kind, network):
    """An optimizer of torch."""
    if kind == "sgd":
        return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(network.parameters(), lr=0.01)


def sets_of_two_and_of_one():
    """Ranks 1 and 2 exchange gradients, rank 0 is a set of its own. With each optimizer: the state that
    hvd.broadcast_optimizer_state has brought to all, and what became of the parameters.
    """
    import horovod.torch as hvd
    from launch import PROCESS_SETS

    found = []
    for kind, members in (
        ("sgd", PROCESS_SETS[:2]),
        ("adamw", PROCESS_SETS[:2]),
        ("adamw", PROCESS_SETS[:1]),
    ):
        network = model()
        mine = next((one for one in members if one.included()), members[0])
        optimizer = dgc.DistributedOptimizer(
            plain(kind, network),
            network.named_parameters(),
            dgc.Config(sparsity=dgc.piecewise({0: 0.0, 2: 0.9})),
            process_set=mine,
        )
        added = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [added]})
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        keys = [sorted(state) for state in optimizer.state.values()]
        train(range(4), None, network, optimizer)
        found.append((keys, flat(network)))
    return found


def stock_saved_in_a_set():
    """Horovod's own optimizer of ranks 1 and 2, saved and loaded by these alone."""
    import horovod.torch as hvd
    from launch import PROCESS_SETS

    if hvd.rank() == 0:
        return None
    network, folder = model(), Path(sys.argv[2]) / "stock"
    optimizer = hvd.DistributedOptimizer(
        plain("sgd", network), network.named_parameters(), process_set=PROCESS_SETS[0]
    )
    train(range(2), None, network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer, {"rank": hvd.rank()})
    saved = flat(network)
    train(range(2, 4), None, network, optimizer)
    extras = dgc.load_checkpoint(folder, network, optimizer)
    return extras["rank"], torch.equal(flat(network), saved)


def set_that_was_not_added():
    """It has the ranks of all, and Horovod does not know of it."""
    import horovod.torch as hvd

    network = model()
    try:
        dgc.DistributedOptimizer(
            plain("sgd", network), network.named_parameters(), process_set=hvd.ProcessSet([0, 1])
        )
    except ValueError as error:
        return str(error)
    return "no error"


def too_large():
    """Together with the other process's one byte more than Horovod can count; nobody writes to the memory."""
    told = []
    for op, name, shape in (
        ("all_gather", "large", 1 << 30),
        ("all_gather", "dgc.sparse.w", 1 << 30),
        ("all_to_all", "large", (2, 1 << 30)),
    ):
        try:
            find().start(Collective(op, torch.empty(shape, dtype=torch.uint8)), name)
        except ValueError as error:
            told.append(str(error))
    return told


def started_anew():
    """Horovod shut down and initialised again under a living optimizer, as elastic jobs do.

    By another host name, since the server at which processes look one another up keeps the addresses of a host's
    processes where one of them was done before another (only elastic jobs clear it), and who reads those finds no one.
    """
    import horovod.torch as hvd

    config = dgc.Config(sparsity=0.9)
    network, optimizer = train(range(3), config)
    hvd.shutdown()
    os.environ["HOROVOD_HOSTNAME"] += "-anew"
    hvd.init()
    train(range(3, 6), config, network, optimizer)
    return flat(network), flat(train(range(6), config)[0])


def process_group():
    """As process_set, with a torch.distributed group of ranks 1 and 2."""
    group = torch.distributed.new_group([1, 2])
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.0), process_set=group
    )
    number = torch.tensor([torch.distributed.get_rank()])
    dgc.broadcast_parameters([number], root_rank=1, process_set=group)
    train(range(5), None, network, optimizer)
    return flat(network), number.item(), optimizer.report().steps


def shared_in_slices():
    """More bytes than Horovod broadcasts at once, were these as few as 1,000."""
    from dgc.transport import horovod

    limit, horovod.MAX_BYTES = horovod.MAX_BYTES, 1000
    try:
        root = find().world.size - 1
        values = [
            torch.arange(5003.0, dtype=torch.float64),
            torch.arange(500.0).view(20, 25).to(torch.bfloat16),
            torch.arange(1000) % 3 == 0,
            torch.arange(250.0),
        ]
        given = [
            value if find().world.rank == root else torch.zeros_like(value) for value in values
        ]
        dgc.broadcast_parameters([given[0]], root)
        waits = [
            find().start(Collective("broadcast", value, root), str(i))
            for i, value in enumerate(given)
        ]
        waits.append(find().start(Collective("all_reduce", values[0].clone()), "sum"))
        expected = [*values, find().world.size * values[0]]
        return [torch.equal(wait(), value) for wait, value in zip(waits, expected, strict=True)]
    finally:
        horovod.MAX_BYTES = limit


def loaded_in_between():
    """After a backward pass in which rank 1 lacks the gradients that leave first, all go back to a state."""
    rank, layers = find().world.rank, nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
    dgc.broadcast_parameters(layers.state_dict())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        optimizer,
        layers.named_parameters(),
        dgc.Config(0.9),
        groups=[[*layer.parameters()] for layer in layers],
    )

    def pass_back(step, without=None):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        for i, layer in enumerate(layers):
            x = x if i == without else layer(x).tanh()
        optimizer.zero_grad()
        x.square().mean().backward()

    def go_on(checkpoint=False):
        if checkpoint:
            dgc.load_checkpoint(folder, layers, optimizer)
        else:
            layers.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.load_residual_state_dict(residuals)
        for step in range(3, 6):
            pass_back(step)
            optimizer.step()
        return flat(layers)

    for step in range(2):
        pass_back(step)
        optimizer.step()
    weights, state, residuals = (
        copy.deepcopy(x)
        for x in (layers.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict())
    )
    folder, found = Path(sys.argv[2]) / "in between", []
    dgc.save_checkpoint(folder, layers, optimizer)
    expected = go_on()
    for checkpoint in (False, True):
        pass_back(2, without=2 if rank == 1 else None)
        found.append(torch.equal(go_on(checkpoint), expected))
    return found


def both_libraries():
    """Horovod initialised by a script that torchrun has started: there it is alone."""
    import horovod.torch as hvd

    hvd.init()
    try:
        find()
    except ValueError as error:
        return str(error)
    finally:
        hvd.shutdown()
    return "no error"


def raises_on_one_rank():
    """Rank 1 fails between two steps."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        raise ArithmeticError("rank 1 has had enough")
    train(range(2, 4), None, network, optimizer)


def out_of_data():
    """Rank 0 runs out of data and calls hvd.join() while the others go on."""
    import horovod.torch as hvd

    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if hvd.rank() == 0:
        hvd.join()
        print("joined", file=sys.stderr)
    else:
        train(range(2, 4), None, network, optimizer)
        hvd.join()


def scaler_of_an_elastic_state():
    """Ranks begin with their own scales. One step after they are synchronized; a step that fails after unscale_();
    back to the commit; and that step again. The scales seen, and the parameters.
    """
    import dgc.elastic

    rank, network = find().world.rank, model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * (1 + rank), growth_interval=1)
    optimizer = dgc.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05),
        network.named_parameters(),
        dgc.Config(0.9),
        grad_scaler=scaler,
    )
    state = dgc.elastic.TorchState(model=network, optimizer=optimizer, step=0, scaler=scaler)
    state.sync()
    scales = [scaler.get_scale()]
    for fails in (False, True, False):
        optimizer.zero_grad()
        state.scaler.scale(loss(network, rank, state.step)).backward()
        state.scaler.unscale_(optimizer)
        if fails:
            state.restore()
            continue
        state.scaler.step(optimizer)
        state.scaler.update()
        state.step += 1
        state.save()
        scales.append(scaler.get_scale())
    off = dgc.elastic.TorchState(
        model=network, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    off.restore()
    return scales, flat(network)


IN_PROCESSES = {
    ("horovod", 2): (
        socket_bytes,
        too_large,
        set_that_was_not_added,
        shared_in_slices,
        scaler_of_an_elastic_state,
        loaded_in_between,
        started_anew,
    ),
    **{("torch", n): (socket_bytes, loaded_in_between) for n in (2, 4, 8)},
    ("horovod", 3): (process_set, sets_of_two_and_of_one, stock_saved_in_a_set),
    ("torch", 3): (process_group, both_libraries),
}


@pytest.mark.parametrize(
    "place",
    [
        ("horovod", 2),
        ("torch", 2),
        *(pytest.param(("torch", n), marks=pytest.mark.long) for n in (4, 8)),
    ],
    ids=lambda place: f"{place[0]}, {place[1]}",
)
@pytest.mark.parametrize("sparsity, exchange", EXCHANGES)
def test_reported_bytes_are_those_on_the_socket(place, sparsity, exchange):
    """The kernel's count of what the processes sent; Horovod's negotiation is in it, which goes on by the clock."""
    results = [rank[sparsity, exchange] for rank in ran(*place, IN_PROCESSES[place])[socket_bytes]]
    counted, reported = (sum(column) for column in zip(*results, strict=True))
    print(
        f"{place[0]}, {place[1]} ranks, sparsity {sparsity}, {exchange}: sent {counted:,}, reported {reported:,.0f}"
    )
    assert counted == pytest.approx(reported, rel=0.05)


def test_the_state_is_broadcast_to_horovods_ranks_of_any_set():
    """Alike on all ranks, so that Horovod's broadcast ends; and a rank alone in its set, or in none, trains as torch's
    optimizer does.
    """
    outside, *inside = ran("horovod", 3, IN_PROCESSES["horovod", 3])[sets_of_two_and_of_one]
    for at, kind in enumerate(("sgd", "adamw", "adamw")):
        assert outside[at][0] == inside[0][at][0] == inside[1][at][0] and outside[at][0]
        assert torch.equal(inside[0][at][1], inside[1][at][1])
        network = model()
        own = plain(kind, network)
        for step in range(4):
            own.zero_grad()
            loss(network, 0, step).backward()
            own.step()
        assert difference(outside[at][1], flat(network)) < 1e-5


@pytest.mark.parametrize(("launcher", "case"), [("horovod", process_set), ("torch", process_group)])
def test_process_sets(launcher, case):
    """Ranks outside are plain optimizers; the divisor is the size of the set, and root 1 of {1, 2} is rank 2."""
    outside, *inside = ran(launcher, 3, IN_PROCESSES[launcher, 3])[case]
    own = torch.optim.SGD((network := model()).parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        own.zero_grad()
        loss(network, 0, step).backward()
        own.step()
    assert torch.equal(outside[0], flat(network)) and outside[1:] == (0, 0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for rank in (1, 2):
            (loss(network, rank, step) / 2).backward()
        optimizer.step()
    for parameters, number, steps in inside:
        assert difference(parameters, flat(network)) < 1e-6
        assert (number, steps) == (2, 5)


def test_horovods_own_optimizer_is_saved_by_the_ranks_of_its_set():
    assert ran("horovod", 3, IN_PROCESSES["horovod", 3])[stock_saved_in_a_set] == [
        None,
        (1, True),
        (2, True),
    ]


def test_more_bytes_than_horovod_counts_are_refused():
    """Which would write them elsewhere: with 4 GB the process ended by SIGSEGV."""
    expected = "the ranks' messages must have at most 2147483647 bytes together with Horovod, got 2147483648"
    for told in ran("horovod", 2, IN_PROCESSES["horovod", 2])[too_large]:
        assert len(told) == 3 and all(expected in one for one in told)
        assert ["smaller buckets" in one for one in told] == [True, False, True]
        assert ["sparse_as_dense=True" in one for one in told] == [False, True, False]


@pytest.mark.parametrize("launcher", ["horovod", "torch"])
def test_a_state_may_be_loaded_between_backward_and_step(launcher):
    """torch.distributed pairs collectives up by order: what some ranks have begun, all begin."""
    assert ran(launcher, 2, IN_PROCESSES[launcher, 2])[loaded_in_between] == [[True, True]] * 2


def test_horovod_alone_beside_several_processes_of_torch_must_be_chosen():
    for told in ran("torch", 3, IN_PROCESSES["torch", 3])[both_libraries]:
        assert told.startswith(
            "process_set must say whether Horovod, with 1 process, or torch.distributed, with 3,"
        )


def test_a_process_set_that_horovod_has_not():
    expected = r"process_set must be one that Horovod has, got one of ranks \[0, 1\] .* \(call hvd\.add_process_set"
    for told in ran("horovod", 2, IN_PROCESSES["horovod", 2])[set_that_was_not_added]:
        assert re.match(expected, told), told


def test_more_than_horovod_broadcasts_at_once():
    assert ran("horovod", 2, IN_PROCESSES["horovod", 2])[shared_in_slices] == [[True] * 5] * 2


def test_an_elastic_state_of_horovod_has_the_scaler_that_the_optimizer_has():
    (scales, parameters), other = ran("horovod", 2, IN_PROCESSES["horovod", 2])[
        scaler_of_an_elastic_state
    ]
    assert scales == other[0] == [1024.0, 2048.0, 4096.0] and torch.equal(parameters, other[1])


def test_horovod_may_be_started_anew_under_the_optimizer():
    for parameters, straight in ran("horovod", 2, IN_PROCESSES["horovod", 2])[started_anew]:
        assert torch.equal(parameters, straight)


@pytest.mark.parametrize("launcher", ["horovod", "torch"])
def test_an_error_on_one_rank_ends_the_job_with_that_error(launcher):
    status, output, seconds = launch(launcher, 2, [raises_on_one_rank], limit=90, check=False)
    assert status != 0 and "rank 1 has had enough" in output
    print(f"{launcher}: the job ended after {seconds:.0f} s")


ENDS_AT_ONCE = """
import os
import signal
import sys
import torch
import dgc
for attempt in range(int(sys.argv[2])):
    pair = []
    for rank in range(2):
        pair.append(os.fork())
        if not pair[-1]:
            signal.alarm(60)  # ends it, should it hang
            torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}/{attempt}", rank=rank, world_size=2)
            sys.setswitchinterval(1000)  # gloo's thread waits for the interpreter's lock until there is nothing to do
            for _ in range(3):
                dgc.broadcast_parameters({"x": torch.ones(1000)})
            sys.exit()
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in pair], flush=True)
"""


@pytest.mark.parametrize("attempts", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_process_may_end_right_after_a_collective(tmp_path, attempts):
    """A quarter of these processes would end by SIGABRT, of plain torch ones too."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path), str(attempts)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=100,
    )
    assert done.stdout == "[0, 0]\n" * attempts


def test_join_is_an_error_and_not_a_hang():
    status, output, _ = launch("horovod", 2, [out_of_data], limit=90, check=False)
    assert (
        status != 0 and "HorovodInternalError" in output and "Horovod has been shut down" in output
    )
