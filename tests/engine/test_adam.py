"""AdamW: torch's own while all is sent; from the first compressed step on momentum correction over a D that follows."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from laws import in_lockstep
from oracle import Network, top

import dgc
from dgc.engine.adam import fresh

LR, DECAY, EPS, B1, B2 = 0.01, 0.1, 1e-6, 0.9, 0.99
DENSE, STEPS = 12, 40  # steps
NETWORK = Network()


class AdamOracle:
    """AdamW (Loshchilov and Hutter, 2019, Algorithm 2) on the mean gradient. After ``dense`` steps nodes accumulate
    u = b1 u + (1 - b1) f g, v = v + u, of which the largest entries are sent; s follows what comes, and the step is
    that over D (docs/method.md, AdamW).
    """

    def __init__(self, nodes, dense, sparsity, masking, total=False, clip=None, lr=lambda t: LR):
        self.nodes, self.dense, self.sparsity, self.masking, self.total = (
            nodes,
            dense,
            sparsity,
            masking,
            total,
        )
        self.clip, self.lr = clip, lr
        self.weights = [np.array(w, np.float64) for w in NETWORK.start]
        self.m, self.s = ([np.zeros_like(w) for w in self.weights] for _ in range(2))

    def step(self, t):
        every = [
            self.clipped(NETWORK.gradient(self.weights, node, t)) for node in range(self.nodes)
        ]
        share = 1 if self.total else 1 / self.nodes
        if t == self.dense:
            hat = [s / (1 - B2**t) for s in self.s]
            self.s = [np.maximum(x, x.mean() * (1 - B2) / (1 - B2**t)) for x in hat]
            self.received = [np.full(s.shape, t) for s in self.s]
            self.u = [
                [m / (1 - B1**t) / (share * self.nodes) for m in self.m] for _ in range(self.nodes)
            ]
            self.v = [[np.zeros_like(w) for w in self.weights] for _ in range(self.nodes)]
            self.squares = np.ones(12)  # running means of f^2
        if t >= self.dense:
            self.f = self.lr(t) / self.lr(self.dense)
            self.squares += (self.f**2 - self.squares) / 2.0 ** np.arange(12)
        for i, w in enumerate(self.weights):
            w *= 1 - self.lr(t) * DECAY
            if t < self.dense:
                g = sum(gradients[i] for gradients in every) * share
                self.m[i] = B1 * self.m[i] + (1 - B1) * g
                self.s[i] = B2 * self.s[i] + (1 - B2) * g * g
                w -= (
                    self.lr(t)
                    * self.m[i]
                    / (1 - B1 ** (t + 1))
                    / (np.sqrt(self.s[i] / (1 - B2 ** (t + 1))) + EPS)
                )
            else:
                x = share * sum(self.sent(node, i, every[node][i]) for node in range(self.nodes))
                self.follow(i, x, t)
                w -= self.lr(self.dense) * x / (np.sqrt(self.s[i]) + EPS)

    def follow(self, i, x, t):
        """The sum of w steps' independent gradients has the mean square w s, less what the momentum of the
        n = w (received / sent by each) steps in which they were accumulated has not added yet.
        """
        came, w = x != 0, t + 1 - self.received[i]
        n = w * max(1, round(64 * came.sum() / math.ceil(x.size * (1 - self.sparsity) - 1e-9)) / 64)
        square = x**2 / w / (1 - 2 * B1 * (1 - B1**n) / (1 - B1**2) / n)
        # Over the mean f^2 of steps as old as those of n steps and of the momentum before them.
        age = (np.maximum(np.floor(n), 1) - 1) / 2 + B1**2 / (1 - B1**2)
        square /= np.interp(np.log2(age + 1), np.arange(12), self.squares)
        weight = np.minimum((1 - B2**w) / (1 - B2 ** (t + 1)), 1 / 8)  # of w of t + 1 steps
        self.s[i] = np.where(came, (1 - weight) * self.s[i] + weight * square, self.s[i])
        self.received[i][came] = t + 1

    def clipped(self, gradients):
        """Lin et al., section 3.2, of gradients that do not carry 1/N."""
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        most = np.inf if self.clip is None else self.clip * self.nodes**0.5
        return [g * min(1, most / norm) for g in gradients]

    def sent(self, node, i, g):
        u, v = self.u[node][i], self.v[node][i]
        u[...] = B1 * u + (1 - B1) * self.f * g
        v += u
        mask = top(v, self.sparsity)
        values = v * mask
        v *= ~mask
        if self.masking:
            u *= ~mask
        return values


def train(
    config,
    kind=torch.optim.AdamW,
    steps=STEPS,
    op=dgc.Average,
    dtype=torch.float64,
    middle=None,
    lr=LR,
    **options,
):
    """Rank's training on the oracle's network: its weights, and its optimizer."""
    weights = [torch.nn.Parameter(torch.tensor(w).to(dtype)) for w in NETWORK.start]
    optimizer = kind(
        weights, **{"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, **options}
    )
    optimizer = dgc.DistributedOptimizer(optimizer, compression=config, op=op)
    rank = dgc.lockstep.current().world.rank
    for step in range(steps):
        if middle is not None:
            optimizer = middle(step, optimizer, weights)
        optimizer.param_groups[0]["lr"] = lr(step) if callable(lr) else lr
        backward(weights, optimizer, rank, step)
        optimizer.step()
    return [w.detach() for w in weights], optimizer


def backward(weights, optimizer, rank, step):
    """Of a loss that the optimizer is to make smaller, or with ``maximize`` of its negative."""
    x, y = (torch.tensor(a).to(weights[0]) for a in NETWORK.batch(rank, step))
    optimizer.zero_grad()
    loss = (torch.tanh(x @ weights[0].T) @ weights[1].T - y).square().mean()
    (-loss if optimizer.param_groups[0]["maximize"] else loss).backward()


def settings(sparsity, masking=False, **others):
    return dgc.Config(
        sparsity=sparsity, value_bits=32, factor_masking=masking, min_numel=0, **others
    )


def dense_first(sparsity, steps=DENSE):
    return lambda step: 0.0 if step < steps else sparsity


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.0}, {"amsgrad": True}, {"maximize": True}], ids=str
)
def test_at_density_1_it_is_torchs_adamw(nodes, options):
    """On the averaged gradient, within 1e-6."""
    results = dgc.lockstep.run(
        lambda: train(settings(0.0), dtype=torch.float32, **options)[0], nodes
    )
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in NETWORK.start]
    plain = torch.optim.AdamW(
        weights, **{"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, **options}
    )
    for step in range(STEPS):
        sums = [torch.zeros_like(w) for w in weights]
        for rank in range(nodes):
            backward(weights, plain, rank, step)
            for total, w in zip(sums, weights, strict=True):
                total += w.grad / nodes
        for total, w in zip(sums, weights, strict=True):
            w.grad = total
        plain.step()
    for result in results:
        for got, expected in zip(result, weights, strict=True):
            assert (got - expected).norm() <= 1e-6 * expected.norm()


def falling(step):
    """A learning rate, along a cosine."""
    return LR * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize(
    ("nodes", "sparsity", "op"),
    [(2, 0.99, dgc.Average), (4, 0.99, dgc.Average), (2, 0.75, dgc.Average), (2, 0.99, dgc.Sum)],
)
def test_it_is_the_transcription(nodes, sparsity, op, masking):
    oracle = AdamOracle(nodes, DENSE, sparsity, masking, total=op == dgc.Sum, lr=falling)
    for step in range(STEPS):
        oracle.step(step)
    results = dgc.lockstep.run(
        lambda: train(settings(dense_first(sparsity), masking), op=op, lr=falling)[0], nodes
    )
    for i, expected in enumerate(oracle.weights):
        assert all(torch.equal(result[i], results[0][i]) for result in results)
        assert np.linalg.norm(results[0][i].numpy() - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("sparsity", "exchange"),
    [
        (0.0, "allgather"),
        (0.5, "allgather"),
        (0.9, "allgather"),
        (0.97, "allgather"),
        (0.9, "reduce"),
    ],
)
def test_of_noise_d_is_that_of_the_averaged_gradient(sparsity, exchange):
    """Whatever the density, and while the learning rate falls: the mean square of noise is found from sums of it, that
    came when they were large, to a third or twice its size. It begins at a quarter of it.
    """
    scale = torch.logspace(-0.2, 0.2, 40).view(40, 1).expand(40, 30)

    def worker():
        random = torch.Generator().manual_seed(dgc.lockstep.current().world.rank)
        w = torch.nn.Parameter(torch.zeros(40, 30))
        optimizer = torch.optim.AdamW([w], lr=1e-12, betas=(0.9, 0.98), eps=0.0)
        optimizer = dgc.DistributedOptimizer(
            optimizer,
            compression=settings(
                lambda step: 0.0 if step < DENSE else max(sparsity, 1e-9 * (step == DENSE)),
                exchange=exchange,
            ),
        )
        for step in range(DENSE + 100):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 1e-12 * (DENSE + 101 - step)
            noise = torch.randn(40, 30, generator=random) * scale
            (w * (noise if step >= DENSE else noise / 2)).sum().backward()
            optimizer.step()
        return optimizer.state[w]["exp_avg_sq"] / (1 - 0.98**DENSE)

    square = in_lockstep(worker, 4)[0]
    found = (square * 4 / scale.square()).mean()
    print(f"{exchange} at {sparsity}: {found:.2f} of the mean square")
    assert 1 / 3 < found < 2


@pytest.mark.parametrize(
    ("before", "exchange", "entries"),
    [(0, "allgather", 120), (40, "allgather", 120), (0, "reduce", 360)],
)
def test_an_update_counts_for_the_less_the_more_steps_there_were(before, exchange, entries):
    """By hand, also where plain AdamW has trained before: the first update after ``before`` + 1 dense steps and a
    compressed one, alike on both ranks, has a weight of (1 - b2) / (1 - b2^t), t = ``before`` + 2. As many entries come
    as each rank has sent, which the reduce exchange sends three times as many of: so they are of one step.
    """
    random = torch.Generator().manual_seed(0)
    gradients = torch.randn(before + 2, 40, 30, generator=random, dtype=torch.float64)

    def worker():
        w = torch.nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))
        plain = torch.optim.AdamW([w], lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.0)
        for g in gradients[:before]:
            w.grad = g.clone()
            plain.step()
        optimizer = dgc.DistributedOptimizer(
            plain, compression=settings(dense_first(0.9, 1), exchange=exchange)
        )
        for g in gradients[before:]:
            square, w.grad = optimizer.state[w]["exp_avg_sq"].clone(), g.clone()
            optimizer.step()
        return w.grad, square, optimizer.state[w]["exp_avg_sq"]

    x, square, after = in_lockstep(worker)[0]
    unbiased = 1 - B2 ** (before + 1)
    # As no step is too large.
    s = (square / unbiased).clamp(min=float(square.mean() / unbiased * (1 - B2) / unbiased))
    weight = (1 - B2) / (1 - B2 ** (before + 2))
    found = x**2 * (1 + B1) / (1 - B1)  # of one step: h(1) = (1 - b1) / (1 + b1)
    came = x != 0
    assert came.sum() == entries
    expected = s + min(weight, 1 / 8) * (found - s)
    torch.testing.assert_close((after / unbiased)[came], expected[came], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"fused": False}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_the_first_state_is_that_of_torch(options, default):
    """Which torch makes in a step."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        w = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float32))
        plain = torch.optim.AdamW([w], **options)
        ours = fresh(w, plain.param_groups[0])
        w.grad = torch.zeros_like(w)
        plain.step()
    finally:
        torch.set_default_dtype(before)
    torchs = plain.state[w]
    assert list(ours) == list(torchs)
    assert all(
        (x.dtype, x.shape, x.device) == (torchs[key].dtype, torchs[key].shape, torchs[key].device)
        for key, x in ours.items()
    )


