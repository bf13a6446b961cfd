"""S4D: all backends against the loop, gradients, and the zero-order hold of small steps."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops.zero_order_hold import hold, hold_vjp
from linattn_np.testing import check_vjp, relative_error
from tests.cases import peak_memory
from tests.elementwise.checks import packed_sequences_are_one_by_one
from tests.naive.elementwise.s4d import s4d as loop

FORMS = [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 5}, {"backend": "numba"}, {"chunk_size": 1}, {}]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def drawn(T=23, D=3, N=4, B=(2,), dtype=np.float64):
    """(arrays by name, state)"""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.s4d, rng, B=B, T=T, V=D, K=N)
    state = rng.standard_normal((*B, D, N)) + 1j * rng.standard_normal((*B, D, N))
    own = lambda x: x.astype(np.result_type(dtype, np.complex64) if x.dtype.kind == "c" else dtype)  # noqa: E731
    return {n: own(x) for n, x in arrays.items()}, own(state)


def pulled(arrays, state, **options):
    """out, the final state, and gradients with random cotangents."""
    (out, end), pull = la.vjp(la.s4d, **arrays, state=state, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout, dend = (rng.standard_normal(y.shape).astype(y.dtype) for y in (out, end))
    return [out, end, *pull(dout, dend * (1 - 2j))]


@pytest.mark.parametrize("T", [0, 1, 2, 31, 33, 67])
@every_form
def test_it_is_the_loop(form, T):
    arrays, state = drawn(T)
    out, end = la.s4d(**arrays, state=state, return_state=True, scale=0.5, **form)
    expected, last = loop(**arrays, state=state, scale=0.5)
    assert relative_error(out, expected) <= 1e-13
    assert relative_error(end, last) <= 1e-13


@pytest.mark.parametrize("T", [0, 1, 9, 37])
@every_form
def test_gradients_are_central_differences(form, T):
    """Of complex and of real weights, with and without what is optional."""
    arrays, state = drawn(T)
    check_vjp(la.s4d, **arrays, state=state, scale=0.5, **form)
    check_vjp(la.s4d, **{n: arrays[n].real for n in arrays if n != "D"}, **form)


@pytest.mark.parametrize(("T", "D", "N"), [(5, 1, 1), (70, 17, 3), (33, 64, 16), (40, 300, 5), (65, 530, 2)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda d: np.dtype(d).name)
def test_blocks_columns_and_segments_are_the_definition(dtype, T, D, N):
    arrays, state = drawn(T, D, N, dtype=dtype)
    wide = {n: x.astype(complex if x.dtype.kind == "c" else float) for n, x in arrays.items()}
    exact = pulled(wide, state.astype(complex), backend="reference")
    for y, expected in zip(pulled(arrays, state), exact, strict=True):
        assert relative_error(y, expected) <= 512 * np.finfo(dtype).eps


@every_form
def test_packed_sequences_are_one_by_one_to_the_bit(form):
    arrays, _ = drawn(40, B=(1,))
    _, state = drawn(0, B=(4,))
    packed_sequences_are_one_by_one(la.s4d, arrays, "x", state, **form)


def test_no_bit_depends_on_threads_batches_or_runs():
    arrays, state = drawn(50, 600, 3, B=(3,), dtype=np.float32)
    first = pulled(arrays, state, num_threads=1)
    for threads in (1, 2, 3):
        for y, same in zip(pulled(arrays, state, num_threads=threads), first, strict=True):
            np.testing.assert_array_equal(y, same)
    own = arrays | {"x": arrays["x"][1:2]}
    np.testing.assert_array_equal(la.s4d(**own, state=state[1:2]), first[0][1:2])


def test_no_array_has_a_state_for_every_token():
    """Forward and backward allocate at most six times the memory of the inputs, freed results of others included."""
    arrays, _ = drawn(4096, 128, 16, B=(1,), dtype=np.float32)
    pulled(arrays, None)
    la.clear_cache()
    peak = peak_memory(lambda: pulled(arrays, None))
    assert peak <= 6 * sum(x.nbytes for x in arrays.values())


@pytest.mark.parametrize("kind", ["loops", "array calls"])
def test_slopes_of_a_hold_of_small_steps_do_not_cancel(kind):
    """db / dA = dt^2 sum_n n z^{n - 1} / (n + 1)!, steps from 1e-9 to 0.3."""
    N, wide = 40, np.clongdouble
    xp = pytest.importorskip("array_api_strict") if kind == "array calls" else np
    dt_log = np.log(np.logspace(-9, -0.5, 7))
    A_log, A_imag = np.random.default_rng(0).standard_normal((2, 7, N))
    A, dt = -np.exp(A_log.astype(np.longdouble)) + wide(1j) * A_imag, np.exp(dt_log.astype(np.longdouble))[:, None]
    slope, gain, term = np.zeros_like(A), np.ones_like(A), np.ones_like(A) / 2  # z^{n - 1} / (n + 1)!
    for n in range(1, 60):
        slope, gain, term = slope + n * term, gain + term * (dt * A), term * (dt * A) / (n + 2)
    dA = np.conj(dt * dt * slope)
    given = [xp.asarray(y) for y in (dt_log, A_log, A_imag)]
    none, one = (xp.asarray(np.full((7, N), y, complex)) for y in (0, 1))
    _, dA_log, dA_imag = hold_vjp(xp, *given, none, one, xp.float64)
    for row in range(7):
        assert relative_error(np.asarray(dA_log)[row], (A.real * dA.real)[row]) <= 1e-13
        assert relative_error(np.asarray(dA_imag)[row], dA.imag[row]) <= 1e-13
    z, b = hold(xp, *given, xp.float64)
    assert relative_error(np.asarray(z), dt * A) <= 1e-15
    assert relative_error(np.asarray(b) / dt, gain) <= 1e-13
