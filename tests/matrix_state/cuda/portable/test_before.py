"""Own erase vectors that read the decayed state, as ones that read the state before: gradients too, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import core
from linattn_np.matrix_state.cuda.portable.delta import _before, _before_vjp
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.runtime.shapes import Sequence
from linattn_np.testing import relative_error


@pytest.mark.parametrize("decay", ["tokens", "heads", "none"])
def test_erase_vectors_of_the_state_before(decay):
    rng, T, H, K, V = np.random.default_rng(0), 21, 3, 5, 4
    q, k, r = rng.standard_normal((3, 2, T, H, K)) / 2
    beta, v = rng.uniform(0, 1, (2, T, H, 1)), rng.standard_normal((2, T, H, V))
    g = {"tokens": -rng.uniform(0, 1, (2, T, H, 1)), "none": None,
         "heads": np.broadcast_to(-rng.uniform(0, 1, (H, 1)), (T, H, 1))}[decay]  # fmt: skip
    if decay == "tokens":
        g[:, 7] = -np.inf
    x = Inputs(q, k, v, g, r=r, beta=beta)
    plan = Plan(np, np.float64, 0.7, sequences=(Sequence(None, 0, T),), gradients=True)
    changed, before = _before(x, plan)
    state, dstate, dout = *rng.standard_normal((2, 2, H, K, V)), rng.standard_normal(v.shape)
    (out, end, saved), (expected, last, plain) = (
        core.forward("f", y, how, state, "chunks") for y, how in ((changed, before), (x, plan))
    )
    assert relative_error(out, expected) < 1e-13
    assert relative_error(end, last) < 1e-13
    (d, dbegin), (exact, dfirst) = (core.backward(one, dout, dstate) for one in (saved, plain))
    grads = {n: y for n, y in d._asdict().items() if y is not None}
    if decay != "none":
        grads |= _before_vjp(x, changed.r, before, grads)
    assert relative_error(dbegin, dfirst) < 1e-13
    for name in ("q", "k", "v", "r", "beta", *(() if g is None else ("g",))):
        assert relative_error(grads[name], getattr(exact, name)) < 1e-12, name
