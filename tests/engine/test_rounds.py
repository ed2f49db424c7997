"""Local steps: agreement, conservation, and a transcription of the rounds in float64 from their equations."""

import copy

import pytest
import torch
from launch import ran
from torch import nn

import dgc
from dgc.transport import find

F64 = torch.float64
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "sgd with decay": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


def network(dtype=F64):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 6)).to(dtype)


def batch(step, rank, dtype=F64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator, dtype=dtype)


def loss(model, step, rank):
    return model(batch(step, rank, next(model.parameters()).dtype)).square().mean()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def made(kind, model, **config):
    config = {"sparsity": 0.9, "local_steps": 3, "min_numel": 16, "value_bits": 32, **config}
    inner = KINDS[kind](model.parameters())
    return dgc.DistributedOptimizer(inner, model.named_parameters(), dgc.Config(**config))


def trained(kind, steps, dtype=F64, **config):
    """Parameters after each step, and the optimizer's v in the end."""
    rank, model = find().world.rank, network(dtype)
    optimizer, seen = made(kind, model, **config), []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        seen.append(flat(model))
    return seen, optimizer.residual_state_dict()["v"], optimizer.report()


def transcribed(kind, steps, size, density, every, decays=False):
    """x of each rank after each step, and v, by the equations:

    v_i = v_i + (d x_start - x_i); s_i = the k entries of v_i with the largest magnitude, of each
    matrix (of vectors: all); v_i = v_i - s_i; x = d x_start - mean_i s_i. d is what decoupled
    weight decay leaves: the product of 1 - lr decay.
    """
    models = [network() for _ in range(size)]
    inner = [KINDS[kind](model.parameters()) for model in models]
    start = [p.detach().clone() for p in models[0].parameters()]
    v = [[torch.zeros_like(p) for p in start] for _ in range(size)]
    d, seen = 1.0, []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        if decays:
            d *= 1 - inner[0].defaults["lr"] * inner[0].defaults["weight_decay"]
        if step % every == every - 1:
            for i in range(len(start)):
                total = torch.zeros_like(start[i])
                for rank, model in enumerate(models):
                    vi = v[rank][i]
                    vi += d * start[i] - list(model.parameters())[i].detach()
                    sent = vi.clone()
                    if vi.dim() > 1:
                        k = max(1, round(vi.numel() * density))
                        kept = vi.flatten().abs().topk(k).indices
                        sent = torch.zeros_like(vi.flatten())
                        sent[kept] = vi.flatten()[kept].float().double()  # as it travels
                        sent = sent.view_as(vi)
                    vi -= sent
                    total += sent
                start[i] = d * start[i] - total / size
                with torch.no_grad():
                    for model in models:
                        list(model.parameters())[i].copy_(start[i])
            d = 1.0
        seen.append([flat(model) for model in models])
    return seen, v


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_equations_say(kind, size):
    expected, v = transcribed(kind, 12, size, 0.1, 3, decays=kind in ("adamw", "sgd with decay"))
    for rank, (seen, own, _) in enumerate(dgc.lockstep.run(lambda: trained(kind, 12), size)):
        for step, x in enumerate(seen):
            assert (x - expected[step][rank]).abs().max() < 1e-12, step
        names = [name for name, _ in network().named_parameters()]
        for name, residual in zip(names, v[rank], strict=True):
            if name in own and residual.dim() > 1:
                assert torch.allclose(own[name], residual, rtol=0, atol=1e-12)


def test_with_one_step_a_round_it_is_dgc_without_masking():
    def ordinary():
        rank, model = find().world.rank, network()
        optimizer = dgc.DistributedOptimizer(
            KINDS["sgd"](model.parameters()),
            model.named_parameters(),
            dgc.Config(0.9, factor_masking=False, min_numel=16, value_bits=32),
        )
        for step in range(10):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        return flat(model)

    expected = dgc.lockstep.run(ordinary, 4)[0]
    seen = dgc.lockstep.run(lambda: trained("sgd", 10, local_steps=1), 4)[0][0]
    assert (seen[-1] - expected).abs().max() < 1e-7  # values travel in float32


