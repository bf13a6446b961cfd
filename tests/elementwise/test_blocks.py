"""Recurrences of short vectors under matrices: filters of second order, rotations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.naive.elementwise.block_scan import block_scan as loop

FORMS = [{"backend": "reference"}, {"backend": "chunks"}, {"backend": "numba"}, {"chunk_size": 5}, {}]


def drawn(N=2, constant=False, kind="real", T=23, B=2, D=3, sequences=None):
    """(a, x, state)"""
    rng = np.random.default_rng(0)
    normal = lambda *s: rng.standard_normal(s) + (1j * rng.standard_normal(s) if kind == "complex" else 0)  # noqa: E731
    lead = () if constant else (B, T)
    return 0.6 * normal(*lead, D, N, N) / N, normal(B, T, D, N), normal(sequences or B, D, N)


every_form = pytest.mark.parametrize("form", FORMS, ids=str)
every_size = pytest.mark.parametrize("N", [1, 2, 3, 5])
every_gate = pytest.mark.parametrize("constant", [False, True], ids=["tokens", "constant"])


@pytest.mark.parametrize("T", [0, 1, 2, 23, 70])
@every_form
@every_gate
@every_size
def test_it_is_the_loop(N, constant, form, T):
    a, x, h = drawn(N, constant, T=T)
    out, end = la.block_scan(a, x, state=h, return_state=True, scale=0.5, **form)
    expected, last = loop(a, x, 0.5, h)
    assert relative_error(out, expected) <= 1e-13
    assert relative_error(end, last) <= 1e-13
    check_vjp(la.block_scan, a, x, state=h, scale=0.5, **form)


@pytest.mark.parametrize("T", [0, 1, 9, 67])
@every_form
@every_gate
@every_size
def test_complex_matrices(N, constant, form, T):
    a, x, h = drawn(N, constant, "complex", T=T)
    expected, last = loop(a, x, None, h)
    out, end = la.block_scan(a, x, state=h, return_state=True, **form)
    assert relative_error(out, expected) <= 1e-13
    assert relative_error(end, last) <= 1e-13
    check_vjp(la.block_scan, a, x, state=h, **form)
    check_vjp(la.block_scan, a, x.real, state=h, **form)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("D", [1, 4, 9, 150])
@every_gate
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("N", [2, 3])
def test_compiled_loops_of_any_width_threads_and_layout(N, kind, constant, D, dtype):
    own = dtype if kind == "real" else np.result_type(dtype, np.complex64)
    a, x, h = (y.astype(own) for y in drawn(N, constant, kind, T=150, D=D))
    rng = np.random.default_rng(1)
    dout, dend = rng.standard_normal(x.shape).astype(own), rng.standard_normal(h.shape).astype(own)

    def every(a, x, **how):
        result, pull = la.vjp(la.block_scan, a, x, state=h, return_state=True, **how)
        return [*result, *pull(dout, dend)]

    found = every(a, x, num_threads=1)
    for y, expected in zip(found, every(a, x, backend="reference"), strict=True):
        assert relative_error(y, expected) <= 500 * np.finfo(dtype).eps
    apart = [np.moveaxis(np.moveaxis(y, -1, 0).copy(), 0, -1) for y in (a, x)]
    for others in (every(a, x, num_threads=3), every(*apart)):
        for y, same in zip(others, found, strict=True):
            np.testing.assert_array_equal(y, same)


@every_form
@every_gate
def test_packed_reversed_and_single_tokens(constant, form):
    a, x, h = drawn(2, constant, B=1, sequences=4)
    offsets = [0, 0, 1, 18, 23]
    part = lambda y, start, stop: y if constant else y[:, start:stop]  # noqa: E731
    out, end = la.block_scan(a, x, state=h, cu_seqlens=offsets, return_state=True, **form)
    for n, (start, stop) in enumerate(pairwise(offsets)):
        one, last = la.block_scan(part(a, start, stop), x[:, start:stop], state=h[n : n + 1], return_state=True, **form)
        np.testing.assert_array_equal(out[:, start:stop], one)
        np.testing.assert_array_equal(end[n : n + 1], last)
    check_vjp(la.block_scan, a, x, state=h, cu_seqlens=offsets, **form)
    flipped = a if constant else a[:, ::-1]
    back = la.block_scan(a, x, reverse=True, state=h[:1], **form)
    np.testing.assert_array_equal(back[:, ::-1], la.block_scan(flipped, x[:, ::-1], state=h[:1], **form))
    *_, states = la.block_scan(a, x, state=h[:1], return_states_at=[0, 7, 23], **form)
    whole = loop(a, x, None, h[:1])[0]
    assert relative_error(states, np.stack([h[:1], whole[:, 6], whole[:, 22]], axis=1)) <= 1e-13
    stepped, last = la.step(la.block_scan, a if constant else a[:, 0], x[:, 0], state=h[:1], return_state=True)
    np.testing.assert_array_equal(stepped, last)
    assert relative_error(stepped, whole[:, 0]) <= 1e-13


def test_sections_of_second_order_are_a_filter():
    """A cascade of sections beside scipy.signal.sosfilt; states carry over between pieces."""
    signal = pytest.importorskip("scipy.signal")
    u = np.random.default_rng(0).standard_normal(500)
    sections = signal.butter(6, 0.2, output="sos")

    def cascade(u, states):
        ends = []
        for (*b, one, a1, a2), state in zip(sections, states, strict=True):
            A = np.array([[[-a1, 1.0], [-a2, 0.0]]]) / one
            x = u[:, None, None] * (np.array(b[1:]) - np.array([a1, a2]) * b[0])
            h, end = la.block_scan(A, x, state=state, return_state=True)
            before = np.concatenate([np.zeros(1) if state is None else state[0, :1], h[:-1, 0, 0]])
            u = b[0] * u + before
            ends.append(end)
        return u, ends

    expected = signal.sosfilt(sections, u)
    whole, _ = cascade(u, [None] * len(sections))
    assert relative_error(whole, expected) <= 1e-12
    first, states = cascade(u[:200], [None] * len(sections))
    rest, _ = cascade(u[200:], states)
    assert relative_error(np.concatenate([first, rest]), expected) <= 1e-12


def test_rotations_are_complex_factors():
    rng = np.random.default_rng(0)
    a = 0.95 * np.exp(1j * rng.uniform(-2, 2, (2, 40, 5)))
    x = rng.standard_normal((2, 40, 5)) + 1j * rng.standard_normal((2, 40, 5))
    turns = np.stack([np.stack([a.real, -a.imag], axis=-1), np.stack([a.imag, a.real], axis=-1)], axis=-2)
    h = la.block_scan(turns, np.stack([x.real, x.imag], axis=-1))
    assert relative_error(h[..., 0] + 1j * h[..., 1], la.scan(a, x)) <= 1e-13


def test_matrices_that_are_not_square_are_an_error():
    x = np.ones((4, 3, 2))
    with pytest.raises(ValueError, match=r"block_scan: a has shape \(4, 3, 2, 3\), expected"):
        la.block_scan(np.ones((4, 3, 2, 3)), x)
