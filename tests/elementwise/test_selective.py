"""The selective scan: all backends, real and complex, against the loop; its gradients, sums and memory."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.cases import peak_memory
from tests.elementwise.checks import packed_sequences_are_one_by_one
from tests.naive.elementwise.selective_scan import selective_scan as loop

FORMS = [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 5}, {"chunk_size": 1}, {}]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
every_kind = pytest.mark.parametrize("kind", ["real", "complex"])


def drawn(T=23, D=3, N=4, kind="real", B=(2,), sequences=None, seed=0, dtype=np.float64):
    """(arrays by name, state)"""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(la.selective_scan, rng, B=B, T=T, V=D, K=N)
    state = rng.standard_normal((*(B if sequences is None else (sequences,)), D, N))
    if kind == "complex":
        arrays |= {n: arrays[n] + 1j * rng.standard_normal(arrays[n].shape) for n in "ABC"}
        state = state + 1j * rng.standard_normal(state.shape)
    return {n: x.astype(np.complex64 if x.dtype.kind == "c" else dtype) if dtype != np.float64 else x
            for n, x in arrays.items()}, state  # fmt: skip


def kind_like(x, dtype):
    """An array in a dtype, or in its complex one."""
    return x.astype(np.result_type(dtype, np.complex64) if x.dtype.kind == "c" else dtype)


def pulled(arrays, state, **options):
    """(out, final state, gradients by name) with random cotangents."""
    (out, end), pull = la.vjp(la.selective_scan, **arrays, state=state, dt_softplus=True, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout, dend = (rng.standard_normal(y.shape) + 1j * rng.standard_normal(y.shape) for y in (out, end))
    grads = pull(dout.real.astype(out.dtype), (dend if end.dtype.kind == "c" else dend.real).astype(end.dtype))
    return out, end, {n: d for n, d in grads._asdict().items() if d is not None}


@pytest.mark.parametrize("T", [0, 1, 2, 31, 33, 67])
@every_form
@every_kind
def test_it_is_the_loop(kind, form, T):
    arrays, state = drawn(T, kind=kind)
    out, end = la.selective_scan(**arrays, state=state, dt_softplus=True, return_state=True, **form)
    expected, last = loop(**arrays, state=state, dt_softplus=True)
    assert out.dtype == np.float64
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(end, last) <= 1e-12


@pytest.mark.parametrize("given", ["all", "required"])
@every_form
@every_kind
def test_gradients_are_central_differences(kind, form, given):
    """Of dt through decay and input, of the last state, of everything that is optional."""
    arrays, state = drawn(9, kind=kind)
    arrays = arrays if given == "all" else {n: arrays[n] for n in ("x", "dt", "A", "B", "C")}
    check_vjp(la.selective_scan, **arrays, state=state, dt_softplus=True, **form)
    check_vjp(la.selective_scan, **arrays, dt_softplus=True, **form)


@every_form
def test_a_complex_number_counts_with_its_conjugate(form):
    """Twice the real part: numbers without an imaginary part count twice, pairs of conjugates once each."""
    arrays, state = drawn(11)
    own = {n: arrays[n] for n in ("x", "dt", "A", "B", "C")}
    out = la.selective_scan(**own, state=state, **form)
    same = la.selective_scan(**own | {n: own[n] + 0j for n in "ABC"}, state=state + 0j, **form)
    assert relative_error(same, 2 * out) <= 1e-14


@pytest.mark.parametrize(("T", "D", "N"), [(5, 1, 1), (70, 17, 3), (33, 64, 16), (40, 300, 5), (65, 530, 2)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda d: np.dtype(d).name)
@every_kind
def test_blocks_columns_and_segments_are_the_definition(kind, dtype, T, D, N):
    """Channels that fill no vector, several blocks, tokens that fill no segment."""
    arrays, state = drawn(T, D, N, kind, dtype=dtype)
    out, end, grads = pulled(arrays, kind_like(state, dtype))
    wide = {n: kind_like(x, np.float64) for n, x in arrays.items()}
    expected, last, exact = pulled(wide, state, backend="reference")
    bound = 64 * np.finfo(dtype).eps
    assert relative_error(out, expected) <= bound
    assert relative_error(end, last) <= bound
    for name in exact:
        assert relative_error(grads[name], exact[name]) <= 8 * bound, name


@every_form
@every_kind
def test_packed_sequences_are_one_by_one_to_the_bit(kind, form):
    arrays, state = drawn(40, kind=kind, B=(1,), sequences=4)
    tokens = ("x", "dt", "B", "C", "z")
    packed_sequences_are_one_by_one(la.selective_scan, arrays, tokens, state, dt_softplus=True, **form)


@every_kind
def test_no_bit_depends_on_threads_batches_or_runs(kind):
    arrays, state = drawn(50, 600, 3, kind, B=(3,), dtype=np.float32)
    state = kind_like(state, np.float32)
    first = pulled(arrays, state, num_threads=1)
    for threads in (1, 2, 3):
        out, end, grads = pulled(arrays, state, num_threads=threads)
        np.testing.assert_array_equal(out, first[0])
        np.testing.assert_array_equal(end, first[1])
        for name, d in grads.items():
            np.testing.assert_array_equal(d, first[2][name], name)
    own = {n: x[1:2] if n in ("x", "dt", "B", "C", "z") else x for n, x in arrays.items()}
    np.testing.assert_array_equal(la.selective_scan(**own, state=state[1:2], dt_softplus=True), first[0][1:2])


@every_form
@every_kind
def test_no_later_token_changes_an_earlier_output(kind, form):
    arrays, _ = drawn(37, kind=kind)
    out = la.selective_scan(**arrays, dt_softplus=True, **form)
    for t in (1, 16, 32, 36):
        later = {n: x.copy() for n, x in arrays.items()}
        for name in ("x", "dt", "B", "C", "z"):
            later[name][:, t:] *= 30
        np.testing.assert_array_equal(la.selective_scan(**later, dt_softplus=True, **form)[:, :t], out[:, :t])


@every_form
def test_a_step_of_zero_keeps_and_an_infinite_rate_resets(form):
    arrays, state = drawn(6)
    own = {n: arrays[n] for n in ("x", "dt", "A", "B", "C")}
    kept = la.selective_scan(**own | {"dt": 0 * own["dt"]}, state=state, return_state=True, **form).state
    np.testing.assert_array_equal(kept, state)
    reset = own | {"A": np.full_like(own["A"], -np.inf)}
    _, end = la.selective_scan(**reset, state=state, return_state=True, **form)
    u = (own["dt"] * own["x"])[:, -1, :, None] * own["B"][:, -1, None]
    assert relative_error(end, u) <= 1e-15


@every_form
@every_kind
def test_halves_steps_positions_and_reverse(kind, form):
    arrays, state = drawn(kind=kind)
    tokens, options = ("x", "dt", "B", "C", "z"), {"dt_softplus": True, **form}
    whole, end = la.selective_scan(**arrays, state=state, return_state=True, **options)
    cut = lambda part: {n: x[:, part] if n in tokens else x for n, x in arrays.items()}  # noqa: E731
    _, middle = la.selective_scan(**cut(slice(0, 9)), state=state, return_state=True, **options)
    rest, last = la.selective_scan(**cut(slice(9, None)), state=middle, return_state=True, **options)
    assert relative_error(rest, whole[:, 9:]) <= 1e-13
    assert relative_error(last, end) <= 1e-13
    *_, states = la.selective_scan(**arrays, state=state, return_states_at=[0, 9, 23], **options)
    assert relative_error(states, np.stack([state, middle, end], axis=1)) <= 1e-13
    _, stepped = la.step(la.selective_scan, **cut(0), state=state, return_state=True, dt_softplus=True)
    _, first = la.selective_scan(**cut(slice(0, 1)), state=state, return_state=True, **options)
    assert relative_error(stepped, first) <= 1e-15
    back = la.selective_scan(**cut(slice(None, None, -1)), reverse=True, state=state, **options)
    np.testing.assert_array_equal(back[:, ::-1], whole)


@every_kind
def test_one_token_in_place(kind):
    arrays, state = drawn(1, kind=kind)
    expected, end = la.selective_scan(**arrays, state=state, dt_softplus=True, return_state=True)
    own = state.copy()
    out, same = la.selective_scan(**arrays, state=own, dt_softplus=True, return_state=True, overwrite_state=True)
    assert same is own
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(own, end)


@every_kind
def test_strided_and_read_only_arrays_are_inputs(kind):
    """The layout (B, D, T) of other libraries is a view of ours."""
    arrays, state = drawn(35, 20, kind=kind)
    expected = la.selective_scan(**arrays, state=state, dt_softplus=True)
    moved = {n: np.ascontiguousarray(x.T).T if x.ndim > 1 else x for n, x in arrays.items()}
    for x in moved.values():
        x.flags.writeable = False
    np.testing.assert_array_equal(la.selective_scan(**moved, state=state, dt_softplus=True), expected)


@every_kind
def test_no_array_has_a_state_for_every_token(kind):
    """Forward and backward allocate less than half of T D N numbers."""
    T, D, N = 4096, 64, 32
    arrays, _ = drawn(T, D, N, kind, B=(1,), dtype=np.float32)
    pulled(arrays, None)
    assert peak_memory(lambda: pulled(arrays, None)) < T * D * N * 4 / 2


def test_a_step_of_complex_channels_has_the_bits_of_the_token_in_a_long_call():
    arrays, state = drawn(7, 33, 5, "complex", dtype=np.float32)
    state = kind_like(state, np.float32)
    out = la.selective_scan(**arrays, state=state, chunk_size=1)
    for t in range(7):
        own = {n: x[:, t] if n in ("x", "dt", "B", "C", "z") else x for n, x in arrays.items()}
        y, state = la.step(la.selective_scan, **own, state=state, return_state=True)
        np.testing.assert_array_equal(y, out[:, t])


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
def test_a_complex_state_of_a_real_recurrence_is_refused(backend):
    x = la.testing.sample(la.selective_scan, np.random.default_rng(0), T=3)
    state = la.selective_scan(**x, return_state=True).state + 1j
    with pytest.raises(TypeError, match="selective_scan: state has dtype complex128, expected a real one"):
        la.selective_scan(**x, state=state, backend=backend)
