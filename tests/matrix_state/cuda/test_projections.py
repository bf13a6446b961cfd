"""Raw projections and tokens of several steps in the CUDA kernels of the delta rule, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state.cuda.delta import calls as cuda_delta
from linattn_np.matrix_state.cuda.delta import plan as cuda_delta_plan
from linattn_np.matrix_state.types import Decay, EraseKey
from tests.cases import RECURRENCES, has_decay
from tests.matrix_state.cuda.delta.test_kernels import GRADS, OFFSETS, both, bound_of
from tests.matrix_state.cuda.scan.test_kernels import DTYPES
from tests.matrix_state.cuda.step_twin import recorded_plans

from .device_arrays import check_same_bits, error, typed

pytestmark = pytest.mark.gpu
FACTOR = {"bfloat16": 1.0, "float16": 0.4, "float32": 2e-3}  # of the bounds in delta/test_kernels.py
RATES = (0.0, 0.05, 1.0, 5.0)  # of the log decay; heads take them in turn
PATHS = pytest.mark.parametrize("path", ["as it comes", "portable"], indirect=True)


@pytest.fixture
def path(request):
    request.getfixturevalue("portable" if request.param == "portable" else "hopper")
    return request.param


def rows(rng, shape, dtype, lengths=(0.3, 3.0)):
    """Rows whose lengths are drawn, rounded; a few are 0."""
    x = rng.standard_normal(shape)
    x *= rng.uniform(*lengths, (*shape[:-1], 1)) / np.linalg.norm(x, axis=-1, keepdims=True)
    return np.where(rng.random((*shape[:-1], 1)) < 0.02, 0, x).astype(typed(dtype))


def draw(fn, B=(2,), T=97, n=(), Hq=4, Hk=4, H=4, K=128, V=128, seed=0, states=None, dtype="bfloat16", raw=True):
    """(arrays by name, state, dout, dstate) of a delta rule; raw: lengths that are not 1, a gate before its formula."""
    rng, steps = np.random.default_rng(seed), (n or (2,)) if fn.spec.micro_steps else ()
    lengths = (0.3, 3.0) if raw else (1.0, 1.0)
    x = {"q": rows(rng, (*B, T, Hq, K), dtype, lengths), "k": rows(rng, (*B, T, *steps, Hk, K), dtype, lengths),
         "v": rng.standard_normal((*B, T, *steps, H, V)).astype(typed(dtype))}  # fmt: skip
    if "p" in fn.spec.arrays:
        x["p"] = (0.5 * rows(rng, (*B, T, Hk, K), dtype, (1.0, 1.0)).astype(np.float32)).astype(typed(dtype))
    x["beta"] = rng.uniform(0, 1.5, (*B, T, *steps, H)).astype(np.float32)
    if "g" in fn.spec.arrays:
        rate = np.array([RATES[h % len(RATES)] for h in range(H)])
        x["g"] = (-rate * rng.uniform(0, 2, (*B, T, H))).astype(np.float32)
        if raw:
            x["g"] = rng.standard_normal((*B, T, H)).astype(typed(dtype))
            x |= {"A_log": np.log(rate + 1e-3).astype(np.float32), "dt_bias": rng.standard_normal(H).astype(np.float32)}
    state, dstate = rng.standard_normal((2, *(states or B), H, K, V)).astype(np.float32)
    dout = rng.standard_normal((*B, T, max(Hq, H), V)).astype(typed(dtype))
    return x, state, dout, dstate


def errors(cp, fn, drawn, **options):
    """Of every result and gradient, by name; device arrays, float64 on the CPU."""
    x, state, dout, dstate = drawn
    wide = lambda y: y.astype(np.float64)  # noqa: E731
    names = list(x)
    call = lambda *y, **o: fn(**dict(zip(names, y, strict=True)), **o)  # noqa: E731
    call.vjp = lambda arrays, o: la.vjp(fn, **dict(zip(names, arrays, strict=True)), **o)
    expected = both(call, [wide(y) for y in x.values()], wide(state), wide(dout), wide(dstate), **options)
    there = both(call, [cp.asarray(y) for y in x.values()], *(cp.asarray(y) for y in (state, dout, dstate)),
                 backend="cuda", **options)  # fmt: skip
    found = {}
    for name, y in expected.items():
        gates = name in ("dg", "dbeta", "dA_log", "ddt_bias")
        found[name] = error(there[name], y) / (bound_of("dg") if gates else bound_of(name))
    return found


def check(cp, fn, drawn, dtype="bfloat16", factor=1.0, **options):
    found = errors(cp, fn, drawn, **options)
    sums = 2 if dtype == "bfloat16" else 1  # over tokens, which cancel: 1.4 was seen
    most = {n: FACTOR[dtype] * (sums if n in ("dA_log", "ddt_bias") else 1) for n in found}
    assert not {n: float(e) for n, e in found.items() if not e <= factor * most[n]}


RAW = [fn for fn in RECURRENCES if "qk_l2norm" in fn.spec.options]
SCALAR = [fn for fn in RAW if fn.spec.decay is not Decay.VECTOR]
RULES = [fn for fn in SCALAR if fn.spec.change.erase_key is EraseKey.KEY]
every_rule = pytest.mark.parametrize("fn", RULES, ids=lambda f: f.__name__)
SHAPES = {
    "one chunk": {"T": 40}, "some": {"T": 150}, "narrow": {"K": 64, "V": 40, "T": 100},
    "value heads share": {"Hq": 2, "Hk": 2, "T": 140}, "more queries": {"Hk": 2, "H": 2, "T": 140},
    "segments": {"B": (1,), "T": 1300},
}  # fmt: skip


def as_published(fn):
    """The options of models that pass raw projections; eps and bound are large enough to be seen."""
    options = {"qk_l2norm": True, "l2norm_eps": 0.25, "beta_sigmoid": True, "allow_neg_eigval": True}
    return options if fn is la.delta_rule else options | {"lower_bound": -3.0}


@PATHS
@every_rule
@pytest.mark.parametrize("shape", ["one chunk", "value heads share", "segments"])
def test_raw_projections_as_published(cp, path, fn, shape):
    """With an eps in the norm, the sigmoid of beta, and a gate with a lower bound."""
    x, *rest = draw(fn, **SHAPES[shape])
    x["beta"] = np.random.default_rng(3).standard_normal(x["beta"].shape).astype(typed("bfloat16"))
    check(cp, fn, (x, *rest), factor=1.0 if path == "as it comes" else 1.5, **as_published(fn))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5])
@every_rule
def test_a_few_raw_projections_as_published(cp, fn, dtype, T):
    """Replayed calls too: the same bits as the first."""
    x, state, *_ = draw(fn, T=T, dtype=dtype)
    x["beta"] = np.random.default_rng(3).standard_normal(x["beta"].shape).astype(typed(dtype))
    options, there = as_published(fn) | {"return_state": True}, {n: cp.asarray(y) for n, y in x.items()}
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    expected = fn(**wide, state=state.astype(np.float64), **options)
    calls = [fn(**there, state=cp.asarray(state), backend="cuda", **options) for _ in range(2)]
    for found, again, y in zip(*calls, expected, strict=True):
        assert error(found, y) <= FACTOR[dtype] * bound_of("out")
        assert (found == again).all()


@PATHS
@every_rule
@pytest.mark.parametrize("shape", SHAPES)
def test_raw_projections(cp, path, fn, shape):
    check(cp, fn, draw(fn, **SHAPES[shape]), factor=1.0 if path == "as it comes" else 1.5, qk_l2norm=True)


@every_rule
@pytest.mark.parametrize("offsets", [OFFSETS, [0, 3, 1100, 1100, 1701]])
def test_raw_projections_of_a_ragged_batch(cp, fn, offsets):
    drawn = draw(fn, B=(1,), T=offsets[-1], states=(len(offsets) - 1,))
    check(cp, fn, drawn, qk_l2norm=True, cu_seqlens=offsets)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fn", SCALAR, ids=lambda f: f.__name__)
def test_raw_projections_of_other_dtypes(cp, portable, dtype, fn):
    check(cp, fn, draw(fn, T=150, K=60, V=48, dtype=dtype), dtype, qk_l2norm=True)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fn", RAW, ids=lambda f: f.__name__)
def test_raw_projections_of_a_few_tokens(cp, fn, dtype, T):
    x, state, *_ = draw(fn, T=T, dtype=dtype)
    if fn.spec.decay is Decay.VECTOR:
        x["g"] = np.repeat(x["g"][..., None], 128, axis=-1)
        x["dt_bias"] = np.repeat(x["dt_bias"][..., None], 128, axis=-1)
    options = {"qk_l2norm": True, "return_state": True}
    out, end = fn(**{n: cp.asarray(y) for n, y in x.items()}, state=cp.asarray(state), **options)
    expected, wanted = fn(**{n: y.astype(np.float64) for n, y in x.items()}, state=state.astype(np.float64), **options)
    assert max(error(out, expected), error(end, wanted)) <= {"bfloat16": 6e-3, "float16": 1e-3, "float32": 1e-5}[dtype]


def test_lengths_are_taken_out_in_the_kernels_and_before_them(cp, hopper, monkeypatch):
    """The same numbers both ways but for the rounding of divided rows."""
    fn = la.gated_delta_rule
    drawn = draw(fn, T=300)
    there = {n: cp.asarray(y) for n, y in drawn[0].items()}
    assert "which divide q and k by their length" in la.explain(fn, **there, qk_l2norm=True).reason
    check(cp, fn, drawn, qk_l2norm=True)
    monkeypatch.setattr(cuda_delta, "handles", lambda x, plan: frozenset())
    assert "after one that divides q and k by their length" in la.explain(fn, **there, qk_l2norm=True).reason
    check(cp, fn, drawn, factor=1.2, qk_l2norm=True)
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    check(cp, fn, drawn, factor=1.2, qk_l2norm=True)


def test_blocks_made_again_with_lengths(cp, hopper, monkeypatch):
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    check(cp, la.gated_delta_rule, draw(la.gated_delta_rule, B=(1,), T=700), qk_l2norm=True)


PRODUCTS = {
    "gated": {"T": 100}, "no gate": {"T": 100, "gate": False}, "shared": {"T": 90, "Hq": 2, "Hk": 2},
    "more queries": {"T": 90, "Hk": 2, "H": 2}, "segments": {"B": (1,), "T": 700},
    "ragged": {"B": (1,), "T": 301, "states": (6,), "cu_seqlens": OFFSETS},
}  # fmt: skip


@PATHS
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_delta_product(cp, path, n, kind):
    sizes = dict(PRODUCTS[kind])
    gate, offsets = sizes.pop("gate", True), sizes.pop("cu_seqlens", None)
    x, *rest = draw(la.delta_product, n=(n,), raw=False, **sizes)
    if not gate:
        del x["g"]
    there = {name: cp.asarray(y) for name, y in x.items()}
    explained = la.explain(la.delta_product, **there, cu_seqlens=offsets)
    assert explained.backend == "cuda"
    assert ("expanded to the steps" in explained.reason) == (
        n > 1 and (path == "portable" or not cuda_delta_plan.skips(n))
    )
    check(cp, la.delta_product, (x, *rest), factor=1.0 if path == "as it comes" else 1.5, cu_seqlens=offsets)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_tokens_of_several_steps_as_they_come(cp, hopper, n, raw, kind):
    sizes = dict(PRODUCTS[kind])
    gate, offsets = sizes.pop("gate", True), sizes.pop("cu_seqlens", None)
    x, *rest = draw(la.delta_product, n=(n,), raw=raw, **sizes)
    for name in () if gate else ("g", "A_log", "dt_bias"):
        x.pop(name, None)
    check(cp, la.delta_product, (x, *rest), cu_seqlens=offsets, qk_l2norm=raw)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_delta_product_of_other_dtypes(cp, portable, dtype, n):
    check(cp, la.delta_product, draw(la.delta_product, n=(n,), T=100, K=40, V=72, dtype=dtype, raw=False), dtype)


@pytest.mark.parametrize("fn", [fn for fn in RULES if has_decay(fn)], ids=lambda f: f.__name__)
def test_calls_like_an_earlier_one_take_their_own_arrays(cp, hopper, fn):
    options = {"qk_l2norm": True, "return_state": True, "backend": "cuda"}
    replay.clear()
    for T in (5, 150):
        for seed in range(3):
            x, state, *_ = draw(fn, T=T, seed=seed)
            there = {n: cp.asarray(y) for n, y in x.items()}
            out, end = fn(**there, state=cp.asarray(state), **options)
            wide = {n: y.astype(np.float64) for n, y in x.items()}
            expected, _ = fn(**wide, state=state.astype(np.float64), qk_l2norm=True, return_state=True)
            assert error(out, expected) <= GRADS
            assert bool(cp.isfinite(end).all())
    if not fn.spec.micro_steps:  # queries and gates of several steps are spread out
        assert len(recorded_plans()) == 2


def test_same_bits_with_lengths(cp, hopper):
    """Alone, in a batch, in a ragged batch, on ten runs."""
    check_same_bits(cp, la.delta_product, *draw(la.delta_product, B=(3,), T=96))