@pytest.mark.parametrize("exchange", ["allgather", "reduce"])
@pytest.mark.parametrize(("sparsity", "bits"), [(0.0, 2), (0.0, 32), (0.9, 4), (0.75, 1)])
def test_ranks_agree_after_each_round_and_nothing_is_lost(exchange, sparsity, bits):
    """What v has, and what the parameters have moved by, is together what the ranks came."""

    def worker():
        rank, model = find().world.rank, network(torch.float32)
        optimizer = made("adamw", model, exchange=exchange, sparsity=sparsity, value_bits=bits)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        came, ends = torch.zeros(len(flat(model)), dtype=F64), []
        begin = flat(model).double()
        for step in range(9):
            before = flat(model).double()
            loss(model, step, rank).backward()
            with torch.no_grad():  # the round would move the parameters on
                shadow = copy.deepcopy(model)
                inner = KINDS["adamw"](shadow.parameters())
                inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                for p, q in zip(shadow.parameters(), model.parameters(), strict=True):
                    p.grad = q.grad.clone()
                inner.step()
            came += flat(shadow).double() - before
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                ends.append(flat(model))
        moved = flat(model).double() - begin
        v = optimizer.residual_state_dict()["v"]
        rest = torch.cat(
            [
                v[n].flatten().double() if n in v else torch.zeros(p.numel(), dtype=F64)
                for n, p in model.named_parameters()
            ]
        )
        return came, moved, rest, ends

    results = dgc.lockstep.run(worker, 4)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][3], others[3], strict=True))
    came = sum(came for came, *_ in results) / 4
    rest = sum(rest for _, _, rest, _ in results) / 4
    assert torch.allclose(results[0][1] - rest, came, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [(2, 1), (4, 2)])
def test_a_round_in_the_middle_of_which_it_is_saved_goes_on_to_the_bit(world):
    def worker(stops):
        rank, model = find().world.rank, network()
        config = {"value_bits": 4, "hierarchical": world[1] > 1}
        optimizer = made("adamw", model, **config)
        for step in range(11):
            if stops and step == 7:
                saved = copy.deepcopy((model.state_dict(), optimizer.residual_state_dict()))
                model = network()
                optimizer = made("adamw", model, **config)
                model.load_state_dict(saved[0])
                optimizer.load_residual_state_dict(saved[1])
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        return flat(model)

    runs = [dgc.lockstep.run(lambda s=s: worker(s), *world) for s in (False, True)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_between_rounds_the_common_parameters_can_be_seen():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
            if step == 2:
                common = flat(model)
        own = flat(model)
        with optimizer.averaged():
            assert torch.equal(flat(model), common)
        assert torch.equal(flat(model), own) and not torch.equal(own, common)
        optimizer.flush()
        assert not any(x.any() for x in optimizer.residual_state_dict()["v"].values())
        return flat(model)

    first, second = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second)


def test_within_averaged_a_second_block_changes_nothing_and_no_round_is_made():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model)
        loss(model, 0, rank).backward()
        optimizer.step()
        own = flat(model)
        with optimizer.averaged():
            with optimizer.averaged():
                common = flat(model)
            assert torch.equal(flat(model), common)
            for call in (optimizer.flush, optimizer.step):
                with pytest.raises(RuntimeError, match=r"after the block of averaged\(\)"):
                    call()
        assert torch.equal(flat(model), own) and not torch.equal(own, common)

    dgc.lockstep.run(worker, 2)


def test_a_step_without_gradients_begins_no_round():
    """Such as the one before a scheduler's first step: weights may be loaded after it."""

    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(5.0)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        return flat(model)

    first, second = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and (first - 5).abs().max() < 0.1


def test_gradients_that_no_backward_pass_brings_count():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model)
        for step in range(6):
            gradients = torch.autograd.grad(loss(model, step, rank), list(model.parameters()))
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        return flat(model), optimizer.report().steps

    (first, rounds), (second, _) = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and rounds == 2


def test_a_line_search_is_one_step():
    """Its closure calls zero_grad() for each of several gradients, as torch's documentation shows."""

    def worker():
        rank, model = find().world.rank, network()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        config = dgc.Config(0.0, local_steps=2, min_numel=16, value_bits=32)
        optimizer = dgc.DistributedOptimizer(inner, model.named_parameters(), config)
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                value = loss(model, step, rank)
                value.backward()
                return value

            optimizer.step(closure)
        return flat(model), optimizer.report().steps

    (first, rounds), (second, _) = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and rounds == 2


