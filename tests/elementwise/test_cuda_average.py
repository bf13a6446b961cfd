"""The kernel of averages in log space, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.elementwise.test_cuda import scans  # noqa: F401

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
State = type(la.rwkv4(np.ones((1, 1)), np.ones((1, 1)), np.ones(1), np.ones(1), return_state=True).state)


def drawn(dtype=FLOAT32, T=70, D=40, B=(2,), sequences=None, keys=None, seed=0):
    """(arrays by name, state): tokens in `dtype`, keys in `keys`, parameters in float32 or wider."""
    rng, wide = np.random.default_rng(seed), FLOAT64 if dtype == FLOAT64 else FLOAT32
    arrays = la.testing.sample(la.rwkv4, rng, B=B, T=T, V=D)
    shape = (*(B if sequences is None else (sequences,)), D)
    state = State(rng.standard_normal(shape), rng.uniform(0.1, 1, shape), rng.standard_normal(shape))
    own = {n: x.astype(dtype if x.ndim > 1 else wide) for n, x in arrays.items()}
    own["k"] = own["k"].astype(keys or dtype)
    return own, State(*(x.astype(wide) for x in state))


def called(arrays, state, bring=np.asarray, see=np.asarray, rounded=None, without=(), **options):
    """[out, S, n, m, gradients]; rounded: the dtype that the cotangent of out is rounded to."""
    given = {n: bring(x) for n, x in arrays.items()}
    given |= {} if state is None else {"state": State(*map(bring, state))}
    (out, end), pull = la.vjp(la.rwkv4, **given, return_state=True, **options)
    out, end, rng = see(out), [see(x) for x in end], np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(rounded or out.dtype).astype(out.dtype)
    dend = [rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for x in end]
    grads = pull(None if "dout" in without else bring(dout), None if "dend" in without else State(*map(bring, dend)))
    return [out, *end, *(see(d) for d in grads[:4]), *(() if state is None else map(see, grads.state))]


def widened(arrays, state):
    return {n: x.astype(float) for n, x in arrays.items()}, state and State(*(x.astype(float) for x in state))


def compare(device, arrays, state, **options):  # noqa: F811
    """Results and gradients against the definition, and the same bits again; one kernel a pass has done it."""
    found, again = (called(arrays, state, device.bring, device.see, **options) for _ in range(2))
    exact = called(*widened(arrays, state), backend="reference", rounded=found[0].dtype, **options)
    for y, same, e in zip(found, again, exact, strict=True):
        assert y.tobytes() == same.tobytes()
        eps = float(ml_dtypes.finfo(y.dtype).eps)
        few = 0.6 * eps if y.dtype.itemsize == 2 else 512 * eps
        assert y.shape == e.shape
        assert np.linalg.norm(y.astype(e.dtype) - e) <= few * np.linalg.norm(e)
    if device.launched is not None:
        files = [(file, entry) for file, entry, *_ in device.launched if entry != "clear" and file != "ops/sums.cu"]
        assert files == [("elementwise/average.cu", "average")] * 4
    return found


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32, FLOAT64], ids=str)
def test_it_is_the_definition_in_every_dtype(scans, dtype):  # noqa: F811
    """Several tiles, and a last one that is not whole; some channels behind a block's."""
    compare(scans, *drawn(dtype, 150, 70))


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 64), (2, 0, 7), (2, 20, 40), (2, 2, 65, 33)], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_one_tile_as_short_as_it_may_be(scans, dtype, shape):  # noqa: F811
    *B, T, D = shape
    compare(scans, *drawn(dtype, T, D, B=tuple(B)))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT64], ids=str)
def test_groups_of_tiles_are_linked(scans, dtype):  # noqa: F811
    """More than two groups, and a last one that is not whole."""
    compare(scans, *drawn(dtype, 2203 if dtype == BFLOAT16 else 1203, 5, B=(1,)))


@pytest.mark.parametrize("without", ["state", "dout", "dend"])
def test_without(scans, without):  # noqa: F811
    arrays, state = drawn(FLOAT32, 150, 33)
    compare(scans, arrays, None if without == "state" else state, without=(without,))


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_a_scale(scans, scale):  # noqa: F811
    compare(scans, *drawn(FLOAT32, 150, 33), scale=scale)


