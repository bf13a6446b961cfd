"""What a vector decay's forward stores for its backward: states in 20 bits, P in two terms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state.cuda.shared_memory import DELTA_END
from linattn_np.matrix_state.cuda.vector import calls as vector
from linattn_np.matrix_state.types import Erase, Inputs, Plan, ReadState
from linattn_np.runtime.shapes import sequences
from tests.matrix_state.cuda.device_arrays import error, same, typed
from tests.matrix_state.cuda.vector.test_kernels import BY_READ, OUT, draw, name_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
GRAM = 1.2e-3  # of P in two terms; one rounding to bfloat16 is 1.65e-3


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mild", "mixed"])
@pytest.mark.parametrize("fn", [fn for fn in BY_READ if fn.spec.erase is Erase.NONE], ids=name_of)
def test_outputs_do_not_depend_on_what_is_stored(cp, monkeypatch, fn, kind, gate):
    """Those of a call with gradients, whether its residuals are stored or recomputed."""
    arrays, state = draw(fn, T=300, kind=kind, gate=gate)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    out, pull = la.vjp(fn, **there, state=cp.asarray(state), backend="cuda")
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    again, pull_again = la.vjp(fn, **there, state=cp.asarray(state), backend="cuda")
    assert same(out, again)
    assert not same(out, fn(**there, state=cp.asarray(state), backend="cuda"))
    dout = cp.asarray(arrays["v"])
    assert all(same(x, y) for x, y in zip(pull(dout), pull_again(dout), strict=True) if x is not None)


@pytest.mark.parametrize("drawn", ["normal", "whole numbers"])
@pytest.mark.parametrize(("fn", "widths"), [(la.gla, (128, 128)), (la.rwkv6, (128, 128)), (la.rwkv6, (64, 40))])
def test_gate_gradients_without_decay(cp, fn, widths, drawn):
    """Nearly all are states times their gradients, of 20 bits each; whole numbers are often half way in bfloat16."""
    arrays, _ = draw(fn, B=1, T=1023, K=widths[0], V=widths[1], kind="mild", gate="float32")
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(arrays["v"].shape)
    if drawn == "whole numbers":
        arrays |= {n: np.where(arrays[n] < 0, -1, 1).astype(arrays[n].dtype) for n in "qk"}
        arrays["v"], dout = (rng.integers(-64, 65, arrays["v"].shape).astype(arrays["v"].dtype) for _ in range(2))
    dout, arrays["g"] = dout.astype(arrays["v"].dtype), np.zeros_like(arrays["g"])
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    found = la.vjp(fn, **there, scale=1.0, backend="cuda")[1](cp.asarray(dout))
    right = la.vjp(fn, **wide, scale=1.0)[1](dout.astype(np.float64))
    assert error(found.g, right.g) < 1e-3  # 1.9e-3 of states in bfloat16


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 70, 200, 300]])
def test_residuals(cp, before, offsets):
    """The state before every chunk and P of every chunk, where they are asked for."""
    arrays, state = draw(B=1, T=300, heads=(2, 2, 2), N=len(offsets) - 1 if offsets else 1, kind="mixed")
    state[:, :, :8] = state[:, :, :8].astype(typed("bfloat16"))
    state[:, :, :4, :9] = 0.0
    namespace = pytest.importorskip("array_api_compat.cupy")
    cuts = offsets or [0, 300]
    reads = ReadState.PREVIOUS if before else ReadState.UPDATED
    plan = Plan(namespace, np.float32, 0.5, reads, chunk_size=64, sequences=tuple(sequences(300, offsets)))
    x = Inputs(*(cp.asarray(arrays[n]) for n in "qkvg"))
    assert vector.unsupported_reason(matrix_state.Call(x, plan)) is None
    out, end, saved = vector.forward(x, plan, cp.asarray(state), keep=True)
    plain, last, _ = vector.forward(x, plan, cp.asarray(state))
    assert error(out, plain.get().astype(np.float64)) < OUT  # P has fewer roundings where it is kept
    assert same(end, last)
    slots = saved.starts.states.shape[0] // 2
    for n, (first, stop) in enumerate(pairwise(cuts)):
        for head in range(2):
            q, k, v, g = (arrays[name][0, first:stop, head].astype(np.float64) for name in "qkvg")
            S = state[n, head].astype(np.float64)
            for chunk in range(-(-(stop - first) // 64)):
                stored = head * slots + (first // 64 + n if offsets else 0) + chunk
                rows = slice(64 * chunk, min(64 * chunk + 64, stop - first))
                kept = unswizzled(saved.starts.states[stored, :DELTA_END], 128)
                assert error(kept, S.T) < OUT
                if chunk == 0:  # as it was given, to a 16th of a unit in the last place, mostly half of that
                    exact = with_low_bits(kept.get(), saved.starts.states[stored, DELTA_END:].get())
                    assert (np.abs(exact - S.T) <= 2.0**-11 * np.abs(S.T)).all()
                    assert np.linalg.norm(exact - S.T) < 2.0**-13 * np.linalg.norm(S)
                    assert (exact == S.T)[:, :8].all()  # of bfloat16
                P = expected_gram(q[rows], k[rows], g[rows], before)
                first_term, rest = cp.split(unswizzled(saved.starts.grams[stored], 64).astype(np.float32), 2, axis=1)
                assert error((first_term + rest)[: len(P), : len(P)], P) < GRAM
                for t in range(rows.start, rows.stop):
                    S = np.exp(g[t])[:, None] * S + np.outer(k[t], v[t])


def unswizzled(tile, rows):
    """Panels of 64 bfloat16 columns, pieces of 16 bytes permuted by the row's last three bits, as a matrix."""
    x = tile.view(typed("bfloat16")).reshape(-1, rows, 8, 8)
    order = np.arange(8) ^ (np.arange(rows)[:, None] & 7)
    panels = x[:, np.arange(rows)[:, None], order]
    return panels.transpose(1, 0, 2, 3).reshape(rows, -1)


def with_low_bits(kept, low):
    """A state's 128 x 128 bfloat16 with the four bits that each has besides (tile/low_bits.cuh)."""
    half, warp, lane, word, pair, column = np.ogrid[:2, :8, :32, :4, :4, :2]
    words = low.view(np.uint32).reshape(2, 8, 32, 4, 1, 1)
    n = np.empty((128, 128), dtype=np.int64)
    n[16 * warp + lane // 4 + 8 * (pair & 1), 64 * half + 16 * word + 8 * (pair >> 1) + lane % 4 * 2 + column] = (
        words >> (12 - 4 * pair + 16 * column).astype(np.uint32) & 15
    )
    bits = (kept.view(np.uint16).astype(np.int64) << 16) + n * 0x1000 - 0x8000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def expected_gram(q, k, g, before):
    P = np.zeros((len(q), len(q)))
    for i in range(len(q)):
        decay = np.ones(q.shape[1])
        for j in range(i - before, -1, -1):
            decay = decay * np.exp(g[j + 1]) if j < i - before else decay
            P[i, j] = (q[i] * decay) @ k[j]
    return P
