"""Calls without queries on a GPU: the state, its bits and gradients are those of a call that also reads."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.cases import RECURRENT
from tests.matrix_state.cuda.device_arrays import error, same, typed

pytestmark = pytest.mark.gpu
WRITING = [
    fn
    for fn in RECURRENT
    if fn.spec.core is la.simple_gla.spec.core and fn.spec.readout.name == "LINEAR" and fn.spec.state.parts is None
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("offsets", [None, [0, 5, 5, 100, 211]], ids=["dense", "ragged"])
@pytest.mark.parametrize("fn", WRITING, ids=lambda fn: fn.__name__)
def test_a_state_does_not_depend_on_its_readers(fn, offsets, dtype):
    cp, rng = pytest.importorskip("cupy"), np.random.default_rng(0)
    drawn = la.testing.sample(fn, rng, B=(2,) if offsets is None else (1,), T=211, K=64, V=64, optional=False)
    x = {n: cp.asarray(y.astype(typed(dtype))) for n, y in drawn.items()}
    options = {"return_state": True} | ({} if offsets is None else {"cu_seqlens": offsets})
    expected, pull = la.vjp(fn, **x, **options)
    silent = x | {fn.spec.change.query: None}
    found, back = la.vjp(fn, **silent, **options)
    assert found.out is None
    assert same(found.state, expected.state)
    explained = la.explain(fn, **silent, **options)
    assert explained.backend == la.explain(fn, **x, **options).backend
    d = cp.asarray(rng.standard_normal(expected.state.shape), np.float32)
    wanted = pull(None, d)._asdict()
    for name, y in back(None, d)._asdict().items():
        if y is not None:
            assert error(y, np.asarray(wanted[name].get()).astype(np.float64)) < (2e-2 if dtype == "bfloat16" else 1e-5)
