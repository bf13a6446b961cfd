"""What tests of kernels share: dtypes by name, errors against NumPy, the same bits however sequences come."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, vjp
from linattn_np.call.replay import plans as replay
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import recorded_plans


def typed(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def error(actual, expected):
    """Norm of the difference over the norm; absolute where the expected is 0."""
    actual = np.asarray(actual.get()).astype(np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0)


def poisoned(shape, dtype, memory=None):
    """A new array full of NaN, or one in memory."""
    x = pytest.importorskip("cupy").ndarray(shape, dtype, memory)
    x.data.memset_async(0xFF, x.nbytes)
    return x


def check_made_again(cp, monkeypatch, every, sets, kept=1):
    """every(one), a list of arrays, of other numbers launches what it did before, and the same bits come out.

    All memory that it takes begins full of NaN. kept: calls that it makes.
    """
    monkeypatch.setattr(launch, "array_type", lambda: poisoned)
    monkeypatch.setattr(replay, "by_key", {})
    right = []
    for one in sets:
        replay.clear()
        right.append(every(one))
    assert len(recorded_plans()) == kept
    with monkeypatch.context() as nothing_planned:
        nothing_planned.setattr(dispatch, "prepare", None)
        nothing_planned.setattr(vjp, "prepare", None)
        for one, expected in zip(sets, right, strict=True):
            assert all(same(a, b) for a, b in zip(every(one), expected, strict=True))


def same(a, b):
    """Whether two arrays on the device hold the same bits."""
    a, b = (x.reshape(x.shape or (1,)).copy(order="C").view(np.uint8) for x in (a, b))
    return a.shape == b.shape and bool((a == b).all())


def check_same_bits(cp, fn, arrays, state, dout, dstate, at=()):
    """Forward and backward on ten runs, alone and in a ragged batch as in a batch; forward in parts that begin `at`.

    arrays: by name, in NumPy; (B, T, ...) but for those whose axes has no T.
    """
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    state, dout, dstate = map(cp.asarray, (state, dout, dstate))
    B, T = dout.shape[:2]
    each = [n for n in arrays if fn.spec.arrays[n].axes.startswith("T ")]
    options = {"return_state": True, "backend": "cuda"} | ({"qk_l2norm": True} if "A_log" in arrays else {})

    def run(pick, pick_state, **more):
        given = there | {n: pick(there[n]) for n in each}
        result, pull = la.vjp(fn, **given, state=pick_state(state), **options, **more)
        grads = pull(pick(dout), pick_state(dstate))._asdict()
        return [*result, *(grads[n] for n in (*each, "state")), *(grads[n] for n in there if n not in each)]

    def check(found, expected):
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))

    whole, own = run(lambda x: x, lambda x: x), len(each) + 3  # results with one row per sequence
    for _ in range(9):
        check(run(lambda x: x, lambda x: x), whole)
    for b in range(B):
        row = slice(b, b + 1)
        check(run(lambda x, row=row: x[row], lambda x, row=row: x[row])[:own], [y[row] for y in whole[:own]])
    packed = run(lambda x: x.reshape(1, -1, *x.shape[2:]), lambda x: x, cu_seqlens=list(range(0, B * T + 1, T)))
    check([y.reshape(z.shape) for y, z in zip(packed, whole, strict=True)][:own], whole[:own])
    outs = []
    for start, stop in pairwise((0, *at, T)) if at else ():
        part = there | {n: there[n][:, start:stop] for n in each}
        out, state = fn(**part, state=state, **options)
        outs.append(out)
    if at:
        check([cp.concatenate(outs, axis=1), state], whole[:2])
