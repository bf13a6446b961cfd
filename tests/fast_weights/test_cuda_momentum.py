"""The kernels of the momentum delta rule, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights.cuda import momentum, rates
from linattn_np.runtime.cuda import launch
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = (np.dtype(x) for x in (ml_dtypes.bfloat16, "f2", "f4", "f8"))


def drawn(T=37, K=8, V=6, H=2, B=(2,), dtype=FLOAT32, sequences=None, seed=0):
    """(arrays by name, state), with the rounding of `dtype`."""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(la.momentum_delta_rule, rng, B=B, T=T, H=H, K=K, V=V)
    lead = B if sequences is None else (sequences,)
    state = (rng.standard_normal((*lead, H, K, V)) for _ in range(2))
    wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
    return {n: x.astype(dtype) for n, x in arrays.items()}, tuple(S.astype(wide) for S in state)


def called(arrays, state, bring=np.asarray, see=np.asarray, kind=None, **options):
    """[out, the final states, gradients]; kind: the dtype that the cotangent of out is rounded to."""
    given = {n: bring(x) for n, x in arrays.items()}
    given |= {} if state is None else {"state": la.MomentumState(*map(bring, state))}
    (out, end), pull = la.vjp(la.momentum_delta_rule, **given, return_state=True, **options)
    rng, shapes = np.random.default_rng(1), (out.shape, *(S.shape for S in end))
    dout, *dend = (rng.standard_normal(shape) for shape in shapes)
    dout = dout.astype(kind or out.dtype).astype(out.dtype)
    dend = [d.astype(S.dtype) for d, S in zip(dend, end, strict=True)]
    found = pull(bring(dout), la.MomentumState(*map(bring, dend)))
    more = [] if state is None else list(found.state)
    return [see(y) for y in (out, *end, *(d for d in found if d is not None and d is not found.state), *more)]


def compare(device, arrays, state, **options):  # noqa: F811
    """Results and gradients against the definition; the kernels, and no others, have done it."""
    if device.launched is not None:
        device.launched.clear()  # an earlier comparison's
    found = called(arrays, state, device.bring, device.see, **options)
    wide = {n: x.astype(float) for n, x in arrays.items()}
    exact = called(wide, None if state is None else [S.astype(float) for S in state], kind=arrays["v"].dtype,
                   **options | {"backend": "reference"})  # fmt: skip
    for y, e in zip(found, exact, strict=True):
        eps = float(ml_dtypes.finfo(y.dtype).eps)
        few = eps if y.dtype.itemsize == 2 else 2.0**-10 if arrays["v"].dtype == BFLOAT16 else 512 * eps  # tf32
        assert np.linalg.norm(y.astype(float) - e) <= few * np.linalg.norm(e)
    if device.launched is not None:
        files = {(file, entry) for file, entry, *_ in device.launched}
        by_kernel, by_tiles = momentum.fits(found[1].shape[-2], launch.shared_limit())
        by_kernel &= options.get("chunk_size", 1) <= momentum.MOST and found[1].dtype == FLOAT32
        walk = momentum.WALK if by_kernel and by_tiles else momentum.SOURCE
        assert {(walk, "forward"), (walk, "backward")} <= files
        assert ((momentum.VJP, "momentum_vjp") in files) == by_kernel
    return found


@pytest.mark.parametrize("predict", ["decayed", "previous"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32, FLOAT64], ids=str)
def test_it_is_the_definition_in_every_dtype(public, dtype, predict):  # noqa: F811
    compare(public, *drawn(70, 24, 20, B=(1,), dtype=dtype), predict=predict)


@pytest.mark.parametrize(("T", "K", "V"), [(1, 5, 1), (8, 32, 33), (64, 7, 40), (65, 128, 16), (130, 4, 3),
                                           (20, 200, 17)])  # fmt: skip
def test_any_number_of_tokens_and_channels(public, T, K, V):  # noqa: F811
    compare(public, *drawn(T, K, V, B=(1,)), scale=0.5)


def test_doubles_of_wide_keys(public):  # noqa: F811
    compare(public, *drawn(9, 130, 18, H=1, B=(1,), dtype=FLOAT64))


@pytest.mark.parametrize("without", [(), ("eta",)], ids=["eta", "no eta"])
def test_what_is_not_given(public, without):  # noqa: F811
    arrays, _ = drawn(21)
    compare(public, {n: x for n, x in arrays.items() if n not in without}, None)


def test_shared_heads(public):  # noqa: F811
    arrays, state = drawn(21, H=4)
    compare(public, arrays | {n: np.ascontiguousarray(arrays[n][..., :2, :]) for n in ("q", "k")}, state)


def test_packed_sequences_are_one_by_one_to_the_bit(public):  # noqa: F811
    """Of no token, one, a tile, and between."""
    offsets = [0, 0, 1, 33, 97, 97, 170]
    arrays, state = drawn(170, B=(1,), sequences=len(offsets) - 1)
    whole = compare(public, arrays, state, cu_seqlens=np.array(offsets))
    for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if stop > start:
            own = {name: x[:, start:stop] for name, x in arrays.items()}
            one = called(own, [S[n : n + 1] for S in state], public.bring, public.see)
            np.testing.assert_array_equal(whole[0][:, start:stop], one[0])
            for S, end in zip(whole[1:3], one[1:3], strict=True):
                np.testing.assert_array_equal(S[n], end[0])


def test_no_later_token_or_batch_changes_a_bit(public):  # noqa: F811
    arrays, state = drawn(70, B=(2,))
    whole = called(arrays, state, public.bring, public.see)
    for y, again in zip(whole, called(arrays, state, public.bring, public.see), strict=True):
        np.testing.assert_array_equal(y, again)
    own = called({n: x[1:, :66] for n, x in arrays.items()}, [S[1:] for S in state], public.bring, public.see)
    np.testing.assert_array_equal(own[0], whole[0][1:, :66])


def test_a_hard_reset(public):  # noqa: F811
    """g = -inf: nothing of the state remains, and no gradient is NaN."""
    arrays, state = drawn(70)
    arrays["g"][:, 5] = arrays["g"][:, 66] = -np.inf
    assert all(np.isfinite(y).all() for y in compare(public, arrays, state))


def test_tiles_in_several_groups_are_the_same_to_the_bit(public, monkeypatch):  # noqa: F811
    arrays, state = drawn(200, dtype=FLOAT64)
    whole = called(arrays, state, public.bring, public.see)
    monkeypatch.setattr(momentum, "TOGETHER", 1)
    for y, other in zip(whole, called(arrays, state, public.bring, public.see), strict=True):
        np.testing.assert_array_equal(y, other)


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10], ids=["no tiles", "no walk by tiles"])
def test_blocks_with_less_shared_memory(public, monkeypatch, limit):  # noqa: F811
    monkeypatch.setattr(launch, "shared_limit", lambda: limit)
    assert momentum.fits(100, limit) == (limit > 99 << 10, False)
    compare(public, *drawn(70, 100, 6, H=1, B=(1,)))


def test_tiles_of_other_lengths(public):  # noqa: F811
    """A tile longer than those of the kernel of the coefficients takes array calls."""
    arrays, state = drawn(150, H=1, B=(1,))
    for chunk_size in (3, 40, rates.MOST, rates.MOST + 1):
        compare(public, arrays, state, chunk_size=chunk_size)


def test_the_state_is_written_without_queries(public):  # noqa: F811
    arrays, state = drawn(70)
    given = {n: public.bring(x) for n, x in arrays.items()} | {"state": la.MomentumState(*map(public.bring, state))}
    _, expected = la.momentum_delta_rule(**given, return_state=True)
    none, end = la.momentum_delta_rule(**given | {"q": None}, return_state=True)
    assert none is None
    for S, other in zip(end, expected, strict=True):
        np.testing.assert_array_equal(public.see(S), public.see(other))
