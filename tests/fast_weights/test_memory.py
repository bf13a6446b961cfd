"""No result is memory that nothing has written: new memory is NaN, of empty axes too."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights.core import FastWeights

pytest.importorskip("numba")
LEARNERS = [fn for fn in la.VARIANTS if isinstance(fn.spec.core, FastWeights)]
SIZES = [(0, 5, 3), (1, 5, 3), (6, 5, 3), (70, 5, 3), (6, 0, 3), (6, 5, 0)]  # T, K, V
EMPTY = np.empty


def poisoned(shape, dtype=float, *more, **how):
    y = EMPTY(shape, dtype, *more, **how)
    if y.dtype.kind == "f":
        y.fill(np.nan)
    return y


def draw(fn, T, K, V):
    return la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=T, H=2, K=K, V=V)


def backends(fn):
    """Those that compute the function."""
    found = la.explain(fn, **draw(fn, *SIZES[2]), **fn.samples.options[0])
    return [found.backend, *(name for name, why in found.others.items() if why == "covers the call too")]


@pytest.mark.parametrize(("fn", "backend"), [(fn, name) for fn in LEARNERS for name in backends(fn)],
                         ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_results_and_gradients_are_written(fn, backend, monkeypatch):
    options = fn.samples.options[0]
    for sizes in SIZES:
        x, found = draw(fn, *sizes), []
        for empty in (EMPTY, poisoned):
            la.clear_cache()
            monkeypatch.setattr(np, "empty", empty)
            (out, end), pullback = la.vjp(fn, **x, **options, return_state=True, backend=backend)
            found.append([out, *end, *(d for d in pullback(np.ones_like(out)) if d is not None)])
            monkeypatch.undo()
        for a, b in zip(*found, strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.isfinite(b).all()
