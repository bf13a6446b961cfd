"""The CUDA step on a GPU, every variant and layout, against the definition in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import binding
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state.cuda.token import calls as cuda_step
from linattn_np.matrix_state.types import Inputs
from tests.cases import RECURRENCES, has_decay, in_dtype, one_per
from tests.core_cases import CELLS, case
from tests.matrix_state.cuda.device_arrays import error, same, typed

pytestmark = pytest.mark.gpu
BOUND = {"bfloat16": 4e-3, "float16": 8e-4, "float32": 2e-6}  # of the norm of the output; states and float32: the last
VARIANTS = [fn for fn in RECURRENCES if not fn.spec.micro_steps]


def compare(cp, cell, dtype, gates="float32", q=True, **sizes):
    """Inputs rounded to dtype (gates to `gates`), one sequence's reset in the middle, a state on the way in."""
    import array_api_compat.cupy as xp

    x, plan, state, *_ = case(*cell, C=None, **{"T": 5, "K": 32, "V": 16} | sizes)
    kinds = {n: typed(gates if n in ("g", "gv", "beta", "u") else dtype) for n in x._fields}
    narrow = Inputs(**{n: None if y is None else y.astype(kinds[n]) for n, y in x._asdict().items()})
    if narrow.g is not None and cell[0] != "constant" and narrow.v.shape[-3] > 2:
        narrow.g[..., 2, :, :] = -np.inf
    wide = Inputs(*(None if y is None else y.astype(np.float64) for y in narrow))
    state = state.astype(np.float32)
    if not q:
        narrow, wide = narrow._replace(q=None), wide._replace(q=None)
    expected, end, _ = recurrence.forward(wide, plan, state.astype(np.float64))
    there = Inputs(*(None if y is None else cp.asarray(y) for y in narrow))
    if cell[0] == "constant":
        there = there._replace(g=cp.broadcast_to(cp.asarray(narrow.g[:1]), narrow.g.shape))
    plan = plan._replace(xp=xp, dtype=np.float32)
    out, end2, _ = cuda_step.forward(there, plan, cp.asarray(state))
    found = {"state": error(end2, end) / BOUND["float32"]}
    if q:
        assert out.dtype == typed(dtype)
        found["out"] = error(out, expected) / BOUND[dtype]
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("T", [5, 1])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell(cp, cell, dtype, T):
    compare(cp, cell, dtype, gates="float32" if dtype != "float16" else "float16", T=T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("K", "V"),
    [(1, 1), (7, 60), (60, 7), (64, 100), (100, 64), (128, 129), (129, 128), (256, 256), (255, 3), (192, 64)],
)
def test_widths(cp, K, V, dtype):
    compare(cp, ("vector", "free", "after"), dtype, K=K, V=V)
    compare(cp, ("scalar", "delta", "after"), dtype, K=K, V=V)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("K", "V"), [(4, 4), (20, 36), (36, 72), (64, 64), (100, 64), (128, 128), (128, 132), (200, 72), (256, 256)]
)
def test_widths_of_one_token(cp, K, V, dtype):
    gates = "float32" if dtype == "float32" else "bfloat16"
    compare(cp, ("vector", "free", "after"), dtype, gates, K=K, V=V, T=1)
    compare(cp, ("vector", "none", "bonus"), dtype, gates, K=K, V=V, T=1)
    compare(cp, ("outer", "delta", "after"), dtype, gates, K=K, V=V, T=1)


@pytest.mark.parametrize("T", [5, 1])
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
def test_grouped_heads(cp, heads, T):
    compare(cp, ("scalar", "delta", "after"), "bfloat16", heads=heads, T=T)
    if heads[0] <= heads[2]:
        compare(cp, ("vector", "none", "bonus"), "bfloat16", heads=heads, T=T)


def test_ragged_and_without_queries(cp):
    compare(cp, ("vector", "delta", "after"), "bfloat16", B=1, T=30, offsets=[0, 5, 5, 7, 23, 30])
    compare(cp, ("vector", "delta", "after"), "bfloat16", q=False)
    compare(cp, ("vector", "delta", "after"), "bfloat16", q=False, T=1)
    compare(cp, ("scalar", "free", "after"), "float32", T=200)  # as chunk_size=1 asks


