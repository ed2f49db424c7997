"""The other methods in NumPy and float64, written from their papers and not from the code.

Gradients are ``g[step][rank][tensor]``. Each function returns what is subtracted from the parameters, step by step, as
flat arrays, and what each rank has kept at the end.
"""

import numpy as np
import scipy.fft


def flat(tensors):
    return np.concatenate([np.asarray(t, np.float64).reshape(-1) for t in tensors])


def signum(g, lr, b):
    """Bernstein et al. 2018, algorithm 2 on each worker, algorithm 3's vote."""
    m, steps = [0.0 for _ in g[0]], []
    for ranks in g:
        m = [b * own + (1 - b) * flat(tensors) for own, tensors in zip(m, ranks, strict=True)]
        steps.append(lr * np.sign(sum(np.where(own >= 0, 1, -1) for own in m)))
    return steps, m


def ef_signsgd(g, lr):
    """Karimireddy et al. 2019, algorithm 1, layer by layer, averaged over workers."""
    e, steps = [[np.zeros(np.shape(t)) for t in ranks] for ranks in g[0]], []
    for ranks in g:
        sent = []
        for rank, tensors in enumerate(ranks):
            p = [
                lr * np.asarray(t, np.float64) + old
                for t, old in zip(tensors, e[rank], strict=True)
            ]
            d = [np.abs(x).sum() / x.size * np.where(x >= 0, 1, -1) for x in p]
            e[rank] = [x - y for x, y in zip(p, d, strict=True)]
            sent.append(flat(d))
        steps.append(sum(sent) / len(sent))
    return steps, [flat(own) for own in e]


def dropping(g, k):
    """Aji and Heafield 2017, gradient dropping of one tensor with a threshold that lets k entries pass; of lr 1."""
    v, steps = [0.0 for _ in g[0]], []
    for ranks in g:
        sent = []
        for rank, tensors in enumerate(ranks):
            v[rank] = v[rank] + flat(tensors)
            sent.append(np.where(np.abs(v[rank]) >= np.sort(np.abs(v[rank]))[-k], v[rank], 0))
            v[rank] = v[rank] - sent[-1]
        steps.append(sum(sent) / len(sent))
    return steps


def atomo_probabilities(atoms, s):
    """Wang et al. 2018, as their algorithm recurses: the largest atom is certain, or all are balanced."""
    order, p = list(np.argsort(-np.abs(atoms))), np.zeros(len(atoms))
    while order:
        total = np.abs(atoms[order]).sum()
        if s * np.abs(atoms[order[0]]) <= total:
            p[order] = s * np.abs(atoms[order]) / total
            break
        p[order.pop(0)] = 1
        s -= 1
    return p


def demo(g, lr, b, k, chunk):
    """Peng et al. 2024 with SciPy's transform, chunk after chunk; a coefficient's mean is over those who send it."""

    def side(n):
        return next(d for d in range(min(n, chunk), 0, -1) if n % d == 0)

    def chunks(x):
        rows, columns = side(x.shape[0]), side(x.shape[1])
        return [
            (slice(i, i + rows), slice(j, j + columns))
            for i in range(0, x.shape[0], rows)
            for j in range(0, x.shape[1], columns)
        ]

    def matrix(t):
        t = np.asarray(t, np.float64)
        return t.reshape(1, -1) if t.ndim == 1 else t.reshape(len(t), -1)

    m, steps = [[np.zeros_like(matrix(t)) for t in ranks] for ranks in g[0]], []
    for ranks in g:
        totals, senders = ([np.zeros_like(own) for own in m[0]] for _ in range(2))
        for own, tensors in zip(m, ranks, strict=True):
            for x, t, total, count in zip(own, tensors, totals, senders, strict=True):
                x[:] = b * x + lr * matrix(t)
                for place in chunks(x):
                    q = scipy.fft.dctn(x[place], norm="ortho").reshape(-1)
                    q[np.argsort(-np.abs(q))[k:]] = 0
                    q = q.reshape(x[place].shape)
                    x[place] -= scipy.fft.idctn(q, norm="ortho")
                    total[place] += q
                    count[place] += q != 0
        for total, count in zip(totals, senders, strict=True):
            for place in chunks(total):
                total[place] = scipy.fft.idctn(
                    total[place] / np.maximum(count[place], 1), norm="ortho"
                )
        steps.append(lr * np.sign(flat(totals)))
    return steps, [flat(own) for own in m]


def power_iteration(g, lr, rank, q, matrices):
    """Vogels et al. 2019, algorithm 1 with the error of algorithm 2; Gram-Schmidt, and the mean of other tensors."""

    def orthogonal(x):
        done = []
        for column in x.T:
            for other in done:
                column = column - other * (other @ column)
            done.append(column / np.linalg.norm(column))
        return np.stack(done, 1)

    n, steps = len(g[0]), []
    e = [
        [np.zeros((len(t), t[0].size)) if i in matrices else None for i, t in enumerate(ranks)]
        for ranks in g[0]
    ]
    for ranks in g:
        update = []
        for i in range(len(ranks[0])):
            own = [np.asarray(tensors[i], np.float64) for tensors in ranks]
            if i not in matrices:
                update.append(sum(own) / n)
                continue
            m = [x.reshape(len(x), -1) + kept[i] for x, kept in zip(own, e, strict=True)]
            q[i] = orthogonal(q[i])
            p = orthogonal(sum(x @ q[i] for x in m) / n)
            q[i] = sum(x.T @ p for x in m) / n
            for x, kept in zip(m, e, strict=True):
                kept[i] = x - p @ q[i].T
            update.append(p @ q[i].T)
        steps.append(lr * flat(update))
    return steps, e


def one_step_late(oracle, steps):
    """Li et al. 2018, a pipeline of width two: what the oracle subtracts in a step is subtracted in the next one; the
    last step subtracts its own, too.
    """
    waiting = [np.zeros_like(w) for w in oracle.weights]
    for t in range(steps):
        before = oracle.weights
        oracle.step(t)
        found = [old - new for old, new in zip(before, oracle.weights, strict=True)]
        oracle.weights = [w - late for w, late in zip(before, waiting, strict=True)]
        waiting = found
    return [w - late for w, late in zip(oracle.weights, waiting, strict=True)]


def pushes(weights, gradient, workers, steps, lr, m, decay):
    """Update t is worker t mod N's, at what it pulled N - 1 updates ago; torch's Nesterov momentum, of lr / N."""
    x, momentum, pulled = (
        [np.array(w, np.float64) for w in weights],
        [np.zeros_like(w) for w in weights],
        {},
    )
    history = [x]
    for t in range(workers * steps):
        at = history[pulled.get(t % workers, 0)]
        assert t < workers or pulled[t % workers] == t - (workers - 1)
        g = [
            own + decay * now
            for own, now in zip(gradient(at, t % workers, t // workers), x, strict=True)
        ]
        momentum = [m * old + own for old, own in zip(momentum, g, strict=True)]
        x = [now - lr / workers * (own + m * v) for now, own, v in zip(x, g, momentum, strict=True)]
        history.append(x)
        pulled[t % workers] = t + 1
    return [history[pulled[w]] for w in range(workers)], x
