"""Dense means stock: at sparsity 0 a script does with ours what it does with stock Horovod or
DistributedDataParallel, beside it in the same processes. Compressed, what is not applied is kept;
and a schedule that returns to dense ends as momentum SGD.
"""

import copy
import functools
import itertools
import warnings

import pytest
import stock
import stock_kept
import stock_optimizers
import torch
from launch import ran
from laws import in_lockstep, rank
from stock import BOTH, DDP, DENSE, DROPS, SCHEDULED, SPARSE
from torch import nn

import dgc

ROUNDING = {
    stock_optimizers.one_in_float64: 1e-12,
    stock_optimizers.in_float64: 1e-12,
    stock_optimizers.in_float32: 1e-5,
}
KINDS = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
OPTIMIZERS = sorted(KINDS - {"Optimizer", "LBFGS"})
LAUNCHED = (stock.observed, stock_kept.kept, stock_optimizers.one_in_float64)
LONG = (stock_optimizers.in_float64, stock_optimizers.in_float32)


def results(over, function):
    """What a function has returned on each of two ranks. One launch, which takes long, runs all
    that ``make test`` looks at.
    """
    return ran(over, 2, LONG if function in LONG else LAUNCHED)[function]


def same(a, b):
    """Whether two values of scripts are equal, to the bit, as a sum of two has but one order."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or a == b
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


# -- every optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("over", BOTH)
@pytest.mark.parametrize(
    "trained",
    [
        stock_optimizers.one_in_float64,
        *(pytest.param(all_cases, marks=pytest.mark.long) for all_cases in LONG),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_of_torchs_optimizers_is_itself_where_nothing_is_compressed(name, trained, over):
    """Parameters, gradients and the state, with torch's own test inputs, in float64 and float32: to
    the bit, and to rounding where rows of sparse gradients are added up in another order.
    """
    for found in results(over, trained):
        cases = {case: difference for case, difference in found.items() if case[0] == name}
        assert cases
        wrong = {
            case: difference
            for case, difference in cases.items()
            if not (isinstance(difference, float) and difference <= case[3] * ROUNDING[trained])
        }
        assert not wrong


def test_lbfgs_is_refused_at_any_sparsity():
    def worker():
        model = nn.Linear(40, 40)
        optimizer = torch.optim.LBFGS(model.parameters())
        return dgc.DistributedOptimizer(optimizer, compression=dgc.Config(0.0))

    with pytest.raises(TypeError, match="LBFGS"):
        in_lockstep(worker)


# -- scripts ---------------------------------------------------------------------------------------

MAY_BE_REFUSED = "a_rank_that_joins_and_does_not_count"


def seen(over, name):
    """Of each rank: mode -> what the script has seen."""
    return [found[name] for found in results(over, stock.observed)]


def runs(*modes):
    return [
        (name, over, mode)
        for name, (_, where, own) in stock.scripts().items()
        for over in where
        for mode in modes
        if mode in own and name != MAY_BE_REFUSED
    ]


@pytest.mark.parametrize(("name", "over", "mode"), runs(DENSE, SCHEDULED))
def test_a_script_does_what_it_does_on_stock(name, over, mode):
    """Where nothing is compressed: what it looks at, where it ends, and without a warning."""
    for each in seen(over, name):
        its, ours = each["stock"], each[mode]
        assert its["error"] is None and ours["error"] is None
        assert same(ours["end"], its["end"])
        assert ours["alike"] == its["alike"]
        assert len(ours["close"]) == len(its["close"])
        pairs = enumerate(zip(ours["close"], its["close"], strict=True))
        assert [i for i, pair in pairs if not same(*pair)] == []
        assert [text for text in ours["warnings"] if text not in its["warnings"]] == []


@pytest.mark.parametrize(("name", "over", "mode"), runs(SPARSE))
def test_a_script_runs_when_compressed(name, over, mode):
    """Without an error; and ranks end with the same parameters, to the bit, which are finite."""
    ranks = seen(over, name)
    for each in ranks:
        ours = each[mode]
        assert ours["error"] is None
        assert ours["alike"] == each["stock"]["alike"]
        assert ours["end"].isfinite().all()
        assert torch.equal(ours["end"], ranks[0][mode]["end"])


def test_what_a_copied_model_carries_along():
    """A model that is saved between backward() and step() has no residuals with it."""
    for each in seen("torch", "copies_between_backward_and_step"):
        assert each[SPARSE]["bytes"] < each["stock"]["bytes"] + 4000  # u and v have 25,600


@pytest.mark.parametrize("mode", [DENSE, SPARSE])
def test_join_that_divides_by_the_ranks_that_are_left_is_right_or_refused(mode):
    for each in seen("torch", MAY_BE_REFUSED):
        its, ours = each["stock"], each[mode]
        assert its["error"] is None
        if ours["error"] is not None:
            assert "divide_by_initial_world_size" in ours["error"]
        else:
            assert mode == DENSE
            assert same(ours["end"], its["end"])


# -- what is kept of a step that is not taken ------------------------------------------------------

CONSERVED = {
    name: over
    for name, over in itertools.chain(
        ((name, BOTH) for name in stock_kept.OVER_BOTH),
        ((name, DDP) for name in stock_kept.OVER_DDP),
    )
    if name.startswith(("dropped", "a spike", "one weight", "two"))
}


def kept(over, name):
    ranks = [found[name] for found in results(over, stock_kept.kept)]
    assert [found for found in ranks if isinstance(found, str)] == []  # what was raised
    return ranks


def mean(ranks, *path):
    for key in path:
        ranks = [found[key] for found in ranks]
    return sum(ranks) / len(ranks)


def cases(names):
    return [(name, over) for name, where in names.items() for over in where]


@pytest.mark.parametrize(("name", "over"), cases(CONSERVED))
def test_what_came_is_applied_or_pending(name, over):
    """Of a compressed weight, whatever was dropped; of one that travels dense what was dropped is
    gone, as on stock.

    The mean over the ranks of v, and what was applied over the learning rate, together grow by the
    mean of their gradients.
    """
    found = kept(over, name)
    if name == "two models":
        assert torch.allclose(
            mean(found, "before") + mean(found, "came"),
            mean(found, "after") + found[0]["applied"],
            rtol=1e-9,
            atol=1e-10,
        )
        return
    scale = mean(found, "came", "0.weight").abs().max().item()
    accumulated = mean(found, "before") + mean(found, "came", "0.weight")
    accounted = mean(found, "after") + found[0]["applied"]["0.weight"]
    assert torch.allclose(accounted, accumulated, rtol=1e-9, atol=1e-10 * max(1.0, scale))
    assert found[0]["applied"]["0.weight"].any()
    dense = mean(found, "came", "2.weight")
    assert torch.allclose(found[0]["applied"]["2.weight"], dense, rtol=1e-9, atol=1e-10)
    assert torch.equal(found[0]["end"], found[1]["end"])


@pytest.mark.parametrize("over", BOTH)
def test_a_weight_whose_gradient_is_taken_away_stays_where_it_is(over):
    assert [found["moved"] for found in kept(over, "one weight")] == [[False], [False]]


@pytest.mark.parametrize("over", BOTH)
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_nan_that_nobody_applies_enters_nothing(over, nonfinite):
    found = kept(over, f"nan, {nonfinite}")
    accumulated = mean(found, "before") + mean(found, "came")
    assert torch.allclose(mean(found, "after"), accumulated, rtol=1e-9, atol=1e-12)
    assert found[0]["end"].isfinite().all()
    assert torch.equal(found[0]["end"], found[1]["end"])


@pytest.mark.parametrize("over", BOTH)
@pytest.mark.parametrize("spike", ["10000", "nan"])
def test_residuals_of_before_a_bad_step_undo_it(over, spike):
    """Parameters, u, v and the step are those of a training in which it was not."""
    for without, with_bad_step in kept(over, f"restored from {spike}"):
        for a, b in zip(without, with_bad_step, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("over", BOTH)
@pytest.mark.parametrize("drop", DROPS)
def test_one_warning_tells_how_to_undo_a_step(over, drop):
    first, other = kept(over, f"told of {drop}")
    assert len(first) == 1
    assert "residual_state_dict" in first[0]
    assert other in ([], first)


@pytest.mark.parametrize("over", BOTH)
def test_a_spike_leaves_out_one_step_of_a_script_that_looks_at_the_reports_norm(over):
    for left_out, end in kept(over, "left out"):
        assert left_out == [5]
        assert end.isfinite().all()


@pytest.mark.parametrize("over", BOTH)
def test_steps_that_are_not_taken_do_not_count_in_the_schedule(over):
    assert kept(over, "counted") == [[0, 1, 1, 2, 2, 3]] * 2


# -- from dense to compressed and back -------------------------------------------------------------

FIRST, BACK, END = 5, 12, 18  # the first compressed step, the first dense one after it, and the end
SCHEDULE = dgc.piecewise({0: 0.0, FIRST: 0.9, BACK: 0.0})
THERE_AND_BACK = dgc.Config(SCHEDULE, factor_masking=False)
VARIANTS = {
    "no momentum": {"momentum": 0.0},
    "heavy-ball": {},
    "nesterov": {"nesterov": True},
    "maximize": {"maximize": True},
}
DECAYING = [
    {"weight_decay": 0.1, **more}
    for more in ({}, {"nesterov": True}, {"momentum": 0.0}, {"maximize": True})
]
WEIGHTS = {"a": (40, 40), "b": (40,), "c": (50, 30)}  # b travels dense; c is in a group of its own
OPS = {"average": dgc.Average, "sum": dgc.Sum}


def weights():
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterDict(
        {name: torch.randn(shape, generator=generator).double() for name, shape in WEIGHTS.items()}
    )


def fixed(name, step, of_rank):
    """A rank's gradient, whatever the parameters are."""
    seed = 1000 * step + 10 * of_rank + list(WEIGHTS).index(name)
    return torch.randn(WEIGHTS[name], generator=torch.Generator().manual_seed(seed)).double()


