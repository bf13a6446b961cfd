"""The CUDA kernels of a vector decay, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.runtime.cuda import launch
from tests.cases import has_plain_state, one_per, required
from tests.matrix_state.cuda.device_arrays import check_made_again, error, same, typed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
OUT = 6e-3  # of the norm of the result
GATES = ("zero", "mild", "five", "twenty", "edge", "resets", "mixed")
DRAWN = {"q", "k", "v", "g", "u", "beta", "a", "b"}
FUNCTIONS = [fn for fn in la.VARIANTS if has_plain_state(fn.spec) and fn.spec.decay is Decay.VECTOR
             and set(required(fn)) <= DRAWN]  # fmt: skip
BY_READ = one_per(lambda spec: (spec.erase, spec.query_reads), FUNCTIONS)
BY_ERASE = one_per(lambda spec: spec.erase, FUNCTIONS)
padded_and_cut = pytest.mark.parametrize(
    ("fn", "widths"),
    [(la.gla, (256, 256)), (la.rwkv6, (192, 96)), (la.gla, (60, 100)), (la.kda, (128, 256)), (la.kda, (60, 100))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)


def gates(rng, shape, kind):
    """Log decays: mild ones; 5 and 20 nats everywhere; 0, 79 or 81 nats in 16 tokens; rows of -inf; all of these."""
    u = rng.uniform(0, 1, shape)
    if kind in ("zero", "five", "twenty"):
        return np.full(shape, {"zero": -0.0, "five": -5.0, "twenty": -20.0}[kind])
    if kind == "edge":
        return np.broadcast_to(rng.choice([0.0, -79 / 16, -81 / 16, -0.01], shape[-2:]), shape).copy()
    g = -0.05 * u
    if kind == "resets":
        g[rng.uniform(size=shape[:-1]) < 0.03] = -np.inf
    if kind == "mixed":
        g = -u * 10 ** rng.uniform(-3, 1.8, shape[-2:])
        z = rng.uniform(size=shape)
        g[z < 0.02], g[z > 0.95], g[(z > 0.1) & (z < 0.12)] = -np.inf, 0.0, -60.0
    return g


def name_of(fn):
    return fn.__name__


def draw(fn=la.gla, B=2, T=150, heads=(3, 3, 3), K=128, V=128, kind="mixed", gate="float32", N=None, seed=0):
    """(arrays by name, initial state), rounded."""
    rng, (Hq, Hk, H) = np.random.default_rng(seed), heads
    q, k, v = (rng.standard_normal((B, T, h, D)) for h, D in ((Hq, K), (Hk, K), (H, V)))
    if fn.spec.erase is not Erase.NONE:
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, k, v = (x.astype(typed("bfloat16")) for x in (q, k, v))
    g = gates(rng, (B, T, H, K), kind).astype(typed(gate))
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "u": rng.standard_normal((H, K)).astype(np.float32),
        "beta": rng.uniform(0, 1, (B, T, H)).astype(np.float32),
    }
    if fn.spec.erase is Erase.FREE:
        a = rng.standard_normal((B, T, Hk, K))
        a /= np.linalg.norm(a, axis=-1, keepdims=True)
        arrays |= {"a": a.astype(v.dtype), "b": (-a * rng.uniform(0, 1, a.shape)).astype(v.dtype)}
    state = rng.standard_normal((N or B, H, K, V)).astype(np.float32)
    return {n: arrays[n] for n in fn.spec.arrays if n in arrays}, state


def run(cp, fn, arrays, state, **options):
    """out and final state by the chunk kernels."""
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    state = None if state is None else cp.asarray(state)
    return fn(**there, state=state, return_state=True, backend="cuda", chunk_size=64, **options)


def compare(cp, fn=la.gla, options=None, **how):
    arrays, state = draw(fn, **how)
    options = options or {}
    out, end = run(cp, fn, arrays, state, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = fn(**wide, state=state.astype(np.float64), return_state=True, **options)
    assert out.dtype == arrays["v"].dtype
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=name_of)
def test_gates(cp, fn, kind, gate):
    compare(cp, fn, kind=kind, gate=gate, T=200)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 257])
@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
def test_lengths(cp, fn, T):
    compare(cp, fn, T=T, seed=T)


@pytest.mark.parametrize("widths", [(64, 64), (128, 64), (64, 128), (40, 120)])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_widths(cp, fn, widths):
    for gate in ("bfloat16", "float32"):
        compare(cp, fn, K=widths[0], V=widths[1], gate=gate)


@padded_and_cut
def test_widths_that_are_padded_and_cut(cp, fn, widths):
    compare(cp, fn, K=widths[0], V=widths[1], T=100)
    compare(cp, fn, {"cu_seqlens": [0, 5, 5, 100]}, K=widths[0], V=widths[1], T=100, B=1, N=3, heads=(2, 2, 4))


def test_narrow_keys(cp):
    compare(cp, K=8, V=16)


@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_grouped_heads(cp, fn, heads):
    compare(cp, fn, heads=heads)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=name_of)
@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_ragged(cp, fn, gate):
    compare(cp, fn, {"cu_seqlens": [0, 5, 5, 70, 97, 300, 301]}, B=1, T=301, N=6, gate=gate)
    compare(cp, fn, {"cu_seqlens": [0, 64, 130]}, B=1, T=130, N=2, gate=gate, K=64, V=40, heads=(2, 2, 2))


@pytest.mark.parametrize("kind", ["mild", "mixed", "resets"])
@pytest.mark.parametrize("offsets", [None, [0, 3, 1100, 1100, 1700]])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_segments(cp, fn, kind, offsets):
    assert vector_plan.segments(3, 27, launch.multiprocessors()) > 1
    options = {} if offsets is None else {"cu_seqlens": offsets}
    compare(cp, fn, options, B=1, T=1700, N=None if offsets is None else 4, kind=kind)


@pytest.mark.parametrize(("widths", "heads"), [((64, 128), (1, 1, 2)), ((128, 40), (2, 1, 2))])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_segments_of_other_widths(cp, fn, widths, heads):
    compare(cp, fn, B=1, T=1700, K=widths[0], V=widths[1], heads=heads)


@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_later_tokens_change_no_bit(cp, fn, gate):
    """Also where they force the exact path."""
    mild, state = draw(fn, B=1, T=400, kind="mild", gate=gate)
    wild, _ = draw(fn, B=1, T=400, kind="mixed", gate=gate, seed=1)
    whole, _ = run(cp, fn, mild, state)
    for at in (192, 200, 205):
        changed = {n: x if n == "u" else np.concatenate([x[:, :at], wild[n][:, at:]], axis=1) for n, x in mild.items()}
        out, _ = run(cp, fn, changed, state)
        assert same(out[:, :at], whole[:, :at])
        assert not same(out[:, at:], whole[:, at:])


@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_same_bits_alone_batched_ragged_and_in_parts(cp, fn, gate):
    arrays, state = draw(fn, B=3, T=200, gate=gate)
    out, end = run(cp, fn, arrays, state)
    for b in range(3):
        one = {n: x if n == "u" else x[b : b + 1] for n, x in arrays.items()}
        found, last = run(cp, fn, one, state[b : b + 1])
        assert same(found, out[b : b + 1])
        assert same(last, end[b : b + 1])
    packed = {n: x if n == "u" else x.reshape(1, -1, *x.shape[2:]) for n, x in arrays.items()}
    found, last = run(cp, fn, packed, state, cu_seqlens=[0, 200, 400, 600])
    assert same(found.reshape(out.shape), out)
    assert same(last, end)
    first, middle = run(cp, fn, {n: x if n == "u" else x[:, :128] for n, x in arrays.items()}, state)
    second, last = run(cp, fn, {n: x if n == "u" else x[:, 128:] for n, x in arrays.items()}, middle)
    assert same(cp.concatenate([first, second], axis=1), out)
    assert same(last, end)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=name_of)
def test_no_tokens(cp, fn):
    """The state is unchanged, and so is its gradient."""
    arrays, state = draw(fn, T=0)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    (out, end), pull = la.vjp(fn, **there, state=cp.asarray(state), return_state=True)
    assert out.shape == arrays["v"].shape
    assert error(end, state) == 0
    grads = pull(out, cp.asarray(2 * state))
    assert error(grads.state, 2 * state) == 0
    assert all(grads._asdict()[n].shape == x.shape for n, x in arrays.items())


@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_views_have_the_bits_of_their_copies(cp, fn):
    """Every second token, backwards, and heads before tokens in memory: outputs and gradients."""
    arrays, _ = draw(fn, T=100, gate="bfloat16")
    there = {n: cp.asarray(x) for n, x in arrays.items()}

    def results(**given):
        out, pull = la.vjp(fn, **given, backend="cuda")
        return [out, *(x for x in pull(there["v"])._asdict().values() if x is not None)]

    def spread(x):
        wide = cp.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, dtype=x.dtype)
        wide[:, 1::2] = x
        return wide[:, 1::2]

    def backwards(x):
        return x[:, ::-1].copy()[:, ::-1]

    def heads_first(x):
        return cp.moveaxis(cp.moveaxis(x, 2, 1).copy(), 1, 2)

    right = results(**there)
    for view in (spread, backwards, heads_first):
        given = {n: x if n == "u" else view(x) for n, x in there.items()}
        assert all(x.shape == there[n].shape for n, x in given.items())
        assert all(same(a, b) for a, b in zip(results(**given), right, strict=True)), view.__name__


@pytest.mark.parametrize(("fn", "bounds"), [
    (la.gla, {}), (la.rwkv6, {}),
    (la.kda, {"out": 3.2e-3, "dbeta": 2.2e-3, **dict.fromkeys(("dq", "dk", "dv", "dg"), 2.7e-3)}),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_roundings_at_strong_gates(cp, fn, bounds):
    """Without an erase term a result has its own rounding alone, 1.66e-3, where a token reads little but itself."""
    arrays, _ = draw(fn, B=1, T=257, kind="five", gate="bfloat16")
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    dout = np.random.default_rng(1).standard_normal(arrays["v"].shape).astype(arrays["v"].dtype)
    out, pull = la.vjp(fn, **there, backend="cuda")
    expected, right = la.vjp(fn, **wide)
    assert error(out, expected) < bounds.get("out", 2e-3)
    for name, want in right(dout.astype(np.float64))._asdict().items():
        if want is not None:
            assert error(getattr(pull(cp.asarray(dout)), name), want) < bounds.get(f"d{name}", 2e-3), name


def test_strengths_above_one(cp):
    """Up to 2, where a key reflects its component of the state."""
    arrays, state = draw(la.kda, T=200, kind="mild", gate="bfloat16")
    arrays["beta"] = 1 + arrays["beta"]
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    out, pull = la.vjp(la.kda, **there, state=cp.asarray(state), backend="cuda")
    expected, right = la.vjp(la.kda, **wide, state=state.astype(np.float64))
    assert error(out, expected) < 2 * OUT
    for x, want in zip(pull(there["v"]), right(wide["v"]), strict=True):
        assert (x is None) == (want is None)
        assert want is None or error(x, want) < 2 * OUT


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_keys_that_repeat_later_change_no_bit_before(cp, gate):
    """Second terms of a chunk begin where a key is like the one before it."""
    arrays, state = draw(la.kda, B=1, T=64, heads=(2, 2, 2), kind="mild", gate=gate)
    out, _ = run(cp, la.kda, arrays, state)
    for at in (1, 2, 17, 33, 63):
        there = arrays | {"k": arrays["k"].copy()}
        there["k"][:, at:] = there["k"][:, at - 1 : at]
        found, _ = run(cp, la.kda, there, state)
        assert same(found[:, :at], out[:, :at]), at


def test_roundings_of_equal_keys(cp):
    """U of two terms: with one the output was off by 1.63e-2, dk by 3.7e-3."""
    arrays, _ = draw(la.kda, B=1, T=1023, heads=(4, 4, 4), gate="bfloat16")
    arrays["k"][:], arrays["beta"][:] = arrays["k"][:, :1], 1
    rng = np.random.default_rng(1)
    arrays["g"] = (-0.05 * rng.random(arrays["g"].shape)).astype(arrays["g"].dtype)
    there, wide = ({n: f(x) for n, x in arrays.items()} for f in (cp.asarray, lambda x: x.astype(np.float64)))
    out, pull = la.vjp(la.kda, **there, backend="cuda")
    expected, right = la.vjp(la.kda, **wide)
    assert error(out, expected) < 1.45e-2
    assert error(pull(there["v"]).k, right(wide["v"]).k) < 3.4e-3


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["zero", "mild", "five"])
def test_equal_keys(cp, kind, beta):
    """One key at every token: A loses digits in 16 bits, and the rounding error of a row enters the next one."""
    arrays, state = draw(la.kda, B=1, T=300, heads=(2, 2, 2), kind=kind)
    arrays["k"][:], arrays["beta"][:] = arrays["k"][:, :1], beta
    out, end = run(cp, la.kda, arrays, state)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.kda(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < 2.5e-2
    assert error(end, last) < 2.5e-2


def test_raw_projections(cp):
    """Rows of q and k divided by their length, the gate's formula, the sigmoid of beta: before the kernels."""
    arrays, state = draw(la.kda, T=130, kind="mild", gate="bfloat16")
    arrays["k"] = (3 * arrays["k"].astype(np.float32)).astype(arrays["k"].dtype)
    rng = np.random.default_rng(1)
    given = arrays | {"A_log": rng.uniform(-1, 1, 3).astype(np.float32),
                      "dt_bias": rng.standard_normal((3, 128)).astype(np.float32)}  # fmt: skip
    there = {n: cp.asarray(x) for n, x in given.items()}
    out = la.kda(**there, state=cp.asarray(state), qk_l2norm=True, backend="cuda")
    wide = {n: x.astype(np.float64) for n, x in given.items()}
    assert error(out, la.kda(**wide, state=state.astype(np.float64), qk_l2norm=True)) < 1e-2