def call_of(cp, fn, T, B=3, H=4, K=32, V=16, dtype="bfloat16", seed=0):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(B,), T=T, H=H, K=K, V=V, optional=False)
    kinds = {n: np.float32 if n in ("g", "beta", "u") else typed(dtype) for n in drawn}
    state = np.random.default_rng(seed + 1).standard_normal((B, H, K, V)).astype(np.float32)
    return {n: cp.asarray(x.astype(kinds[n])) for n, x in drawn.items()}, cp.asarray(state)


@pytest.mark.parametrize(("K", "V"), [(32, 16), (128, 128), (200, 72)])
@pytest.mark.parametrize("fn", VARIANTS, ids=lambda f: f.__name__)
def test_same_bits(cp, fn, K, V):
    """On every run, alone and in a batch, token by token and at once, in place and apart, with rows of a pool."""
    arrays, state = call_of(cp, fn, 16, K=K, V=V)
    on_tokens = [n for n in arrays if n != "u"]
    part = lambda b, t: {n: x[b, t] if n in on_tokens else x for n, x in arrays.items()}  # noqa: E731
    out, end = fn(**arrays, state=state, return_state=True)
    assert la.explain(fn, **arrays, state=state).backend == "cuda"
    for _ in range(9):
        out2, end2 = fn(**arrays, state=state, return_state=True)
        assert same(out, out2)
        assert same(end, end2)
    alone, alone_end = fn(**part(slice(1, 2), slice(None)), state=state[1:2], return_state=True)
    assert same(alone, out[1:2])
    assert same(alone_end, end[1:2])
    running, outs = state.copy(), []
    for t in range(16):
        o, s = fn(**part(slice(None), slice(t, t + 1)), state=running, return_state=True, overwrite_state=True)
        assert s is running
        outs.append(o)
    assert same(cp.concatenate(outs, axis=1), out)
    assert same(running, end)
    for kind in (np.int32, np.int64):
        pool = cp.full((7, *state.shape[1:]), 3, np.float32)
        rows = cp.asarray([5, 0, 2], dtype=kind)
        pool[rows] = state
        for _ in range(2):  # the second is replayed
            apart = fn(**arrays, state=pool, state_rows=rows, return_state=True)
            assert same(apart.out, out)
            assert same(apart.state, end)
        assert same(pool[rows], state)
        here = fn(**arrays, state=pool, state_rows=rows, return_state=True, overwrite_state=True)
        assert here.state is pool
        assert same(here.out, out)
        assert same(pool[rows], end)
        assert bool((pool[cp.asarray([1, 3, 4, 6])] == 3).all())


