"""Second derivatives: right where PyTorch differentiates array calls, else an error of ours; never 0."""

from __future__ import annotations

import functools

import pytest

from tests.bridges.autograd.differentiable import entries, operators, real

torch = pytest.importorskip("torch")
TINY = {"T": 2, "B": (), "H": 1, "K": 2, "V": 2}
ENTRIES = entries()
OPERATORS = operators()
PIECES = "short_conv", "gated_norm", "l2_norm"  # vmap follows their torch operations
FUNCTIONAL = torch.autograd.functional
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)


def of_one(entry):
    """(the loss as a function of one tensor, that tensor)."""
    n = min(1, len(entry.tensors) - 1)

    def loss(x):
        return entry.loss([*entry.tensors[:n], x, *entry.tensors[n + 1 :]])

    return loss, entry.tensors[n]


def gradient_again(entry):
    given = entry.given()
    grads = torch.autograd.grad(entry.loss(given), given, create_graph=True)
    torch.autograd.grad(sum(real(d).sum() for d in grads), given, allow_unused=True)


def backward_again(entry):
    given = entry.given()
    sum(real(d).sum() for d in torch.autograd.grad(entry.loss(given), given, create_graph=True)).backward()


def by_cotangent(entry):
    given = entry.given()
    results = entry.fn(*given)
    y = results[0] if isinstance(results, tuple) else results
    dy = torch.ones_like(y).requires_grad_()
    grads = torch.autograd.grad(y, given, dy, create_graph=True, allow_unused=True)
    torch.autograd.grad(sum(real(d).sum() for d in grads if d is not None), dy, allow_unused=True)


def hessian(entry):
    loss, x = of_one(entry)
    FUNCTIONAL.hessian(loss, x)


def product(entry):
    loss, x = of_one(entry)
    FUNCTIONAL.vhp(loss, x, torch.ones_like(x))


@pytest.mark.parametrize("ask", [gradient_again, backward_again, by_cotangent, hessian, product])
@pytest.mark.parametrize("entry", ENTRIES + OPERATORS, ids=str)
def test_autograd_raises(entry, ask):
    if not entry.name:
        ask(entry)
        return
    says = f"^{entry.name}: a gradient is differentiated again, expected first derivatives only: second ones are not av"
    with pytest.raises(RuntimeError, match=says):
        ask(entry)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_gradient_that_is_not_differentiated_again_may_have_a_graph(entry):
    given = entry.given()
    expected = torch.autograd.grad(entry.loss(given), given, retain_graph=True)
    found = torch.autograd.grad(entry.loss(given), given, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, by torch.func.hessian itself
@pytest.mark.parametrize("entry", entries(**TINY), ids=str)
def test_second_derivatives_of_transforms_are_right(entry):
    """torch.func and forward-mode differentiation follow the array calls."""
    loss, x = of_one(entry)
    direction, eps = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape), 1e-5

    def gradient(y):
        y = y.detach().requires_grad_()
        return torch.autograd.grad(loss(y), y)[0]

    expected = (gradient(x + eps * direction) - gradient(x - eps * direction)) / (2 * eps)
    found = torch.func.hessian(loss)(x).reshape(x.numel(), -1) @ direction.flatten()
    close(found.reshape(x.shape), expected)
    again = torch.func.grad(lambda y: (torch.func.grad(loss)(y) * direction).sum())(x)
    close(again, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, by torch.func.hessian itself
@pytest.mark.parametrize("entry", [one for one in ENTRIES if one.name not in ("", *PIECES)], ids=str)
def test_gradients_of_single_examples_are_an_error_that_says_what_to_do(entry):
    """vmap of a function, of its gradient and of its second derivatives."""
    loss, x = of_one(entry)
    for transformed in (loss, torch.func.grad(loss), torch.func.hessian(loss)):
        with pytest.raises(TypeError, match=f"{entry.name}: .* is batched by vmap, expected a batch axis of its own"):
            torch.func.vmap(transformed)(torch.stack([x, x]))