def test_a_line_search_leaves_out_no_gradient():
    inner = torch.optim.LBFGS(network().parameters())
    with pytest.raises(ValueError, match='nonfinite must be "error" with LBFGS, got "skip"'):
        dgc.DistributedOptimizer(
            inner, compression=dgc.Config(0.0, local_steps=2, nonfinite="skip")
        )


def test_ranks_whose_optimizers_differ_are_told():
    def worker(groups, lr):
        rank, model = find().world.rank, network()
        parts = [list(model.parameters())]
        if rank and groups:
            parts = [parts[0][:2], parts[0][2:]]
        inner = torch.optim.SGD([{"params": part} for part in parts], 0.1 if rank and lr else 0.01)
        config = dgc.Config(0.0, local_steps=1, min_numel=16)
        optimizer = dgc.DistributedOptimizer(inner, model.named_parameters(), config)
        loss(model, 0, rank).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"Rank 1 has: 2 param groups; rank 0 has: 1 param groups"):
        dgc.lockstep.run(lambda: worker(groups=True, lr=False), 2)
    with pytest.warns(UserWarning, match=r"Rank 1 has: group 0: lr=0.1; rank 0 has: .*lr=0.01"):
        dgc.lockstep.run(lambda: worker(groups=False, lr=True), 2)


def test_ranks_that_took_different_numbers_of_steps_are_told():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("sgd", model)
        for step in range(2 + rank):
            loss(model, step, rank).backward()
            if step < 2:
                optimizer.step()
        with pytest.raises(
            ValueError, match=r"same number of steps.*got 2 on rank 0 and 3 on rank 1"
        ):
            optimizer.flush() if rank == 0 else optimizer.step()

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_a_scaler_leaves_out_counts(unscales):
    """Also the round's last, with a graph that waits for its backward pass; else nothing is scaled."""

    def worker(scale, bad=-1):
        rank, model = find().world.rank, network(torch.float32)
        optimizer = made("adamw", model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scale)
        for step in range(4):
            value = loss(model, step, rank)
            optimizer.zero_grad()
            scaler.scale(value).backward()
            if rank == 1 and step == bad:
                next(model.parameters()).grad.fill_(torch.inf)
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                common = flat(model)
        return common, flat(model), scaler.get_scale()

    for bad in (1, 2):
        (first, _, scale), (second, _, lower) = dgc.lockstep.run(lambda b=bad: worker(True, b), 2)
        assert torch.equal(first, second) and lower < scale
    for with_scale, without in zip(
        dgc.lockstep.run(lambda: worker(True), 2),
        dgc.lockstep.run(lambda: worker(False), 2),
        strict=True,
    ):
        assert all(map(torch.equal, with_scale[:2], without[:2]))


def test_a_step_that_the_script_leaves_out_counts():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model)
        # The step counts in zero_grad(), at the next step's rate.
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            if rank == 0 or step != 1:
                optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        return flat(model), optimizer.report().steps

    (first, rounds), (second, _) = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and rounds == 1


def test_the_number_of_steps_may_change_from_round_to_round():
    """By a function of which each rank has its own."""

    def worker():
        lengths = {0: 1, 1: 1, 2: 3, 5: 4}
        seen, _, report = trained("adamw", 9, local_steps=lambda step: lengths[step])
        return seen, report.steps

    (first, rounds), (second, _) = dgc.lockstep.run(worker, 2)
    ends = [step for step in range(9) if torch.equal(first[step], second[step])]
    assert ends == [0, 1, 4, 8] and rounds == 4


def test_ranks_whose_functions_differ_at_a_later_step_are_told_before_the_first_round():
    def worker():
        later = 100 + find().world.rank
        return trained("adamw", 1, local_steps=lambda step: 1 if step < later else 5)

    with pytest.raises(ValueError, match=r"differ in the local steps.*step 100: 1.*step 100: 5"):
        dgc.lockstep.run(worker, 2)


def test_a_number_of_steps_that_is_none_is_told():
    def worker():
        with pytest.raises(ValueError, match=r"local_steps must be .*got 0 \(of .* for step 0"):
            trained("adamw", 1, local_steps=lambda step: 0)

    dgc.lockstep.run(worker, 1 + 1)


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_gradient_that_is_not_finite(nonfinite):
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model, nonfinite=nonfinite)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            if rank == 1 and step == 0:
                next(model.parameters()).grad[0, 0] = torch.nan
            if nonfinite == "error" and step == 2:
                with pytest.raises(FloatingPointError, match="rank 1"):
                    optimizer.step()
            else:
                optimizer.step()
        return flat(model), optimizer.report().skipped

    (first, skipped), (second, other) = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and first.isfinite().all()
    if nonfinite == "skip":
        assert (skipped, other) == (0, 1)


