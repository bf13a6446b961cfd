"""Results do not depend on memory layout: strides, order, alignment, byte order, overlap. And shapes at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn_np as la
from linattn_np.call.binding import axes_of_states
from linattn_np.testing import relative_error
from tests.cases import (
    CASES,
    PLAIN,
    draw,
    enumerate_parts,
    is_count,
    kind_like,
    naive,
    pairwise,
    parts,
    parts_like,
    with_gradients,
    worst,
)

every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)
AT_RANDOM = settings(deadline=None, derandomize=True, max_examples=12, database=None)


def negative(x):
    """The same numbers, every stride negative."""
    flip = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[flip])[flip]


def unaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)
    y = raw[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def every_other(x):
    """A window of a larger array, a gap of one entry on every axis."""
    buffer = np.full(tuple(2 * n + 1 for n in x.shape), np.nan if x.dtype.kind == "f" else -1, x.dtype)
    window = buffer[tuple(slice(1, None, 2) for _ in x.shape)]
    window[...] = x
    return window


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "negative strides": negative,
    "Fortran order": np.asfortranarray,
    "unaligned": unaligned,
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "every other entry": every_other,
    "read-only": read_only,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "last axis outermost": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1) if x.ndim else x,
    "unaligned and backwards": lambda x: unaligned(x[::-1])[::-1],
}


def laid(how, x):
    return parts_like(x, [LAYOUTS[how](S) for S in parts(x)])


SAMPLE = [c for c in CASES if c in PLAIN or c.normalised]


@pytest.mark.parametrize(
    ("case", "how", "dtype"),
    pairwise(SAMPLE, LAYOUTS, [np.float32, np.float64]),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_layout(case, how, dtype):
    arrays, state = draw(case, T=19, dtype=dtype)
    expected = with_gradients(case, arrays, state=state)
    moved = {n: LAYOUTS[how](x) for n, x in arrays.items()}
    for n, x in moved.items():
        np.testing.assert_array_equal(x, arrays[n])
    found = with_gradients(case, moved, state=laid(how, state))
    for name, x in found.items():
        assert x.dtype == (np.int64 if is_count(name) else kind_like(expected[name], dtype))
        assert x.dtype.isnative
        assert relative_error(x, expected[name]) <= 50 * np.finfo(dtype).eps, name


@every_variant
def test_layouts_of_one_channel(case):
    """An axis of one entry has any stride."""
    arrays, state = draw(case, T=3, K=1, V=1)
    expected = with_gradients(case, arrays, state=state)
    for how, layout in LAYOUTS.items():
        found = with_gradients(case, {n: layout(x) for n, x in arrays.items()}, state=laid(how, state))
        for name, x in found.items():  # the gradient of a unit row of one channel is rounding error
            np.testing.assert_allclose(
                x, expected[name], rtol=0, atol=1e-12 * (1 + abs(x).max(initial=0)), err_msg=f"{how} {name}"
            )


@pytest.mark.parametrize("how", LAYOUTS)
def test_layout_of_cotangents_and_of_what_is_read(how):
    case = next(c for c in PLAIN if c.fn is la.kda)
    arrays, state = draw(case, T=19)
    result, pullback = la.vjp(la.kda, **arrays, state=state, return_state=True)
    expected = pullback(result.out, result.state)
    found = pullback(LAYOUTS[how](result.out), LAYOUTS[how](result.state))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= 1e-14
    out, pullback = la.vjp(la.read, arrays["q"], state)
    moved, pull = la.vjp(la.read, LAYOUTS[how](arrays["q"]), LAYOUTS[how](state))
    for a, b in zip([moved, *pull(LAYOUTS[how](out))], [out, *pullback(out)], strict=True):
        assert relative_error(a, b) <= 1e-14


@every_variant
def test_zero_strides(case):
    """One token, one head or one batch row broadcast over all: as if it had been copied."""
    arrays, state = draw(case, T=1, B=(1,), H=1)
    sizes = {"T": 13, "H": 3}

    def spread(x, letters, lead=(2,)):
        own = x.shape[x.ndim - len(letters) :]
        shape = tuple(sizes.get(c.rstrip("qk"), n) for c, n in zip(letters, own, strict=True))
        return np.broadcast_to(x, (*lead, *shape) if x.ndim > len(letters) else shape)

    wide = {n: spread(x, case.given[n].split()) for n, x in arrays.items()}
    by_part = axes_of_states(case.spec)
    axes = [by_part[name].split() for name in getattr(state, "_fields", ["state"])]
    states = parts_like(state, [spread(S, letters) for S, letters in zip(parts(state), axes, strict=True)])
    assert 0 in wide[case.spec.change.value].strides
    copied = parts_like(states, [S.copy() for S in parts(states)])
    expected = with_gradients(case, {n: x.copy() for n, x in wide.items()}, state=copied)
    found = with_gradients(case, wide, state=states)
    error, what = worst(found, expected)
    assert error <= 1e-13, what


def one_anywhere(x):
    """The same numbers, with 0 and an odd number for the strides of axes of length 1; contiguous, says NumPy."""
    strides = [s if n > 1 else 8 * (i % 2) for i, (n, s) in enumerate(zip(x.shape, x.strides, strict=True))]
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


AXES = [{"T": 35, "B": (1,), "H": 1}, {"T": 1, "B": (3,), "H": 2}]


@pytest.mark.parametrize("sizes", AXES, ids=["one head", "one token"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strides_of_axes_of_one(case, sizes):
    """x[:, None] has a stride of 0 there, which no pass over rows may use."""
    arrays, state = draw(case, **sizes)
    expected = with_gradients(case, arrays, state=state)
    moved = {n: one_anywhere(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    found = with_gradients(case, moved, state=parts_like(state, [one_anywhere(S) for S in parts(state)]))
    error, what = worst(found, expected)
    assert error <= 1e-13, what


@pytest.mark.parametrize("case", [c for c in PLAIN if {"q", "k"} <= c.given.keys() and not c.spec.micro_steps], ids=str)
def test_overlapping_arrays(case):
    """q is k, or all are windows of one array."""
    arrays, state = draw(case, T=20, K=4, V=4)
    same = arrays | {"q": arrays["k"]}
    expected = with_gradients(case, same | {"q": arrays["k"].copy()}, state=state)
    error, what = worst(with_gradients(case, same, state=state), expected)
    assert error <= 1e-14, what
    k = arrays["k"]
    windows = arrays | {"q": k[:, 2:], "k": k[:, :-2]}
    windows = {n: x[:, :18] if n in case.given and case.on_tokens(n) else x for n, x in windows.items()}
    expected = with_gradients(case, {n: x.copy() for n, x in windows.items()}, state=state)
    error, what = worst(with_gradients(case, windows, state=state), expected)
    assert error <= 1e-14, what


def test_a_state_that_overlaps_an_input_is_overwritten_last():
    buffer = np.random.default_rng(0).standard_normal((1, 3, 2, 4))
    state = buffer.reshape(1, 2, 4, 3)[..., :3]
    q = np.random.default_rng(1).standard_normal((1, 3, 2, 4))
    expected = la.linear_attention(q, buffer.copy(), q[..., :3], state=state.copy(), return_state=True)
    out, end = la.linear_attention(q, buffer, q[..., :3], state=state, overwrite_state=True, return_state=True)
    np.testing.assert_allclose(out, expected.out, rtol=1e-14)
    np.testing.assert_allclose(end, expected.state, rtol=1e-14)


sizes = st.fixed_dictionaries(
    {
        "T": st.integers(0, 20),
        "B": st.sampled_from([(), (1,), (2,), (1, 2)]),
        "K": st.integers(1, 9),
        "V": st.integers(1, 9),
        "seed": st.integers(0, 99),
    }
)
heads = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from(["equal", "keys", "both", "queries"]))
chunk = st.one_of(st.none(), st.integers(1, 24), st.just("parallel"))


def head_sizes(case, drawn):
    """(G, R, who is shared) as Hq, Hk, H."""
    G, R, shared = drawn
    if shared == "queries" and case.spec.shares_states:
        return {"Hq": G * R, "Hk": G, "H": G}
    return {"H": G * R, "Hq": G if shared == "both" else G * R, "Hk": G if shared in ("both", "keys") else G * R}


@every_variant
def test_any_shape_any_form(case):
    @AT_RANDOM
    @given(sizes, heads, chunk)
    def check(sizes, heads, chunk):
        if case.fn is la.rebased and sizes["K"] == 2:  # a norm of two channels is a sign: its slope is all cancellation
            sizes = sizes | {"K": 3}
        arrays, state = draw(case, **sizes, **head_sizes(case, heads))
        found = with_gradients(case, arrays, state=state, chunk_size=chunk)
        out, end = naive(case, arrays, state)
        expected = with_gradients(case, arrays, state=state, chunk_size=1)
        assert (
            worst(
                {"out": found["out"]} | {n: x for n, x in found.items() if n.startswith("state")},
                {"out": out} | dict(enumerate_parts("state", end)),
            )[0]
            <= 1e-12
        )
        assert worst(found, expected)[0] <= 1e-11

    check()


@every_variant
def test_any_strides(case):
    @AT_RANDOM
    @given(st.integers(0, 99), st.data())
    def check(seed, data):
        arrays, state = draw(case, T=7, seed=seed)
        hows = {n: data.draw(st.sampled_from(sorted(LAYOUTS)), label=n) for n in arrays}
        moved = {n: LAYOUTS[hows[n]](x) for n, x in arrays.items()}
        assert worst(with_gradients(case, moved, state=state), with_gradients(case, arrays, state=state))[0] <= 1e-13

    check()


gates = st.lists(
    st.one_of(st.just(0.0), st.just(-np.inf), st.floats(-1e3, 0.0), st.floats(-1.0, 0.0)), min_size=1, max_size=8
)


@pytest.mark.parametrize("case", [c for c in PLAIN if c.given.keys() & {"g", "gv", "slopes"}], ids=str)
def test_any_gates(case):
    @AT_RANDOM
    @given(gates, st.integers(0, 99), chunk)
    def check(values, seed, chunk):
        arrays, state = draw(case, T=18, seed=seed)
        rng = np.random.default_rng(seed)
        for name in arrays.keys() & {"g", "gv", "slopes"}:
            arrays[name] = rng.choice(np.array(values), arrays[name].shape) * (-1.0 if name == "slopes" else 1.0)
        found = with_gradients(case, arrays, state=state, chunk_size=chunk)
        assert all(np.isfinite(x).all() for x in found.values())
        out, end = naive(case, arrays, state)
        expected = {"out": out} | dict(enumerate_parts("state", end))
        error, what = worst({n: found[n] for n in expected}, expected)
        assert error <= 1e-12, what

    check()