def test_a_row_outside_the_pool_is_zeros_and_is_not_written(cp):
    arrays, state = call_of(cp, la.simple_gla, 1)
    pool = cp.full((4, *state.shape[1:]), 3, np.float32)
    out = la.simple_gla(**arrays, state=pool, state_rows=cp.asarray([1, -1, 4]), overwrite_state=True)
    expected = la.simple_gla(**arrays)
    assert same(out[1:], expected[1:])
    assert bool((pool[cp.asarray([0, 2, 3])] == 3).all())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 40, 200])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_sequences_of_a_pool_that_begin_without_a_state(cp, fn, T, kind):
    """Row -1 more often than the pool has rows, stale rows of NaN, without the host reading either; and again.

    Calls of one token with plain states compute their variables in one kernel, which rounds in its own order; of
    features that are more than the channels of q and k the terms cancel.
    """
    rng, P = np.random.default_rng(0), 3
    drawn = la.testing.sample(fn, rng, B=(5,), T=T, H=2, K=16, V=16, optional=False)
    arrays = {n: cp.asarray(in_dtype(x, np.float32)) for n, x in drawn.items()}
    start = la.testing.sample_state(fn, rng, (P,), {}, H=2, K=16, V=16)
    named = binding.flatten("state", start)
    factor = 0 if T > 1 else 16 if max([S.shape[-2] for S in named.values() if S.ndim == 4], default=0) > 16 else 1
    agrees = lambda x, y: same(x, y) or error(x, y.get()) <= factor * BOUND[str(x.dtype)]  # noqa: E731
    wide = {n: cp.asarray(in_dtype(S, np.float32)) for n, S in named.items()}
    for n, S in wide.items():
        S[:2] = 12345 if S.dtype.kind == "i" else np.nan  # of tokens; numbers
        if n in ("state", "state.S") and kind != "float32" and S.dtype.kind == "f":
            wide[n] = S.astype(typed(kind))
    hows = [([2, -1, 0, -1, -1], [False, False, True, False, True]), ([-1] * 5, [False] * 5),
            ([-1, 2, -1, -1, 1], [True, True, False, False, True])]  # fmt: skip
    for rows, fresh in hows * 2:
        begins = np.array(fresh) | (np.array(rows) < 0)
        plain, pools = {}, {n: S.copy() for n, S in wide.items()}
        for n, S in wide.items():
            plain[n] = S[cp.asarray(np.maximum(rows, 0))]
            first = np.eye(S.shape[-1]) if n.removeprefix("state.") in fn.spec.state.unit else 0
            plain[n][cp.asarray(begins)] = cp.asarray(first, np.float32)
        state, pool = (binding.unflatten(start, list(parts.values())) for parts in (plain, pools))
        expected = fn(**arrays, state=state, return_state=True, overwrite_state=True)
        out = fn(**arrays, state=pool, state_rows=cp.asarray(rows), fresh=cp.asarray(fresh), overwrite_state=True)
        assert agrees(out, expected.out)
        owned = [n for n in range(5) if rows[n] >= 0]
        others = [n for n in range(P) if n not in rows]
        for x, end, before in zip(
            pools.values(), binding.flatten("state", expected.state).values(), wide.values(), strict=True
        ):
            for n in owned:
                assert agrees(x[rows[n]], end[n])
            for n in others:
                assert bool(cp.array_equal(in_dtype(x[n], np.float32), in_dtype(before[n], np.float32), equal_nan=True))


@pytest.mark.parametrize(
    ("B", "K", "V", "kind"),
    [
        (3, 128, 128, "bfloat16"),
        (3, 200, 72, "float16"),
        (3, 36, 20, "bfloat16"),
        (3, 7, 5, "float16"),
        (64, 128, 128, "float16"),
        (65, 100, 132, "bfloat16"),
    ],
)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("fn", VARIANTS, ids=lambda f: f.__name__)
def test_states_in_16_bits(cp, fn, T, B, K, V, kind):
    """The bits of a float32 state of the same numbers; overwritten, in rows of a pool too, they are rounded once."""
    arrays, state = call_of(cp, fn, T, B, K=K, V=V)
    narrow = state.astype(typed(kind))
    out, end = fn(**arrays, state=narrow.astype(np.float32), return_state=True)
    rounded = end.astype(typed(kind))
    places = np.random.default_rng(2).permutation(B + 4)
    rows, others = cp.asarray(places[:B]), cp.asarray(places[B:])
    for _ in range(3):  # the later ones are replayed
        apart = fn(**arrays, state=narrow, return_state=True)
        assert same(apart.out, out)
        assert same(apart.state, end)
        mine = narrow.copy()
        here = fn(**arrays, state=mine, return_state=True, overwrite_state=True)
        assert here.state is mine
        assert same(here.out, out)
        assert same(mine, rounded)
        bits = cp.full((B + 4, *state.shape[1:]), 3, np.uint16)
        bits[rows] = narrow.view(np.uint16)
        pool = bits.view(typed(kind))
        assert same(fn(**arrays, state=pool, state_rows=rows, overwrite_state=True), out)
        assert same(bits[rows], rounded.view(np.uint16))
        assert bool((bits[others] == 3).all())
    assert la.explain(fn, **arrays, state=narrow).backend == "cuda"
    if (T, K) == (1, 36):
        _, pull = la.vjp(fn, **arrays, state=narrow, return_state=True)
        assert pull(out, end).state.dtype == typed(kind)
        long, _ = call_of(cp, fn, 40, K=K, V=V)  # by the kernels of chunks, and with rows taken out of the pool
        expected, last = fn(**long, state=narrow.astype(np.float32), return_state=True)
        bits[rows] = narrow.view(np.uint16)
        assert same(fn(**long, state=pool, state_rows=rows, overwrite_state=True), expected)
        assert same(bits[rows], last.astype(typed(kind)).view(np.uint16))


