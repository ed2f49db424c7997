"""Errors at the door."""

import pytest
import torch
from laws import in_lockstep, model, train, wrapped
from torch import nn

import dgc


def sgd(**settings):
    return torch.optim.SGD(model().parameters(), **{"lr": 0.1, **settings})


class Compressor:
    """With what Horovod's are told by."""

    compress = decompress = None


def twice():
    a, b = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return torch.optim.SGD([a, b, a], 0.1)


def by_apex(optimizer):
    """With what ``apex.amp.initialize`` leaves in any optimizer, as its source has it."""
    optimizer._amp_stash = object()
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: dgc.DistributedOptimizer(sgd(), compression="fp16"),
            TypeError,
            r"compression must be a dgc\.Config, .* got 'fp16'",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                sgd(), compression=Compressor, grad_scaler=torch.amp.GradScaler("cpu")
            ),
            ValueError,
            "grad_scaler must be None where compression is Horovod's",
        ),
        (
            lambda: dgc.DistributedOptimizer("sgd"),
            TypeError,
            r"optimizer must be a torch\.optim\.Optimizer, got 'sgd'",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), op=2),
            ValueError,
            r"op must be Average \(0\) or Sum \(1\) .* got 2",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(momentum=0.9, dampening=0.1)),
            ValueError,
            r"dampening must be 0, .* got 0\.1",
        ),
        (
            lambda: dgc.DistributedOptimizer(torch.optim.RMSprop(model().parameters())),
            TypeError,
            r"must be torch\.optim\.SGD or AdamW for momentum correction, .* RMSprop "
            r".*Config\(momentum_correction=False\)",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                torch.optim.Adam(model().parameters(), weight_decay=0.1)
            ),
            ValueError,
            r"weight_decay must be 0 for torch\.optim\.Adam, .* got 0\.1 \(use torch\.optim\.AdamW",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                torch.optim.AdamW(model().parameters()),
                compression=dgc.Config(clip_norm=1.0, clip_per_tensor=True),
            ),
            ValueError,
            "clip_per_tensor must be False for AdamW",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                torch.optim.AdamW(model().parameters(), fused=True),
                grad_scaler=torch.amp.GradScaler("cpu"),
            ),
            ValueError,
            "must have fused=False",
        ),
        (
            lambda: dgc.DistributedOptimizer(torch.optim.LBFGS(model().parameters())),
            TypeError,
            "got LBFGS, which evaluates",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                torch.optim.SGD([nn.Parameter(torch.zeros(2, 2, dtype=torch.float8_e5m2))], 0.1)
            ),
            TypeError,
            r"got one of shape \(2, 2\) and dtype torch\.float8_e5m2",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.int64), False)], 0.1)
            ),
            TypeError,
            "must have a parameter of .*, got none whose gradient can be exchanged",
        ),
        (
            lambda: dgc.DistributedOptimizer(torch.optim.NAdam(model().parameters())),
            TypeError,
            r"got NAdam \(torch\.optim\.AdamW learns better with compressed gradients; or give Config\(momentum_c",
        ),
        (
            lambda: dgc.DistributedOptimizer(torch.optim.RMSprop(model().parameters())),
            TypeError,
            r"got RMSprop \(give Config\(momentum_correction=False\), and RMSprop gets the averaged",
        ),
        (
            lambda: dgc.DistributedOptimizer(by_apex(sgd())),
            TypeError,
            "must not be one that apex.amp",
        ),
        (
            lambda: by_apex(dgc.DistributedOptimizer(sgd())).load_state_dict({}),
            TypeError,
            "must not be one that apex.amp",
        ),
        (
            lambda: train(
                range(1),
                None,
                network := model(),
                by_apex(dgc.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1))),
            ),
            TypeError,
            "must not be one that apex.amp",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), backward_passes_per_step=0),
            ValueError,
            "backward_passes_per_step must be > 0",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), op=dgc.Sum, gradient_predivide_factor=2.0),
            ValueError,
            "gradient_predivide_factor not supported with op != Average",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), groups=-1),
            ValueError,
            "groups should be a non-negative integer",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), groups=[["a"]]),
            ValueError,
            r"groups must consist of torch\.Tensor",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                opt := sgd(), groups=[opt.param_groups[0]["params"][:2]] * 2
            ),
            ValueError,
            "A parameter can only appear once in groups",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                opt := sgd(), [[n, p] for n, p in enumerate(opt.param_groups[0]["params"])]
            ),
            ValueError,
            "named_parameters should be a sequence of tuples",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), dgc.Config()),
            TypeError,
            r"named_parameters must be model\.named_parameters\(\), got a Config \(give that as compression=\)",
        ),
        (
            lambda: dgc.DistributedOptimizer(
                opt := sgd(), [("same", p) for p in opt.param_groups[0]["params"]]
            ),
            ValueError,
            "Parameter names in named_parameters must be unique. Found duplicates: same",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), [("a", nn.Parameter(torch.zeros(1)))]),
            ValueError,
            "one or more model parameters were not named",
        ),
        (
            lambda: dgc.DistributedOptimizer(twice()),
            ValueError,
            r"must have each parameter once, got one of shape \(3, 2\) twice, number 2 of them",
        ),
        (
            lambda: dgc.DistributedOptimizer(dgc.DistributedOptimizer(sgd())),
            ValueError,
            "must be the plain optimizer, wrapped once",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd()).set_backward_passes_per_step(0),
            ValueError,
            "must be > 0",
        ),
        (
            lambda: dgc.DistributedOptimizer(sgd(), process_set="all"),
            RuntimeError,
            "nothing to exchange gradients over",
        ),
        (lambda: dgc.broadcast_parameters("model"), ValueError, "invalid params of type"),
        (
            lambda: dgc.broadcast_parameters({"model": model().state_dict()}),
            ValueError,
            r"params must hold tensors, as model\.state_dict\(\) does, got none among model \(broadcast its parts",
        ),
        (
            lambda: dgc.broadcast_parameters([torch.zeros(1)], root_rank=2),
            ValueError,
            r"root_rank must be an integer from 0 to 1, got 2",
        ),
    ],
)
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        in_lockstep(make)


def test_dampening_set_later_is_refused_at_the_step():
    def worker():
        network, optimizer = wrapped()
        optimizer.param_groups[0]["dampening"] = 0.5
        train(range(1), None, network, optimizer)

    with pytest.raises(ValueError, match=r"dampening must be 0, .* got 0\.5"):
        in_lockstep(worker)


def test_num_groups_is_deprecated():
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        in_lockstep(lambda: dgc.DistributedOptimizer(sgd(), num_groups=2), 1)


def test_an_8_bit_parameter_that_thaws_is_refused():
    def worker():
        p, q = (
            nn.Parameter(torch.ones(2, dtype=torch.float8_e5m2), requires_grad=False),
            nn.Parameter(torch.ones(2)),
        )
        dgc.DistributedOptimizer(torch.optim.SGD([p, q], 0.1))
        p.requires_grad_(True)
        with pytest.raises(TypeError, match="keep it frozen"):
            p.float().sum().backward()

    in_lockstep(worker)
