"""The CUDA passes of erase NONE, decay NONE and SCALAR, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.scan import plan as cuda_plan
from linattn_np.runtime.cuda import launch
from tests.cases import WITHOUT_ERASE, one_per, required
from tests.matrix_state.cuda.device_arrays import check_made_again, check_same_bits, error, same, typed

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")
FORWARD = {"bfloat16": 4e-3, "float16": 8e-4, "float32": 4e-6, "tf32": 8e-4}  # of the norm of the result
UNGATED = one_per(lambda spec: spec.decay, [fn for fn in WITHOUT_ERASE if "g" not in required(fn)])
GATES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5, "tf32": 6e-3}  # tf32 rounds q, k, v too


def draw(dtype, B=(2,), T=97, Hq=2, Hk=2, H=2, K=32, V=48, gates=(0.0, 0.001, 0.05, 5.0, np.inf), seed=0, states=None):
    """Rounded q, k, v, g, initial state, dout, dstate; gates are cyclic over heads; inf: a tenth is -inf."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((*B, T, h, D)).astype(typed(dtype)) for h, D in ((Hq, K), (Hk, K), (H, V)))
    u = rng.uniform(0, 2, (*B, T, H))
    rate = np.array([gates[h % len(gates)] for h in range(H)])
    g = -np.where(np.isinf(rate), 0.1, rate) * u
    g = np.where(np.isinf(rate) & (u < 0.2), -np.inf, g).astype(np.float32)
    states = states or B
    state, dstate = rng.standard_normal((2, *states, H, K, V)).astype(np.float32)
    dout = rng.standard_normal((*B, T, max(Hq, H), V)).astype(typed(dtype))
    return q, k, v, g, state, dout, dstate


def compare(cp, dtype, arrays, bound=1.0, **options):
    q, k, v, g, state, dout, dstate = arrays
    wide = [x.astype(np.float64) for x in (q, k, v, g)]
    fn = la.simple_gla
    (out, end), pull = la.vjp(fn, *wide, state=state.astype(np.float64), return_state=True, **options)
    expected = pull(dout.astype(np.float64), dstate.astype(np.float64))
    there = [cp.asarray(x) for x in (q, k, v, g)]
    how = {**options, "state": cp.asarray(state), "return_state": True, "backend": "cuda"}
    (out2, end2), pull2 = la.vjp(fn, *there, **how)
    actual = pull2(cp.asarray(dout), cp.asarray(dstate))
    assert out2.dtype == q.dtype
    found = {"out": error(out2, out), "state": error(end2, end)}
    for name in ("q", "k", "v", "state"):
        found["d" + name] = error(getattr(actual, name), getattr(expected, name))
    assert max(found.values()) <= bound * FORWARD[dtype], found
    for h in range(g.shape[-1]):
        found[f"dg{h}"] = error(actual.g[..., h], expected.g[..., h])
    assert all(e <= bound * GATES[dtype] for n, e in found.items() if n.startswith("dg")), found
    return out2, end2, actual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 7, 60, 64, 100, 128, 256])
def test_widths(cp, dtype, K):
    compare(cp, dtype, draw(dtype, H=4, Hq=4, Hk=4, K=K, V={60: 129, 100: 7, 256: 192}.get(K, K), T=150))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (60, 129), (128, 128), (256, 192)])
def test_tf32_where_asked(cp, K, V):
    arrays = draw("float32", H=4, Hq=4, Hk=4, K=K, V=V, T=150)
    out, *_ = compare(cp, "tf32", arrays, precision="tf32")
    exact = la.simple_gla(*map(cp.asarray, arrays[:4]), state=cp.asarray(arrays[4]))
    assert error(out, exact.get().astype(np.float64)) > FORWARD["float32"]


@pytest.mark.parametrize(("dtype", "K"), [("bfloat16", 72), ("float16", 256), ("float32", 256)])
def test_smaller_shared_memory(cp, portable, monkeypatch, dtype, K):
    """As on a device that has less: fewer chunks in flight, and x in the place of q."""
    monkeypatch.setattr(launch, "shared_limit", lambda: policy.LEAST_SHARED)
    compare(cp, dtype, draw(dtype, H=4, Hq=4, Hk=4, K=K, V=K, T=150))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 33, 63, 64, 65, 257, 521])
def test_lengths(cp, dtype, T):
    compare(cp, dtype, draw(dtype, T=T, H=5, Hq=5, Hk=5, seed=T))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
