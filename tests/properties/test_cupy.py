"""CuPy arrays: the same functions, on the device, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Decay, Erase, EraseKey, ReadState
from linattn_np.testing import relative_error, sample_state
from tests.cases import RECURRENCES, WITHOUT_ERASE, cases_of, has_decay, in_dtype, kind_like

pytestmark = pytest.mark.gpu
CASES = [(fn, n) for fn in la.VARIANTS for n in range(len(fn.samples.options))]
IDS = [f"{fn.__name__}-{n}" for fn, n in CASES]


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def draw(fn, options, T=97, K=20, V=12, seed=0, **sizes):
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(fn, rng, T=T, K=K, V=V, **sizes)
    options = {n: x for n, x in options.items() if n != "chunk_size"}
    arrays["state"] = sample_state(fn, rng, (2,), options, K=K, V=V)
    return arrays


def to(cp, x, dtype=None):
    if isinstance(x, tuple):
        return type(x)(*(to(cp, y, dtype) for y in x))
    return cp.asarray(x if dtype is None else in_dtype(x, dtype))


def parts(result):
    return [y for x in result for y in (parts(x) if isinstance(x, tuple) else [x]) if y is not None]


def numbers(results):
    """All but counts, which are integers of 64 bits."""
    return [y for y in results if y.dtype != np.int64]


def both(cp, fn, arrays, options, dtype):
    """(out, state, gradients) on NumPy in float64 and on CuPy in dtype, on the same rounded inputs."""

    def rounded(x):
        return type(x)(*map(rounded, x)) if isinstance(x, tuple) else in_dtype(in_dtype(x, dtype), np.float64)

    arrays = {n: rounded(x) for n, x in arrays.items()}
    there = {n: to(cp, x, dtype) for n, x in arrays.items()}
    here, pull_here = la.vjp(fn, **arrays, **options, return_state=True)
    result, pull = la.vjp(fn, **there, **options, return_state=True)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(here[0].shape).astype(dtype)
    dstate = here[1]
    grads = pull(to(cp, dout), to(cp, dstate, np.float64 if dtype == np.float64 else np.float32))
    return parts(here) + parts(pull_here(dout.astype(np.float64), dstate)), parts(result) + parts(grads)


@pytest.mark.parametrize(("fn", "n"), CASES, ids=IDS)
@pytest.mark.parametrize("chunk_size", [None, 1, "parallel"])
def test_float64_is_numpys(cp, fn, n, chunk_size):
    options = {**fn.samples.options[n], "chunk_size": chunk_size}
    expected, actual = both(cp, fn, draw(fn, options, T=41), options, np.float64)
    assert all(isinstance(y, cp.ndarray) for y in actual)
    assert all(y.dtype == kind_like(y, np.float64) for y in numbers(actual))
    assert max(map(relative_error, actual, expected)) < 1e-11


@pytest.mark.parametrize(("fn", "n"), CASES, ids=IDS)
def test_float32(cp, fn, n):
    options = fn.samples.options[n]
    expected, actual = both(cp, fn, draw(fn, options), options, np.float32)
    assert all(y.dtype == kind_like(y, np.float32) for y in numbers(actual))
    most = 200 * 2.0**-23  # 50 eps, 4 for 97 tokens of sums
    if cases_of(fn)[0].learns:  # inner steps may magnify a rounding of the inputs
        nearby, _ = both(np, fn, scaled(np.random.default_rng(2), draw(fn, options)), options, np.float64)
        most = max([most, *(4 * relative_error(x, y) for x, y in zip(nearby, expected, strict=True))])
    assert max(map(relative_error, actual, expected)) < most


def scaled(rng, x):
    """Arrays whose numbers differ by at most an eps of float32."""
    if isinstance(x, dict):
        return {n: scaled(rng, y) for n, y in x.items()}
    if isinstance(x, tuple):
        return type(x)(*(scaled(rng, y) for y in x))
    return x * (1 + 2.0**-23 * rng.uniform(-1, 1, x.shape)) if x.dtype.kind == "f" else x


@pytest.mark.parametrize("fn", WITHOUT_ERASE, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("K", [257, 520])
def test_keys_wider_than_the_kernels_hold(cp, fn, K):
    arrays = draw(fn, {}, K=K)
    explained = la.explain(fn, **{n: to(cp, x, np.float32) for n, x in arrays.items()})
    assert explained.backend == "cuda"
    assert f"keys of {K} channels in {-(-K // 256)} blocks" in explained.reason
    expected, actual = both(cp, fn, arrays, {}, np.float32)
    assert max(map(relative_error, actual, expected)) < 200 * 2.0**-23


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_float16_storage(cp, fn):
    options = fn.samples.options[0]
    arrays = draw(fn, options)
    arrays.pop("state")
    there = {n: to(cp, x, np.float16) for n, x in arrays.items()}
    wide = {n: in_dtype(x, np.float32) for n, x in there.items()}
    out, state = fn(**there, **options, return_state=True)
    expected, expected_state = fn(**wide, **options, return_state=True)
    assert out.dtype == kind_like(out, np.float16)
    assert all(y.dtype == kind_like(y, np.float32) for y in numbers(parts((state,))))
    kernels = la.explain(fn, **there, **options).backend == "cuda"  # their products take 16-bit operands
    assert relative_error(out, expected) <= (4 if kernels else 1) * 2.0**-11
    solves = fn.spec.erase is Erase.DELTA  # rounded operands enter the system
    for a, b in zip(parts((state,)), parts((expected_state,)), strict=True):
        assert relative_error(a, b) <= ((2.0**-9 if solves else 2.0**-10) if kernels else 4 * 2.0**-23)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_explain(cp, fn, T, dtype):
    options = fn.samples.options[0]
    arrays = la.testing.sample(fn, np.random.default_rng(0), T=T, K=16, V=8)
    found = la.explain(fn, **{n: to(cp, x, dtype) for n, x in arrays.items()}, **options)
    assert found.backend in ("cuda", "chunks", "reference")
    assert found.operations >= 0
    assert found.bytes > 0


FORGETTING = [fn for fn in RECURRENCES if has_decay(fn) or fn.spec.erase is Erase.DELTA]  # errors do not add up


@pytest.mark.parametrize(
    "fn", [fn for fn in FORGETTING if fn.spec.query_reads is ReadState.UPDATED], ids=lambda fn: fn.__name__
)
def test_bfloat16_storage(cp, fn):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = {
        n: cp.asarray(x.astype(np.float32)).astype(ml_dtypes.bfloat16)
        for n, x in la.testing.sample(fn, np.random.default_rng(0), T=70, K=16, V=8, optional=False).items()
    }
    out, pullback = la.vjp(fn, **arrays)
    expected, wide = la.vjp(fn, **{n: x.astype(np.float32) for n, x in arrays.items()})
    assert out.dtype == ml_dtypes.bfloat16
    solves = fn.spec.erase is Erase.DELTA  # with operands of 16 bits
    factors = solves or fn.spec.decay is Decay.VECTOR  # are computed before a product, and rounded to 16 bits
    repeats = fn.spec.micro_steps or fn.spec.change.erase_key is EraseKey.OWN  # keys nearly: 8e-3 to 1e-2 was seen
    most = 2.0**-6 if solves and repeats else 2.0**-7
    assert relative_error(out.astype(np.float32), expected) <= (most if factors else 2.0**-8)
    for a, b in zip(parts(pullback(out)), parts(wide(out.astype(np.float32))), strict=True):
        assert relative_error(a.astype(np.float32), b) <= most


def test_ragged_grouped_heads_first(cp):
    fn, offsets = la.gated_delta_rule, [0, 5, 5, 70, 97]
    arrays = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=97, H=4, Hq=2, Hk=2, K=8, V=6)
    state = np.random.default_rng(1).standard_normal((4, 4, 8, 6))
    options = {"cu_seqlens": offsets, "return_state": True}
    expected = fn(**arrays, state=state, **options)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    actual = fn(**there, state=cp.asarray(state), **options)
    turned = fn(
        **{n: cp.moveaxis(x, 1, 2) for n, x in there.items()},
        state=cp.asarray(state),
        layout="heads_first",
        **{**options, "cu_seqlens": cp.asarray(offsets)},
    )
    assert max(map(relative_error, actual, expected)) < 1e-12
    assert bool((cp.moveaxis(turned[0], 1, 2) == actual[0]).all())


def test_overwritten_state_and_reading(cp):
    arrays = {n: cp.asarray(x) for n, x in la.testing.sample(la.kda, np.random.default_rng(0), T=1, K=8, V=6).items()}
    state = cp.ones((2, 2, 8, 6))
    expected = la.kda(**arrays, state=state, return_state=True)
    out, same = la.kda(**arrays, state=state, return_state=True, overwrite_state=True)
    assert same is state
    assert bool((state == expected.state).all())
    assert bool((out == expected.out).all())
    assert relative_error(la.read(arrays["q"], state, scale=8**-0.5), out) < 1e-14


def test_two_libraries_are_refused_by_name(cp):
    arrays = la.testing.sample(la.delta_rule, np.random.default_rng(0))
    with pytest.raises(TypeError, match="k is an array of numpy and q of cupy"):
        la.delta_rule(**{**arrays, "q": cp.asarray(arrays["q"])})


def test_torch_tensors_on_the_device(cp):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    arrays = la.testing.sample(la.gated_delta_rule, np.random.default_rng(0), T=70)
    there = {n: torch.asarray(x, device="cuda") for n, x in arrays.items()}
    out, pullback = la.vjp(la.gated_delta_rule, **there)
    expected, here = la.vjp(la.gated_delta_rule, **arrays)
    assert out.device.type == "cuda"
    assert relative_error(out, expected) < 1e-12
    for a, b in zip(parts(pullback(out)), parts(here(expected)), strict=True):
        assert relative_error(a, b) < 1e-11


@pytest.mark.parametrize("T", [1, 5, 150])
@pytest.mark.parametrize("offsets", [None, True], ids=["batch", "ragged"])
def test_reverse(cp, T, offsets):
    """To the bit the usual direction on flipped arrays; a second call is replayed."""
    rng = np.random.default_rng(0)
    drawn = la.testing.sample(la.gated_delta_rule, rng, B=(2,) if offsets is None else (1,), T=T, K=64, V=64)
    x = {n: cp.asarray(y.astype(np.float32)) for n, y in drawn.items()}
    turned = {n: cp.ascontiguousarray(cp.flip(y, 1)) for n, y in x.items()}
    S = cp.asarray(rng.standard_normal((2, 2, 64, 64)).astype(np.float32))
    own, usual = ({}, {}) if offsets is None else (
        {"cu_seqlens": [0, T // 3, T]}, {"cu_seqlens": [0, T - T // 3, T]})  # fmt: skip
    begin = S if offsets is None else cp.ascontiguousarray(S[::-1])
    expected, pull = la.vjp(la.gated_delta_rule, **turned, state=begin, return_state=True, **usual)
    for _ in range(2):
        (out, end), pulled = la.vjp(la.gated_delta_rule, **x, state=S, return_state=True, reverse=True, **own)
        assert (out == cp.flip(expected[0], 1)).all()
        assert (end == (expected[1] if offsets is None else expected[1][::-1])).all()
        assert (la.gated_delta_rule(**x, state=S, reverse=True, **own) == out).all()
        found, wanted = pulled(out), pull(cp.ascontiguousarray(cp.flip(out, 1)))
        assert (found.k == cp.flip(wanted.k, 1)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if "l2norm_eps" in fn.spec.options], ids=lambda f: f.__name__)
def test_raw_projections_as_published(cp, fn, T, dtype):
    """An eps in the norm, the sigmoid of beta, a gate with a lower bound: forward and gradients against float64."""
    from tests.call.test_raw_formulas import raw

    x, options = raw(fn, T=T)
    arrays = {**x, "state": np.random.default_rng(1).standard_normal((2, 2, 5, 3))}
    expected, actual = both(cp, fn, arrays, options, dtype)
    for e, a in zip(expected, actual, strict=True):
        assert relative_error(a, e) <= (1e-10 if dtype == np.float64 else 2e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["based", "rebased"])
def test_polynomial_maps_take_the_memory_that_explain_names(cp, name, dtype):
    """8256 features of all tokens would take 2 GiB in float32; errors are as the dtype's rounding."""
    rng, fn = np.random.default_rng(0), getattr(la, name)
    host = [rng.standard_normal((2, 2048, 8, 128)).astype(dtype) for _ in range(3)]
    given = [cp.asarray(x) for x in host]
    pool = cp.get_default_memory_pool()
    for options in ({}, {"chunk_size": 64}):
        assert "at most 256 MiB" in la.explain(fn, *given, **options).reason
        pool.free_all_blocks()
        before = pool.total_bytes()
        out, pullback = la.vjp(fn, *given, **options)
        grads = pullback(out)[:3]
        few = 8 * sum(x.nbytes for x in given) * (4 // np.dtype(dtype).itemsize)
        assert pool.total_bytes() - before <= (256 << 20) + few
        one = [x[:1, :256, :1].astype(np.float64) for x in host]
        expected = fn(*one, backend="chunks")
        assert relative_error(cp.asnumpy(out[:1, :256, :1]), expected) <= 64 * float(np.finfo(dtype).eps)
        assert all(cp.isfinite(d).all() for d in grads)
