"""States in few bits: rounded by the step of their channel, exact where that is promised."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.serving import log_loops, pools

KINDS = {"int16": 16, "int12": 12, "int8": 8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("V", [1, 4, 7])
def test_numbers_change_by_half_a_step_of_their_value_channel_at_most(kind, V):
    rng = np.random.default_rng(0)
    S = (rng.standard_normal((3, 2, 5, V)) * 10.0 ** rng.integers(-9, 9, (3, 2, 1, V))).astype(np.float32)
    S[0, 0, :, 0] = 0
    small = la.pack_state(S, kind)
    back = la.unpack_state(small)
    largest = np.abs(S).max(-2, keepdims=True)
    assert (np.abs(back - S) <= largest * (0.5 / (2 ** (KINDS[kind] - 1) - 1) + 2**-23)).all()
    assert (back[0, 0, :, 0] == 0).all()
    assert small.shape == S.shape
    assert small.nbytes == 6 * 4 * V + 30 * {"int16": 2 * V, "int12": V + (V + 1) // 2, "int8": V}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_rounding_changes_nothing(kind):
    """Codes of an unpacked state are the codes that it was unpacked from."""
    S = np.random.default_rng(1).standard_normal((2, 3, 4, 6)).astype(np.float32)
    small = la.pack_state(S, kind)
    again = la.pack_state(la.unpack_state(small), kind)
    assert all(np.array_equal(a, b) for a, b in zip(small.arrays[::2], again.arrays[::2], strict=True))
    assert np.array_equal(small.codes, again.codes)


def test_every_code_of_twelve_bits_is_stored():
    codes = np.arange(-2047, 2048, dtype=np.float32)[:, None] * [[1, -1]]
    codes = codes.astype(np.float32)
    assert np.array_equal(la.unpack_state(la.pack_state(codes, "int12")), codes)


def test_eight_bits_and_a_residual_of_four_are_twelve_bits():
    """The upper codes are those of an 8-bit state with sixteen times the scale, and the lower ones its residual."""
    S = np.random.default_rng(2).standard_normal((2, 3, 4, 6)).astype(np.float32)
    small = la.pack_state(S, "int12")
    low = np.stack([small.low & 15, small.low >> 4], -1).reshape(S.shape)
    coarse = 16 * small.scale * small.codes
    assert np.allclose(coarse + small.scale * low, la.unpack_state(small), rtol=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "bfloat16", "float16"])
def test_a_log_of_small_states_rounds_at_flushes_alone(kind):
    """Token by token the same as by hand: the function on float32 states, rounded after every fourth token."""
    import ml_dtypes

    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 2, 11, 2, 6)).astype(np.float32)
    v = rng.standard_normal((2, 11, 2, 5)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 0.1, (2, 11, 2)).astype(np.float32), rng.uniform(0, 1, (2, 11, 2)).astype(np.float32)
    x, S = (q, k, v, g, beta), rng.standard_normal((2, 2, 6, 5)).astype(np.float32)

    def stored(state):
        return la.pack_state(state, kind) if kind in KINDS else state.astype(getattr(ml_dtypes, kind, kind))

    pool = stored(S)
    log, outs, state = la.StateLog(la.gated_delta_rule, pool, length=4), [], pools.take(pool, slice(None))
    out = np.concatenate([log.step(*(y[:, a:b] for y in x)) for a, b in ((0, 3), (3, 10), (10, 11))], 1)
    for a in (0, 4, 8):
        one, state = la.gated_delta_rule(*(y[:, a : a + 4] for y in x), state=state, return_state=True)
        outs.append(one)
        state = pools.take(stored(state), slice(None))
    assert log.state is pool
    assert np.allclose(out, np.concatenate(outs, 1), atol=1e-5)
    assert not np.allclose(out[:, 4:], la.gated_delta_rule(*x, state=S)[:, 4:], atol=1e-7)


def drawn_tokens(rng, R, T, H, K, V):
    q, k = rng.standard_normal((2, R, T, H, K)).astype(np.float32) / 2
    v = rng.standard_normal((R, T, H, V)).astype(np.float32)
    return q, k, v, -rng.random((R, T, H), np.float32), rng.random((R, T, H), np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("V", [4, 35, 100])
def test_loops_read_and_write_the_rows_as_they_are_packed(monkeypatch, kind, V, T):
    """To the bit, one task at a time on threads too; other rows stay. Panels are 16 to 64 channels wide."""
    rng = np.random.default_rng(7)
    R, H, K = 3, 2, 5
    S = rng.standard_normal((R, H, K, V)).astype(np.float32)
    S[1, :, :, 1] = 0  # a channel without a scale
    small = la.pack_state(S, kind)
    x = drawn_tokens(rng, R, T, H, K, V)
    pairs = zip((small, la.unpack_state(small)), (2, 1), strict=True)
    log, plain = (la.StateLog(la.gated_delta_rule, pool, num_threads=n) for pool, n in pairs)
    monkeypatch.setattr(pools, "take", None)
    monkeypatch.setattr(log_loops, "GRAIN", 1)
    out = log.step(*x)
    monkeypatch.undo()
    assert np.array_equal(out, plain.step(*x))
    wanted = la.pack_state(log.state_at(), kind)
    before = small.mapped(np.copy)
    monkeypatch.setattr(pools, "put", None)
    log.flush([2, 1])
    for own, new, old in zip(small.arrays, wanted.arrays, before.arrays, strict=True):
        assert np.array_equal(own[1:], new[1:])
        assert np.array_equal(own[0], old[0])


@pytest.mark.parametrize("number", [np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_not_finite_are_refused_and_nothing_is_stored(kind, number):
    x = drawn_tokens(np.random.default_rng(8), 2, 2, 2, 3, 4)
    x[2][1, 1, 1, 2] = number
    small = la.pack_state(np.ones((2, 2, 3, 4), np.float32), kind)
    before = small.mapped(np.copy)
    log = la.StateLog(la.gated_delta_rule, small)
    log.step(*x)
    with pytest.raises(ValueError, match="StateLog: state has inf or NaN, expected finite numbers"):
        log.flush()
    assert all(np.array_equal(a, b) for a, b in zip(small.arrays, before.arrays, strict=True))
    assert log.live.tolist() == [2, 2]


def test_small_states_are_kept_by_a_store():
    S = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
    store = la.StateStore(10**6, chunk_size=1)
    small = la.pack_state(S, "int8")
    assert store.put([1], small)
    small.codes[:] = 0
    with store.longest([1]) as found:
        assert np.array_equal(la.unpack_state(found.state), la.unpack_state(la.pack_state(S, "int8")))
    assert store.nbytes == small.nbytes


def test_wrong_states_are_refused():
    S = np.ones((2, 3, 4))
    for error, text, given, kind in [
        (ValueError, "kind is 'int4', expected one of 'int16', 'int12', 'int8'", S, "int4"),
        (ValueError, "inf or NaN", S * np.inf, "int8"),
        (TypeError, "state is a list", [1.0], "int8"),
        (ValueError, r"state has shape \(4,\)", S[0, 0], "int8"),
        (TypeError, "state has dtype complex128, expected one of", S * 1j, "int8"),
        (TypeError, "state has dtype object, expected one of", S.astype(object), "int8"),
        (TypeError, "state has dtype int64, expected one of", S.astype(int), "int8"),
    ]:
        with pytest.raises(error, match=f"pack_state: .*{text}"):
            la.pack_state(given, kind)
    with pytest.raises(ValueError, match="inf or NaN"):
        la.pack_state(S * np.nan, "int16")
