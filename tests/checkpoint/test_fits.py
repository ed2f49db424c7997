"""What cannot be saved, or does not fit, is refused whole."""

import pytest
import torch
from laws import current_rank, flat, loss, model
from shelves import DOUBLE, in_lockstep, load, made, saved, trained
from torch import nn

import dgc


class Custom:
    """What could only be loaded by running code."""


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"a": [Custom()]}, r"extras must be plain data, .* got test_fits\.Custom"),
        ({"a": torch.tensor([1.0]).numpy()}, r"extras must be plain data, .* got numpy"),
        ({"a": lambda: 0}, r"extras must be plain data, .* got .*lambda"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, extras, message):
    with pytest.raises(TypeError, match=message):
        in_lockstep(
            lambda: dgc.save_checkpoint(tmp_path, *made(), extras if current_rank() else {}), 2
        )
    assert not list(tmp_path.iterdir())


class Marked(torch.Tensor):
    """Of a class that a file cannot make without running code."""


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            lambda: torch.ones(2).as_subclass(Marked),
            r"must be plain data, .* got test_fits\.Marked",
        ),
        (
            lambda: torch.eye(5).to_sparse_csr(),
            r"must be plain data, .* got a tensor of layout torch\.sparse_csr at \['odd'\]",
        ),
        (
            lambda: torch.ones(2, device="meta"),
            r"must be plain data, .* got a tensor on meta at \['odd'\]",
        ),
    ],
)
@pytest.mark.parametrize("where", ["extras", "model"])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_tensor_that_would_not_be_loaded_is_not_saved(tmp_path, where, odd, message):
    """The checkpoint before stays, and loads."""

    def worker():
        network, optimizer = made()
        dgc.save_checkpoint(tmp_path, network, optimizer, {"epoch": 1})
        before = sorted(file.name for file in tmp_path.iterdir())
        if where == "model":
            network.register_buffer("odd", odd())
        with pytest.raises(TypeError, match=f"{where} {message}"):
            dgc.save_checkpoint(
                tmp_path, network, optimizer, {"odd": odd()} if where == "extras" else {}
            )
        assert sorted(file.name for file in tmp_path.iterdir()) == before
        return dgc.load_checkpoint(tmp_path, *made())

    assert in_lockstep(worker, 2) == [{"epoch": 1}] * 2


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*TypedStorage:UserWarning")
def test_tensors_of_every_kind_that_is_loaded_are_saved(tmp_path):
    extras = {
        "COO": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "none": torch.zeros(0, 3),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "half": torch.ones(2).half(),
    }
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made(), extras), 2)
    for loaded in load(tmp_path):
        assert loaded.keys() == extras.keys()
        assert all(
            torch.equal(
                x.to_dense() if x.is_sparse else x,
                extras[k].to_dense() if x.is_sparse else extras[k],
            )
            for k, x in loaded.items()
        )


def test_nothing_is_saved_within_a_step(tmp_path):
    def worker():
        network, optimizer = made()
        loss(network, 0, 0, DOUBLE).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"must be called after step\(\)"):
                dgc.save_checkpoint(tmp_path, network, optimizer)
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        dgc.save_checkpoint(tmp_path, network, optimizer)

    in_lockstep(worker, 2)


def test_what_is_loaded_within_a_step_is_what_was_saved(tmp_path):
    """Nothing of the step that was not finished is added to it."""

    def worker():
        network, optimizer = made()
        trained(range(3), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        saved = optimizer.residual_state_dict()
        expected = trained(range(3, 6), network, optimizer)
        optimizer.zero_grad()
        loss(network, current_rank(), 6, DOUBLE).backward()
        dgc.load_checkpoint(tmp_path, network, optimizer)
        loaded = optimizer.residual_state_dict()
        assert all(
            torch.equal(loaded[letter][name], x)
            for letter in "uv"
            for name, x in saved[letter].items()
        )
        return torch.equal(trained(range(3, 6), network, optimizer), expected)

    assert in_lockstep(worker, 2) == [True, True]


def test_a_loss_scaler_that_skipped_the_last_step(tmp_path):
    """It never called the optimizer's ``step()``, and there is nothing to wait for."""

    def worker():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), dgc.Config(sparsity=0.9), grad_scaler=scaler
        )

        def steps(some, bad=None):
            for step in some:
                optimizer.zero_grad()
                scaler.scale(
                    loss(network, current_rank(), step) * (1e38 if step == bad else 1.0)
                ).backward()
                scaler.step(optimizer)
                scaler.update()
            return flat(network)

        steps(range(4), bad=3)
        assert scaler.get_scale() == 2.0**11
        dgc.save_checkpoint(tmp_path, network, optimizer, {"scaler": scaler.state_dict()})
        expected = steps(range(4, 8))
        scaler.load_state_dict(dgc.load_checkpoint(tmp_path, network, optimizer)["scaler"])
        return torch.equal(steps(range(4, 8)), expected)

    assert in_lockstep(worker, 2) == [True, True]


