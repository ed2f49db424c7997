"""The paper's algorithm in float64 NumPy, written from the paper and importing nothing from the package.

Lin et al. 2018: equation 4 (momentum correction), section 3.2 (local gradient clipping), section 3.3 (momentum
factor masking), Algorithm 4 (DGC on each node), appendix B (Nesterov). Exact selection, one threshold for each tensor.
"""

import math

import numpy as np


def top(v, sparsity):
    """The mask of the k largest |v|, k = ceil((1 - sparsity) n), with the sparsity taken as the decimal it is."""
    kept_back = round(sparsity * 10**9)  # an integer share of 10^9: exact
    k = -(-v.size * (10**9 - kept_back) // 10**9)
    mask = np.zeros(v.size, bool)
    mask[np.argsort(-np.abs(v.ravel()), kind="stable")[:k]] = True
    return mask.reshape(v.shape)


class Oracle:
    """N nodes that train one set of weights.

    gradient(weights, node, step) is the gradient of that node's own loss; Algorithm 4's carries 1/N, which is put
    in here as the paper does, before clipping to N^(-1/2) of the threshold.
    """

    def __init__(
        self,
        weights,
        gradient,
        nodes,
        lr,
        momentum,
        sparsity,
        nesterov=False,
        clip=None,
        masking=True,
    ):
        self.weights = [np.array(w, np.float64) for w in weights]
        self.gradient, self.nodes, self.lr, self.momentum, self.clip = (
            gradient,
            nodes,
            lr,
            momentum,
            clip,
        )
        self.sparsity, self.nesterov, self.masking = sparsity, nesterov, masking
        self.u = [[np.zeros_like(w) for w in self.weights] for _ in range(nodes)]
        self.v = [[np.zeros_like(w) for w in self.weights] for _ in range(nodes)]

    def step(self, t):
        total = [np.zeros_like(w) for w in self.weights]
        for node in range(self.nodes):
            g = [x / self.nodes for x in self.gradient(self.weights, node, t)]
            if self.clip is not None:
                norm = math.sqrt(sum((x**2).sum() for x in g))
                threshold = self.clip * self.nodes**-0.5
                if norm > threshold:
                    g = [x * threshold / norm for x in g]
            for i in range(len(g)):
                u, v = self.u[node][i], self.v[node][i]
                u[...] = self.momentum * u + g[i]
                v += self.momentum * u + g[i] if self.nesterov else u
                mask = top(v, self.sparsity)
                total[i] += v * mask
                v *= ~mask
                if self.masking:
                    u *= ~mask
        self.weights = [w - self.lr * x for w, x in zip(self.weights, total, strict=True)]


class Network:
    """Two layers with tanh and a squared error, and its gradient by hand; each node has its own data at each step.

    Small, and of a seed with which no two entries around a threshold are so near to each other that float32 mistakes
    one for the other: from then on the two trainings would part.
    """

    SHAPES = ((30, 90), (13, 30))  # 2,700 and 390 entries

    def __init__(self, seed=6):
        random = np.random.default_rng(seed)
        self.start = [
            random.standard_normal(s).astype(np.float32) / math.sqrt(s[1]) for s in self.SHAPES
        ]

    def batch(self, node, step):
        random = np.random.default_rng([node, step])
        return (
            random.standard_normal((16, 90)).astype(np.float32),
            random.standard_normal((16, 13)).astype(np.float32),
        )

    def gradient(self, weights, node, step):
        x, y = (a.astype(np.float64) for a in self.batch(node, step))
        first, second = weights
        hidden = np.tanh(x @ first.T)
        error = 2 * (hidden @ second.T - y) / y.size
        inner = (error @ second) * (1 - hidden**2)
        return [inner.T @ x, error.T @ hidden]