def test_drifts_that_are_not_finite_take_the_rank_back_to_the_start_of_the_round():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model, nonfinite="skip", sparsity=0.0)
        for step in range(6):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            if rank == 1 and step == 4:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.inf)
            if rank == 1 and step == 2:
                optimizer.step()
                before = copy.deepcopy(optimizer.state_dict()["state"])
                continue
            optimizer.step()
        if rank == 1:
            after = optimizer.state_dict()["state"]
            assert all(torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in before)
        return flat(model), optimizer.report().skipped

    (first, _), (second, skipped) = dgc.lockstep.run(worker, 2)
    assert torch.equal(first, second) and first.isfinite().all() and skipped == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("momentum_correction", False), ("factor_masking", False), ("clip_norm", 1.0),
     ("local_steps", 0), ("local_steps", True), ("local_steps", 2.0)],
)  # fmt: skip
def test_what_has_no_meaning_with_local_steps_is_refused(field, value):
    with pytest.raises(ValueError, match=f"Config: {field} must be .*got {value!r}"):
        dgc.Config(**{"local_steps": 4, field: value})


def test_bytes_are_those_of_a_step_over_a_round():
    reports = dgc.lockstep.run(
        lambda: trained("adamw", 6, torch.float32, sparsity=0.0, local_steps=3), 2
    )
    report = reports[0][2]
    assert report.steps == 2 and report.total_dense_bytes == 6 * report.dense_bytes / 3
    assert report.as_dict()["compression"] == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize(("bits", "returned"), [(1, 2), (2, 4), (4, 8), (8, 8)])
def test_owners_return_sums_in_twice_the_bits(bits, returned):
    """Their rounding is not averaged over ranks. A rank sends (N - 1) / N of all entries twice."""

    def worker():
        model = nn.Linear(256, 256, bias=False)
        optimizer = made("adamw", model, sparsity=0.0, value_bits=bits, local_steps=1)
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        return optimizer.report().bytes_sent

    sent = dgc.lockstep.run(worker, 4)[0]
    assert sent == pytest.approx(0.75 * 256 * 256 * (bits + returned) / 8, rel=0.06)  # headers


def in_processes():
    """Two trainings over a real transport, and what is the same with DistributedDataParallel."""
    exact = trained("adamw", 9, torch.float32, sparsity=0.75, value_bits=2)[0]
    few = trained("adamw", 9, torch.float32, sparsity=0.0, value_bits=2)[0]
    return exact, few, in_ddp() if torch.distributed.is_initialized() else few