def test_grouped_heads(cp, dtype, heads):
    Hq, Hk, H = heads
    compare(cp, dtype, draw(dtype, Hq=Hq, Hk=Hk, H=H, T=140))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(cp, dtype):
    offsets = [0, 5, 5, 70, 97, 300, 301]
    compare(cp, dtype, draw(dtype, B=(1,), T=301, H=5, Hq=5, Hk=5, states=(6,)), cu_seqlens=offsets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments(cp, dtype):
    """Few heads and many tokens: the sequence is cut, and each segment begins with the right state."""
    T = 1700
    assert cuda_plan.segments(5, T, 1, launch.multiprocessors()) > 1
    compare(cp, dtype, draw(dtype, B=(1,), T=T, H=5, Hq=5, Hk=5, K=16, V=16), bound=1.5)
    offsets = [0, 3, 1100, 1100, 1700]
    compare(
        cp, dtype, draw(dtype, B=(1,), T=T, H=5, Hq=5, Hk=5, K=16, V=16, states=(4,)), bound=1.5, cu_seqlens=offsets
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_views_are_read_in_place(cp, dtype):
    """Heads first, every second token, an odd offset: strides, or a copy, but the same numbers."""
    q, k, v, g, state, _, _ = draw(dtype, T=80, K=16, V=16)
    there = [cp.asarray(x) for x in (q, k, v, g)]
    plain = la.simple_gla(*there, state=cp.asarray(state), backend="cuda")
    turned = la.simple_gla(
        *(cp.ascontiguousarray(cp.moveaxis(x, 1, 2)) for x in there),
        state=cp.asarray(state),
        layout="heads_first",
        backend="cuda",
    )
    assert same(cp.moveaxis(turned, 1, 2), plain)
    doubled = [cp.repeat(x, 2, axis=1)[:, ::2] for x in there]
    assert same(la.simple_gla(*doubled, state=cp.asarray(state), backend="cuda"), plain)
    shifted = [cp.concatenate([cp.zeros((*x.shape[:-1], 1), x.dtype), x], axis=-1)[..., 1:] for x in there[:3]]
    other = la.simple_gla(*shifted, there[3], state=cp.asarray(state), backend="cuda")
    assert error(other, plain.astype(np.float64).get()) <= FORWARD[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_bits(cp, dtype):
    """Alone, in a batch, in a ragged batch, with the state handed over between chunks, and on ten runs."""
    *arrays, state, dout, dstate = draw(dtype, B=(3,), T=192, H=4, Hq=4, Hk=4)
    check_same_bits(cp, la.simple_gla, dict(zip("qkvg", arrays, strict=True)), state, dout, dstate, at=(64,))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("T", [150, 1700])
@pytest.mark.parametrize("fn", WITHOUT_ERASE)
def test_vjp_made_again(cp, monkeypatch, fn, T, dtype):
    def every(one):
        *arrays, state, dout, dstate = one
        out, pull = la.vjp(fn, *arrays[: len(required(fn))], state=state, backend="cuda")
        return [out, *(y for y in pull(dout, dstate if T > 1000 else None) if y is not None)]

    sets = [[cp.asarray(x) for x in draw(dtype, B=(1,), T=T, seed=seed)] for seed in range(3)]
    check_made_again(cp, monkeypatch, every, sets)


def test_causality_to_the_bit(cp):
    q, k, v, g, *_ = draw("bfloat16", B=(1,), T=300)
    there = [cp.asarray(x) for x in (q, k, v, g)]
    before = la.simple_gla(*there, backend="cuda")
    changed = [x.copy() for x in there]
    for x in changed[:3]:
        x[:, 150:] = 3
    after = la.simple_gla(*changed, backend="cuda")
    assert bool((before[:, :150] == after[:, :150]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_decay_and_a_constant_one(cp, dtype):
    q, k, v, *_, dout, _ = draw(dtype, T=150)
    for fn in UNGATED:
        out, pull = la.vjp(fn, *(x.astype(np.float64) for x in (q, k, v)))
        expected = pull(dout.astype(np.float64))
        there = [cp.asarray(x) for x in (q, k, v)]
        assert la.explain(fn, *there).backend == "cuda"
        out2, pull2 = la.vjp(fn, *there)
        actual = pull2(cp.asarray(dout))
        assert error(out2, out) <= FORWARD[dtype]
        for name in ("q", "k", "v"):
            assert error(getattr(actual, name), getattr(expected, name)) <= FORWARD[dtype], (fn, name)


def test_large_float16_states_do_not_overflow(cp):
    x = cp.full((1, 4096, 1, 16), 16, dtype=np.float16)
    out = la.linear_attention(x, x, x / 16, scale=1e-4, backend="cuda")
    expected = np.arange(1, 4097) * 16 * 256 * 1e-4
    assert error(out[0, :, 0, 0], expected) <= FORWARD["float16"]


@pytest.mark.parametrize("D", [32, 64])  # portable and, where they are, by warpgroup products
def test_nan_stays_in_its_head_and_sequence(cp, D):
    q, k, v, g, *_ = draw("bfloat16", B=(1,), T=200, H=4, Hq=4, Hk=4, K=D, V=D)
    there = [cp.asarray(x) for x in (q, k, v, g)]
    there[2][0, 70, 1, 3] = np.nan
    out = la.simple_gla(*there, cu_seqlens=[0, 60, 130, 200], backend="cuda").astype(np.float32)
    bad = cp.isnan(out).any(axis=-1)[0].get()
    assert bad[70:130, 1].all()
    assert not bad[:60].any()
    assert not bad[130:].any()
    assert not bad[:, [0, 2, 3]].any()


def test_what_is_not_covered_says_why(cp):
    x = cp.ones((1, 8, 2, 4))
    assert "float64" in la.explain(la.linear_attention, x, x, x).others["cuda"]
    x = cp.ones((1, 8, 2, 300), dtype=np.float32)
    assert "up to 256" in la.explain(la.linear_attention, x, x, x).others["cuda"]