@pytest.mark.parametrize(("keys", "dtype"), [(FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, FLOAT16)], ids=str)
def test_keys_and_values_of_two_dtypes(scans, keys, dtype):  # noqa: F811
    """Gradients of wide keys beside narrow values are as exact as exponentials are there."""
    arrays, state = drawn(dtype, 150, 33, keys=keys)
    found = called(arrays, state, scans.bring, scans.see)
    exact = called(*widened(arrays, state), backend="reference", rounded=found[0].dtype)
    for y, e in zip(found, exact, strict=True):
        eps = float(ml_dtypes.finfo(y.dtype).eps)
        assert np.linalg.norm(y.astype(float) - e) <= (0.6 * eps if y.dtype.itemsize == 2 else 3e-5) * np.linalg.norm(e)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("offsets", [[0, 0, 1, 18, 130, 131, 131, 300], [0, 600, 601, 640]], ids=len)
def test_sequences_side_by_side(scans, dtype, offsets):  # noqa: F811
    """The definition; each sequence has the bits that it has alone, and in a batch."""
    N = len(offsets) - 1
    arrays, state = drawn(dtype, offsets[-1], 36, B=(1,), sequences=N)
    compare(scans, arrays, state, cu_seqlens=offsets)
    given = {n: scans.bring(x) for n, x in arrays.items()} | {"state": State(*map(scans.bring, state))}
    rng = np.random.default_rng(2)
    dout, dend = rng.standard_normal(arrays["v"].shape).astype(dtype), [x[::-1].copy() for x in state]

    def pulled(given, dout, dend, **options):
        (out, end), pull = la.vjp(la.rwkv4, **given, return_state=True, **options)
        d = pull(scans.bring(dout), State(*map(scans.bring, dend)))
        return [scans.see(x) for x in (out, d.k, d.v)], [scans.see(x) for x in (*end, *d.state)]

    tokens, states = pulled(given, dout, dend, cu_seqlens=offsets)
    for n, (start, stop) in enumerate(pairwise(offsets)):
        own = {name: arrays[name][:, start:stop] for name in "kv"}
        copies = {name: np.concatenate([x, x[::-1] / 2, x]).astype(x.dtype) for name, x in own.items()}
        for several, parts in ((1, own), (3, copies)):
            one = {name: scans.bring(x) for name, x in (parts | {k: arrays[k] for k in "wu"}).items()}
            one["state"] = State(*(scans.bring(np.repeat(x[n : n + 1], several, axis=0)) for x in state))
            alone, ends = pulled(one, np.repeat(dout[:, start:stop], several, axis=0),
                                 [np.repeat(x[n : n + 1], several, axis=0) for x in dend])  # fmt: skip
            for x, y in zip(tokens, alone, strict=True):
                assert x[0, start:stop].tobytes() == y[0].tobytes() == y[-1].tobytes()
            for x, y in zip(states, ends, strict=True):
                assert x[n].tobytes() == y[0].tobytes() == y[-1].tobytes()


