"""CUDA kernels of the softmax core against NumPy in float64, on the same rounded inputs; new memory is full of NaN."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state.types import Readout
from linattn_np.runtime.cuda import launch
from linattn_np.softmax.core import CORE
from linattn_np.softmax.cuda import calls

# what the kernels compute: attention without directions of position maps, whose logits are all of one kind
FUNCTIONS = [
    fn
    for fn in la.VARIANTS
    if fn.spec.core is CORE
    and fn.spec.readout is Readout.SOFTMAX
    and not {"w", "beta"} & fn.spec.arrays.keys()
    and "attend_current" not in fn.spec.options
]
BY_TOKEN = [fn for fn in FUNCTIONS if all(x.axes.startswith("T") or x.optional for x in fn.spec.arrays.values())]
BOUND = {"bfloat16": 1.2e-2, "float16": 2e-3}  # of the norm; a gradient that cancels is compared with its terms


@pytest.fixture
def cp(monkeypatch):
    """CuPy on compute capability 90, with every new buffer full of NaN."""
    cupy = pytest.importorskip("cupy")
    if launch.capability() != 90:
        pytest.skip("needs compute capability 90")

    def poisoned(size):
        memory = cupy.cuda.Memory(size)
        if size:
            cupy.cuda.runtime.memset(memory.ptr, 0xFF, size)
        return cupy.cuda.MemoryPointer(memory, 0)

    replay.clear()
    with cupy.cuda.using_allocator(poisoned):
        yield cupy
    replay.clear()


GATES = {
    "none": lambda rng, shape: np.zeros(shape),
    "mild": lambda rng, shape: -0.3 * rng.random(shape),
    "fading": lambda rng, shape: np.full(shape, -0.5),
    "strong": lambda rng, shape: -50 * rng.random(shape),
    "fifty": lambda rng, shape: np.full(shape, -50.0),
    "resets": lambda rng, shape: np.full(shape, -np.inf),
    "mixed": lambda rng, shape: np.choose(
        rng.integers(0, 8, shape), [-np.inf, -50.0, 0.0, *(-rng.random(shape) * 10.0**-n for n in range(5))]),
}  # fmt: skip


def draw(fn, T, *, dtype="bfloat16", B=2, heads=(2, 2, 2), widths=(128, 128), gates="mixed", keys=None, sinks=False):
    """(arrays by name, cotangent of the output)."""
    rng, (Hq, Hk, H), (K, V) = np.random.default_rng(T), heads, widths
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    shapes = {"q": (B, T, Hq, K), "k": (B, keys or T, Hk, K), "v": (B, keys or T, H, V)}
    arrays = {n: rng.standard_normal(shape).astype(kind) for n, shape in shapes.items()}
    if "g" in fn.spec.arrays:
        arrays["g"] = GATES[gates](rng, (B, T, Hq)).astype(np.float32)
    if "slopes" in fn.spec.arrays:
        arrays["slopes"] = rng.random(Hq).astype(np.float32)
    if sinks:
        arrays["sinks"] = rng.standard_normal(Hq).astype(np.float32)
    return arrays, rng.standard_normal((B, T, max(heads), V)).astype(kind)


def both(fn, arrays, dout, **options):
    """The output and every gradient, by name."""
    out, pullback = la.vjp(fn, **arrays, **options)
    return {"out": out} | {f"d{n}": d for n, d in pullback(dout)._asdict().items() if d is not None}


def check(cp, fn, T, options=None, **drawn):
    arrays, dout = draw(fn, T, **drawn)
    options = options or {}
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    exact = both(fn, wide, dout.astype(np.float64), backend="reference" if T < 70 else None, **options)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    found = both(fn, there, cp.asarray(dout), backend="cuda", **options)
    size = np.sqrt(np.mean(np.square(exact["dv"])))
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        least = 0 if n in ("out", "dv") else 0.1 * size * np.sqrt(x.size)  # dz = p (dp - dot) may cancel to nothing
        assert np.linalg.norm(y - x) <= BOUND[drawn.get("dtype", "bfloat16")] * max(np.linalg.norm(x), least), n


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_lengths(cp, fn, T):
    check(cp, fn, T)


@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (128, 64), (40, 72), (60, 100), (7, 13)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widths(cp, dtype, widths):
    check(cp, la.softmax_attention, 200, dtype=dtype, widths=widths)
    check(cp, la.forgetting_attention, 200, dtype=dtype, widths=widths)


@pytest.mark.parametrize("gates", list(GATES))
@pytest.mark.parametrize("window", [None, 150])
def test_gates(cp, gates, window):
    check(cp, la.forgetting_attention, 520, {"window": window}, gates=gates)


def test_gates_over_many_blocks(cp):
    """The sums of tiles of queries and blocks of keys on both sides of a gate."""
    check(cp, la.forgetting_attention, 2100, B=1, heads=(1, 1, 1))
    check(cp, la.forgetting_attention, 17000, B=1, heads=(1, 1, 1), widths=(64, 64), gates="mild")


@pytest.mark.parametrize(
    "options", [{}, {"window": 700}, {"normalize": False}, {"cu_seqlens": [0, 40, 40, 900, 1500]}], ids=str
)
@pytest.mark.parametrize("gates", ["none", "mild", "fading", "strong", "mixed", "resets"])
def test_blocks_without_weights_are_skipped(cp, monkeypatch, gates, options):
    """No bit changes; without decays nothing is skipped."""
    arrays, dout = draw(la.forgetting_attention, 1500, B=1, heads=(4, 2, 2), widths=(64, 128), gates=gates)
    there, dout, attend, ends = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), calls.attend, []

    def watched(name, *args, **arrays):
        attend(name, *args, **arrays)
        ends.extend([arrays["ends"].copy()] if "ends" in arrays else [])

    monkeypatch.setattr(calls, "attend", watched)
    found = both(la.forgetting_attention, there, dout, backend="cuda", **options)
    monkeypatch.setattr(calls, "norms", lambda plan, batch, *_: cp.full((batch.heads, batch.slots), cp.inf, cp.float32))
    replay.clear()
    exact = both(la.forgetting_attention, there, dout, backend="cuda", **options)
    assert all(same(cp, x, found[n]) for n, x in exact.items())
    some, every = (x.ravel() for x in ends)
    if "cu_seqlens" not in options:  # else slots are left over
        assert bool((some < every).any()) == (gates != "none")
        assert bool((every == 12).all())


@pytest.mark.parametrize("g", [-0.5, -3.0])
def test_far_keys_may_outweigh_their_decay(cp, g):
    """A decay alone does not say that keys have no weight."""
    arrays, dout = draw(la.forgetting_attention, 900, B=1)
    arrays["q"][:] = 1
    arrays["k"][:, :100] = 80 if g > -1 else 400
    arrays["g"][:] = g
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    exact = both(la.forgetting_attention, wide, dout.astype(np.float64))
    assert np.linalg.norm(exact["dv"][:, :100]) > 0.9 * np.linalg.norm(exact["dv"])
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    found = both(la.forgetting_attention, there, cp.asarray(dout), backend="cuda")
    for n in ("out", "dv"):
        error = np.linalg.norm(cp.asnumpy(found[n]).astype(np.float64) - exact[n])
        assert error <= BOUND["bfloat16"] * np.linalg.norm(exact[n]), n


def test_gates_above_zero(cp):
    """They are not meant, but what they give is right: nothing is skipped behind them."""
    arrays, _ = draw(la.forgetting_attention, 700, B=1)
    arrays["g"][:] = np.where(np.arange(700) < 60, -10, np.where(np.arange(700) < 128, 9, -1))[:, None]
    exact = la.forgetting_attention(**{n: x.astype(np.float64) for n, x in arrays.items()})
    found = la.forgetting_attention(**{n: cp.asarray(x) for n, x in arrays.items()}, backend="cuda")
    assert np.linalg.norm(cp.asnumpy(found).astype(np.float64) - exact) <= 1.2e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 4), (4, 2, 4), (6, 1, 1)])
def test_grouped_heads(cp, heads):
    for fn in FUNCTIONS:
        check(cp, fn, 300, heads=heads)


@pytest.mark.parametrize("window", [1, 2, 70, 128, 300])
def test_windows(cp, window):
    check(cp, la.softmax_attention, 500, {"window": window})
    check(cp, la.alibi, 500, {"window": window})


@pytest.mark.parametrize("keys", [1, 100, 200, 333])
def test_all_keys(cp, keys):
    check(cp, la.softmax_attention, 200, {"causal": False}, keys=keys)


def test_sinks_scale_and_numerators(cp):
    check(cp, la.softmax_attention, 300, sinks=True)
    check(cp, la.softmax_attention, 300, {"window": 50}, sinks=True, heads=(4, 2, 2))
    check(cp, la.softmax_attention, 200, {"normalize": False, "scale": 0.05}, sinks=True)
    check(cp, la.forgetting_attention, 200, {"normalize": False})


@pytest.mark.parametrize("options", [{}, {"normalize": False}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_repeated_gradients_of_sinks_are_launches(cp, dtype, options):
    """Of strided sinks too; the bits are those of the first call."""
    arrays, dout = draw(la.softmax_attention, 300, dtype=dtype, heads=(4, 2, 2), sinks=True)
    there, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    first = both(la.softmax_attention, there, dout, **options)
    there["sinks"] = cp.repeat(there["sinks"], 2)[::2]
    for _ in range(3):
        found = both(la.softmax_attention, there, dout, **options)
        assert all(same(cp, x, found[n]) for n, x in first.items())
    assert any(getattr(plan, "replayable", False) for plan in replay.by_key.values())


def same(cp, a, b):
    a, b = (cp.ascontiguousarray(x).view(np.uint8) for x in (a, b))
    return a.shape == b.shape and bool((a == b).all())


def output(fn, arrays, dout, **options):
    """The output of a plain call, by name."""
    return {"out": fn(**arrays, **options)}


def check_same_bits(cp, fn, arrays, dout, offsets, results=both):
    """Alone, in a batch, in a ragged batch, on every run; NaN of the fourth sequence reach no other one."""
    first, stop_bad = offsets[3], offsets[4]
    arrays, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    packed, again = (results(fn, arrays, dout, backend="cuda", cu_seqlens=offsets) for _ in range(2))
    bad = {n: x.copy() for n, x in arrays.items()} | {"dout": dout.copy()}
    for n in bad.keys() & {"q", "k", "v", "w", "beta", "dout"}:
        bad[n][:, first:stop_bad] = np.nan
    beside = results(fn, {n: bad[n] for n in arrays}, bad["dout"], backend="cuda", cu_seqlens=offsets)
    for n, x in packed.items():
        assert same(cp, x, again[n]), n
        assert same(cp, x[:, :first], beside[n][:, :first]), n
        assert same(cp, x[:, stop_bad:], beside[n][:, stop_bad:]), n
    for start, stop in pairwise(offsets):
        if start == stop:
            continue
        one = {n: cp.ascontiguousarray(x[:, start:stop]) for n, x in (arrays | {"dout": dout}).items()}
        two = {n: cp.concatenate([x, x]) for n, x in one.items()}
        alone, batch = (results(fn, {n: y[n] for n in arrays}, y["dout"], backend="cuda") for y in (one, two))
        for n, x in alone.items():
            assert same(cp, x, packed[n][:, start:stop]), (n, start)
            assert same(cp, x, batch[n][1:]), (n, start)


def check_causality(cp, fn, arrays, other, at):
    """Other tokens from `at` on change later outputs only."""
    later = {n: np.concatenate([x[:, :at], other[n][:, at : x.shape[1]]], axis=1) for n, x in arrays.items()}
    a, b = (fn(**{n: cp.asarray(x) for n, x in one.items()}, backend="cuda") for one in (arrays, later))
    assert same(cp, a[:, :at], b[:, :at])
    assert not same(cp, a, b)


@pytest.mark.parametrize("fn", BY_TOKEN)
def test_same_bits(cp, fn):
    check_same_bits(cp, fn, *draw(fn, 700, B=1, heads=(4, 2, 2)), [0, 130, 130, 133, 420, 700])


def test_same_bits_of_many_blocks(cp):
    """Blocks of keys add to dq in one order, however many run at once and whoever is late."""
    arrays, dout = draw(la.forgetting_attention, 1500, B=4, heads=(8, 8, 8))
    arrays, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    first = both(la.forgetting_attention, arrays, dout, backend="cuda")
    one = {n: cp.ascontiguousarray(x[2:3, :, 5:6]) for n, x in (arrays | {"dout": dout}).items()}
    alone = both(la.forgetting_attention, {n: one[n] for n in arrays}, one["dout"], backend="cuda")
    for _ in range(3):
        found = both(la.forgetting_attention, arrays, dout, backend="cuda")
        assert all(same(cp, x, found[n]) for n, x in first.items())
    for n, x in alone.items():
        assert same(cp, x, first[n][2:3, :, 5:6]), n


@pytest.mark.parametrize("fn", BY_TOKEN)
def test_causality_to_the_bit(cp, fn):
    check_causality(cp, fn, draw(fn, 700, B=1)[0], draw(fn, 701, B=1)[0], 333)


@pytest.mark.parametrize("decay", [-50.0, -np.inf, np.nan])
def test_causality_of_gates_in_a_block(cp, decay):
    """Strong gates later in a block of 128 queries change no bit of earlier ones."""
    fn, other = la.forgetting_attention, {}
    arrays, _ = draw(fn, 300, B=1, gates="mild")
    for n, x in arrays.items():
        other[n] = x.copy()
    other["g"][:, 200:] = decay
    a, b = (fn(**{n: cp.asarray(x) for n, x in one.items()}, backend="cuda") for one in (arrays, other))
    assert same(cp, a[:, :200], b[:, :200])
    assert not same(cp, a, b)


def test_replay(cp):
    """The second call and its pullback are recorded launches, with the same bits."""
    from linattn_np.call import dispatch, vjp

    arrays, dout = draw(la.forgetting_attention, 200)
    there, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    first = both(la.forgetting_attention, there, dout)
    other = {n: x.copy() for n, x in there.items()}
    with pytest.MonkeyPatch.context() as nothing_planned:
        nothing_planned.setattr(dispatch, "prepare", None)
        nothing_planned.setattr(vjp, "prepare", None)
        found = both(la.forgetting_attention, other, dout.copy())
    assert all(same(cp, x, found[n]) for n, x in first.items())


def test_what_is_computed_by_array_calls(cp):
    """explain says why; the default falls back."""
    arrays, _ = draw(la.softmax_attention, 40)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    assert la.explain(la.softmax_attention, **there).backend == "cuda"
    _, cache = la.softmax_attention(**there, return_state=True)
    assert la.explain(la.softmax_attention, **there, state=cache).backend == "cuda"
    explained = la.explain(la.softmax_attention, **there, chunk_size=64)
    assert explained.backend == "chunks"
    assert "choose their own tiles" in explained.others["cuda"]
    bias = cp.zeros((2, 40, 2, 40), np.float32)
    assert la.explain(la.softmax_attention, **there, bias=bias).backend == "chunks"
    wide = {n: x.astype(np.float64) for n, x in there.items()}
    assert "float64" in la.explain(la.softmax_attention, **wide).others["cuda"]
