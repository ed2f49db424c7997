"""Saving and loading in one process."""

import random

import pytest
import torch
from laws import Lars, difference, flat, model
from shelves import DOUBLE, in_lockstep, made, pending, trained

import dgc
from dgc.checkpoint import save


def test_one_process_goes_on_to_the_bit(tmp_path):
    """A plain optimizer, of any kind."""

    def worker():
        import numpy as np

        results = []
        for kind in (torch.optim.SGD, torch.optim.RMSprop):
            network, optimizer = made(kind=kind, config=dgc.Config(momentum_correction=False))
            trained(range(3), network, optimizer)
            dgc.save_checkpoint(tmp_path, network, optimizer)
            expected = (
                trained(range(3, 6), network, optimizer),
                torch.rand(3),
                random.random(),
                np.random.rand(),
            )
            network, optimizer = made(kind=kind, config=dgc.Config(momentum_correction=False))
            assert dgc.load_checkpoint(tmp_path, network, optimizer) == {}
            got = (
                trained(range(3, 6), network, optimizer),
                torch.rand(3),
                random.random(),
                np.random.rand(),
            )
            results += [
                torch.equal(got[0], expected[0]),
                torch.equal(got[1], expected[1]),
                got[2:] == expected[2:],
            ]
        return results

    assert in_lockstep(worker, 1) == [[True] * 6]


