"""Formulas of collectives against simulations that send every message."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.compression import sizes as messages
from dgc.compression.sizes import Sizes
from dgc.plan import cost
from dgc.plan.cost import Cluster, Link

SIZES = [
    (2, 1),
    (3, 1),
    (4, 1),
    (5, 1),
    (7, 1),
    (8, 1),
    (1, 4),
    (1, 3),
    (2, 2),
    (3, 2),
    (2, 3),
    (4, 4),
    (3, 4),
    (2, 8),
    (5, 2),
    (3, 5),
]
BETWEEN, INSIDE = Link(7e-3, 1e3), Link(3e-3, 4e3)


class Simulation:
    """Workers with a gradient each, one entry of which is a byte. Messages of a round pass at once."""

    def __init__(self, n, g, numel):
        self.n, self.g, self.workers, self.numel = n, g, n * g, numel
        self.has = [{i: 1000 * w + i for i in range(numel)} for w in range(self.workers)]
        self.total = {i: sum(self.has[w][i] for w in range(self.workers)) for i in range(numel)}
        self.seconds, self.ports = 0.0, {}  # (node, direction) -> bytes

    def round(self, messages):
        """Each: (sender, receiver, entries, whether to add them up)."""
        if not messages:
            return
        for end in (0, 1):
            busy = [m[end] for m in messages]
            assert len(busy) == len(set(busy)), (
                "a worker sends one message at a time and receives one"
            )
        sent = [
            (a, b, {i: self.has[a][i] for i in entries}, add) for a, b, entries, add in messages
        ]
        ports = {}
        times = []
        for a, b, values, add in sent:
            if self.g > 1:
                times.append(INSIDE.latency + len(values) / INSIDE.bandwidth)
            if a // self.g != b // self.g:
                for port in ((a // self.g, "out"), (b // self.g, "in")):
                    ports[port] = ports.get(port, 0) + len(values)
            for i, value in values.items():
                self.has[b][i] = self.has[b].get(i, 0) + value if add else value
        for port, nbytes in ports.items():
            self.ports[port] = self.ports.get(port, 0) + nbytes
        times += [BETWEEN.latency + nbytes / BETWEEN.bandwidth for nbytes in ports.values()]
        self.seconds += max(times)

    def part(self, i, of):
        return range(i * self.numel // of, (i + 1) * self.numel // of)

    def check(self):
        for w in range(self.workers):
            assert self.has[w] == self.total


def ring_among(s, rings, entries):
    """The rings at once; entries(ring) -> the entries that one adds up."""
    size = len(rings[0])

    def part(ring, i):
        mine = entries(ring)
        i %= size
        return mine[i * len(mine) // size : (i + 1) * len(mine) // size]

    for add in (True, False):
        for step in range(size - 1):
            s.round(
                [
                    (w, ring[(k + 1) % size], part(ring, k - step + (not add)), add)
                    for ring in rings
                    for k, w in enumerate(ring)
                ]
            )


def ring(s):
    ring_among(s, [list(range(s.workers))], lambda _: list(range(s.numel)))


def hierarchical_ring(s):
    nodes = [[j * s.g + k for k in range(s.g)] for j in range(s.n)]
    for step in range(s.g - 1):  # reduce-scatter: worker k ends with part k + 1
        s.round(
            [
                (w, node[(k + 1) % s.g], s.part((k - step) % s.g, s.g), True)
                for node in nodes
                for k, w in enumerate(node)
            ]
        )
    ring_among(
        s,
        [[j * s.g + k for j in range(s.n)] for k in range(s.g)],
        lambda r: list(s.part((r[0] % s.g + 1) % s.g, s.g)),
    )
    for step in range(s.g - 1):
        s.round(
            [
                (w, node[(k + 1) % s.g], s.part((k + 1 - step) % s.g, s.g), False)
                for node in nodes
                for k, w in enumerate(node)
            ]
        )


SIMULATIONS = {"ring": ring, "hierarchical ring": hierarchical_ring}


@pytest.mark.parametrize("name", cost.DENSE)
@pytest.mark.parametrize(("n", "g"), SIZES)
def test_dense_formulas_are_what_a_simulation_takes(name, n, g):
    numel = n * g * 16
    simulation = Simulation(n, g, numel)
    SIMULATIONS[name](simulation)
    simulation.check()
    rounds = cost.DENSE[name](numel, n, g)
    assert cost.seconds(rounds, Cluster(n, g, BETWEEN, INSIDE)) == pytest.approx(simulation.seconds)
    assert cost.port_bytes(rounds) == pytest.approx(max(simulation.ports.values(), default=0))


@pytest.mark.parametrize("name", cost.DENSE)
def test_one_worker_sends_nothing(name):
    assert cost.DENSE[name](100.0, 1, 1) == ()
    assert all(cost.exchange(exchange, Sizes(100, 10), 1, 1) == () for exchange in cost.EXCHANGES)


@pytest.mark.parametrize("name", cost.DENSE)
def test_dense_formulas_by_hand(name):
    """8 workers, 1 MB, alpha 1 ms, beta 1 us a byte."""
    link = Link(1e-3, 1e6)
    assert cost.seconds(cost.DENSE[name](1e6, 8, 1), Cluster(8, 1, link, link)) == pytest.approx(
        14e-3 + 1.75
    )


def test_exchanges_by_hand():
    """2 nodes of 2; 800 bytes of gradient, of which 4 entries of 200 leave in 4 bits. Link: 1 s, 1 byte/s.

    A status 4, a scale 4, values 4, places of 5 bits 4 and in unary (4 + 6 bits) 4, a checksum 8: 28 bytes.
    """
    sizes, link = Sizes(800, 200, 4, 4), Link(1.0, 1.0)

    def seconds(name):
        return cost.seconds(cost.exchange(name, sizes, 2, 2), Cluster(2, 2, link, link))

    assert seconds("allgather") == 3 * (1 + 28)
    inside = 2 * (1 + 400)  # a ring of two
    assert seconds("hierarchical") == inside + (1 + 2 * 14) + (1 + 2 * 14)


def test_rounded_sums_by_hand():
    """Of 4,000 entries in 8 bits. Among 4, parts of 1,000: 1,000 bytes, 4 of status, 8 of scales, 8 of a checksum.
    Link: 1 s, 1 byte/s.
    """
    sizes, link = Sizes(16_000, 4_000, 4_000, 8), Link(1.0, 1.0)

    def seconds(name, n, g):
        return cost.seconds(cost.exchange(name, sizes, n, g), Cluster(n, g, link, link))

    assert seconds("allgather", 4, 1) == seconds("hierarchical", 4, 1) == 6 * (1 + 1020)
    assert (
        messages.summed_bytes(sizes, 4) == 5 * 1020
        and cost.port_bytes(cost.dense_sum(sizes, 4, 1)) == 6 * 1020
    )
    # Two nodes of two. Each worker's parts leave one by one, and one of three stays within the node.
    assert seconds("allgather", 2, 2) == (2 * (1 + 1020) + (1 + 2 * 1020)) + 3 * (1 + 1020)
    half = 2_000 + 4 + 16 + 8  # of 2,000 entries, one for each node
    inside, across, together = 2 * (1 + 8_000), 1 + 2 * (half / 2), 1 + 2 * (half / 2)
    assert seconds("hierarchical", 2, 2) == inside + 2 * across + 2 * together
    assert cost.exchange("allgather", sizes._replace(bits=16), 4, 1) == cost.ring(16_000, 4, 1)
    assert not messages.is_rounded(Sizes(40, 10, bits=8), 16)  # 20 bytes each, where 2.5 do


def test_each_byte_crosses_the_network_once_when_hierarchical():
    sizes = Sizes(8_000_000, 2_000_000, 20_000)
    for g in (1, 2, 8):
        assert cost.port_bytes(cost.exchange("hierarchical", sizes, 4, g)) == 3 * sizes.message


def test_gathering_grows_with_the_workers():
    sizes = Sizes(8_000_000, 2_000_000, 4_000)
    gathered = [cost.port_bytes(cost.exchange("allgather", sizes, n, 1)) for n in (2, 16, 128)]
    assert gathered == [sizes.message, 15 * sizes.message, 127 * sizes.message]


@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 10**6),
    st.floats(0, 1),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_no_exchange_sends_more_than_the_dense_one(n, g, numel, density, bits):
    """Over a node's port, of all rounds together; what ranks send on among themselves is not counted twice."""
    dense = 4 * numel
    sizes = Sizes(dense, numel, math.ceil(density * numel), bits)
    for name, kind in cost.EXCHANGES.items():
        ranks = g if kind.hierarchical else 1
        sent = cost.port_bytes(cost.exchange(name, sizes, n, ranks))
        assert sent <= 2 * (n - 1) / n * dense * (1 + 1e-12), name


def test_the_cheapest_exchange_changes_with_the_workers():
    link, sizes = Link(50e-6, 0.125e9), Sizes(32_000_000, 8_000_000, 8_000)
    chosen = {
        n: min(
            cost.EXCHANGES,
            key=lambda name, n=n: cost.seconds(
                cost.exchange(name, sizes, n, 1), Cluster(n, 1, link, link)
            ),
        )
        for n in (2, 256)
    }
    assert chosen[2] == "allgather" and chosen[256] == "reduce"


def test_copying_takes_time_for_each_byte():
    link = Link(0.0, 1e9)
    busy = dataclasses.replace(link, copying=1e-9)
    rounds = cost.ring(8e9, 4, 1)
    assert cost.seconds(rounds, Cluster(4, 1, link, link)) == pytest.approx(12)
    assert cost.seconds(rounds, Cluster(4, 1, busy, link)) == pytest.approx(24)
