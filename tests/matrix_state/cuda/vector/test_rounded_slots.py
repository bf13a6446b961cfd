"""Memories of slots by kernels that round rows to bfloat16, against float64: twins of the kernels in NumPy, no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import core
from linattn_np.matrix_state.cuda import choose
from linattn_np.matrix_state.types import Inputs, Saved
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host

launched, public = host.launched, host.public
BF16 = np.dtype(ml_dtypes.bfloat16)
BOUND = 1.5e-2  # of the norm, as on a GPU: two memories in 16 bits, the first one's errors in an exponent


def wide(y):
    return None if y is None else np.asarray(y).astype(np.float64)


def error(found, expected):
    assert found.shape == expected.shape
    return np.linalg.norm(wide(found) - expected) / np.linalg.norm(expected)


def rounded(x):
    """Rows as the kernels multiply them."""
    return Inputs(*(wide(y if n not in ("q", "k", "v") or y is None else np.asarray(y).astype(BF16))
                    for n, y in x._asdict().items()))  # fmt: skip


@pytest.fixture
def twins(public, monkeypatch):
    """The families of both memories: what their kernels compute, and the dtypes of the rows that they were given."""
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    seen = []

    def forward(x, plan, state):
        assert (x.gv is None) == ("v" not in plan.computed)  # logits are float32
        seen.append({n: y.dtype for n, y in x._asdict().items() if n in ("q", "k", "v")})
        own = plan._replace(xp=np, dtype=np.float64, computed=(), returns_state=True)
        out, end, saved = core.forward("twin", rounded(x), own, wide(state), "chunks")
        kind = plan.dtype if x.gv is not None and "v" in plan.computed else x.v.dtype
        return stub(out.astype(kind)), stub(end.astype(np.float32)), Saved(x, plan, state, saved)

    def backward(saved, dout, dstate):
        assert dout.dtype == BF16
        d, dbegin = core.backward(saved.starts, wide(dout), wide(dstate))
        kinds = {n: BF16 if n in ("q", "k", "v") else np.float32 for n in Inputs._fields}
        d = Inputs(*(None if y is None else stub(y.astype(kinds[n])) for n, y in d._asdict().items()))
        return d, stub(dbegin.astype(np.float32))

    for family in (choose.vector, choose.vector_value):
        monkeypatch.setattr(family, "forward", forward)
        monkeypatch.setattr(family, "backward", backward)
    return seen


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("fn", [la.gsa, la.abc], ids=lambda fn: fn.__name__)
def test_weights_are_rounded_once_and_logits_are_not(twins, fn, with_state):
    rng, T, K, M = np.random.default_rng(0), 70, 32, 16
    n = lambda *shape: rng.standard_normal((2, T, 2, *shape))  # noqa: E731
    x = {"q": 3 * n(K), "k": n(K), "v": n(K), "s": n(M) if fn is la.abc else rng.uniform(0, 0.2, (2, T, 2, M))}
    x = {name: y.astype(BF16) for name, y in x.items()}
    dout, options = n(K).astype(BF16), {"return_state": True} if with_state else {}
    result, pull = la.vjp(fn, **{name: stub(y) for name, y in x.items()}, **options)
    expected, right = la.vjp(fn, **{name: wide(y) for name, y in x.items()}, **options)
    pairs = zip([*result[:1], *result[1]], [*expected[:1], *expected[1]], strict=True) if with_state else [
        (result, expected)]  # fmt: skip
    assert all(error(found, want) < BOUND for found, want in pairs)
    found, want = pull(stub(dout)), right(wide(dout))
    for name in x:
        assert error(getattr(found, name), getattr(want, name)) < 2 * BOUND, name
    assert [set(kinds.values()) for kinds in twins] == [{BF16}, {BF16}]
