import pytest
import torch

from dgc.compression.residual import Gradient, Residual, accumulate, residual_dtype


@pytest.mark.parametrize("nesterov", [False, True])
def test_accumulate_is_sgds_momentum(nesterov):
    """The sum of what v gains is the sum of torch.optim.SGD's updates."""
    p = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=1.0, momentum=0.9, nesterov=nesterov)
    u, v = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for step in range(20):
        p.grad = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        accumulate(u, v, p.grad, 0.9, nesterov)
        sgd.step()
    assert torch.allclose(v, -p.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_residuals_are_kept_in_float32_or_wider(dtype, expected):
    assert residual_dtype(dtype) == expected
    assert Residual("b", {"a": torch.zeros(2, 2, dtype=dtype)}).v.dtype == expected


def test_entries_are_counted_where_they_were():
    """In the same memory: on a GPU another stream counts than the one whose memory it is."""
    b = Residual("b", {"a": torch.zeros(4, 5)})
    kept = b.total_entries
    for entries in (3, 4):
        b.count(torch.tensor(entries))
    assert kept is b.total_entries and int(kept) == 7 and int(b.entries_sent) == 4


def test_views_are_the_flat_tensors():
    b = Residual(
        "b", {"large": torch.empty(70_000), "small": torch.empty(2, 3), "empty": torch.empty(0, 4)}
    )
    b.views(b.v)["small"][1, 2] = 7.0
    b.views(b.v)["large"][-1] = 8.0
    assert b.v[-1] == 7.0 and b.v[69_999] == 8.0 and b.numel == 70_006


def test_what_is_kept_lies_as_the_parameter_does():
    """So that channels last costs no copy, neither of the gradient nor of the update."""
    image = torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    turned, gaps = torch.randn(7, 8).t(), torch.randn(6, 8)[:, ::2]
    b = Residual("b", {"image": image, "turned": turned, "gaps": gaps})
    b.accumulate(
        {name: Gradient(g) for name, g in (("image", image), ("turned", turned), ("gaps", gaps))}
    )
    views = b.views(b.v)
    assert all(map(torch.equal, views.values(), (image, turned, gaps)))
    assert views["image"].stride() == image.stride() and views["turned"].stride() == turned.stride()
    assert b.v[:360].tolist() == torch.as_strided(image, (360,), (1,)).tolist()
    assert [b.in_order(p, g).is_contiguous() for p, g in enumerate((image, turned, gaps))] == [
        True,
        True,
        False,
    ]


def test_scaling_and_missing_gradients():
    b = Residual("b", {"a": torch.empty(2), "c": torch.empty(2)})
    b.accumulate({"a": Gradient(torch.tensor([3.0, 4.0]), 0.5)}, scale=torch.tensor(0.5))
    assert b.v.tolist() == [1.5, 2.0, 0, 0] and b.gradient_square == 6.25
    b.accumulate({"c": Gradient(torch.tensor([1.0, 1.0]), 0.5)}, scale={"c": torch.tensor(2.0)})
    assert b.u.tolist() == [1.5, 2.0, 2, 2]  # the one without a gradient was left alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_entries_that_are_not_finite_count_as_zero(bad):
    b = Residual("b", {"a": torch.empty(2), "c": torch.empty(2)})
    gradients = {
        "a": Gradient(torch.tensor([3.0, bad]), 0.5),
        "c": Gradient(torch.tensor([1.0, 2.0]), 0.5),
    }
    assert b.accumulate(gradients) == ["a"]
    assert b.v.tolist() == b.u.tolist() == [3, 0, 1, 2] and b.gradient_square == 14