@pytest.mark.parametrize("T", [2, 1])
def test_views_are_read_in_place(cp, T):
    arrays, state = call_of(cp, la.kda, T)
    plain = la.kda(**arrays, state=state, return_state=True)
    turned = {n: cp.ascontiguousarray(cp.moveaxis(x, 1, 2)) for n, x in arrays.items()}
    for _ in range(2):
        out, end = la.kda(**turned, state=state, return_state=True, layout="heads_first")
        assert same(cp.moveaxis(out, 1, 2), plain.out)
        assert same(end, plain.state)
    buffer = cp.zeros((3, 8, 32, 24), np.float32)
    view = buffer[:, ::2, :, 4:20]
    view[...] = state
    out, end = la.kda(**arrays, state=view, return_state=True, overwrite_state=True)
    assert end is view
    assert same(out, plain.out)
    assert same(view, plain.state)
    assert bool((buffer[:, 1::2] == 0).all())
    fused = cp.concatenate([arrays["q"], arrays["k"], arrays["v"]], axis=-1)
    q, k, v = cp.split(fused, [32, 64], axis=-1)
    for _ in range(2):
        assert same(la.kda(q, k, v, arrays["g"], arrays["beta"], state=state), plain.out)


@pytest.mark.parametrize("fn", one_per(lambda spec: spec.erase, filter(has_decay, VARIANTS)), ids=lambda f: f.__name__)
def test_inside_a_graph(cp, fn):
    """Captured once, replayed ten times: as ten calls."""
    arrays, state = call_of(cp, fn, 1)
    running = state.copy()
    for _ in range(3):  # compiles, loads, keeps
        fn(**arrays, state=running, overwrite_state=True)
    running[...] = state
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        out = fn(**arrays, state=running, overwrite_state=True)
        graph = stream.end_capture()
        for _ in range(10):
            graph.launch(stream)
        stream.synchronize()
    mine = state.copy()
    for _ in range(10):
        expected = fn(**arrays, state=mine, overwrite_state=True)
    assert same(out, expected)
    assert same(running, mine)


@pytest.mark.parametrize("T", [1, 5, 16])
@pytest.mark.parametrize("fn", VARIANTS, ids=lambda f: f.__name__)
def test_gradients(cp, fn, T):
    drawn = la.testing.sample(fn, np.random.default_rng(0), B=(2,), T=T, H=2, K=16, V=8, optional=False)
    drawn = {n: x.astype(np.float32) for n, x in drawn.items()}
    state = np.random.default_rng(1).standard_normal((2, 2, 16, 8)).astype(np.float32)
    wide = {n: x.astype(np.float64) for n, x in drawn.items()}
    (out, end), pull = la.vjp(fn, **wide, state=state.astype(np.float64), return_state=True)
    there = {n: cp.asarray(x) for n, x in drawn.items()}
    (out2, end2), pull2 = la.vjp(fn, **there, state=cp.asarray(state), return_state=True)
    assert la.explain(fn, **there, state=cp.asarray(state)).backend == "cuda"
    expected, actual = pull(out, end), pull2(cp.asarray(out.astype(np.float32)), cp.asarray(end.astype(np.float32)))
    assert error(out2, out) <= BOUND["float32"]
    assert error(end2, end) <= BOUND["float32"]
    for name, d in expected._asdict().items():
        if d is not None:
            assert error(getattr(actual, name), d) <= 2e-5, name