def test_counts_of_steps_are_loaded_as_they_are():
    """torch would cast them to the parameter's dtype: 1,001 steps are 1,000 in bfloat16."""

    def made():
        w = torch.nn.Parameter(torch.zeros(40, 30, dtype=torch.bfloat16))
        return w, dgc.DistributedOptimizer(
            torch.optim.AdamW([w]), compression=settings(dense_first(0.9))
        )

    def worker():
        (w, one), (other_w, other) = made(), made()
        one.state[w]["dgc_received"].fill_(1001)
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        return one.state[w]["dgc_received"], other.state[other_w]["dgc_received"]

    one, other = in_lockstep(worker)[0]
    assert other.dtype == torch.int32 and torch.equal(one, other)


def test_clipping_goes_by_the_norm_of_gradients():
    """Not by that of what is accumulated."""
    oracle = AdamOracle(2, DENSE, 0.9, False, clip=0.02)
    for step in range(STEPS):
        oracle.step(step)
    weights = dgc.lockstep.run(lambda: train(settings(dense_first(0.9), clip_norm=0.02))[0], 2)[0]
    unclipped = dgc.lockstep.run(lambda: train(settings(dense_first(0.9)))[0], 2)[0]
    for got, other, expected in zip(weights, unclipped, oracle.weights, strict=True):
        assert np.linalg.norm(got.numpy() - expected) <= 1e-5 * np.linalg.norm(expected)
        assert np.linalg.norm(other.numpy() - expected) > 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_momentum_takes_its_share_of_a_gradient_as_it_is(dtype):
    """u = b1 u + (1 - b1) g, of two groups with betas of their own; that is not rounded to the dtype of gradients."""

    def worker():
        weights = [torch.nn.Parameter(torch.zeros(20, 30, dtype=dtype)) for _ in range(2)]
        groups = [
            {"params": [w], "betas": (b1, B2)} for w, b1 in zip(weights, (0.9, 0.7), strict=True)
        ]
        optimizer = dgc.DistributedOptimizer(
            torch.optim.AdamW(groups), compression=settings(dense_first(0.9, 2))
        )
        draw = torch.Generator().manual_seed(dgc.lockstep.current().world.rank)
        for _ in range(4):
            before = {name: u.clone() for name, u in optimizer.residual_state_dict()["u"].items()}
            gradients = [torch.randn(20, 30, generator=draw).to(dtype) for _ in weights]
            for w, g in zip(weights, gradients, strict=True):
                w.grad = g.clone()
            optimizer.step()
        u = optimizer.residual_state_dict()["u"]
        return [
            (u[name] - b1 * before[name] - (1 - b1) * g.to(u[name])).abs().max().item()
            for name, b1, g in zip(sorted(u), (0.9, 0.7), gradients, strict=True)
        ]

    assert max(max(errors) for errors in in_lockstep(worker)) < 1e-6


