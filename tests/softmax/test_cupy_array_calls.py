"""Array calls on arrays that look like CuPy's, whose strengths, states and decays are prepared for kernels too."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host

launched, public = host.launched, host.public
BF16 = np.dtype(ml_dtypes.bfloat16)
FUNCTIONS = [la.householder_positions, la.path_attention, la.deltaformer, la.stick_breaking_attention]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_outputs_and_gradients(public, fn, with_state):
    """Strengths in 16 bits; the state, or the shape alone of one that is not returned."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(2,), T=9, H=2, K=8, V=8, optional=False)
    x = {n: y.astype(BF16) for n, y in x.items()}
    options = {"backend": "chunks", "return_state": with_state}
    found, pull = la.vjp(fn, **{n: stub(y) for n, y in x.items()}, **options)
    expected, right = la.vjp(fn, **{n: y.astype(np.float64) for n, y in x.items()}, **options)
    out, exact = (found[0], expected[0]) if with_state else (found, expected)
    dout = np.cos(np.arange(exact.size)).reshape(exact.shape).astype(BF16)
    found, expected = pull(stub(dout)), right(dout.astype(np.float64))
    for ours, theirs in ((out, exact), *((getattr(found, n), getattr(expected, n)) for n in x)):
        assert ours.dtype == BF16
        wide = np.asarray(ours).astype(np.float64)
        assert np.abs(wide - theirs).max() <= 2.0**-8 * np.abs(theirs).max()