def test_rmsprop_keeps_its_residuals_on_other_numbers_of_ranks_and_says_where_it_cannot(tmp_path):
    config = dgc.Config(sparsity=0.95, momentum_correction=False)

    def first():
        network, optimizer = made(kind=torch.optim.RMSprop, config=config)
        trained(range(3), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    def second():
        network, optimizer = made(kind=torch.optim.RMSprop, config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    before, after = in_lockstep(first, 2), in_lockstep(second, 3)
    assert difference(pending(after, "v", True), pending(before, "v", True)) < 1e-14
    with pytest.raises(
        ValueError,
        match=r"pending gradients must have an optimizer that keeps residuals, got RMSprop, .*before load",
    ):
        in_lockstep(second, 1)


def test_adamw_goes_on_with_its_frozen_denominators(tmp_path):
    """On as many ranks to the bit; on others with all that is pending in u and in v."""
    config = dgc.Config(sparsity=lambda step: 0.0 if step < 3 else 0.95)

    def first():
        network, optimizer = made(kind=torch.optim.AdamW, config=config)
        trained(range(5), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict(), trained(range(5, 8), network, optimizer)

    def second():
        network, optimizer = made(kind=torch.optim.AdamW, config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        assert optimizer.param_groups[0]["dgc_compressed_from"] == 3
        return optimizer.residual_state_dict(), trained(range(5, 8), network, optimizer)

    before, after, others = in_lockstep(first, 2), in_lockstep(second, 2), in_lockstep(second, 3)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
    for letter in "uv":
        sums = [pending([state for state, _ in ranks], letter, True) for ranks in (others, before)]
        assert difference(*sums) < 1e-12
        assert all(x.any() for x in before[0][0][letter].values())
    with pytest.raises(ValueError, match=r"keeps residuals, got AdamW, "):
        in_lockstep(second, 1)


def test_a_new_checkpoint_takes_the_old_ones_place_and_leaves_other_files_alone(tmp_path):
    def worker():
        network, optimizer = made()
        for step in range(3):
            trained([step], network, optimizer)
            dgc.save_checkpoint(tmp_path / "new" / "folder", network, optimizer, {"step": step})
            (tmp_path / "new" / "folder" / "rank-9-0123456789abcdef.pt").touch()  # of a larger job
            (tmp_path / "new" / "folder" / "rank-9.part").touch()
            (tmp_path / "new" / "folder" / "common-notes.pt").touch()
        # The same once more.
        dgc.save_checkpoint(tmp_path / "new" / "folder", network, optimizer, {"step": step})
        return dgc.load_checkpoint(str(tmp_path / "new" / "folder"), network, optimizer)

    assert in_lockstep(worker, 2) == [{"step": 2}] * 2
    names = sorted(file.name.split("-")[0] for file in (tmp_path / "new" / "folder").iterdir())
    assert names == ["common", "common", "manifest.json", "rank", "rank"]
    common = torch.load(
        next((tmp_path / "new" / "folder").glob("common-?*[0-9a-f].pt")), weights_only=True
    )
    model(dtype=DOUBLE).load_state_dict(common["model"])  # as the module says


def test_a_rank_that_fails_when_the_new_one_is_published_leaves_its_file(tmp_path, monkeypatch):
    """As by Ctrl-C, after the last exchange that rank 0 waits for before it publishes."""

    def worker(number):
        network, optimizer = made()
        trained(range(number), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer, {"number": number})

    def collected(ranks, *others):
        collect(ranks, *others)
        if ranks.world.rank == 1:
            ranks.first(lambda: None)
            raise KeyboardInterrupt

    collect = save._collect
    in_lockstep(lambda: worker(1), 2)
    monkeypatch.setattr(save, "_collect", collected)
    with pytest.raises(KeyboardInterrupt):
        in_lockstep(lambda: worker(2), 2)
    assert in_lockstep(lambda: dgc.load_checkpoint(tmp_path, *made()), 2) == [{"number": 2}] * 2


@pytest.mark.parametrize("call", [dgc.save_checkpoint, dgc.load_checkpoint])
def test_a_path_that_is_none_on_one_rank_is_an_error_on_all(call, tmp_path):
    def worker():
        network, optimizer = made()
        if call is dgc.load_checkpoint:
            dgc.save_checkpoint(tmp_path, network, optimizer)
        with pytest.raises(TypeError, match=r"NoneType \(on rank 1\)"):
            call(None if dgc.lockstep.current().world.rank else tmp_path, network, optimizer)
        return True

    assert in_lockstep(worker, 2) == [True] * 2


class Signs(torch.optim.Optimizer):
    """Another one's, whose param groups have a learning rate alone."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])


@pytest.mark.parametrize(
    ("kind", "sparsity", "error"), [(Lars, 0.95, "got Lars, which keeps none"), (Signs, 0.0, None)]
)
def test_one_process_applies_what_is_pending_where_it_is_an_update(kind, sparsity, error, tmp_path):
    """Of an optimizer with another step it is a gradient; where nothing is pending, nothing is asked of it."""
    config = dgc.Config(sparsity=sparsity, momentum_correction=False)

    def first():
        network, optimizer = made(network=model(dtype=DOUBLE), kind=kind, config=config)
        trained(range(3), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return flat(network)

    def second():
        network, optimizer = made(network=model(dtype=DOUBLE), kind=kind, config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return flat(network)

    expected = in_lockstep(first, 2)[0]
    if error:
        with pytest.raises(ValueError, match=error):
            in_lockstep(second, 1)
    else:
        assert torch.equal(in_lockstep(second, 1)[0], expected)


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path):
    """A scheduler that computes with NumPy gives such learning rates."""

    def worker():
        import numpy as np

        network, optimizer = made()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: np.cos(np.pi * step / 90)
        )
        trained(range(2), network, optimizer)
        scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], np.generic)
        extras = {"scheduler": scheduler.state_dict(), "best": np.float32(0.5)}
        dgc.save_checkpoint(tmp_path, network, optimizer, extras)
        expected = float(optimizer.param_groups[0]["lr"])
        network, optimizer = made()
        extras = dgc.load_checkpoint(tmp_path, network, optimizer)
        assert (
            type(optimizer.param_groups[0]["lr"]) is float
            and optimizer.param_groups[0]["lr"] == expected
        )
        assert extras["best"] == 0.5 and extras["scheduler"]["_last_lr"] == [expected]

    in_lockstep(worker, 2)


@pytest.mark.parametrize("kinds", [(list, tuple), (tuple, list)])
def test_a_list_of_coefficients_is_as_good_as_a_tuple(kinds, tmp_path):
    """From YAML comes a list, of which some schedulers make a tuple."""

    def worker():
        for kind in kinds:
            network, optimizer = made(
                kind=torch.optim.AdamW, config=dgc.Config(0.0), betas=kind((0.9, 0.98))
            )
            if kind is kinds[0]:
                trained(range(2), network, optimizer)
                dgc.save_checkpoint(tmp_path, network, optimizer)
            else:
                dgc.load_checkpoint(tmp_path, network, optimizer)
                assert list(optimizer.param_groups[0]["betas"]) == [0.9, 0.98]

    in_lockstep(worker, 2)
