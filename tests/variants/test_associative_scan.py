"""la.associative_scan: any associative operation, affine maps with their adjoint."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error

LENGTHS = (0, 1, 2, 3, 7, 16, 33)


def drawn(blocks, kind="real", T=7, lead=(2,), n=3, seed=0):
    """(A, x, state)"""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if kind == "complex" else x

    return 0.7 * normal(T, *lead, n, *(n,) * blocks), normal(T, *lead, n), normal(*lead, n)


def loop(A, x, h):
    """Item by item: (P_t, h_t)."""
    blocks, Ps, hs = A.ndim > x.ndim, [], []
    P = np.broadcast_to(np.eye(x.shape[-1]), A.shape[1:]) if blocks else np.ones(A.shape[1:])
    for B, y in zip(A, x, strict=True):
        P = B @ P if blocks else B * P
        h = ((B @ h[..., None])[..., 0] if blocks else B * h) + y
        Ps.append(P)
        hs.append(h)
    return np.array(Ps).reshape(A.shape), np.array(hs).reshape(x.shape)


every_kind = pytest.mark.parametrize("kind", ["real", "complex"])
every_form = pytest.mark.parametrize("blocks", [False, True], ids=["numbers", "matrices"])


@pytest.mark.parametrize("T", LENGTHS)
@every_form
@every_kind
def test_affine_maps_are_the_loop_and_their_adjoint_is_central_differences(kind, blocks, T):
    A, x, h = drawn(blocks, kind, T)
    result, pullback = la.vjp(la.associative_scan, "affine", (A, x), state=h)
    for found, expected in zip(result, loop(A, x, h), strict=True):
        assert found.shape == expected.shape
        if T:
            assert relative_error(found, expected) <= 1e-12
    rng = np.random.default_rng(1)
    cotangents = [rng.standard_normal(y.shape) + (1j * rng.standard_normal(y.shape) if kind == "complex" else 0)
                  for y in result]  # fmt: skip
    direction = [rng.standard_normal(y.shape) + (1j * rng.standard_normal(y.shape) if kind == "complex" else 0)
                 for y in (A, x, h)]  # fmt: skip
    for kept in ((0, 1), (0,), (1,)):
        d = [c if n in kept else None for n, c in enumerate(cotangents)]
        grads = pullback(*d)
        moved = [loop(*(y + sign * 1e-6 * z for y, z in zip((A, x, h), direction, strict=True))) for sign in (1, -1)]
        slope = sum(((a - b) * c.conj()).sum().real / 2e-6 for n, (a, b, c) in enumerate(zip(*moved, cotangents,
                    strict=True)) if n in kept)  # fmt: skip
        exact = sum((g * z.conj()).sum().real for g, z in zip(grads, direction, strict=True))
        assert abs(slope - exact) <= 1e-7 * max(1.0, abs(slope))


@every_form
def test_axis_and_direction(blocks):
    A, x, h = drawn(blocks, T=9)
    P, y = la.associative_scan("affine", (A, x), state=h)
    moved = [np.moveaxis(z, 0, 1) for z in (A, x)]
    for found, expected in zip(la.associative_scan("affine", moved, state=h, axis=1), (P, y), strict=True):
        np.testing.assert_array_equal(np.moveaxis(found, 1, 0), expected)
    back = la.associative_scan("affine", (A[::-1], x[::-1]), state=h, reverse=True)
    for found, expected in zip(back, (P, y), strict=True):
        np.testing.assert_array_equal(found[::-1], expected)


@pytest.mark.parametrize("T", LENGTHS)
def test_an_operation_of_ones_own(T):
    """Running maxima with their places, and products of matrices that do not commute."""
    x = np.random.default_rng(0).standard_normal((T, 4))
    place = np.broadcast_to(np.arange(T)[:, None], x.shape)

    def later(first, second):
        more = second[0] > first[0]
        return np.where(more, second[0], first[0]), np.where(more, second[1], first[1])

    most, at = la.associative_scan(later, (x, place))
    np.testing.assert_array_equal(most, np.maximum.accumulate(x, axis=0))
    if T:
        np.testing.assert_array_equal(np.take_along_axis(x, at, axis=0), most)
    A = np.random.default_rng(1).standard_normal((T, 3, 3))
    (found,) = la.associative_scan(lambda first, second: (second[0] @ first[0],), (A,))
    expected = loop(A, np.zeros((T, 3)), np.zeros(3))[0]
    assert T == 0 or relative_error(found, expected) <= 1e-12


@every_form
def test_no_later_item_changes_an_earlier_result(blocks):
    A, x, _ = drawn(blocks, T=37)
    P, h = la.associative_scan("affine", (A, x))
    for t in (1, 2, 15, 16, 31, 36):
        B, y = A.copy(), x.copy()
        B[t:] *= 3
        y[t:] += 1
        for found, expected in zip(la.associative_scan("affine", (B, y)), (P, h), strict=True):
            np.testing.assert_array_equal(found[:t], expected[:t])


@every_form
def test_tensors_are_differentiated_by_pytorch(blocks):
    torch = pytest.importorskip("torch")
    A, x, h = drawn(blocks, T=9)
    tensors = [torch.from_numpy(y).requires_grad_() for y in (A, x, h)]
    P, y = la.associative_scan("affine", tensors[:2], state=tensors[2])
    (P.sum() + (y * y).sum()).backward()
    (_, z), pullback = la.vjp(la.associative_scan, "affine", (A, x), state=h)
    for tensor, d in zip(tensors, pullback(np.ones_like(A), 2 * z), strict=True):
        assert relative_error(tensor.grad, d) <= 1e-12


def test_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    A, x, _ = (y.astype(np.float32) for y in drawn(True, T=9))
    found = la.associative_scan("affine", (jnp.asarray(A), jnp.asarray(x)))
    for y, expected in zip(found, la.associative_scan("affine", (A, x)), strict=True):
        assert type(y).__module__.startswith("jax")
        assert relative_error(np.asarray(y), expected) <= 50 * 2.0**-23


x = np.ones((4, 2))
BAD = [
    (TypeError, "op is 'sum', expected a function of two tuples or 'affine'", {"op": "sum", "items": (x, x)}),
    (TypeError, "items is .*, expected a tuple of arrays", {"op": "affine", "items": x}),
    (ValueError, r"items\[1\] has 3 items along axis 0, expected 4", {"op": "affine", "items": (x, x[:3])}),
    (ValueError, r"items\[0\] has shape \(4, 2, 3\), .*", {"op": "affine", "items": (np.ones((4, 2, 3)), x)}),
    (ValueError, r"state has shape \(3,\), expected \(2,\)", {"op": "affine", "items": (x, x), "state": np.ones(3)}),
    (TypeError, "op returned .*, expected a tuple of 1 arrays", {"op": lambda a, b: None, "items": (x,)}),
    (ValueError, "op returned shape .* for item 0", {"op": lambda a, b: (a[0][:, :1],), "items": (x,)}),
    (ValueError, "state is given, expected None", {"op": lambda a, b: a, "items": (x,), "state": x[0]}),
    (TypeError, "axis is -1, expected a whole number from 0", {"op": "affine", "items": (x, x), "axis": -1}),
    (TypeError, "reverse is 1, expected True or False", {"op": "affine", "items": (x, x), "reverse": 1}),
]


@pytest.mark.parametrize(("kind", "message", "given"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_errors_name_function_and_argument(kind, message, given):
    given = dict(given)
    with pytest.raises(kind, match=f"associative_scan: {message}"):
        la.associative_scan(given.pop("op"), given.pop("items"), **given)


@every_form
def test_results_of_one_item_are_arrays_of_their_own(blocks):
    A, x, _ = drawn(blocks, T=1)
    for result in (la.associative_scan("affine", (A, x)), la.vjp(la.associative_scan, "affine", (A, x))[0],
                   la.associative_scan(lambda first, second: second, (A, x))):  # fmt: skip
        for y, given in zip(result, (A, x), strict=True):
            np.testing.assert_array_equal(y, given)
            assert not np.shares_memory(y, given)


@every_form
def test_a_complex_cotangent_of_a_real_result_is_an_error(blocks):
    A, x, _ = drawn(blocks)
    _, pullback = la.vjp(la.associative_scan, "affine", (A, x))
    with pytest.raises(TypeError, match="associative_scan: dh has dtype complex128, expected one of"):
        pullback(dh=x + 1j)
    with pytest.raises(TypeError, match="associative_scan: dP has dtype complex128, expected one of"):
        pullback(dP=A + 1j)


def test_vjp_of_ones_own_operation_is_an_error():
    with pytest.raises(TypeError, match="associative_scan: op is a function, expected 'affine' for vjp"):
        la.vjp(la.associative_scan, lambda a, b: a, (x,))
    _, pullback = la.vjp(la.associative_scan, "affine", (x, x))
    with pytest.raises(ValueError, match=r"associative_scan: dh has shape \(2,\), expected \(4, 2\)"):
        pullback(None, x[0])
