"""The kernels of a constant diagonal system, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.cuda.diagonal import SOURCE
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BFLOAT16, FLOAT32, FLOAT64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)


def drawn(T=37, D=6, N=4, B=(2,), dtype=FLOAT32, sequences=None, without=(), seed=0):
    """(arrays by name, state): x in `dtype`, parameters in float32 or wider."""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(la.s4d, rng, B=B, T=T, V=D, K=N)
    lead = B if sequences is None else (sequences,)
    state = rng.standard_normal((*lead, D, N)) + 1j * rng.standard_normal((*lead, D, N))
    wide, kind = (np.float64, np.complex128) if dtype == FLOAT64 else (np.float32, np.complex64)
    own = {n: x.astype(dtype if n == "x" else kind if x.dtype.kind == "c" else wide) for n, x in arrays.items()}
    return {n: x for n, x in own.items() if n not in without}, state.astype(kind)


def called(arrays, state, bring=np.asarray, see=np.asarray, kind=None, **options):
    """[out, final state, gradients]; kind: the dtype that the cotangent of out is rounded to."""
    given = {n: bring(x) for n, x in arrays.items()} | ({} if state is None else {"state": bring(state)})
    (out, end), pull = la.vjp(la.s4d, **given, return_state=True, **options)
    out, end, rng = see(out), see(end), np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(kind or out.dtype).astype(out.dtype)
    dend = (rng.standard_normal(end.shape) * (1 - 2j)).astype(end.dtype)
    return [out, end, *(see(d) for d in pull(bring(dout), bring(dend)) if d is not None)]


def compare(device, arrays, state, **options):  # noqa: F811
    """Results and gradients against the definition; the kernels, and no others, have done it."""
    found = called(arrays, state, device.bring, device.see, **options)
    wide = {n: x.astype(complex if x.dtype.kind == "c" else float) for n, x in arrays.items()}
    exact = called(wide, None if state is None else state.astype(complex), kind=arrays["x"].dtype, backend="reference",
                   **options)  # fmt: skip
    for y, e in zip(found, exact, strict=True):
        eps = float(ml_dtypes.finfo(y.real.dtype).eps)
        few = 0.6 * eps if y.dtype.itemsize == 2 else 512 * eps
        assert np.linalg.norm(y.astype(e.dtype) - e) <= few * np.linalg.norm(e)
    if device.launched is not None:
        files = [(file, entry) for file, entry, *_ in device.launched if "elementwise" in file]
        assert files == [(SOURCE, "diagonal"), (SOURCE, "diagonal_vjp")]


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), FLOAT32, FLOAT64], ids=str)
def test_it_is_the_definition_in_every_dtype(public, dtype):  # noqa: F811
    compare(public, *drawn(150, 20, 16, B=(1,), dtype=dtype))


@pytest.mark.parametrize(("T", "D", "N"), [(1, 5, 1), (16, 130, 2), (17, 40, 3), (70, 9, 7), (33, 6, 32), (130, 5, 64)])
def test_any_number_of_tokens_channels_and_states(public, T, D, N):  # noqa: F811
    compare(public, *drawn(T, D, N), scale=0.5)


@pytest.mark.parametrize("without", [(), ("D",)], ids=["skip", "no skip"])
def test_what_is_not_given(public, without):  # noqa: F811
    arrays, _ = drawn(21, 12, 4, dtype=BFLOAT16, without=without)
    compare(public, arrays | {"C": arrays["C"].real.copy()}, None)


def test_packed_sequences_are_one_by_one_to_the_bit(public):  # noqa: F811
    """Of no token, one, a tile, and between."""
    offsets = [0, 0, 1, 33, 65, 65, 140]
    arrays, state = drawn(140, 6, 8, B=(1,), sequences=len(offsets) - 1)
    compare(public, arrays, state, cu_seqlens=np.array(offsets))
    whole = called(arrays, state, public.bring, public.see, cu_seqlens=np.array(offsets))
    for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if stop > start:
            own = arrays | {"x": arrays["x"][:, start:stop]}
            one = called(own, state[n : n + 1], public.bring, public.see)
            np.testing.assert_array_equal(whole[0][:, start:stop], one[0])
            np.testing.assert_array_equal(whole[1][n], one[1][0])


def test_other_arrays_of_the_same_call(public):  # noqa: F811
    """The second and third call may be replayed: with other numbers at other places."""
    for seed in range(3):
        arrays, state = drawn(20, 6, 4, seed=seed)
        found = called(arrays, state, public.bring, public.see)
        wide = {n: x.astype(complex if x.dtype.kind == "c" else float) for n, x in arrays.items()}
        exact = called(wide, state.astype(complex), backend="reference")
        for y, e in zip(found, exact, strict=True):
            assert np.linalg.norm(y - e) <= 512 * 2.0**-23 * np.linalg.norm(e)


def test_no_later_token_or_batch_changes_a_bit(public):  # noqa: F811
    arrays, state = drawn(50, 6, 8, B=(3,))
    whole = called(arrays, state, public.bring, public.see)
    for y, again in zip(whole, called(arrays, state, public.bring, public.see), strict=True):
        np.testing.assert_array_equal(y, again)
    own = called(arrays | {"x": arrays["x"][1:2, :33]}, state[1:2], public.bring, public.see)
    np.testing.assert_array_equal(own[0], whole[0][1:2, :33])


def test_one_token_in_place(public):  # noqa: F811
    arrays, state = drawn(1, 12, 4, B=(5,))
    given = {n: public.bring(x) for n, x in arrays.items()}
    expected, end = la.s4d(**given, state=public.bring(state), return_state=True)
    own = public.bring(state)
    out, same = la.s4d(**given, state=own, return_state=True, overwrite_state=True)
    assert same is own
    np.testing.assert_array_equal(public.see(out), public.see(expected))
    np.testing.assert_array_equal(public.see(own), public.see(end))


def test_factors_of_zero_forget(public):  # noqa: F811
    """Re A = -inf: the state is what the last token wrote, and no gradient of x or C is NaN."""
    arrays, state = drawn(20, 6, 4)
    found = called(arrays | {"A_log": np.full_like(arrays["A_log"], 30)}, state, public.bring, public.see)
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[2]).all()


@pytest.mark.parametrize("N", [4, 16])
def test_memory_is_a_few_times_that_of_the_inputs(public, N):  # noqa: F811
    """Forward and backward: outputs, gradients, states before tiles; no state of every token."""
    if public.launched is None:
        pytest.skip("memory is that of the emulated device")
    arrays, _ = drawn(1024, 64, N, B=(1,))
    given = {n: public.bring(x) for n, x in arrays.items()}
    dout, inputs = public.bring(arrays["x"]), sum(x.nbytes for x in arrays.values())
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        la.vjp(la.s4d, **given)[1](dout)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 6 * inputs


def test_wide_states_take_array_calls(public):  # noqa: F811
    arrays, _ = drawn(3, 2, 65)
    found = la.explain(la.s4d, **{n: public.bring(x) for n, x in arrays.items()})
    assert "diagonal.cu" not in found.reason
    arrays, _ = drawn(3, 2, 64)
    found = la.explain(la.s4d, **{n: public.bring(x) for n, x in arrays.items()})
    assert found.backend == "cuda"
    assert "diagonal.cu" in found.reason