def test_maximizing_is_minimizing_the_negative():
    config = settings(dense_first(0.9), False)
    up, down = (
        dgc.lockstep.run(lambda m=m: train(config, maximize=m)[0], 2)[0] for m in (True, False)
    )
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(up, down, strict=True))


def test_a_state_that_is_loaded_brings_its_own_denominators():
    """Into an optimizer that has frozen others."""
    config = settings(dense_first(0.9))

    def worker():
        _, one = train(config, steps=DENSE + 3)
        _, other = train(config, steps=DENSE + 3, lr=0.001, betas=(B1, 0.9))
        other.load_residual_state_dict(one.residual_state_dict())
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        results = []
        for optimizer in (one, other):
            weights = optimizer.param_groups[0]["params"]
            for w, start in zip(weights, NETWORK.start, strict=True):
                w.data.copy_(torch.tensor(start))
            backward(weights, optimizer, dgc.lockstep.current().world.rank, 0)
            optimizer.step()
            results += [w.detach() for w in weights]
        return results

    a, b, c, d = in_lockstep(worker)[0]
    assert torch.equal(a, c) and torch.equal(b, d)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_scale_of_a_loss_is_taken_out(clip):
    config = settings(dense_first(0.9), clip_norm=clip)

    def worker(scale):
        weights = [torch.nn.Parameter(torch.tensor(w).double()) for w in NETWORK.start]
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        plain = torch.optim.AdamW(weights, lr=LR, betas=(B1, B2), eps=EPS)
        optimizer = dgc.DistributedOptimizer(plain, compression=config, grad_scaler=scaler)
        for step in range(STEPS):
            x, y = (
                torch.tensor(a).double()
                for a in NETWORK.batch(dgc.lockstep.current().world.rank, step)
            )
            optimizer.zero_grad()
            loss = (torch.tanh(x @ weights[0].T) @ weights[1].T - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [w.detach() for w in weights]

    scaled, plain = (
        dgc.lockstep.run(lambda scale=scale: worker(scale), 2)[0] for scale in (1024.0, None)
    )
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(scaled, plain, strict=True))


