"""Decays of key and value channels in portable chunks, emulated and on a GPU, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.portable import calls, columns
from linattn_np.matrix_state.cuda.portable import launch as portable_launch
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.runtime.cuda import launch
from linattn_np.runtime.shapes import Sequence
from tests.cuda.emulation import emulated  # noqa: F401
from tests.matrix_state.cuda.device_arrays import check_same_bits, error, typed
from tests.matrix_state.cuda.step_twin import CUPY, stub

BOUND = {"float32": 6e-6, "float16": 1.5e-3, "bfloat16": 6e-3}  # of the norm of the result
# dg and dgv in 16 bits: sums of up to 128 tokens' differences, which cancel but for roundings to tf32 at strong decays
BOUND_OF_GATES = BOUND | {"float16": 3e-3}
GATES = {
    "mild": lambda rng, shape: -0.1 * rng.random(shape),
    "slow": lambda rng, shape: np.full(shape, -1e-4),
    "five": lambda rng, shape: np.full(shape, -5.0),
    "resets": lambda rng, shape: np.full(shape, -np.inf),
    "mixed": lambda rng, shape: np.choose(rng.integers(0, 40, shape) // 19, [0.0, -0.1, -np.inf]),
}


def draw(T, K, V, kind="mild", heads=(2, 2, 2), B=1, N=None, seed=0):
    """(arrays by name, state, cotangents of the output and of the final state) in float32."""
    rng, (Hq, Hk, H) = np.random.default_rng(seed), heads
    shapes = {"q": (Hq, K), "k": (Hk, K), "v": (H, V), "g": (H, K), "gv": (H, V)}
    x = {n: GATES[kind](rng, (B, T, *s)) if n in ("g", "gv") else rng.standard_normal((B, T, *s))
         for n, s in shapes.items()}  # fmt: skip
    x |= {"state": rng.standard_normal((N or B, H, K, V)), "dout": rng.standard_normal((B, T, H, V))}
    x |= {"dstate": rng.standard_normal((N or B, H, K, V))}
    x = {n: y.astype(np.float32) for n, y in x.items()}
    return {n: x[n] for n in shapes}, x["state"], x["dout"], x["dstate"]


def exact(arrays, state, dout, dstate, **options):
    """The results by name, in float64."""
    wide = {n: y.astype(np.float64) for n, y in arrays.items()}
    (out, end), pull = la.vjp(la.dfw, **wide, state=state.astype(np.float64), return_state=True, **options)
    grads = pull(dout.astype(np.float64), dstate.astype(np.float64))._asdict()
    return {"out": out, "end": end} | {n: d for n, d in grads.items() if d is not None}


def planned(arrays, scale=0.7, stops=None, gradients=True):
    """(inputs on this machine, the plan of their call)."""
    B, T = arrays["v"].shape[:2]
    every = [0, *(stops or [T])]
    rows = [None] * B if stops is None else range(len(stops))
    sequences = tuple(Sequence(row, a, b) for row, a, b in zip(rows, every, every[1:], strict=False))
    x = Inputs(**{n: stub(y) for n, y in arrays.items()})
    return x, Plan(CUPY, np.float32, scale, sequences=sequences, gradients=gradients)


def run(arrays, state, dout, dstate, scale=0.7, stops=None, kept=True):
    """The results of the kernels on this machine."""
    x, plan = planned(arrays, scale, stops)
    out, end, saved = columns.forward(x, plan, stub(state))
    saved = saved if kept else saved._replace(starts=None)
    d, first = columns.backward(saved, stub(dout), stub(dstate))
    return {"out": out, "end": end, **{n: getattr(d, n) for n in arrays}, "state": first}


def agree(found, expected, bound=BOUND["float32"]):
    for n, y in expected.items():
        assert found[n].shape == y.shape, n
        assert np.linalg.norm(found[n] - y) <= bound * (np.linalg.norm(y) or 1.0), n


@pytest.fixture
def kernels(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(launch, "shared_limit", lambda: 227 << 10)


@pytest.mark.parametrize("kind", list(GATES))
def test_gates(kernels, kind):
    drawn = draw(140, 24, 16, kind)
    agree(run(*drawn), exact(*drawn, scale=0.7))


@pytest.mark.parametrize(
    ("T", "K", "V", "heads"), [(17, 32, 48, (2, 2, 2)), (40, 7, 5, (1, 1, 2)), (33, 16, 144, (2, 1, 2))]
)
def test_shapes(kernels, T, K, V, heads):
    drawn = draw(T, K, V, heads=heads)
    agree(run(*drawn, kept=False), exact(*drawn, scale=0.7))


@pytest.mark.parametrize(
    ("dtype", "gate", "T", "K", "V"),
    [
        ("float32", "float32", 33, 33, 48),
        ("float16", "float32", 35, 8, 24),
        ("float16", "float16", 20, 33, 100),
        ("bfloat16", "bfloat16", 18, 64, 48),
        ("bfloat16", "float32", 17, 5, 7),
    ],
)
def test_dtypes_and_widths(kernels, dtype, gate, T, K, V):
    """Every alignment of rows: 16, 8, 4 and 2 bytes."""
    arrays, state, dout, dstate = draw(T, K, V, heads=(1, 1, 1))
    arrays = {n: y.astype(typed(gate if n in ("g", "gv") else dtype)) for n, y in arrays.items()}
    drawn = arrays, state, dout.astype(typed(dtype)), dstate
    agree(run(*drawn), exact(*drawn, scale=0.7), BOUND[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_without_a_backward(kernels, dtype):
    arrays, state, _, _ = draw(150, 16, 24)
    arrays = {n: y if n in ("g", "gv") else y.astype(typed(dtype)) for n, y in arrays.items()}
    with_one, without = (columns.forward(*planned(arrays, gradients=g), stub(state))[:2] for g in (True, False))
    assert all(np.array_equal(x, y) for x, y in zip(with_one, without, strict=True))


@pytest.mark.parametrize(
    ("dtype", "K", "V", "covered"),
    [
        ("float32", 33, 7, False),
        ("float32", 33, 32, False),
        ("float32", 16, 32, False),
        ("float32", 32, 18, True),
        ("float16", 18, 32, False),
        ("bfloat16", 100, 60, True),
    ],
)
def test_widths_that_are_covered(kernels, dtype, K, V, covered):
    """More than 16 channels, in rows of a multiple of 8 bytes."""
    arrays = draw(20, K, V)[0]
    x, plan = planned({n: y if n in ("g", "gv") else y.astype(typed(dtype)) for n, y in arrays.items()})
    why = columns.unsupported_gradients(x, plan)
    assert why is None if covered else "more than 16 channels" in why


def test_views_with_misaligned_rows(kernels):
    """The kernels read aligned copies."""
    arrays = draw(20, 32, 24)[0]
    x, plan = planned(arrays)
    x = Inputs(**{n: stub(np.append(y.ravel(), y.dtype.type(0)))[1:].reshape(y.shape) for n, y in arrays.items()})
    assert columns.batch_of(x, plan).kind.align == 4
    read = columns._batch_of(x, plan)
    assert read.kind.align >= 8
    assert all(np.array_equal(read.arrays[n], getattr(x, n)) for n in arrays)


def test_a_misaligned_row_is_found(kernels, monkeypatch):
    """The emulation refuses what a device does."""
    monkeypatch.setattr(portable_launch, "_alignment", lambda arrays, K, V: 16)
    arrays, state, _, _ = draw(20, 33, 16)
    with pytest.raises(AssertionError, match="is no multiple of 16"):
        columns.forward(*planned(arrays), stub(state))


def test_ragged(kernels):
    drawn, stops = draw(170, 16, 16, "mixed", N=5), [5, 5, 6, 160, 170]
    agree(run(*drawn, stops=stops), exact(*drawn, scale=0.7, cu_seqlens=[0, *stops]))


def test_segments(kernels, monkeypatch):
    monkeypatch.setattr(policy, "SEGMENT_TOKENS", 128)
    drawn = draw(500, 16, 16, B=1)
    many = []
    monkeypatch.setattr(columns.segments, "transfers", lambda xp, batch, own=columns.segments.transfers: (
        many.append(batch.sizes[0]), own(xp, batch))[1])  # fmt: skip
    agree(run(*drawn), exact(*drawn, scale=0.7))
    assert many == [2] * 4


def test_the_kernels_without_decays_of_the_values(kernels):
    """The same emulation of gla: outputs and gradients."""
    arrays, _, dout, _ = draw(50, 32, 48)
    x = {n: arrays[n] for n in "qkvg"}
    plan = Plan(CUPY, np.float32, 1.0, sequences=(Sequence(None, 0, 50),), gradients=True)
    out, _, saved = calls.forward(Inputs(**{n: stub(y) for n, y in x.items()}), plan, None)
    d, _ = calls.backward(saved, stub(dout), None)
    want, pull = la.vjp(la.gla, **{n: y.astype(np.float64) for n, y in x.items()}, scale=1.0)
    grads = pull(dout.astype(np.float64))._asdict()
    agree({"out": out, **{n: getattr(d, n) for n in x}}, {"out": want, **{n: grads[n] for n in x}})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("T", "K", "V", "kind"), [
    (300, 128, 128, "mild"), (65, 64, 64, "mixed"), (150, 128, 128, "five"), (70, 100, 60, "resets"),
    (5000, 32, 32, "slow"),
])  # fmt: skip
def test_on_a_gpu(dtype, T, K, V, kind):
    cp = pytest.importorskip("cupy")
    arrays, state, dout, dstate = draw(T, K, V, kind)
    arrays = {n: y if n in ("g", "gv") else y.astype(typed(dtype)) for n, y in arrays.items()}
    dout = dout.astype(typed(dtype))
    there = {n: cp.asarray(y) for n, y in arrays.items()}
    assert "both axes" in la.explain(la.dfw, **there).reason
    (out, end), pull = la.vjp(la.dfw, **there, state=cp.asarray(state), return_state=True)
    found = {"out": out, "end": end} | pull(cp.asarray(dout), cp.asarray(dstate))._asdict()
    for n, y in exact(arrays, state, dout, dstate).items():
        assert error(found[n], y) < (BOUND_OF_GATES if n in ("g", "gv") else BOUND)[dtype], n


@pytest.mark.gpu
def test_same_bits():
    """On every run, alone and packed."""
    cp = pytest.importorskip("cupy")
    arrays, state, dout, dstate = draw(150, 32, 32, "mixed", B=2)
    check_same_bits(cp, la.dfw, arrays, state, dout, dstate)
