"""What is counted, collective by collective: the formulas of rings."""

from dataclasses import fields

import torch

from dgc.collective import Collective, World, dense_bytes
from dgc.engine.report import Ledger


class Nothing:
    """Parameters of which none travels compressed."""

    numel = 100

    def compressed(self):
        return []

    kept = compressed


def told(ledger):
    return ledger.report(Nothing(), 0.9)


def test_a_step_is_counted_and_added_to_the_totals():
    ledger, world, message = Ledger(), World(1, 4), torch.zeros(120, dtype=torch.uint8)
    ledger.open(dense_bytes(100, 4))
    ledger.count(world, Collective("gather", message))
    ledger.count(world, Collective("sum", message))
    ledger.count(world, Collective("share", message))
    ledger.close(100, 30)
    report = told(ledger)
    assert report.bytes_sent == report.total_bytes_sent == 120 * (3 + 2 * 3 / 4 + 3 / 4)
    assert report.dense_bytes == report.total_dense_bytes == 2 * 3 / 4 * 400
    assert (report.message_bytes, report.steps, report.density) == (360, 1, 0.3)


def test_a_logger_gets_plain_numbers_and_the_compression():
    ledger, world = Ledger(), World(1, 4)
    ledger.open(dense_bytes(100, 4))  # 2 (N - 1) / N * 400
    ledger.count(world, Collective("gather", torch.zeros(20, dtype=torch.uint8)))  # (N - 1) * 20
    ledger.close(100, 30)
    ledger.open(dense_bytes(100, 4))
    ledger.count(world, Collective("gather", torch.zeros(10, dtype=torch.uint8)))
    ledger.close(100, 30)
    report = told(ledger)
    numbers = report.as_dict()
    assert {name: getattr(report, name) for name in numbers if "compression" not in name} == {
        field.name: numbers[field.name] for field in fields(report)}
    assert all(type(value) in (int, float) for value in numbers.values())
    assert (numbers["compression"], numbers["total_compression"]) == (600 / 30, 1200 / 90)


def test_there_is_no_compression_where_nothing_was_sent():
    ledger = Ledger()
    ledger.open(0.0)
    ledger.close(100, 100)
    assert not {"compression", "total_compression"} & told(ledger).as_dict().keys()


def test_what_stays_within_a_node_is_counted_apart():
    ledger, world = Ledger(), World(0, 6, node_size=3)
    ledger.open(0.0)
    ledger.count(world, Collective("sum", torch.zeros(30), group="node"))
    ledger.count(world, Collective("gather", torch.zeros(30), group="across"))
    ledger.close(100, 0)
    report = told(ledger)
    assert (report.node_bytes, report.bytes_sent, report.message_bytes) == (120 * 2 * 2 / 3, 120, 120)


def test_a_skipped_step_sent_what_it_sent_and_is_no_step():
    ledger = Ledger()
    ledger.open(1000.0)
    ledger.count(World(0, 2), Collective("sum", torch.zeros(1)))
    ledger.skip()
    report = told(ledger)
    assert (report.skipped, report.steps, report.total_bytes_sent, report.total_dense_bytes) == (1, 0, 4.0, 0.0)


def test_a_flush_is_in_the_totals_and_the_last_step_stays_the_last():
    ledger = Ledger()
    ledger.open(0.0)
    ledger.count(World(0, 2), Collective("sum", torch.zeros(1)))
    ledger.close(100, 0)
    before = ledger.begin_flush()
    ledger.count(World(0, 2), Collective("sum", torch.zeros(10)))
    ledger.end_flush(before)
    report = told(ledger)
    assert (report.bytes_sent, report.total_bytes_sent, report.steps) == (4.0, 44.0, 1)
