"""AdamW over the life of a training: what was frozen thaws, settings change, a state is rolled back, nobody is there to
exchange with. Expected is torch's own AdamW, or the same training without the event.
"""

import copy

import pytest
import torch

import dgc
from dgc.compression import denominator

pytestmark = pytest.mark.filterwarnings("ignore")


def adamw(parameters, sparsity, wrap=True, min_numel=0, **config):
    """torch's, wrapped or not."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    return (
        dgc.DistributedOptimizer(
            optimizer, compression=dgc.Config(sparsity, min_numel=min_numel, **config)
        )
        if wrap
        else optimizer
    )


def rank():
    return dgc.lockstep.current().world.rank


def head_first(wrap, from_the_start=False):
    """The body is frozen for 150 steps, and then trained with the head, which is small enough to travel dense. Frozen
    before the optimizer is made, it has no state until it thaws.
    """
    torch.manual_seed(0)
    body, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    parameters = [*body.parameters(), *head.parameters()]
    body.requires_grad_(not from_the_start)
    optimizer = adamw(parameters, dgc.piecewise({0: 0.0, 100: 0.9}), wrap, min_numel=1024)
    start = body.weight.detach().clone()
    for step in range(160):
        body.requires_grad_(step >= 150)
        if step == 150:
            assert torch.equal(body.weight, start)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(body(x).tanh()), (x[:, 0] > 0).long()).backward()
        before = body.weight.detach().clone()
        optimizer.step()
    return (body.weight.detach() - before).abs().max().item()


@pytest.mark.parametrize("from_the_start", [False, True])
def test_what_was_frozen_in_the_dense_steps_moves_by_about_the_learning_rate(from_the_start):
    assert 1e-4 < head_first(False) < 1.1e-3
    assert all(
        1e-4 < moved < 1e-2
        for moved in dgc.lockstep.run(lambda: head_first(True, from_the_start), 2)
    )


@pytest.mark.parametrize("steps", [0, 5])
def test_an_added_group_has_what_a_loaded_one_has(steps):
    """Before the dense steps have ended, and after. hvd.broadcast_optimizer_state sends what rank 0 has, which alone
    may have loaded; the others look for the same keys.
    """

    def worker():
        first, second = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
        optimizer = adamw([first], dgc.piecewise({0: 0.0, 3: 0.5}))
        for _ in range(steps):
            optimizer.zero_grad()
            first.square().sum().backward()
            optimizer.step()
        optimizer.add_param_group({"params": [second]})
        added = copy.deepcopy(
            {key: value for key, value in optimizer.param_groups[1].items() if key != "params"}
        )
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert added == {
            key: value for key, value in optimizer.param_groups[1].items() if key != "params"
        }
        assert added["dgc_dense_b2"] == (0.999 if steps else 0.0) and "dgc_rates" in added

    dgc.lockstep.run(worker, 2)


def test_steps_stay_dense_until_there_is_any_gradient():
    """As AdamW's: a first step over eps alone would be a hundred million times the learning rate."""

    def train(wrap):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 3: 0.5}), wrap)
        for step in range(6):
            optimizer.zero_grad()
            (p * float(step >= 5)).sum().backward()
            optimizer.step()
        return p.detach()

    for found in dgc.lockstep.run(lambda: train(True), 2):
        torch.testing.assert_close(found, train(False), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("size", "node", "config"),
    [(1, 1, {}), (1, 1, {"nonfinite": "skip"}), (2, 2, {"hierarchical": True})],
    ids=str,
)
def test_where_nothing_is_compressed_it_is_torchs_adamw(size, node, config):
    def train(wrap):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 10: 0.9}), wrap, **config)
        noise = torch.Generator().manual_seed(1)
        for _ in range(60):
            optimizer.zero_grad()
            (p * (1 + 0.1 * torch.randn(4, 4, generator=noise))).sum().backward()
            optimizer.step()
        return p.detach()

    for found in dgc.lockstep.run(lambda: train(True), size, node):
        torch.testing.assert_close(found, train(False), rtol=1e-5, atol=0)


def test_where_nothing_is_compressed_a_copy_goes_on_as_the_original():
    """It does not know yet that all ranks are on one machine."""

    def worker():
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 10: 0.9}), hierarchical=True)
        noise = torch.Generator().manual_seed(1)
        pairs = [(p, optimizer)]
        for step in range(30):
            if step == 15:
                pairs.append(copy.deepcopy((p, optimizer)))
            factor = 1 + 0.1 * torch.randn(4, 4, generator=noise)
            for q, each in pairs:
                each.zero_grad()
                (q * factor).sum().backward()
                each.step()
        return [q.detach() for q, _ in pairs]

    for original, other in dgc.lockstep.run(worker, 2, 2):
        assert torch.equal(original, other)