def grouped(network, settings):
    given = {"lr": 0.05, "momentum": 0.9, **settings}
    groups = [
        {"params": [network["a"], network["b"]]},
        {"params": [network["c"]], "lr": 0.02, "momentum": given["momentum"] / 2},
    ]
    return torch.optim.SGD(groups, **given)


def distributed(settings, op=dgc.Average, config=THERE_AND_BACK):
    network = weights()
    optimizer = grouped(network, settings)
    return network, dgc.DistributedOptimizer(optimizer, network.items(), config, op=op)


def steps_of(network, optimizer, steps, gradients=fixed):
    """After each step: weights, gradients, and momentum, by name."""
    history = []
    for step in steps:
        optimizer.zero_grad()
        sum((p * gradients(name, step, rank())).sum() for name, p in network.items()).backward()
        optimizer.step()
        history.append(
            {
                "p": {name: p.detach().clone() for name, p in network.items()},
                "g": {name: p.grad.clone() for name, p in network.items()},
                "m": {
                    name: copy.deepcopy(optimizer.state[p].get("momentum_buffer"))
                    for name, p in network.items()
                },
                "from": optimizer.param_groups[0].get("dgc_compressed_from"),
                "step": optimizer.param_groups[0].get("dgc_step"),
            }
        )
    return history


