"""Passes of far levels: which arrays they exchange, against gradients of the definition; the passes are NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state.cuda.scan import levels, wgmma
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.compile import compile_source
from linattn_np.runtime.shapes import Sequence
from tests.cuda.machine_code import HGMMA, operations, spilled
from tests.matrix_state.cuda.step_twin import CUPY, stub

C, MARK = 64, 256
FIRST, COUNT = 7, 3


def twin(marks, batch, arrays, g, first, count, factors, reverse=False, dots=None):
    """levels_wgmma.cu chunk by chunk, in float64; marks: what it stores before every MARK tokens."""
    q, k, v, out = (np.repeat(y, batch.heads // y.shape[2], axis=2).astype(np.float64) for y in arrays)
    g = np.repeat(g[..., 0], count, axis=2).astype(np.float64)
    out[...] = np.nan
    T, step, (read, write) = batch.T, -1 if reverse else 1, factors
    for n, h in np.ndindex(batch.N, batch.heads):
        S, level = np.zeros((k.shape[-1], v.shape[-1])), first + h % count - 6
        for c in range(-(-T // C))[::step]:
            if (c + reverse) % 2**level == 0:
                S[...] = 0
            if dots is not None and not reverse and c * C % MARK == 0:
                marks["products"][n, h, c * C // MARK] = (S * marks["S"][n, h, c * C // MARK]).sum()
            rows = np.arange(c * C, min(c * C + C, T))[::step]
            own = g[n, rows, h]
            upto = np.cumsum(own) - (own if reverse else 0)  # a token's decay acts after its write, in reverse
            start, end = np.exp(upto)[:, None], np.exp(own.sum() - upto)[:, None]
            reads = (c >> (level - 1) & 1) != reverse
            if reads:
                out[n, rows, h] = read * start * (q[n, rows, h] @ S)
            if dots is not None:
                x = np.repeat(dots.x, batch.heads // dots.x.shape[2], axis=2)[n, rows, h]
                marks[reverse][n, rows, h] = (x * out[n, rows, h]).sum(axis=-1) if reads else 0
            S *= np.exp(own.sum())
            if not reads:
                S += k[n, rows, h].T @ (write * end * v[n, rows, h])
            if dots is not None and reverse and c * C % MARK == 0:
                marks["S"][n, h, c * C // MARK] = S
    arrays[3][...] = out


def twin_gate_grad(marks):
    """gate_grad.cu."""
    dg = np.zeros(marks[False].shape)
    for t in range(dg.shape[1]):
        first = t // MARK * MARK
        sums = (marks[True] - marks[False])[:, first:t].sum(axis=1)
        dg[:, t] = marks["products"][:, :, t // MARK] + sums
    return dg


@pytest.mark.parametrize("T", [130, 600])
def test_gradients(monkeypatch, T):
    B, H, K, V = 2, 2, 3, 4
    rng = np.random.default_rng(0)
    draw = lambda *shape: stub(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    x = Inputs(draw(B, T, H, K), draw(B, T, 1, K), draw(B, T, H, V), stub(-np.abs(draw(B, T, H, 1)) * 0.05))
    dy = draw(B, T, H * COUNT, V)
    shape, n = (B, T, H * COUNT), -(-T // MARK)
    marks = {False: np.zeros(shape), True: np.zeros(shape), "products": np.zeros((B, H * COUNT, n)),
             "S": np.zeros((B, H * COUNT, n, V, K))}  # fmt: skip
    monkeypatch.setattr(levels, "_pass", lambda *how: twin(marks, *how))
    monkeypatch.setattr(levels, "gate_grad", lambda *how: stub(twin_gate_grad(marks)))
    plan = Plan(CUPY, np.float32, 0.7, sequences=(Sequence(None, 0, T),))
    y = levels.forward(x, plan, FIRST, COUNT)
    d = levels.backward(x, plan, FIRST, COUNT, dy)

    q, k, v, g = (np.repeat(z, H * COUNT // z.shape[2], axis=2).astype(np.float64) for z in x[:4])
    sums, p, level = np.cumsum(g[..., 0], axis=1), np.arange(T), FIRST + np.arange(H * COUNT) % COUNT
    apart = np.frexp((p[:, None] ^ p).astype(float))[1]
    at = (apart[..., None] == level) & (p[:, None] > p)[..., None]  # (t, j, h)
    decay = np.where(at, np.exp(np.where(at, sums[:, :, None] - sums[:, None], 0)), 0)
    A, dA = np.einsum("bthk,bjhk->btjh", q, k), np.einsum("bthv,bjhv->btjh", dy, v)
    W = 0.7 * A * decay
    pairs = W * dA
    before = np.concatenate([np.zeros((B, 1, T, H * COUNT)), np.cumsum(pairs[:, ::-1], axis=1)], axis=1)[:, ::-1]
    flows = np.stack([before[:, t, :t].sum(axis=1) for t in range(T)], axis=1)  # j < t <= i
    expected = {"y": (y, np.einsum("btjh,bjhv->bthv", W, v)),
                "q": (d.q, np.einsum("btjh,bjhk->bthk", 0.7 * decay * dA, k)),
                "k": (d.k, np.einsum("btjh,bthk->bjhk", 0.7 * decay * dA, q)),
                "v": (d.v, np.einsum("btjh,bthv->bjhv", W, dy)), "g": (d.g, flows[..., None])}  # fmt: skip
    for name, (found, right) in expected.items():
        found = np.asarray(found, np.float64)
        read = np.isfinite(found)
        assert read.any()
        assert not right[~read].any(), name  # nothing is left out but zeros
        assert np.abs(found - right)[read].max() < 2e-5 * max(1, np.abs(right).max()), name


def test_stages_fit_a_multiprocessor():
    for K, V in ((64, 64), (128, 128), (40, 72), (128, 64), (64, 128)):
        for dots in (False, True):
            how = wgmma.level_pass(K, V, True, dots, dots)
            assert dict(how.constants)["LA_STAGES"] >= 4
            assert how.shared * dict(how.constants)["LA_BLOCKS"] <= 227 * 1024


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("K", "V", "reverse", "dots"), [(128, 128, False, False), (128, 64, True, True)])
def test_machine_code(K, V, reverse, dots):
    """Warpgroup products that do not wait for one another, and no spilled registers."""
    how = wgmma.level_pass(K, V, True, reverse, dots)
    cubin, log, *_ = compile_source(sources.installed(how.file), dict(how.constants), "sm_90a", cached=False)
    assert operations(cubin) & HGMMA
    assert spilled(log) == (0, 0)
    assert "serialized" not in log