def test_ranks_that_differ_are_told(tmp_path):
    def worker():
        network, optimizer = made(network=model(seed=current_rank() // 2, dtype=DOUBLE))
        dgc.save_checkpoint(tmp_path, network, optimizer)

    with pytest.raises(ValueError, match=r"the optimizer's state .* got others on ranks \[2\]"):
        in_lockstep(worker, 3)


def test_a_residual_that_overflowed_is_told(tmp_path):
    def worker():
        network, optimizer = made()
        views = optimizer._dgc._residuals.views()
        views["v"]["6.weight"][0, 0] = float("inf") if current_rank() else 0.0
        dgc.save_checkpoint(tmp_path, network, optimizer)

    with pytest.raises(ValueError, match=r"v of 6\.weight must be finite.* \(on rank 1\)"):
        in_lockstep(worker, 2)


class Groups(torch.optim.SGD):
    """With another division of the parameters."""

    def __init__(self, parameters, **changed):
        parameters = list(parameters)
        super().__init__([{"params": parameters[:2]}, {"params": parameters[2:]}], **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"network": nn.Linear(40, 40).double()},
            r"common-\S+: model must have the same names, got none for \['bias', 'weight'\] and unknown \['0\.",
        ),
        (
            {"config": dgc.Config(sparsity=0.9, momentum_correction=False)},
            r"rank-0-\S+: u must have the same names, got none for \[\] and unknown",
        ),
        (
            {"kind": Groups},
            r"common-\S+: the optimizer's groups must have \[2, 8\] parameters, got \[10\]",
        ),
        (
            {"kind": torch.optim.AdamW},
            r"common-\S+: group 0 of the optimizer must have \['betas', 'eps'\], got a group without "
            r"them \(was an optimizer of another class saved",
        ),
        (
            {"config": dgc.Config(min_numel=5000)},
            r"rank-0-.*\.pt: u must have the same names, got none for \[\] and unknown \['3\.weight'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(shelf, changed, message):
    saved(2, dgc.Average, f"{shelf}/2-{dgc.Average}")
    with pytest.raises(ValueError, match=message):
        load(f"{shelf}/2-{dgc.Average}", **changed)


def test_parameters_in_another_order_are_refused_with_adamw_too(tmp_path):
    """Nothing is loaded then."""

    def built(order):
        torch.manual_seed(order)
        network = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48))
        optimizer = torch.optim.AdamW(list(network.parameters())[::order])
        return network, dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), dgc.Config(0.9)
        )

    def worker():
        network, optimizer = built(1)
        network(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        dgc.save_checkpoint(tmp_path, network, optimizer)
        network, optimizer = built(-1)
        before = flat(network).clone()
        with pytest.raises(ValueError, match=r"exp_avg of parameter 0 .* \(48,\), got \(32, 64\)"):
            dgc.load_checkpoint(tmp_path, network, optimizer)
        return torch.equal(flat(network), before)

    assert in_lockstep(worker, 2) == [True, True]


@pytest.mark.parametrize("call", [dgc.save_checkpoint, dgc.load_checkpoint])
def test_a_wrapper_of_the_optimizer_is_refused(tmp_path, call):
    """It would be taken for an optimizer without residuals."""

    def worker():
        network, optimizer = made()
        wrapper = type(
            "Wrapper", (), {"optimizer": optimizer, "param_groups": optimizer.param_groups}
        )()
        with pytest.raises(TypeError, match=r"a wrapper of it, Wrapper \(give its \.optimizer"):
            call(tmp_path, network, wrapper)

    in_lockstep(worker, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_the_model_lacks_are_told(tmp_path, size):
    def worker():
        network, other = nn.Linear(40, 40), nn.Linear(40, 3)
        optimizer = torch.optim.SGD([*network.parameters(), *other.parameters()], lr=0.1)
        optimizer = dgc.DistributedOptimizer(optimizer)
        both = nn.ModuleList([network, other])
        for p in both.parameters():
            nn.init.zeros_(p)
        message = r"got one that lacks those of shapes \[\(3, 40\), \(3,\)\] \(give one module that holds them all"
        with pytest.raises(ValueError, match=message):
            dgc.save_checkpoint(tmp_path, network, optimizer)
        assert current_rank() or not list(tmp_path.iterdir())
        dgc.save_checkpoint(tmp_path, both, optimizer)
        with pytest.raises(ValueError, match=message):
            dgc.load_checkpoint(tmp_path, network, optimizer)
        dgc.load_checkpoint(tmp_path, both, optimizer)

    in_lockstep(worker, size)


def test_a_rank_without_a_gradient_knows_after_loading_that_it_is_sparse(tmp_path):
    """Without momentum, whose buffer would tell; to the bit as without stopping."""

    def step(network, optimizer, has):
        optimizer.zero_grad()
        if has:
            network(torch.arange(10)).square().sum().backward()
        optimizer.step()

    def worker():
        torch.manual_seed(0)
        weight = torch.randn(100, 32, dtype=DOUBLE)
        network, optimizer = made(
            network=nn.Embedding(100, 32, sparse=True, _weight=weight.clone()),
            momentum=0.0,
            weight_decay=0.0,
        )
        step(network, optimizer, True)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        step(network, optimizer, current_rank() == 0)
        other, optimizer = made(
            network=nn.Embedding(100, 32, sparse=True, _weight=weight.clone()),
            momentum=0.0,
            weight_decay=0.0,
        )
        dgc.load_checkpoint(tmp_path, other, optimizer)
        step(other, optimizer, current_rank() == 0)
        return torch.equal(flat(network), flat(other))

    assert in_lockstep(worker, 2) == [True, True]


class Versioned(nn.Linear):
    """Takes its parameters from version 2 of it alone, or whoever fails first."""

    _version = 2
    fails = False

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version is {local_metadata.get('version')}; accepted: 2")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if self.fails:
            raise ValueError("refused by the module")


def test_modules_are_told_their_versions_and_what_one_refuses_is_loaded_on_no_rank(tmp_path):
    """In part neither: the first module has taken its parameters when the second refuses."""

    def worker():
        network = nn.Sequential(nn.Linear(40, 40), Versioned(40, 40))

        def step():
            optimizer.zero_grad()
            network(torch.full((1, 40), 1.0 + current_rank())).square().sum().backward()
            optimizer.step()

        def state():
            residuals = optimizer.residual_state_dict()
            return torch.cat(
                [
                    flat(network),
                    *(x.flatten() for letter in "uv" for x in residuals[letter].values()),
                ]
            )

        for p in network.parameters():
            nn.init.constant_(p, 0.01)
        _, optimizer = made(network=network, config=dgc.Config(sparsity=0.95))
        step()
        dgc.save_checkpoint(tmp_path, network, optimizer)
        saved = state()
        step()
        before = state()
        network[1].fails = current_rank() == 1
        with pytest.raises(ValueError, match=r"common-\S+: refused by the module \(on rank 1\)"):
            dgc.load_checkpoint(tmp_path, network, optimizer)
        assert torch.equal(state(), before) and optimizer.param_groups[0]["dgc_step"] == 2
        network[1].fails = False
        dgc.load_checkpoint(tmp_path, network, optimizer)
        assert torch.equal(state(), saved) and not torch.equal(saved, before)

    in_lockstep(worker, 2)


class Grown(nn.Linear):
    """With a buffer whose shape is known when it is loaded."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("seen", torch.empty(0))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_module_may_change_the_shape_of_its_buffer_and_no_other_does(tmp_path):
    def worker():
        torch.manual_seed(0)
        network = Grown(40, 40)
        network.seen = torch.arange(5.0) + current_rank()
        dgc.save_checkpoint(tmp_path, *made(network=network))
        network = Grown(40, 40)
        dgc.load_checkpoint(tmp_path, *made(network=network))
        assert torch.equal(network.seen, torch.arange(5.0) + current_rank())
        network = nn.Linear(40, 40)
        network.register_buffer("seen", torch.zeros(4))
        before = flat(network)
        with pytest.raises(ValueError, match=r"common-\S+: Error[^`]*size mismatch for seen"):
            dgc.load_checkpoint(tmp_path, *made(network=network))
        assert torch.equal(flat(network), before)

    in_lockstep(worker, 2)


@pytest.mark.parametrize(
    ("saved", "loaded", "hint"),
    [
        (
            "module",
            "wrapper",
            r"\(the checkpoint is of the module in the wrapper: give model\.module\)",
        ),
        (
            "wrapper",
            "module",
            r"\(the checkpoint is of a wrapper, whose names begin with module\.: give such",
        ),
    ],
)
def test_the_checkpoint_of_a_wrapper_says_which_model_to_give(saved, loaded, hint, tmp_path):
    """DDP's names begin with module."""

    def go(save):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        wrapper = torch.nn.Module()
        wrapper.module = net
        models = {"module": net, "wrapper": wrapper}
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1), net.named_parameters()
        )
        if save:
            dgc.save_checkpoint(tmp_path / "saved", models[saved], optimizer)
        else:
            with pytest.raises(ValueError, match=hint):
                dgc.load_checkpoint(tmp_path / "saved", models[loaded], optimizer)

    for save in (True, False):
        dgc.lockstep.run(lambda save=save: go(save), 2)