def test_arrays_of_any_layout(scans):  # noqa: F811
    """Channels apart, rows that begin anywhere: the same bits."""
    arrays, state = drawn(FLOAT32, 140, 40, B=(3,))
    expected = called(arrays, state, scans.bring, scans.see)
    whole = np.zeros((3, 140, 43), FLOAT32)
    whole[..., 1:41] = arrays["k"]
    apart = scans.bring(np.ascontiguousarray(np.moveaxis(arrays["v"], -1, 0)))
    given = {"k": scans.bring(whole)[..., 1:41], "v": scans.xp.moveaxis(apart, 0, -1)}
    given |= {n: scans.bring(np.repeat(arrays[n], 2))[::2] for n in "wu"}
    found = called(given, state, lambda x: scans.bring(x) if type(x) is np.ndarray else x, scans.see)
    for x, y in zip(found, expected, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("start", [-90.0, 0.0, 90.0, 3000.0])
def test_a_weight_of_long_ago_is_exact_in_float32(scans, start):  # noqa: F811
    """The rounding of m in every token is made up for: 3000 tokens that add next to nothing, far from a first one."""
    T, w = 3000, 0.01
    k = np.full((1, T, 1), start - 80, np.float32)
    k[:, 0] = start
    v = np.zeros_like(k)
    v[:, 0] = 1
    arrays = {"k": k, "v": v, "w": np.full(1, w, np.float32), "u": np.full(1, -1e4, np.float32)}
    _, S, _, m, *_ = called(arrays, None, scans.bring, scans.see)
    _, S_exact, _, m_exact, *_ = called(*widened(arrays, None), backend="reference")
    total, expected = float(np.log(float(S[0, 0]))) + float(m[0, 0]), np.log(S_exact[0, 0]) + m_exact[0, 0]
    assert abs(total - expected) <= 2 * T * np.finfo(np.float32).eps


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("keys", ["falling", "rising", "equal", "masked", "wide"])
def test_keys_of_any_size(scans, dtype, keys):  # noqa: F811
    """Whichever token the maximum is of: its gradient is there."""
    arrays, state = drawn(dtype, 150, 20)
    t = np.arange(150.0)[:, None]
    k = {"falling": -3 * t, "rising": 3 * t, "equal": 0 * t, "masked": np.where(t % 3, -np.inf, t / 9),
         "wide": 200 * np.cos(t)}[keys]  # fmt: skip
    arrays["k"] = np.broadcast_to(k, arrays["k"].shape).astype(dtype)
    arrays["w"] = np.full_like(arrays["w"], 0.5)
    arrays["v"] = (arrays["v"].astype(float) + 2).astype(dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = called(arrays, state, scans.bring, scans.see)
        exact = called(*widened(arrays, state), backend="numba", rounded=dtype)
    for y, e in zip(found, exact, strict=True):
        assert np.isfinite(y.astype(float)).all()
        eps = float(ml_dtypes.finfo(y.dtype).eps)
        least = 1e-5 if dtype == BFLOAT16 else 512 * eps
        few = max(0.6 * eps, least) * np.linalg.norm(e) + least * np.sqrt(e.size)
        assert np.linalg.norm(y.astype(float) - e) <= few


def test_what_is_not_a_number_stays_in_its_channel(scans):  # noqa: F811
    arrays, _ = drawn(FLOAT32, 150, 20)
    arrays["k"][0, 50, 7] = arrays["v"][1, 30, 3] = np.nan
    out = scans.see(la.rwkv4(**{n: scans.bring(x) for n, x in arrays.items()}))
    expected = np.zeros(out.shape, bool)
    expected[0, 50:, 7] = expected[1, 30:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


def test_no_later_token_or_batch_changes_a_bit(scans):  # noqa: F811
    arrays, state = drawn(BFLOAT16, 200, 40, B=(3,))
    whole = called(arrays, state, scans.bring, scans.see)
    own = arrays | {n: arrays[n][1:2, :133] for n in "kv"}
    part = called(own, State(*(x[1:2] for x in state)), scans.bring, scans.see)
    np.testing.assert_array_equal(part[0], whole[0][1:2, :133])


def test_states_at_positions_and_in_place(scans):  # noqa: F811
    arrays, state = drawn(FLOAT32, 150, 40)
    given = {n: scans.bring(x) for n, x in arrays.items()}
    exact = la.rwkv4(**widened(arrays, None)[0], return_states_at=[0, 70, 150], state=widened({}, state)[1])
    found = la.rwkv4(**given, state=State(*map(scans.bring, state)), return_states_at=[0, 70, 150])
    for x, y in zip(found.states, exact.states, strict=True):
        assert np.linalg.norm(scans.see(x) - y) <= 512 * 2.0**-23 * np.linalg.norm(y)
    own = State(*map(scans.bring, state))
    halves = [{n: x[:, t] if n in "kv" else x for n, x in given.items()} for t in (slice(70), slice(70, None))]
    out = [la.rwkv4(**half, state=own, return_state=True, overwrite_state=True) for half in halves]
    assert all(x.data.ptr == y.data.ptr for x, y in zip(out[1].state, own, strict=True))
    whole = np.concatenate([scans.see(x.out) for x in out], axis=1)
    assert np.linalg.norm(whole - exact.out) <= 512 * 2.0**-23 * np.linalg.norm(exact.out)
    for x, y in zip(own, exact.states, strict=True):
        assert np.linalg.norm(scans.see(x) - y[:, -1]) <= 512 * 2.0**-23 * np.linalg.norm(y[:, -1])


def test_explain_names_the_kernel(scans):  # noqa: F811
    arrays, _ = drawn()
    given = {n: scans.bring(x) for n, x in arrays.items()}
    found = la.explain(la.rwkv4, **given)
    assert found.backend == "cuda"
    assert "elementwise/average.cu, tiles of" in found.reason
    assert not found.slow
    assert la.explain(la.rwkv4, **given, backend="chunks").backend == "chunks"
