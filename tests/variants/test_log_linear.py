"""Log-linear attention: its closed form, its special case, and what its state holds."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.cases import with_gradients
from tests.properties.test_nan import BACKENDS, FIRST, POISONED, C, both

PLAIN = {la.log_linear_gla: la.simple_gla, la.log_linear_gated_delta_rule: la.gated_delta_rule}
every_variant = pytest.mark.parametrize("fn", PLAIN, ids=lambda fn: fn.__name__)


def drawn(fn, T, levels=12, **sizes):
    x = la.testing.sample(fn, np.random.default_rng(0), T=T, **sizes)
    return x | {"lam": x["lam"][..., :levels]}


def plain(fn, x):
    return {n: y for n, y in x.items() if n != "lam"}


@every_variant
@pytest.mark.parametrize("T", [3, 70, 300])
def test_the_influence_of_the_plain_variant_times_weights_of_levels(fn, T):
    x = drawn(fn, T)
    at = np.arange(T)
    levels = np.array([[int(i ^ j).bit_length() for j in at] for i in at])
    A = la.influence_matrix(PLAIN[fn], **plain(fn, x))  # (B, H, T, T)
    lam = np.moveaxis(x["lam"], 2, 1)[:, :, at[:, None], levels]
    out = np.einsum("bhij,bjhv->bihv", A * lam, x["v"])
    assert relative_error(fn(**x), out) < 1e-13


@every_variant
@pytest.mark.parametrize("T", [1, 64, 130])
def test_weights_of_one_are_the_plain_variant(fn, T):
    x = drawn(fn, T)
    x["lam"] = np.ones_like(x["lam"])
    out, state = fn(**x, return_state=True)
    expected, S = PLAIN[fn](**plain(fn, x), return_state=True)
    assert relative_error(out, expected) < 1e-13
    assert relative_error(state.S.sum(axis=-3), S) < 1e-13


@every_variant
def test_a_state_has_the_levels_of_the_bits_of_its_position(fn):
    for T in (1, 2, 6, 100):
        state = fn(**drawn(fn, T), return_state=True).state
        assert (state.position == T).all()
        is_live = state.S.any(axis=(0, 1, 3, 4))
        assert [*is_live] == [bool(T >> n & 1) for n in range(12)]


@every_variant
def test_entries_of_empty_levels_are_not_read(fn):
    """Of a pool, for one."""
    x = drawn(fn, 80)
    first = {n: y[:, :37] for n, y in x.items()}
    rest = {n: y[:, 37:] for n, y in x.items()}
    state = fn(**first, return_state=True).state
    S = np.where(state.S.any(axis=(0, 1, 3, 4))[:, None, None], state.S, np.nan)
    for T in (1, 3, 43):
        part = {n: y[:, :T] for n, y in rest.items()}
        np.testing.assert_array_equal(fn(**part, state=state), fn(**part, state=la.LevelState(S, state.position)))


@every_variant
def test_too_few_levels_are_an_error(fn):
    assert fn(**drawn(fn, 8, levels=4)).shape[1] == 8
    with pytest.raises(ValueError, match=f"{fn.__name__}: lam has 4 levels, expected at least 5 for 9 tokens"):
        fn(**drawn(fn, 9, levels=4))
    state = fn(**drawn(fn, 8, levels=4), return_state=True).state
    with pytest.raises(ValueError, match="lam has 4 levels, expected at least 5 for 9 tokens"):
        fn(**drawn(fn, 1, levels=4), state=state)


@every_variant
def test_decoding_is_the_whole_call(fn):
    """With steps in place, from one state."""
    x = drawn(fn, 40)
    out = fn(**x)
    state = None
    for t in range(40):
        now = {n: y[:, t] for n, y in x.items()}
        y, state = la.step(fn, **now, state=state, overwrite_state=state is not None, return_state=True)
        assert relative_error(y, out[:, t]) < 1e-13


@every_variant
@pytest.mark.parametrize("T", [15, 256, 300])
def test_the_loops_and_the_sums_of_calls_have_the_same_gradients(fn, T):
    """Of a sequence that begins at position 37, with more queries than states, and of its states."""
    first = fn(**drawn(fn, 37, Hq=4, H=2, Hk=2), return_state=True).state
    x = drawn(fn, T, Hq=4, H=2, Hk=2) | {"state": first, "return_state": True}
    (loops, pull), (sums, pull_sums) = la.vjp(fn, **x), la.vjp(fn, **x, chunk_size=32)
    assert relative_error(loops.out, sums.out) < 1e-13
    rng = np.random.default_rng(1)
    dout, dS = rng.standard_normal(loops.out.shape), rng.standard_normal(loops.state.S.shape)
    d, expected = (p(dout, loops.state._replace(S=dS)) for p in (pull, pull_sums))
    for name, y in d._asdict().items():
        y, other = (y.S, expected.state.S) if name == "state" else (y, getattr(expected, name))
        assert relative_error(y, other) < 1e-12, name


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("case", "name"), [x[:2] for x in POISONED if x[2] == FIRST], ids=str)
def test_gradients_of_queries_before_a_chunk_do_not_see_a_nan(case, name, backend):
    clean, found = both(case, name, FIRST, with_gradients, backend=backend, chunk_size=C)
    for d in ("dq", "dlam"):
        np.testing.assert_array_equal(found[d][:, :FIRST], clean[d][:, :FIRST])