def test_what_is_frozen_is_not_decayed():
    """Where zero_grad(set_to_none=False) leaves it a gradient of zeros, in compressed steps."""

    def worker():
        body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        parameters = [*body.parameters(), *head.parameters()]
        optimizer = adamw(parameters, dgc.piecewise({0: 0.0, 2: 0.5}))
        optimizer.param_groups[0]["weight_decay"] = 0.1
        for step in range(8):
            if step == 5:
                before = body.requires_grad_(False).weight.detach().clone()
            optimizer.zero_grad(set_to_none=False)
            head(body(torch.ones(4, 8)).tanh()).square().sum().backward()
            optimizer.step()
        return torch.equal(body.weight, before)

    assert dgc.lockstep.run(worker, 2) == [True, True]


def test_a_param_group_whose_decay_is_in_the_gradient_is_refused():
    def worker():
        optimizer = dgc.DistributedOptimizer(
            torch.optim.Adam([torch.nn.Parameter(torch.zeros(4, 4))]),
            compression=dgc.Config(0.9, min_numel=0),
        )
        with pytest.raises(ValueError, match="weight_decay"):
            optimizer.add_param_group(
                {"params": [torch.nn.Parameter(torch.zeros(4, 4))], "weight_decay": 0.1}
            )
        return len(optimizer.param_groups)

    assert dgc.lockstep.run(worker, 2) == [1, 1]


def test_a_step_without_a_learning_rate_takes_no_momentum_away():
    """Nor where it is the first that would be compressed. Gradients end before it, so that all that moves is momentum;
    D, which follows from what comes, is another than torch's by then.
    """

    def train(wrap):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}), wrap, factor_masking=False)
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 0.0 if step == 5 else 1e-3
            optimizer.zero_grad()
            (p * float(step < 5)).sum().backward()
            optimizer.step()
            if step == 5:
                before = p.detach().clone()
        return p.detach() - before

    for found in dgc.lockstep.run(lambda: train(True), 2):
        torch.testing.assert_close(found, train(False), rtol=0.5, atol=0)


def steps(p, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        (
            p * torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank()))
        ).sum().backward()
        optimizer.step()


def test_a_state_that_is_written_into_is_what_training_goes_on_from():
    """As hvd.broadcast_optimizer_state does: it asks for the state dict, and writes into its tensors and the groups."""

    def train(rolled_back):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}))
        steps(p, optimizer, 0, 12)
        best, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
        pending = copy.deepcopy(optimizer.residual_state_dict())
        if rolled_back:
            steps(p, optimizer, 12, 40)
            p.data.copy_(weights)
            for key, value in optimizer.state_dict()["state"][0].items():
                value.copy_(best["state"][0][key])
            optimizer.param_groups[0].update(
                {
                    key: best["param_groups"][0][key]
                    for key in best["param_groups"][0]
                    if key != "params"
                }
            )
            optimizer.load_residual_state_dict(pending)
        steps(p, optimizer, 12, 20)
        return p.detach()

    for found, expected in zip(
        dgc.lockstep.run(lambda: train(True), 2),
        dgc.lockstep.run(lambda: train(False), 2),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_a_state_from_before_rates_were_kept_goes_on():
    """With the learning rate that it has."""

    def train(older):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}))
        steps(p, optimizer, 0, 10)
        state = copy.deepcopy(optimizer.state_dict())
        assert state["param_groups"][0]["dgc_rates"][0] == 1e-3
        if older:
            del state["param_groups"][0]["dgc_rates"]
        optimizer.load_state_dict(state)
        steps(p, optimizer, 10, 20)
        return p.detach()

    older, newer = (
        dgc.lockstep.run(lambda older=older: train(older), 2)[0] for older in (True, False)
    )
    assert torch.equal(older, newer)


@pytest.mark.parametrize("masking", [True, pytest.param(False, marks=pytest.mark.long)])
def test_steps_without_a_learning_rate_leave_d_as_it_is(masking):
    """However many: what the momentum still sends tells nothing new of gradients."""

    def train():
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}), factor_masking=masking)
        steps(p, optimizer, 0, 30)
        optimizer.param_groups[0]["lr"] = 0.0
        square = optimizer.state[p]["exp_avg_sq"].clone()
        steps(p, optimizer, 30, 1130)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], square)
        optimizer.param_groups[0]["lr"] = 1e-3
        before = p.detach().clone()
        steps(p, optimizer, 1130, 1150)
        after = optimizer.state[p]["exp_avg_sq"]
        assert 0 < (p - before).abs().max() < 0.1 and 0.2 < after.mean() / square.mean() < 5
        return p.detach()

    ends = dgc.lockstep.run(train, 2)
    assert torch.equal(*ends) and ends[0].isfinite().all()


