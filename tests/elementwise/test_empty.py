"""Empty axes of channels: every number of a result is written, by the first call and by its replay."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.core import CORE
from tests.cases import parts

VARIANTS = [fn for fn in la.VARIANTS if fn.spec.core is CORE]
FORMS = [*({"backend": n} for n in CORE.BACKENDS if n != "cuda"), {}]


@pytest.fixture
def nothing_but_nan(monkeypatch):
    """Memory that no kernel writes holds NaN."""
    make = np.empty

    def with_nan(shape, dtype=float, **options):
        y = make(shape, dtype, **options)
        if y.dtype.kind in "fc":
            y.fill(np.nan)
        elif y.dtype == np.uint8:
            y.fill(0xFF)
        return y

    monkeypatch.setattr(np, "empty", with_nan)


def empty_axes(fn):
    """Each axis of its arrays but tokens, and the batch."""
    letters = {letter for arg in fn.spec.arrays.values() for letter in arg.axes.replace("|", " ").split()}
    return [{"B": (0,)}, *({letter: 0} for letter in sorted(letters & {*"DHKNV"}))]


@pytest.mark.parametrize("T", [0, 1, 6, 70])
@pytest.mark.parametrize("fn", VARIANTS, ids=lambda fn: fn.__name__)
def test_results_and_gradients_of_empty_axes_are_written(fn, T, nothing_but_nan):
    for sizes in empty_axes(fn):
        arrays = la.testing.sample(fn, np.random.default_rng(0), **{"T": T, "H": 2, "K": 4, "V": 3} | sizes)
        for form in FORMS:
            for _ in range(3):  # the third one by the plans of the first two
                with contextlib.suppress(ValueError):  # a backend without complex numbers
                    result, pullback = la.vjp(fn, **arrays, return_state=True, **form)
                    grads = pullback(*result)
                    again = fn(**arrays, return_state=True, **form)
                    for y in (result.out, *parts(result.state), again.out, *parts(again.state), *grads[:-1],
                              *parts(grads.state)):  # fmt: skip
                        assert y is None or np.isfinite(y).all(), (sizes, form)