def by_torch(settings, op=dgc.Average, size=2, gradients=fixed):
    """The same by torch.optim.SGD on what the ranks' gradients add up to."""
    network, history = weights(), []
    optimizer = grouped(network, settings)
    for step in range(END):
        for name, p in network.items():
            total = sum(gradients(name, step, r) for r in range(size))
            p.grad = total / size if op == dgc.Average else total
        optimizer.step()
        history.append(
            {
                "p": {name: p.detach().clone() for name, p in network.items()},
                "g": {name: p.grad.clone() for name, p in network.items()},
                "m": {
                    name: copy.deepcopy(optimizer.state[p].get("momentum_buffer"))
                    for name, p in network.items()
                },
            }
        )
    return history


def equal(a, b):
    """Two tensors, to the bit, or None twice."""
    return a is b if a is None or b is None else torch.equal(a, b)


def agree(a, b):
    """Two tensors, or None twice."""
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_is_momentum_sgd(variant, op):
    """Until the first compressed step it is stock, to the bit. The first dense step after those
    brings parameters and momentum to where stock's are, to rounding; then ``p.grad`` is, too.
    """
    settings, op = VARIANTS[variant], OPS[op]
    expected = by_torch(settings, op)
    for history in in_lockstep(lambda: steps_of(*distributed(settings, op), range(END))):
        for step, kind, name in itertools.product(range(FIRST), ("p", "g", "m"), WEIGHTS):
            assert equal(history[step][kind][name], expected[step][kind][name]), (step, kind, name)
        before = BACK - 1  # something is pending
        assert not agree(history[before]["p"]["a"], expected[before]["p"]["a"])
        for step, kind, name in itertools.product(range(BACK, END), ("p", "g", "m"), WEIGHTS):
            if (step, kind) != (BACK, "g") or name == "b":
                its = expected[step][kind][name]
                assert agree(history[step][kind][name], its), (step, kind, name)