def in_ddp(**config):
    rank, model = find().world.rank, network(torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer, seen = KINDS["adamw"](wrapped.parameters()), []
    config = {"sparsity": 0.0, "local_steps": 3, "min_numel": 16, "value_bits": 2, **config}
    dgc.register_comm_hook(wrapped, optimizer, dgc.Config(**config))
    for step in range(9):
        optimizer.zero_grad()
        loss(wrapped, step, rank).backward()
        optimizer.step()
        seen.append(flat(model))
    return seen


def two_optimizers(registered):
    """A model whose parameters two optimizers step; the second may be forgotten."""
    rank, model = find().world.rank, network(torch.float32)
    wrapped, config = nn.parallel.DistributedDataParallel(model), dgc.Config(0.0, local_steps=3)
    optimizers = [KINDS[kind](model[i].parameters()) for kind, i in (("adamw", 0), ("rmsprop", 2))]
    for optimizer in optimizers[:registered]:
        dgc.register_comm_hook(wrapped, optimizer, config)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(wrapped, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    return flat(model)


def both():
    return two_optimizers(2)


def one():
    with pytest.raises(ValueError, match=r"got none for 2\.weight, 2\.bias \(register"):
        two_optimizers(1)


def scaled_in_ddp():
    """The forward pass exchanges buffers before zero_grad(), when one rank has left its last step out."""
    rank = find().world.rank
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = KINDS["adamw"](wrapped.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    dgc.register_comm_hook(wrapped, optimizer, dgc.Config(0.0, local_steps=3))
    for step in range(6):
        value = loss(wrapped, step, rank)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        if rank == 1 and step == 2:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    return flat(model)


def test_each_parameter_of_a_ddp_model_is_in_a_round():
    results = ran("torch", 2, [both, one, scaled_in_ddp])
    for case in (both, scaled_in_ddp):
        first, second = results[case]
        assert torch.equal(first, second)


@pytest.mark.parametrize(("launcher", "size"), [("horovod", 2), ("torch", 4)])
def test_real_transports_and_ddp_give_the_same_to_the_bit(launcher, size):
    results = ran(launcher, size, [in_processes])[in_processes]
    for seen in zip(*results, strict=True):
        for step in (2, 5, 8):
            assert all(torch.equal(x[step], seen[0][step]) for x in seen)
    expected = dgc.lockstep.run(in_processes, size)
    for rank, (exact, few, ddp) in enumerate(results):
        assert all(map(torch.equal, few, ddp))
        assert all(map(torch.equal, exact, expected[rank][0]))
        assert all(map(torch.equal, few, expected[rank][1]))


@pytest.mark.parametrize("world", [(2, 1), (4, 2)])
def test_a_copy_goes_on_within_the_round_to_the_bit(world):
    def worker(copies):
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model, hierarchical=world[1] > 1)
        optimizer.set_backward_passes_per_step(2)
        for step in range(8):
            if copies and step == 4:
                model, optimizer = copy.deepcopy((model, optimizer))
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            loss(model, step + 8, rank).backward()
            optimizer.step()
        return flat(model)

    runs = [dgc.lockstep.run(lambda c=c: worker(c), *world) for c in (False, True)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_one_process_takes_plain_steps():
    def worker():
        model, plain = network(), network()
        optimizer, expected = made("adamw", model), KINDS["adamw"](plain.parameters())
        for step in range(5):
            for one, taken in ((model, optimizer), (plain, expected)):
                taken.zero_grad()
                loss(one, step, 0).backward()
                taken.step()
        assert torch.equal(flat(model), flat(plain))

    dgc.lockstep.run(worker, 1)


@pytest.mark.parametrize("world", [(2, 1), (4, 2)])
def test_a_param_group_is_added_between_rounds(world):
    def worker():
        rank, model, more = find().world.rank, network(), nn.Linear(6, 6).to(F64)
        with torch.no_grad():
            more.weight.fill_(0.1)
            more.bias.zero_()
        optimizer = made("adamw", model, hierarchical=world[1] > 1)
        for step in range(4):
            optimizer.zero_grad()
            more(model(batch(step, rank))).square().mean().backward()
            optimizer.step()
            if step == 0:
                with pytest.raises(RuntimeError, match="after a round, got a call 1 steps"):
                    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
                optimizer.flush()
                optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
        return torch.cat([flat(model), flat(more)])

    first, *others = dgc.lockstep.run(worker, *world)
    assert all(torch.equal(first, other) for other in others)
    assert not (first[-36:] == 0.1).any()


def on_machines(size, node_size, passes):
    """Parameters after each step, of ranks that are grouped as machines, or of ranks alone that have a
    machine's batches.
    """

    def worker():
        rank, model = find().world.rank, network()
        optimizer = dgc.DistributedOptimizer(
            KINDS["adamw"](model.parameters()),
            model.named_parameters(),
            dgc.Config(0.9, local_steps=3, value_bits=32, hierarchical=node_size > 1),
            backward_passes_per_step=passes,
        )
        seen = []
        for step in range(7):
            optimizer.zero_grad()
            for k in range(passes):
                machine, mine = rank // node_size, [rank % 2] if node_size > 1 else [0, 1]
                losses = [loss(model, passes * step + k, 2 * machine + r) for r in mine]
                (sum(losses) / len(losses)).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
            seen.append(flat(model))
        optimizer.flush()
        return [*seen, flat(model)]

    return dgc.lockstep.run(worker, size, node_size)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_machine_takes_steps_as_one_rank_with_all_of_its_batches(passes):
    machines, alone = on_machines(4, 2, passes), on_machines(2, 1, passes)
    for rank, seen in enumerate(machines):
        for ours, theirs in zip(seen, alone[rank // 2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert all(map(torch.equal, machines[0], machines[1]))
    assert all(map(torch.equal, machines[2], machines[3]))
    assert not torch.equal(machines[0][3], machines[2][3])  # machines differ between rounds
    assert torch.equal(machines[0][-1], machines[2][-1])


def on_machines_of_two():
    """A training over a real transport, and the same with DistributedDataParallel."""
    few = {"sparsity": 0.0, "value_bits": 2, "hierarchical": True}
    alone = trained("adamw", 9, torch.float32, **few)[0]
    return alone, in_ddp(hierarchical=True) if torch.distributed.is_initialized() else alone


@pytest.mark.parametrize("launcher", [pytest.param("horovod", marks=pytest.mark.long), "torch"])
def test_real_machines_take_the_same_steps_to_the_bit(launcher):
    results = ran(launcher, 4, [on_machines_of_two], node_size=2)[on_machines_of_two]
    expected = dgc.lockstep.run(on_machines_of_two, 4, 2)
    for (alone, ddp), (theirs, _) in zip(results, expected, strict=True):
        assert all(map(torch.equal, alone, theirs)) and all(map(torch.equal, ddp, theirs))


def scaled(synchronizes, given):
    """Whether each step was left out, and the parameters in the end, of two machines of two. Rank 0's
    gradient overflows in steps 1 and 4.
    """

    def worker():
        rank, model, counts = find().world.rank, network(torch.float32), []
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        optimizer = dgc.DistributedOptimizer(
            KINDS["adamw"](model.parameters()),
            model.named_parameters(),
            dgc.Config(0.0, local_steps=3, value_bits=2, hierarchical=True),
            grad_scaler=scaler if given else None,
        )
        for step in range(6):
            optimizer.zero_grad()
            value = loss(model, step, rank)
            if rank == 0 and step in (1, 4):
                value = value * torch.inf
            scaler.scale(value).backward()
            if synchronizes:
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = flat(model)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            counts.append(torch.equal(before, flat(model)))
            scaler.update()
        optimizer.zero_grad()
        optimizer.flush()
        return counts, flat(model), scaler.get_scale()

    return dgc.lockstep.run(worker, 4, 2)


@pytest.mark.parametrize(("synchronizes", "given"), [(True, False), (False, True), (True, True)])
def test_a_scaler_leaves_a_step_out_on_the_whole_machine(synchronizes, given):
    results = scaled(synchronizes, given)
    for rank, (left_out, last, scale) in enumerate(results):
        assert left_out == [rank < 2 and step in (1, 4) for step in range(6)]
        assert torch.equal(last, results[0][1]) and last.isfinite().all()
        assert scale == (2.0 if rank < 2 else 8.0)


def test_a_scaler_that_the_machine_does_not_know_is_refused():
    """The machine's exchange, of scaled gradients, would overwrite what the scaler has unscaled."""
    with pytest.raises(RuntimeError, match="grad_scaler must be the GradScaler whose step"):
        unknown_scaler()


def unknown_scaler():
    def worker():
        rank, model = find().world.rank, network(torch.float32)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = made("adamw", model, hierarchical=True)
        scaler.scale(loss(model, 0, rank)).backward()
        scaler.step(optimizer)

    dgc.lockstep.run(worker, 4, 2)


def test_a_machine_whose_gradient_is_not_finite_ends_the_round_of_all():
    def worker():
        rank, model = find().world.rank, network()
        optimizer = made("adamw", model, hierarchical=True)
        for step in range(3):
            optimizer.zero_grad()
            (loss(model, step, rank) * (torch.nan if rank == step == 1 else 1)).backward()
            if step < 2:
                optimizer.step()
        with pytest.raises(FloatingPointError):
            optimizer.step()
        return True

    assert dgc.lockstep.run(worker, 4, 2) == [True] * 4


@pytest.mark.parametrize(
    ("world", "kind", "error"),
    [((4, 4), "adamw", "all 4 ranks are on one machine"), ((4, 2), "lbfgs", "got LBFGS")],
)
def test_machines_that_cannot_take_steps_are_refused(world, kind, error):
    def worker():
        model = network()
        optimizers = {**KINDS, "lbfgs": lambda p: torch.optim.LBFGS(p)}
        dgc.DistributedOptimizer(
            optimizers[kind](model.parameters()),
            model.named_parameters(),
            dgc.Config(0.0, local_steps=2, hierarchical=True),
        )

    with pytest.raises((ValueError, TypeError), match=error):
        dgc.lockstep.run(worker, *world)
