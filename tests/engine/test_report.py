"""What is counted, collective by collective: the formulas of rings."""

from dataclasses import fields

import pytest
import torch
from torch import nn

import dgc
from dgc.collective import Collective, World, dense_bytes
from dgc.engine.step import Ledger, Step


class Nothing:
    """Parameters of which none travels compressed."""

    numel = 100

    def compressed_residuals(self):
        return []

    residuals = compressed_residuals


def told(ledger):
    return ledger.report(Nothing(), 0.9)


def sending(world, dense_bytes, *collectives):
    """A step in which this rank has begun some collectives."""
    step = Step((), 1)
    step.world, step.sent["dense_bytes"] = world, dense_bytes
    for collective in collectives:
        step.count(collective)
    return step


def test_a_step_is_counted_and_added_to_the_totals():
    ledger, message = Ledger(), torch.zeros(120, dtype=torch.uint8)
    ledger.close_with_update(
        sending(
            World(1, 4),
            dense_bytes(100, 4),
            Collective("all_gather", message),
            Collective("all_reduce", message),
            Collective("broadcast", message),
        ),
        100,
        30,
    )
    report = told(ledger)
    assert report.bytes_sent == report.total_bytes_sent == 120 * (3 + 2 * 3 / 4 + 3 / 4)
    assert report.dense_bytes == report.total_dense_bytes == 2 * 3 / 4 * 400
    assert (report.message_bytes, report.steps, report.density) == (360, 1, 0.3)


def test_a_logger_gets_plain_numbers_and_the_compression():
    ledger = Ledger()
    for nbytes in (
        20,
        10,
    ):  # of which (N - 1) times as many are sent, instead of 2 (N - 1) / N * 400
        message = Collective("all_gather", torch.zeros(nbytes, dtype=torch.uint8))
        ledger.close_with_update(sending(World(1, 4), dense_bytes(100, 4), message), 100, 30)
    report = told(ledger)
    numbers = report.as_dict()
    assert {name: getattr(report, name) for name in numbers if "compression" not in name} == {
        field.name: numbers[field.name] for field in fields(report)
    }
    assert all(type(value) in (int, float) for value in numbers.values())
    assert (numbers["compression"], numbers["total_compression"]) == (600 / 30, 1200 / 90)


def test_there_is_no_compression_where_nothing_was_sent():
    ledger = Ledger()
    ledger.close_with_update(sending(World(0, 1), 0.0), 100, 100)
    assert not {"compression", "total_compression"} & told(ledger).as_dict().keys()


def test_what_stays_within_a_node_is_counted_apart():
    ledger, numbers = Ledger(), torch.zeros(30)
    ledger.close_with_update(
        sending(
            World(0, 6, node_size=3),
            0.0,
            Collective("all_reduce", numbers, group="intra_node"),
            Collective("all_gather", numbers, group="inter_node"),
        ),
        100,
        0,
    )
    report = told(ledger)
    assert (report.node_bytes, report.bytes_sent, report.message_bytes) == (
        120 * 2 * 2 / 3,
        120,
        120,
    )


def summing(numel, dense_bytes=1000.0):
    return sending(World(0, 2), dense_bytes, Collective("all_reduce", torch.zeros(numel)))


def test_a_skipped_step_sent_what_it_sent_and_is_no_step():
    """The last step stays the last one that was taken."""
    ledger = Ledger()
    ledger.close_with_update(summing(50), 100, 30)
    taken = told(ledger)
    ledger.close_skipped(summing(1))
    report = told(ledger)
    assert (report.skipped, report.steps, report.total_bytes_sent, report.total_dense_bytes) == (
        1,
        1,
        204.0,
        1000.0,
    )
    assert (
        (report.bytes_sent, report.dense_bytes, report.density)
        == (200.0, 1000.0, 0.3)
        == (taken.bytes_sent, taken.dense_bytes, taken.density)
    )
    for skip in (False, True, True):  # one that is dropped, as its exchange has failed
        step = summing(2)
        (ledger.close_skipped if skip else ledger.close_without_update)(step)
        ledger.close_without_update(step)  # which has been dropped already
    report = told(ledger)
    assert (report.bytes_sent, report.density, report.skipped, report.total_bytes_sent) == (
        200.0,
        0.3,
        3,
        228.0,
    )


def test_a_flush_is_in_the_totals_and_the_last_step_stays_the_last():
    ledger = Ledger()
    ledger.close_with_update(summing(1, 0.0), 100, 0)
    ledger.close_without_update(summing(10, 0.0))
    report = told(ledger)
    assert (report.bytes_sent, report.total_bytes_sent, report.steps) == (4.0, 44.0, 1)


def test_what_is_frozen_sends_nothing():
    """By hand: 3,200 entries of which a tenth of a half is sent, and 8 of a bias that travels dense."""

    def worker():
        p, q, bias = (nn.Parameter(torch.ones(shape)) for shape in ((40, 40), (40, 40), (8,)))
        optimizer = torch.optim.SGD([p, q, bias], lr=0.1)
        optimizer = dgc.DistributedOptimizer(
            optimizer, None, dgc.Config(0.9, min_numel=10), groups=[[p], [q], [bias]]
        )
        told = []
        for step in range(3):
            p.requires_grad_(step < 1)
            bias.requires_grad_(step < 2)
            for x in (p, q, bias):
                x.grad = torch.arange(1.0, 1 + x.numel()).view_as(x) if x.requires_grad else None
            optimizer.step()
            report = optimizer.report()
            told.append((report.density * 3208, report.gradient_norm))
        return told

    norm = sum(i * i for i in range(1, 1601)) ** 0.5
    for told in dgc.lockstep.run(worker, 2):
        entries, norms = zip(*told, strict=True)
        assert entries == pytest.approx((328, 168, 160)) and norms == pytest.approx(
            (2**0.5 * norm, norm, norm)
        )
