"""The host side of the kernels of raw projections, against twins that work on the bytes they are given: no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from linattn_np.matrix_state.preprocess import unit_rows, unit_rows_vjp
from linattn_np.matrix_state.types import Plan
from linattn_np.ops import gate_formula, norms
from linattn_np.ops.cuda import gate_formula as gate_kernel
from linattn_np.ops.cuda import unit_rows as rows_kernel
from linattn_np.ops.cuda.arguments import GATE_FORMULA, UNIT_ROWS
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import CUPY, KINDS, _rows, stub

THREADS, F32 = 256, np.dtype(np.float32)
EPS = 0.3


def rows_twin(entry, d, blocks, arguments):
    """What unit_rows.cu does, in float32."""
    unpacked, K, kind, grad = UNIT_ROWS.unpack(arguments), d["LA_K"], KINDS[d["LA_DTYPE"]], KINDS[d["LA_GRAD"]]
    count = 0
    for n, of in enumerate(unpacked["of"]):
        if n == 1:
            assert unpacked["first"] == count
        if not of["y"]:
            continue
        x, T, heads, rows = of["x"], of["T"], of["heads"], of["rows"]
        shape = (rows // T // heads, T, heads, K)

        def dense(p, kind, shape=shape):
            return _rows(p, tuple(kind.itemsize * int(np.prod(shape[i + 1 :])) for i in range(4)), shape, kind)

        y = _rows(x["data"], (x["batch"], x["token"], x["head"], kind.itemsize), shape, kind).astype(F32)
        length = np.sqrt((y * y).sum(-1, keepdims=True) + np.float32(unpacked["root"]) ** 2)
        length = np.where(length == 0, 1, length)
        y = y / length
        if entry == "unit_rows_vjp":
            dy = dense(of["dy"], grad).astype(F32)
            dense(of["y"], kind)[...] = (dy - y * (y * dy).sum(-1, keepdims=True)) / length
        else:
            dense(of["y"], kind)[...] = y
        count += -(-rows // (THREADS // d["LA_LANES"]))
    assert blocks == count


def gate_twin(entry, d, blocks, arguments):
    """What gate_formula.cu does, in float32."""
    unpacked = GATE_FORMULA.unpack(arguments)
    tokens, width, each = (unpacked[n] for n in ("tokens", "width", "each"))
    kind, heads = KINDS[d["LA_DTYPE"]], width // each

    def of_tokens(name, kind=F32):
        return _rows(unpacked[name], (width * kind.itemsize, kind.itemsize), (tokens, width), kind)

    of_heads = _rows(unpacked["A_log"], (4,), (heads,), F32)
    bias = _rows(unpacked["bias"], (4,), (width,), F32)
    raw = of_tokens("raw", kind).astype(F32) + (0 if bias is None else bias)
    rate = 1 if of_heads is None else np.repeat(np.exp(of_heads), each)
    bounded = entry.startswith("bounded_gate")
    x = rate * raw if bounded else raw
    sigmoid, bound = 1 / (1 + np.exp(-x)), unpacked["bound"]
    g = bound * sigmoid if bounded else -rate * np.logaddexp(0, x)
    if not entry.endswith("vjp"):
        assert blocks == -(-tokens * width // THREADS)
        of_tokens("g")[...] = g
        return
    dg = of_tokens("dg")
    d_scaled, scaled = (bound * dg * sigmoid * (1 - sigmoid), x) if bounded else (dg, g)
    da = rate * d_scaled if bounded else -rate * dg * sigmoid
    of_tokens("da")[...] = da
    parts = -(-tokens // unpacked["block"])
    assert blocks == parts * -(-width // THREADS)
    to = _rows(unpacked["parts"], (8 * width, 4 * width, 4), (parts, 2, width), F32)
    for n in range(parts):
        own = slice(n * unpacked["block"], (n + 1) * unpacked["block"])
        to[n] = da[own].sum(0), (scaled * d_scaled)[own].sum(0)


@pytest.fixture
def launched(monkeypatch):
    """The entries that were launched; kernels are their twins."""
    found = []

    def run(file, entry, constants, blocks, threads, shared, arguments, arrays=None, made=()):
        assert threads == THREADS
        twin = {rows_kernel.SOURCE: rows_twin, gate_kernel.SOURCE: gate_twin}[file]
        twin(entry, dict(constants), blocks, arguments)
        found.append(entry)

    monkeypatch.setattr(launch, "launch", run)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    for module in ("linattn_np.matrix_state.preprocess", "linattn_np.ops.gate_formula"):
        monkeypatch.setattr(f"{module}.is_cupy", lambda xp: xp is CUPY)
    return found


@pytest.mark.parametrize("eps", [0.0, EPS])
def test_rows_divided_by_their_length(launched, eps):
    rng = np.random.default_rng(0)
    q, k, dq, dk = (rng.standard_normal(s).astype(F32) for s in 2 * ((2, 5, 4, 16), (2, 5, 2, 16)))
    q[0, 2, 1] = 0
    plan = Plan(CUPY, F32, 1.0, l2norm_eps=eps)
    found = unit_rows(plan, (stub(q), stub(k)))
    grads = unit_rows_vjp(plan, (stub(q), stub(k)), (stub(dq), stub(dk)))
    for x, d, y, dx in zip((q, k), (dq, dk), found, grads, strict=True):
        np.testing.assert_allclose(y, norms.unit(np, x, eps), rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(dx, norms.unit_vjp(np, x, d, eps), rtol=1e-5, atol=2e-6)
    assert launched == ["unit_rows", "unit_rows_vjp"]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("given", ["A_log bias", "A_log", "bias", ""])
@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 7, 1), (2, 600, 3, 5), (1, 9, 2, 1)], ids=str)
def test_gates_with_a_bound(launched, given, shape, dtype):
    rng, by_channel = np.random.default_rng(0), len(shape) == 4
    raw, dy = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(F32)
    A_log = rng.standard_normal(shape[2]).astype(F32) if "A_log" in given else None
    bias = rng.standard_normal(shape[2:]).astype(F32) if "bias" in given else None
    how = gate_formula.Bounded(-3.0, A_log, bias)
    there = gate_formula.Bounded(-3.0, *(None if y is None else stub(y) for y in (A_log, bias)))
    found = [gate_formula.bounded(CUPY, stub(raw), there, F32, by_channel),
             *gate_formula.bounded_vjp(CUPY, stub(raw), there, stub(dy), by_channel)]  # fmt: skip
    wanted = [gate_formula.bounded(np, raw, how, F32, by_channel),
              *gate_formula.bounded_vjp(np, raw, how, dy, by_channel)]  # fmt: skip
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_allclose(np.reshape(x, y.shape), y, rtol=1e-5, atol=1e-4)
    assert launched == ["bounded_gate", "bounded_gate_vjp"]


def test_the_gate_without_a_bound(launched):
    rng = np.random.default_rng(0)
    raw, dg = (rng.standard_normal((2, 7, 3)).astype(F32) for _ in range(2))
    A_log, bias = rng.standard_normal((2, 3)).astype(F32)
    found = [gate_formula.log_decay(CUPY, stub(raw), stub(A_log), stub(bias), F32, False),
             *gate_formula.log_decay_vjp(CUPY, stub(raw), stub(A_log), stub(bias), stub(dg), False)]  # fmt: skip
    wanted = [gate_formula.log_decay(np, raw, A_log, bias, F32, False),
              *gate_formula.log_decay_vjp(np, raw, A_log, bias, dg, False)]  # fmt: skip
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert launched == ["gate_formula", "gate_formula_vjp"]
