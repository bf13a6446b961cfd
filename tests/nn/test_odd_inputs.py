"""Inputs that calls drawn at random have found: byte orders, arrays without axes, without channels."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from tests.nn.table import SMALL, B, T, normal

every = pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.name} {c.label}".strip())


def parts(result):
    return result if isinstance(result, tuple) else (result,)


@every
def test_bytes_of_another_order(case):
    """The call, explain and check; results are in this machine's order."""
    swapped = {n: x.astype(x.dtype.newbyteorder()) for n, x in case.arrays.items()}
    found, pullback = case.vjp(swapped)
    wanted, expected = case.vjp()
    d = [normal(*y.shape) for y in parts(wanted)]
    for a, b in zip((*parts(found), *pullback(*d)), (*parts(wanted), *expected(*d)), strict=True):
        if b is not None:
            np.testing.assert_array_equal(a, b)
            assert a.dtype.isnative
    options = {**swapped, **case.whole, **case.options}
    plain = {**case.arrays, **case.whole, **case.options}
    plans.clear()  # explain says how other tests' calls were recorded
    assert la.explain(case.fn, **options) == la.explain(case.fn, **plain)
    assert la.check(case.fn, **options) == la.check(case.fn, **plain)


@pytest.mark.parametrize("case", [case for case in SMALL if "cu_seqlens" not in case.options], ids=str)
def test_gradients_of_one_row_share_no_memory(case):
    """Sums over one row are copies; the pullback is replayed too."""
    each = {n: x[:1, :1].copy() if x.shape[:2] == (B, T) else x for n, x in (case.arrays | dict(case.whole)).items()}
    each |= {n: x[:1].copy() for n, x in each.items() if n == "state"}
    for how in ({}, {"backend": "reference"}):
        for _ in range(3):
            result, pullback = la.vjp(case.fn, **each, **case.options, **how)
            d = [np.ones_like(y) for y in parts(result)]
            grads = [y for y in pullback(*d) if y is not None]
            for n, x in enumerate(grads):
                assert not any(np.shares_memory(x, y) for y in (*grads[:n], *d, *each.values()))


@pytest.mark.parametrize("name", ["short_conv", "token_shift"])
def test_ragged_rows_without_channels(name):
    arrays = {"x": np.zeros((1, 4, 0)), "state": np.zeros((5, 2, 0))} | (
        {"weight": np.zeros((0, 2))} if name == "short_conv" else {})  # fmt: skip
    (out, end), pullback = la.vjp(getattr(la.nn, name), **arrays, cu_seqlens=[0, 0, 2, 4, 4, 4], return_state=True)
    grads = pullback(out, end)
    assert (out.shape, end.shape, grads.x.shape, grads.state.shape) == ((1, 4, 0), (5, 2, 0), (1, 4, 0), (5, 2, 0))


def test_parts_of_one_query_are_merged():
    """lse has no axes."""
    out, lse = normal(5), normal(2)
    found, pullback = la.vjp(la.merge, out, np.asarray(lse[0]), -out, np.asarray(lse[1]))
    assert (found.out.shape, found.lse.shape) == ((5,), ())
    assert np.isclose(found.lse, np.logaddexp(*lse), rtol=1e-14)
    grads = pullback(out, np.asarray(1.0))
    assert (grads.lse1.shape, grads.out2.shape) == ((), (5,))


@every
def test_numbers_without_axes_and_one_row(case):
    """Elementwise pieces take arrays without axes."""
    if {*case.fn.piece.axes.values()} != {"..."}:
        pytest.skip("its arrays have axes")
    one = {n: np.asarray(x[0, 0, 0]) for n, x in case.arrays.items()}
    out, pullback = la.vjp(case.fn, **one, **case.options)
    assert out.shape == ()
    assert all(d.shape == () for d in pullback(np.asarray(1.0)))
    assert out == case()[0, 0, 0] or case.name == "dropout"


@pytest.mark.parametrize(("lead", "K", "M"), [((2, 3), 4, 0), ((2, 70), 4, 0), ((70,), 0, 3), ((0,), 4, 3), ((), 5, 0)])
def test_a_dense_layer_of_empty_arrays(lead, K, M):
    x, weight, bias = np.ones((*lead, K), np.float32), np.ones((K, M), np.float32), np.ones(M, np.float32)
    for layer in ({}, {"bias": bias}):
        y, pullback = la.vjp(la.nn.linear, x, weight, **layer)
        np.testing.assert_array_equal(y, np.full((*lead, M), K + len(layer)))
        assert la.nn.linear(x, weight, **layer).shape == y.shape
        grads = pullback(np.ones_like(y))
        np.testing.assert_array_equal(grads.x, np.full(x.shape, M))
        np.testing.assert_array_equal(grads.weight, np.full(weight.shape, np.prod(lead, dtype=int)))
