"""The portable CUDA kernels of the delta rule, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.portable import delta_plan as cuda_delta_portable
from linattn_np.ops.preconditioner import Bounds, Keys, preconditioned
from linattn_np.runtime.cuda import launch
from linattn_np.runtime.shapes import sequences
from tests.matrix_state.cuda.delta.test_kernels import NAMES, OFFSETS, both, bound_of, draw, found_errors
from tests.matrix_state.cuda.device_arrays import check_same_bits, error, same
from tests.matrix_state.cuda.scan.test_kernels import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("portable")]
FACTOR = {"bfloat16": 1.5, "float16": 0.25, "float32": 1.5e-3}  # of the bounds in delta/test_kernels.py


def check(cp, dtype, arrays, factor=1.0, **options):
    found = found_errors(cp, arrays, **options)
    assert not {n: float(e) for n, e in found.items() if not e <= factor * FACTOR[dtype] * bound_of(n)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (60, 129), (100, 36), (256, 192)])
def test_widths(cp, dtype, widths):
    check(cp, dtype, draw(K=widths[0], V=widths[1], T=150, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [17, 31, 32, 33, 64, 65, 257])
def test_lengths(cp, dtype, T):
    check(cp, dtype, draw(T=T, K=48, V=32, seed=T, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 2, 4), (4, 1, 1)])
def test_grouped_heads(cp, dtype, heads):
    Hq, Hk, H = heads
    check(cp, dtype, draw(Hq=Hq, Hk=Hk, H=H, T=140, K=64, V=48, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(cp, dtype):
    check(cp, dtype, draw(B=(1,), T=301, K=64, V=48, states=(6,), dtype=dtype), cu_seqlens=OFFSETS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments(cp, dtype):
    """A few heads leave the device idle: their sequences are cut into segments."""
    assert cuda_delta_portable.segments(5, 1700 // 64, launch.multiprocessors()) > 1
    check(cp, dtype, draw(B=(1,), T=1700, K=48, V=32, dtype=dtype), 1.5)
    check(
        cp, dtype, draw(B=(1,), T=1700, K=32, V=40, states=(4,), dtype=dtype), 1.5, cu_seqlens=[0, 3, 1100, 1100, 1700]
    )
    check(cp, dtype, draw(B=(1,), T=1100, K=32, V=32, decay=False, Hq=1, Hk=1, H=4, dtype=dtype), 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys(cp, dtype):
    q, k, v, g, beta, *rest = draw(B=(1,), T=300, K=64, V=64, decay=False, dtype=dtype)
    k[:] = k[:, :1]
    beta[:] = 1
    found = found_errors(cp, (q, k, v, g, beta, *rest))
    assert max(found.values()) <= {"bfloat16": 6e-2, "float16": 1e-2, "float32": 1e-4}[dtype], found
    beta[:] = 2
    assert np.isfinite(list(found_errors(cp, (q, k, v, g, beta, *rest)).values())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["states", "ragged", "long"])
def test_erase_vectors_that_read_before_the_decay(cp, dtype, how):
    """Comba: r is another array than k, and the state that it reads has not faded."""
    B, T, states, options = {
        "states": ((2,), 150, None, {}), "ragged": ((1,), 301, (6,), {"cu_seqlens": OFFSETS}),
        "long": ((1,), 1100, None, {}),
    }[how]  # fmt: skip
    q, k, v, g, beta, state, dout, dstate = draw(B=B, T=T, Hq=1, Hk=1, H=5, K=48, V=40, states=states, dtype=dtype)
    p = (np.random.default_rng(1).uniform(0.3, 0.9, (*B, T, 1, 1)) * k.astype(np.float64)).astype(k.dtype)
    arrays = [q, k, v, p, g, beta]
    wide = both(
        la.comba,
        [x.astype(np.float64) for x in arrays],
        state.astype(np.float64),
        dout.astype(np.float64),
        dstate.astype(np.float64),
        **options,
    )
    there = both(
        la.comba,
        [cp.asarray(x) for x in arrays],
        cp.asarray(state),
        cp.asarray(dout),
        cp.asarray(dstate),
        **options,
        backend="cuda",
    )
    found = {n: error(there[n], y) for n, y in wide.items()}
    factor = FACTOR[dtype] * (1.5 if how == "long" else 1)
    assert not {n: float(e) for n, e in found.items() if not e <= factor * bound_of(n)}
    out = la.comba(*(cp.asarray(x) for x in arrays), backend="cuda", **options)
    plain = la.comba(*(x.astype(np.float64) for x in arrays), **options)
    assert error(out, plain) <= factor * bound_of("out")


def test_same_bits(cp):
    """Alone, in a batch, in a ragged batch, and on ten runs."""
    *arrays, state, dout, dstate = draw(B=(3,), T=192, H=4, Hq=4, Hk=4, K=64, V=64)
    check_same_bits(cp, la.gated_delta_rule, dict(zip(NAMES, arrays, strict=True)), state, dout, dstate)


def test_batch_axes_and_views(cp):
    q, k, v, g, beta, _, dout, _ = draw(T=80, H=4, Hq=4, Hk=4, K=20, V=12)
    there = [cp.asarray(x) for x in (q, k, v, g, beta)]
    out, pull = la.vjp(la.gated_delta_rule, *there)
    plain = [out, *pull(cp.asarray(dout))[:5]]
    assert "portable" in la.explain(la.gated_delta_rule, *there).reason
    out, pull = la.vjp(
        la.gated_delta_rule, *(cp.ascontiguousarray(cp.moveaxis(x, 1, 2)) for x in there), layout="heads_first"
    )
    turned = [out, *pull(cp.ascontiguousarray(cp.moveaxis(cp.asarray(dout), 1, 2)))[:5]]
    out, pull = la.vjp(la.gated_delta_rule, *(x[None] for x in there))
    wide = [out, *pull(cp.asarray(dout)[None])[:5]]
    for a, b, c in zip(plain, turned, wide, strict=True):
        assert same(cp.moveaxis(b, 1, 2), a)
        assert same(c[0], a)


def terms_of_center(arrays, state, dout, dstate):
    """dw_t * k_t * dm_t / dcenter of every token, head and channel, in float64: their sums are the gradient of center.

    Terms of both signs, whose sum may be a small part of the root of the sum of their squares. Each has the rounding of
    a 16-bit dw, so that root is what the error of the sum is a part of, as that of dw is of its norm.
    """
    q, k, v, g, beta, a, b, center = (x.astype(np.float64) for x in arrays)
    (S, A), H, rate = (x.astype(np.float64) for x in state), v.shape[-2], np.log(1.5)
    q, k = (np.repeat(x, H // x.shape[-2], axis=-2) for x in (q, k))
    how = Bounds(np, tuple(sequences(k.shape[-3], None)), 1.5, 1e-6, np.dtype(np.float64))
    w, _ = preconditioned(how, Keys(k, a, b, center), A)
    given = q, w, v, k * np.exp(g)[..., None], g, beta
    (_, _), pull = la.vjp(la.comba, *given, state=S, return_state=True)
    dw = pull(dout.astype(np.float64), dstate.astype(np.float64)).k
    return rate * dw * w * (1 - np.abs(np.log(w / k) / rate)) ** 2  # log m = -rate r / (1 + |r|)


@pytest.mark.parametrize("sizes", [(130, 2, 2, 48, 40), (300, 1, 4, 128, 128), (1100, 2, 2, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_erase_vectors_that_read_after_the_decay(cp, dtype, sizes):
    """Preconditioned keys write, the keys themselves erase."""
    fn, (T, Hk, H, K, V) = la.preconditioned_gated_delta_rule, sizes
    q, k, v, g, beta, S, dout, dS = draw(B=(1,), T=T, Hq=Hk, Hk=Hk, H=H, K=K, V=V, dtype=dtype)
    rng = np.random.default_rng(1)
    squares = [-rng.uniform(0, 1, beta.shape).astype(np.float32), rng.uniform(0, 1, beta.shape).astype(np.float32)]
    arrays = [q, k, v, g, beta / 2, *squares, rng.uniform(-1, 1, H).astype(np.float32)]
    A, dA = rng.uniform(0, 1, (2, 1, H, K)).astype(np.float32)
    kind = la.PreconditionedState
    wide = both(
        fn, [x.astype(np.float64) for x in arrays], kind(*(x.astype(np.float64) for x in (S, A))),
        dout.astype(np.float64), kind(*(x.astype(np.float64) for x in (dS, dA))),
    )  # fmt: skip
    there = both(
        fn, [*map(cp.asarray, arrays)], kind(cp.asarray(S), cp.asarray(A)), cp.asarray(dout),
        kind(cp.asarray(dS), cp.asarray(dA)), backend="cuda",
    )  # fmt: skip
    found = {}
    for n, y in wide.items():
        parts = zip(("", "A"), there[n], y, strict=True) if isinstance(y, tuple) else [("", there[n], y)]
        found |= {n + part: error(a, b) for part, a, b in parts}
    terms = terms_of_center(arrays, (S, A), dout, dS)
    np.testing.assert_allclose(terms.sum((0, 1, 3)), wide["dcenter"], rtol=1e-9)
    size = np.linalg.norm(np.sqrt((terms**2).sum((0, 1, 3))))
    found["dcenter"] *= min(1, np.linalg.norm(wide["dcenter"]) / size)
    factor = FACTOR[dtype] * (1.5 if T > 1000 else 1)
    assert not {n: float(e) for n, e in found.items() if not e <= factor * bound_of(n)}