def test_small_queries_where_the_state_decays(cp):
    """Queries of 1e-6 and 79 nats in 16 tokens: nothing is rounded to zero on its way."""
    arrays, state = draw(kind="five", B=1, T=64)
    arrays["g"][...] = -79 / 16
    arrays["q"] = (arrays["q"].astype(np.float32) * 1e-6).astype(arrays["q"].dtype)
    out, _ = run(cp, la.gla, arrays, state)
    expected = la.gla(**{n: x.astype(np.float64) for n, x in arrays.items()}, state=state.astype(np.float64))
    for t in range(64):
        assert error(out[:, t], expected[:, t]) < 2 * OUT, t


def test_nan_stays_in_its_head_and_sequence(cp):
    arrays, state = draw(B=2, T=200, kind="mild")
    clean, _ = run(cp, la.gla, arrays, state)
    for name in ("q", "k", "v", "g"):
        there = {n: x.copy() for n, x in arrays.items()}
        there[name][1, 100, 2, 5] = np.nan
        out, _ = run(cp, la.gla, there, state)
        assert same(out[0], clean[0])
        assert same(out[1, :, :2], clean[1, :, :2])
        assert same(out[1, :64], clean[1, :64])
        assert bool(cp.isnan(out[1, 100, 2].astype(np.float32)).any())


@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
@pytest.mark.parametrize("T", [150, 1100])
def test_calls_are_replayed(cp, monkeypatch, fn, T):
    sets = [draw(fn, B=1, T=T, gate="bfloat16", seed=n) for n in range(3)]
    there = [[{n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(state)] for arrays, state in sets]
    call = lambda one: list(fn(**one[0], state=one[1], return_state=True))  # noqa: E731
    check_made_again(cp, monkeypatch, call, there)
