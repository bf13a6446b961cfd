"""The kernels of the selective scan, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.cuda import selective, selective_plan
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORAGE = [BFLOAT16, *map(np.dtype, (np.float16, np.float32, np.float64))]
dtypes = pytest.mark.parametrize("dtype", STORAGE, ids=str)
TOKENS = ("x", "dt", "B", "C", "z")
OPTIONS = {"dt_softplus": True, "return_state": True}


def drawn(T=23, D=6, N=4, B=(2,), dtype=BFLOAT16, without=(), sequences=None, seed=0, kinds=None):
    """(arrays by name in dtype, or in one of their own; the state in float32 or wider)"""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(la.selective_scan, rng, B=B, T=T, V=D, K=N)
    arrays["dt"] = arrays["dt"] - 1
    state = rng.standard_normal((*(B if sequences is None else (sequences,)), D, N))
    wide = np.float64 if dtype == np.float64 else np.float32
    own = {n: (kinds or {}).get(n, dtype if n in TOKENS else wide) for n in arrays}
    return {n: x.astype(own[n]) for n, x in arrays.items() if n not in without}, state.astype(wide)


def called(device, arrays, state, backward=True, kind=None, **options):  # noqa: F811
    """(out, final state), and the gradients by name; kind: the dtype that the cotangent of out is rounded to."""
    rng, given = np.random.default_rng(1), {n: device.bring(x) for n, x in arrays.items()}
    given |= {} if state is None else {"state": device.bring(state)}
    options = OPTIONS | options
    if not backward:
        return tuple(map(device.see, la.selective_scan(**given, **options))), {}
    results, pull = la.vjp(la.selective_scan, **given, **options)
    results = tuple(map(device.see, results))
    kinds = [arrays["x"].dtype if kind is None else kind, results[1].dtype]
    d = [rng.standard_normal(y.shape).astype(kind).astype(y.dtype) for y, kind in zip(results, kinds, strict=True)]
    return results, {n: device.see(y) for n, y in pull(*map(device.bring, d))._asdict().items() if y is not None}


def near(found, expected, narrow, name):
    """Of the norm, within the rounding to a dtype of 16 bits, and of functions that are approximate for those."""
    found, eps = np.asarray(found), float(ml_dtypes.finfo(found.dtype).eps)
    few = (eps / 2 if found.dtype.itemsize == 2 else 100 * eps) + (5e-5 if narrow else 0)
    expected = expected.astype(np.float64)
    assert found.shape == expected.shape, name
    error = np.linalg.norm(found.astype(np.float64) - expected) / (np.linalg.norm(expected) or 1.0)
    assert error <= few, (name, error, few)


def compare(device, arrays, state, backward=True, **options):  # noqa: F811
    """Results and gradients against the definition; which kernels did it."""
    (out, end), grads = called(device, arrays, state, backward, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    host = SimpleNamespace(bring=lambda x: x.astype(np.float64), see=np.asarray)
    exact, exact_grads = called(host, wide, state, backward, arrays["x"].dtype, backend="reference", **options)
    narrow = arrays["x"].dtype.itemsize == 2
    for name, y, e in zip(("out", "state"), (out, end), exact, strict=True):
        near(y, e, narrow, name)
    for name, y in grads.items():
        assert y.dtype == (arrays[name] if name != "state" else state).dtype
        near(y, exact_grads[name], narrow, name)
    if device.launched is not None:
        wanted = {selective.FORWARD, selective.BACKWARD} if backward else {selective.FORWARD, selective.STEP}
        assert wanted & {file for file, *_ in device.launched}
        assert not backward or selective.BACKWARD in {file for file, *_ in device.launched}


@dtypes
def test_it_is_the_definition_in_every_dtype(public, dtype):  # noqa: F811
    arrays, state = drawn(37, 70, 16, dtype=dtype, B=(1,))
    compare(public, arrays, state, backward=public.launched is None or dtype != np.float16)


@pytest.mark.parametrize("T", [1, 15, 16, 33])
def test_any_number_of_tokens(public, T):  # noqa: F811
    arrays, state = drawn(T, 40, 16)
    compare(public, arrays, state)
    compare(public, arrays, state, backward=False)


@pytest.mark.parametrize("N", [3, 24, 128])
def test_any_number_of_states(public, N):  # noqa: F811
    arrays, state = drawn(19, 10, N, dtype=np.dtype(np.float32))
    compare(public, arrays, state)


@pytest.mark.parametrize("D", [1, 130])
def test_any_number_of_channels(public, D):  # noqa: F811
    arrays, state = drawn(18, D, 16)
    compare(public, arrays, state)


@pytest.mark.parametrize("without", [("D",), ("dt_bias",), ("D", "z", "dt_bias")], ids=str)
def test_what_is_not_given(public, without):  # noqa: F811
    arrays, state = drawn(21, 12, 16, without=without)
    compare(public, arrays, state if len(without) == 1 else None)


@pytest.mark.parametrize("options", [{"dt_softplus": False, "dt_limit": (0.1, 0.9)},
                                     {"dt_limit": (0.3, 1.0), "scale": 0.4}], ids=str)  # fmt: skip
def test_formulas_of_steps(public, options):  # noqa: F811
    arrays, state = drawn(20, 6, 16, dtype=np.dtype(np.float32))
    compare(public, arrays, state, **options)


def test_arrays_of_several_dtypes(public):  # noqa: F811
    """As mixed precision has them: constants in float32 or bfloat16, steps in float32."""
    arrays, state = drawn(20, 10, 16, kinds={"dt": np.float32, "A": BFLOAT16, "D": BFLOAT16, "C": np.float32})
    compare(public, arrays, state)


def test_ragged_batches(public):  # noqa: F811
    """Sequences of no token, of one, of tiles and between."""
    offsets = [0, 0, 1, 17, 33, 33, 70, 71]
    arrays, state = drawn(71, 10, 16, B=(1,), sequences=len(offsets) - 1)
    compare(public, arrays, state, cu_seqlens=np.array(offsets))
    compare(public, arrays, state, backward=False, cu_seqlens=np.array(offsets))
    whole, grads = called(public, arrays, state, cu_seqlens=np.array(offsets))
    part = {n: x[:, 17:33] if n in TOKENS else x for n, x in arrays.items()}
    one, own = called(public, part, state[3:4])
    np.testing.assert_array_equal(whole[0][:, 17:33].view(np.uint16), one[0].view(np.uint16))
    np.testing.assert_array_equal(whole[1][3], one[1][0])
    assert grads["x"].shape == arrays["x"].shape
    assert own["x"].shape == part["x"].shape


@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(STORAGE[3], marks=pytest.mark.gpu)], ids=str)
def test_segments_of_long_sequences(public, monkeypatch, dtype):  # noqa: F811
    """Cut, the last segment shorter; ragged, so that some sequences have none of the later ones."""
    monkeypatch.setattr(selective_plan, "SEGMENT", 16)
    arrays, state = drawn(70, 6, 16, B=(1,), dtype=dtype)
    compare(public, arrays, state)
    if public.launched is not None:
        assert {"carry", "chain", "carry_back"} <= {entry for _, entry, *_ in public.launched}
    offsets = np.array([0, 50, 50, 54, 70])
    arrays, state = drawn(70, 6, 16, B=(1,), sequences=4, dtype=dtype)
    compare(public, arrays, state, cu_seqlens=offsets)


@pytest.mark.parametrize(("dtype", "N"), [(BFLOAT16, 16), (np.dtype(np.float32), 7), (STORAGE[3], 64)], ids=str)
def test_one_token_of_many_sequences(public, dtype, N):  # noqa: F811
    arrays, state = drawn(1, 70, N, B=(9,), dtype=dtype)
    compare(public, arrays, state, backward=False)
    compare(public, arrays, None, backward=False)
    if public.launched is not None:
        assert {file for file, *_ in public.launched} == {selective.STEP}


@pytest.mark.parametrize("N", [3, 7, 16, 64, 128])
def test_one_token_alone_is_that_of_a_batch(public, N):  # noqa: F811
    """Lanes share out the sequences of a thread: one to eight of them, by 1 to 32 lanes a channel."""
    arrays, state = drawn(1, 33, N, B=(8,))
    if public.launched is not None and N == 128:
        arrays, state = drawn(1, 9, N, B=(5,))
    whole, _ = called(public, arrays, state, backward=False)
    compare(public, arrays, state, backward=False)
    for first, last in ((0, 1), (1, 3), (2, 5), (0, 5)):
        part = {n: x[first:last] if n in TOKENS else x for n, x in arrays.items()}
        own, _ = called(public, part, state[first:last], backward=False)
        for one, other in zip(own, whole, strict=True):
            assert one.tobytes() == other[first:last].tobytes()


def test_one_token_in_place(public):  # noqa: F811
    arrays, state = drawn(1, 12, 16, B=(5,))
    (expected, end), _ = called(public, arrays, state, backward=False)
    own = public.bring(state)
    given = {n: public.bring(x) for n, x in arrays.items()}
    out, same = la.selective_scan(**given, state=own, **OPTIONS, overwrite_state=True)
    assert same is own
    np.testing.assert_array_equal(public.see(out).view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(public.see(own), end)


def test_views_are_inputs(public):  # noqa: F811
    """x and z as halves of one array, and tokens apart."""
    arrays, state = drawn(20, 16, 16)
    both = public.bring(np.concatenate([arrays["x"], arrays["z"]], axis=-1))
    (expected, _), _ = called(public, arrays, state, backward=False)
    given = {n: public.bring(x) for n, x in arrays.items()} | {"x": both[..., :16], "z": both[..., 16:]}
    out, _ = la.selective_scan(**given, state=public.bring(state), **OPTIONS)
    np.testing.assert_array_equal(public.see(out).view(np.uint16), expected.view(np.uint16))


def test_gates_that_reset_and_steps_of_zero(public):  # noqa: F811
    """A = -inf: the state is what the last token wrote; dt = 0: it is kept, and no gradient is NaN."""
    arrays, state = drawn(18, 6, 16, dtype=np.dtype(np.float32), without=("dt_bias",))
    (_, end), _ = called(public, arrays | {"dt": 0 * arrays["dt"]}, state, dt_softplus=False)
    np.testing.assert_array_equal(end, state)
    dt = np.abs(arrays["dt"]) + 0.1
    (_, end), grads = called(public, arrays | {"dt": dt, "A": np.full_like(arrays["A"], -np.inf)}, state,
                             dt_softplus=False)  # fmt: skip
    u = (dt * arrays["x"])[:, -1, :, None] * arrays["B"][:, -1, None]
    np.testing.assert_allclose(end, u, rtol=1e-6)
    assert all(np.isfinite(grads[n].astype(np.float32)).all() for n in ("x", "B", "C", "D", "z"))


def test_every_run_has_the_same_bits(public, monkeypatch):  # noqa: F811
    monkeypatch.setattr(selective_plan, "SEGMENT", 16)
    arrays, state = drawn(50, 70, 16, B=(1,))
    runs = [called(public, arrays, state) for _ in range(2)]
    for one, again in zip(*([*r, *g.values()] for r, g in runs), strict=True):
        assert one.tobytes() == again.tobytes()


def test_complex_numbers_and_wide_states_take_array_calls(public):  # noqa: F811
    arrays, _ = drawn(3, 4, 130)
    given = {n: public.bring(x) for n, x in arrays.items()}
    if public.launched is None:
        found = la.explain(la.selective_scan, **given)
        assert found.backend == "chunks"
        assert "a state has 130 numbers a channel" in found.reason
    reason = selective.unsupported_reason(
        SimpleNamespace(is_complex=True), SimpleNamespace(__name__="cupy"), np.float32
    )
    assert reason == "its kernels are those of real numbers"


# diagonal_longhorn: the same kernels, whose steps are beta / (1 + beta |B|^2) and whose decays are 1 - dt B^2


def of_keys(device, dtype=BFLOAT16, T=37, D=70, N=16, B=(1,), sequences=None, backward=True, **options):  # noqa: F811
    """Results and gradients against the definition; (results, gradients, entries)."""
    rng = np.random.default_rng(0)
    arrays = {n: x.astype(dtype) for n, x in la.testing.sample(la.diagonal_longhorn, rng, B=B, T=T, V=D, K=N).items()}
    wide = np.float64 if dtype == np.float64 else np.float32
    state = rng.standard_normal((*(B if sequences is None else (sequences,)), D, N)).astype(wide)
    cotangents = [rng.standard_normal(x.shape) for x in (arrays["v"], state)]

    def run(bring, see, kind, **options):
        given = {n: bring(kind(x)) for n, x in (arrays | {"state": state}).items()}
        if not backward:
            return list(map(see, la.diagonal_longhorn(**given, return_state=True, **options))), {}
        results, pull = la.vjp(la.diagonal_longhorn, **given, return_state=True, **options)
        d = [bring(kind(x.astype(y.dtype))) for x, y in zip(cotangents, (arrays["v"], state), strict=True)]
        return list(map(see, results)), {n: see(y) for n, y in pull(*d)._asdict().items()}

    found, grads = run(device.bring, device.see, lambda x: x, **options)
    exact, exact_grads = run(np.asarray, np.asarray, lambda x: x.astype(np.float64), backend="reference", **options)
    for name, y, e in zip(("out", "end"), found, exact, strict=True):
        near(y, e, np.dtype(dtype).itemsize == 2, name)
    for name, y in grads.items():
        near(y, exact_grads[name], np.dtype(dtype).itemsize == 2, name)
    return found, grads


@dtypes
def test_decays_of_keys_are_the_definition_in_every_dtype(public, dtype):  # noqa: F811
    of_keys(public, dtype, backward=public.launched is None or dtype != np.float16)
    if public.launched is not None:
        assert selective.FORWARD in {file for file, *_ in public.launched}


@pytest.mark.parametrize(("T", "D", "N"), [(1, 5, 3), (18, 12, 7), (17, 131, 3), (19, 70, 40), (9, 18, 128)])
def test_decays_of_keys_of_any_width(public, T, D, N):  # noqa: F811
    of_keys(public, np.float32, T, D, N, B=(2,))
    of_keys(public, np.float32, T, D, N, B=(2,), backward=False)


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": np.array([0, 50, 50, 54, 70])}], ids=["one", "ragged"])
def test_segments_of_decays_of_keys(public, monkeypatch, options):  # noqa: F811
    """A segment multiplies an earlier state by the product of its decays."""
    monkeypatch.setattr(selective_plan, "SEGMENT", 16)
    of_keys(public, np.float32, 70, 6, sequences=4 if options else None, **options)
    if public.launched is not None:
        assert {"carry", "chain", "carry_back"} <= {entry for _, entry, *_ in public.launched}


def test_no_array_of_strengths_is_made(public):  # noqa: F811
    """A forward allocates its outputs, a backward its gradients, marks and the sums of blocks: 16-bit numbers."""
    if public.launched is None:
        pytest.skip("memory is that of the emulated device")
    T, D, N = 512, 128, 8
    rng = np.random.default_rng(0)
    wide = la.testing.sample(la.diagonal_longhorn, rng, B=(2,), T=T, V=D, K=N)
    given = {n: public.bring(x.astype(BFLOAT16)) for n, x in wide.items()}
    dout = public.bring(wide["v"].astype(BFLOAT16))
    channels, inputs = dout.nbytes, sum(x.nbytes for x in given.values())

    def peak(run):
        run()
        public.launched.clear()
        tracemalloc.start()
        run()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(lambda: la.diagonal_longhorn(**given)) < 2.2 * channels  # the array, and the copy of a stub
    assert {file for file, *_ in public.launched} == {selective.FORWARD}
    assert peak(lambda: la.vjp(la.diagonal_longhorn, **given)[1](dout)) < 6 * inputs
    assert {file for file, *_ in public.launched if "elementwise" in file} == {selective.FORWARD, selective.BACKWARD}


@pytest.mark.parametrize("beta", [0.0, 1e4])
def test_strengths_that_write_nothing_or_all(public, beta):  # noqa: F811
    """b |k|^2 is 0, or 1 up to its rounding: 1 / (1 + beta |k|^2) is the slope, not a difference from 1."""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.diagonal_longhorn, rng, B=(1,), T=20, V=6, K=4)
    arrays = {n: x.astype(np.float32) for n, x in (arrays | {"beta": np.full((1, 20, 6), beta)}).items()}

    def run(bring, see):
        out, pull = la.vjp(la.diagonal_longhorn, **{n: bring(x) for n, x in arrays.items()})
        return [see(y) for y in (out, *pull(bring(arrays["v"].astype(out.dtype)))) if y is not None]

    found = run(public.bring, public.see)
    arrays = {n: x.astype(np.float64) for n, x in arrays.items()}
    for y, exact in zip(found, run(np.asarray, np.asarray), strict=True):
        assert np.linalg.norm(y - exact) <= 64 * 2.0**-23 * np.linalg.norm(exact)


def test_one_token_of_decays_of_keys(public):  # noqa: F811
    of_keys(public, BFLOAT16, 1, 70, 16, B=(9,), backward=False)
    if public.launched is not None:
        assert {file for file, *_ in public.launched if "selective" in file} == {selective.STEP}