@pytest.mark.parametrize(
    "change", [{"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}, {"eps": 1e-3}], ids=str
)
def test_a_setting_that_changed_is_as_if_it_never_stopped_after_a_resume(change):
    def train(resumed):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}))
        steps(p, optimizer, 0, 10)
        optimizer.param_groups[0].update(change)
        steps(p, optimizer, 10, 20)
        if resumed:
            optimizer.load_residual_state_dict(optimizer.residual_state_dict())
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(p, optimizer, 20, 30)
        return p.detach()

    for found, expected in zip(
        dgc.lockstep.run(lambda: train(True), 2),
        dgc.lockstep.run(lambda: train(False), 2),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_a_gradient_that_is_a_million_times_as_large_makes_no_larger_step():
    """As with AdamW: it is in the denominator before the step."""

    def train(wrap):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 20: 0.5}), wrap)
        for step in range(31):
            before = p.detach().clone()
            optimizer.zero_grad()
            noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            (p * noise * (1e6 if step == 30 else 1.0)).sum().backward()
            optimizer.step()
        return (p.detach() - before).abs().max().item()

    assert train(False) < 1e-3  # the learning rate
    assert all(0 < moved < 3e-3 for moved in dgc.lockstep.run(lambda: train(True), 2))


def test_another_b2_makes_no_jump():
    """D is the same before and after it: the bias is that of the dense steps, whose b2 it was."""

    def size(b2):
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 20: 0.5}))
        steps(p, optimizer, 0, 30)
        # Eps, too, so that D is read anew.
        optimizer.param_groups[0].update(betas=(0.9, b2), eps=1.001e-8)
        before = p.detach().clone()
        optimizer.flush()  # over D as it is
        return (p.detach() - before).norm().item()

    assert dgc.lockstep.run(lambda: size(0.99), 2) == pytest.approx(
        dgc.lockstep.run(lambda: size(0.999), 2), rel=1e-6
    )


def test_a_b1_that_changes_in_every_step_keeps_no_more_tables():
    def train():
        p = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw([p], dgc.piecewise({0: 0.0, 5: 0.5}))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=80)
        for step in range(79):
            steps(p, optimizer, step, step + 1)
            scheduler.step()

    dgc.lockstep.run(train, 2)
    assert 0 < denominator._deficits.cache_info().currsize <= 16
    assert len(denominator._deficits(0.99999, torch.float32, torch.device("cpu"))) <= 2**22 + 1


def test_a_schedule_is_asked_for_no_step_before_its_first():
    def schedule(step):
        assert step >= 0
        return 0.5

    def train():
        p, said = torch.nn.Parameter(torch.ones(4, 4)), []
        optimizer = dgc.DistributedOptimizer(
            torch.optim.AdamW([p], betas=(0.9, 0.5)),
            [("p", p)],
            dgc.Config(schedule, min_numel=0, nonfinite="skip"),
        )
        for step in range(4):
            optimizer.zero_grad()
            (p * p * (torch.nan if step == 2 else 1)).sum().backward()
            optimizer.step()
            said.append(optimizer.report().sparsity)
        return said

    assert dgc.lockstep.run(train, 2) == [[0.0, 0.0, 0.0, 0.5]] * 2


def noise(parameter, optimizer, which):
    for step in which:
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(10 * step + rank())
        (
            parameter * torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        ).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_that_is_loaded_before_wrapping_goes_on_as_one_that_is_loaded_after(dtype):
    """torch's load_state_dict makes floats of the numbers of steps."""
    schedule = dgc.piecewise({0: 0.0, 3: 0.8})

    def worker():
        trained = torch.nn.Parameter(torch.zeros(20, 30, dtype=dtype))
        optimizer = adamw([trained], schedule)
        noise(trained, optimizer, range(8))
        state, residuals, ends = optimizer.state_dict(), optimizer.residual_state_dict(), []
        for before in (False, True):
            parameter = torch.nn.Parameter(trained.detach().clone())
            plain = adamw([parameter], schedule, wrap=False)
            if before:
                plain.load_state_dict(copy.deepcopy(state))
            other = dgc.DistributedOptimizer(plain, compression=dgc.Config(schedule, min_numel=0))
            if not before:
                other.load_state_dict(copy.deepcopy(state))
            other.load_residual_state_dict(residuals)
            noise(parameter, other, range(8, 12))
            ends.append(parameter.detach())
        return ends

    for after, before in dgc.lockstep.run(worker, 2):
        assert torch.equal(after, before)


def test_numbers_of_steps_that_were_rounded_to_16_bits_are_refused():
    def worker():
        parameter = torch.nn.Parameter(torch.zeros(20, 30, dtype=torch.bfloat16))
        optimizer = adamw([parameter], dgc.piecewise({0: 0.0, 3: 0.8}))
        noise(parameter, optimizer, range(5))
        plain = adamw([parameter], 0.0, wrap=False)
        plain.load_state_dict(optimizer.state_dict())
        with pytest.raises(
            ValueError,
            match=r"must be loaded after its optimizer was wrapped, got .* torch\.bfloat16",
        ):
            dgc.DistributedOptimizer(plain, compression=dgc.Config(0.8, min_numel=0))

    dgc.lockstep.run(worker, 2)