@pytest.mark.parametrize("lr", [lambda step: LR, falling], ids=["constant", "falling"])
def test_nothing_is_lost_and_all_is_flushed(lr):
    """At constant b1: what was sent, and is pending in v + c u, is the sum of gradients from the first compressed step
    on, each with the learning rate of its own step, and with the momentum that AdamW had; a flush applies v, over D.
    """

    def worker():
        rank = dgc.lockstep.current().world.rank
        _, optimizer = train(settings(dense_first(0.9), False), weight_decay=0.0, steps=DENSE)
        weights = optimizer.param_groups[0]["params"]
        came = [B1 / (1 - B1) * optimizer.state[w]["exp_avg"] / (1 - B1**DENSE) for w in weights]
        sent = [torch.zeros_like(w) for w in weights]
        for step in range(DENSE, STEPS):
            optimizer.param_groups[0]["lr"] = lr(step)
            backward(weights, optimizer, rank, step)
            came = [x + lr(step) / lr(DENSE) * w.grad for x, w in zip(came, weights, strict=True)]
            optimizer.step()
            sent = [x + w.grad for x, w in zip(sent, weights, strict=True)]
        square = [optimizer.state[w]["exp_avg_sq"] / (1 - B2**DENSE) for w in weights]
        before, pending = (
            [w.detach().clone() for w in weights],
            copy.deepcopy(optimizer.residual_state_dict()),
        )
        optimizer.flush()
        moved = [
            (x - w.detach()) / lr(DENSE) * (s.sqrt() + EPS)
            for x, w, s in zip(before, weights, square, strict=True)
        ]
        assert not any(v.any() for v in optimizer.residual_state_dict()["v"].values())
        assert [optimizer.state[w]["step"].item() for w in weights] == [DENSE, DENSE]
        assert not any(optimizer.state[w]["exp_avg"].any() for w in weights)  # it is in u
        names = [
            next(name for name, x in pending["v"].items() if x.shape == w.shape) for w in weights
        ]
        return came, sent, moved, [[pending[kind][name] for name in names] for kind in ("u", "v")]

    one, other = in_lockstep(worker)
    for i, (sent, moved) in enumerate(zip(one[1], one[2], strict=True)):
        came, u, v = (
            (a[i] + b[i]) / 2 for a, b in ((one[0], other[0]), *zip(one[3], other[3], strict=True))
        )
        torch.testing.assert_close(sent + v + B1 / (1 - B1) * u, came, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(moved, v, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_schedule_that_is_sparse_from_the_start_begins_when_d_has_settled(kind):
    """After 1 / (1 - b2) steps, which are told of."""

    def worker():
        densities = []

        def middle(step, optimizer, weights):
            if step:
                densities.append(optimizer.report().density)
            return optimizer

        _, optimizer = train(
            settings(0.99), kind, betas=(B1, 0.9), steps=14, middle=middle, weight_decay=0.0
        )
        assert optimizer.param_groups[0]["dgc_compressed_from"] == 10
        return densities

    with pytest.warns(UserWarning, match="the first 10 steps travel dense"):
        results = dgc.lockstep.run(worker, 2)
    for densities in results:
        assert densities[:10] == [1.0] * 10 and max(densities[10:]) < 0.02


def test_a_warm_up_is_not_over_before_it_has_begun():
    """It counts from the first compressed step, also when it is loaded; one that begins dense counts as it says."""

    def worker(schedule):
        sparsities = []

        def middle(step, optimizer, weights):
            if step:
                sparsities.append(optimizer.report().sparsity)
            if step == 12:
                state = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
                optimizer = dgc.DistributedOptimizer(
                    torch.optim.AdamW(weights), compression=settings(schedule)
                )
                optimizer.load_residual_state_dict(state[1])
                optimizer.load_state_dict(state[0])
            return optimizer

        train(settings(schedule), betas=(B1, 0.9), steps=18, middle=middle)
        return sparsities

    rising = dgc.piecewise({0: 0.5, 3: 0.7, 5: 0.9})
    assert in_lockstep(lambda: worker(rising))[0] == [0.0] * 10 + [0.5] * 3 + [0.7] * 2 + [0.9] * 2
    dense = dgc.piecewise({0: 0.0, 4: 0.5, 11: 0.9})
    assert in_lockstep(lambda: worker(dense))[0] == [0.0] * 4 + [0.5] * 7 + [0.9] * 6


@pytest.mark.parametrize(
    ("at", "dtype"),
    [
        (DENSE - 2, torch.float64),
        (DENSE, torch.float64),
        (DENSE + 5, torch.float64),
        (DENSE + 5, torch.bfloat16),
    ],
)
def test_a_checkpoint_goes_on_to_the_bit(at, dtype):
    def again(step, optimizer, weights):
        if step != at:
            return optimizer
        plain = torch.optim.AdamW(weights, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY)
        new = dgc.DistributedOptimizer(plain, compression=settings(dense_first(0.9)))
        new.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return new

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, parts = (
            dgc.lockstep.run(
                lambda middle=middle: train(
                    settings(dense_first(0.9)), middle=middle, dtype=dtype, lr=falling
                )[0],
                2,
            )
            for middle in (None, again)
        )
    assert all(torch.equal(a, b) for a, b in zip(whole[0], parts[0], strict=True))


def test_what_had_no_gradient_takes_no_large_step():
    """An entry, or a whole parameter, that D knows nothing of: steps as large as those of the others, with a warning
    for the parameter.
    """

    def worker():
        table = torch.nn.Parameter(torch.zeros(64, 32))
        late = torch.nn.Parameter(torch.zeros(40, 30))
        random = torch.Generator().manual_seed(dgc.lockstep.current().world.rank)
        plain = torch.optim.AdamW([table, late], lr=LR, betas=(B1, B2), weight_decay=0.0)
        optimizer = dgc.DistributedOptimizer(plain, compression=settings(dense_first(0.5)))
        for step in range(STEPS):
            optimizer.zero_grad()
            rows = 32 if step < DENSE else 64
            loss = (table[:rows] * torch.randn(rows, 32, generator=random)).sum()
            (
                loss
                if step < DENSE
                else loss + (late * torch.randn(40, 30, generator=random)).sum()
            ).backward()
            optimizer.step()
        return table.detach()[:32], table.detach()[32:], late.detach()

    with pytest.warns(
        UserWarning, match=r"allreduce\.noname\.0\.1 had no gradient in the 12 dense steps"
    ):
        (seen, unseen, late), _ = in_lockstep(worker)
    for part in (unseen, late):
        assert 0 < part.norm() / part.numel() ** 0.5 < 3 * seen.norm() / seen.numel() ** 0.5


def test_a_decay_that_is_not_decoupled_is_refused_at_any_compressed_step():
    def worker():
        def middle(step, optimizer, weights):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step == DENSE + 1)
            return optimizer

        train(settings(dense_first(0.9)), torch.optim.Adam, middle=middle, weight_decay=0.0)

    with pytest.raises(
        ValueError, match=r"weight_decay must be 0 for torch\.optim\.Adam.* got 0\.1"
    ):
        dgc.lockstep.run(worker, 2)