@pytest.mark.parametrize("settings", [{}, *DECAYING])
def test_the_optimizer_says_since_when_something_is_compressed(settings):
    """And counts the steps."""
    for history in in_lockstep(lambda: steps_of(*distributed(settings), range(END))):
        assert [each["from"] for each in history[:FIRST]] == [-1] * FIRST
        assert {each["from"] for each in history[FIRST:BACK]} == {FIRST}
        assert {each["from"] for each in history[BACK + 1 :]} == {-1}
        assert [each["step"] for each in history] == list(range(1, END + 1))


@pytest.mark.parametrize("settings", DECAYING)
def test_weight_decay_alone_is_stocks_when_compressed_and_back(settings):
    """Without gradients, and compressed from the start: what decays is never sent."""

    def none(name, step, of_rank):
        return torch.zeros(WEIGHTS[name]).double()

    config = dgc.Config(dgc.piecewise({0: 0.9, BACK: 0.0}), factor_masking=False)
    expected = by_torch(settings, gradients=none)
    for history in in_lockstep(
        lambda: steps_of(*distributed(settings, config=config), range(END), none)
    ):
        for step, name in itertools.product(range(END), WEIGHTS):
            assert agree(history[step]["p"][name], expected[step]["p"][name]), (step, name)


@pytest.mark.parametrize("settings", DECAYING[:2])
def test_with_weight_decay_ranks_agree_and_learn(settings):
    """Towards a target, which each rank sees with noise of its own."""
    target = {name: torch.ones(shape).double() for name, shape in WEIGHTS.items()}

    def worker():
        network, optimizer = distributed(settings)
        losses = []
        for step in range(40):
            optimizer.zero_grad()
            parts = [
                (p - target[name] - 0.1 * fixed(name, step, rank())).square().sum() / 2
                for name, p in network.items()
            ]
            losses.append(sum(parts).item())
            sum(parts).backward()
            optimizer.step()
        return losses, [p.detach().clone() for p in network.values()]

    (losses, ends), (_, others) = in_lockstep(worker)
    assert all(map(torch.equal, ends, others))
    assert losses[-1] < losses[BACK] < losses[0]


STOPS = (3, 8, BACK, BACK + 1)
RESUMED = {"plain": {}, "nesterov and decay": {"weight_decay": 0.1, "nesterov": True}}


@functools.cache
def uninterrupted(name):
    return in_lockstep(lambda: steps_of(*distributed(RESUMED[name]), range(END)))


def resumed(name, stop, with_residuals):
    """On each rank: from a training that has stopped there, its states are loaded into another."""

    def worker():
        network, optimizer = distributed(RESUMED[name])
        steps_of(network, optimizer, range(stop))
        states = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
        residuals = optimizer.residual_state_dict()
        del optimizer
        network, optimizer = distributed(RESUMED[name])
        network.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        if with_residuals:
            optimizer.load_residual_state_dict(residuals)
        return steps_of(network, optimizer, range(stop, END))

    return in_lockstep(worker)


def assert_ends_alike(ranks, name):
    """To the bit, as where it was never interrupted."""
    for history, expected in zip(ranks, uninterrupted(name), strict=True):
        for kind, each in itertools.product(("p", "g", "m"), WEIGHTS):
            assert equal(history[-1][kind][each], expected[-1][kind][each]), (kind, each)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("stop", STOPS)
def test_a_training_that_stops_there_and_goes_on(stop, name):
    """By the states of model, optimizer and residuals."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_ends_alike(resumed(name, stop, with_residuals=True), name)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("stop", STOPS)
def test_a_checkpoint_of_there(stop, name, tmp_path):
    """By dgc.save_checkpoint and dgc.load_checkpoint."""

    def saves():
        network, optimizer = distributed(RESUMED[name])
        steps_of(network, optimizer, range(stop))
        dgc.save_checkpoint(tmp_path, network, optimizer)

    def loads():
        network, optimizer = distributed(RESUMED[name])
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return steps_of(network, optimizer, range(stop, END))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(saves)
        assert_ends_alike(in_lockstep(loads), name)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("stop", STOPS)
def test_what_a_training_needs_that_goes_on_without_residuals(stop, name):
    """Nothing, where the next step is stock's; else it is told of dgc.save_checkpoint."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ranks = resumed(name, stop, with_residuals=False)
    if stop in (3, BACK + 1):
        assert told == []
        assert_ends_alike(ranks, name)
    else:
        assert any("dgc.save_checkpoint" in str(warning.message) for warning in told)
