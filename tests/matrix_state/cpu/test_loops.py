"""The compiled loops against the definition: every cell, head grouping and size, in float64 and float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.matrix_state.types import EraseKey, ReadState
from linattn_np.runtime.shapes import sequences
from linattn_np.testing import relative_error
from tests.core_cases import CELLS, case

HEADS = {"equal": (2, 2, 2), "shared keys": (1, 1, 2), "shared values": (4, 2, 2), "shared k": (2, 1, 2)}
OUT, GRADIENT = 2e-6, 5e-6  # float32 against the float64 definition


def both(x, plan, state, dout=None, dstate=None, module=numba_loops):
    """out, final state and, with cotangents, every gradient, by name."""
    out, end, saved = module.forward(x, plan, state)
    found = {"out": out, "state": end}
    if dstate is not None:
        grads, found["dstate"] = module.backward(saved, dout, dstate)
        found |= {"d" + name: d for name, d in grads._asdict().items() if d is not None}
    return {name: y for name, y in found.items() if y is not None}


def errors(found, expected):
    assert found.keys() == expected.keys()
    return {name: relative_error(y, expected[name]) for name, y in found.items()}


def single(x, plan, *arrays):
    """The same call in float32."""
    cast = [None if y is None else y.astype(np.float32) for y in (*x, *arrays)]
    return type(x)(*cast[: len(x)]), plan._replace(dtype=np.float32), *cast[len(x) :]


def wide(x, *arrays):
    """The same numbers in float64."""
    cast = [None if y is None else y.astype(np.float64) for y in (*x, *arrays)]
    return type(x)(*cast[: len(x)]), *cast[len(x) :]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_is_the_recurrence(cell, heads):
    args = case(*cell, heads=HEADS[heads])
    x, plan, *rest = args
    expected = both(*args, module=recurrence)
    for C in (8, 16, None):
        found = errors(both(x, plan._replace(chunk_size=C), *rest), expected)
        assert max(found.values()) < 1e-11, (C, found)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 64, 97])
@pytest.mark.parametrize(
    "cell",
    [
        ("scalar", "delta", "after"),
        ("vector", "free", "after"),
        ("vector", "none", "bonus"),
        ("outer", "none", "before"),
        ("value", "none", "after"),
    ],
)
def test_awkward_lengths(cell, T):
    args = case(*cell, T=T, K=7, V=4)
    x, plan, *rest = args
    expected = both(*args, module=recurrence)
    for C in (3, 16, 32, 64):
        found = errors(both(x, plan._replace(chunk_size=C), *rest), expected)
        assert max(found.values()) < 1e-11, (C, found)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (7, 60), (60, 7), (64, 100), (100, 33), (128, 256), (256, 1)])
@pytest.mark.parametrize(
    "cell",
    [
        ("scalar", "delta", "after"),
        ("vector", "delta", "after"),
        ("none", "none", "before"),
        ("outer", "none", "after"),
    ],
)
def test_awkward_widths(cell, K, V):
    args = case(*cell, T=37, K=K, V=V, B=1)
    x, plan, *rest = args
    plan = plan._replace(chunk_size=None)
    expected = both(x, plan, *rest, module=recurrence)
    found = errors(both(x, plan, *rest), expected)
    assert max(found.values()) < 1e-11, found
    found = errors(both(*single(x, plan, *rest)), expected)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_the_gradient_of_keys_that_are_erased_has_both_parts(decay):
    """Added chunk by chunk, with the bits of a sum of both."""
    x, plan, *rest = case(decay, "delta", "after", K=7, V=4)
    x = x._replace(r=x.k)
    apart = both(x, plan, *rest)
    found = both(x, plan._replace(erase_key=EraseKey.KEY), *rest)
    assert "dr" not in found
    assert (found["dk"] == apart["dk"] + apart["dr"]).all()


def gates(kind, shape, rng):
    """Log decays that break what subtracts long sums or divides by a decay."""
    mean = {"0.1": 0.1, "1": 1.0, "10": 10.0, "60": 60.0}.get(kind)
    if mean is not None:
        return -mean * rng.exponential(1, shape)
    resets = {"resets": -np.inf, "huge": -1e30, "sometimes -80": -80.0}[kind]
    return np.where(rng.uniform(size=shape) < 0.1, resets, 0.0)


@pytest.mark.parametrize("kind", ["0.1", "1", "10", "60", "resets", "huge", "sometimes -80"])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("erase", ["none", "delta", "delta undecayed", "free"])
def test_any_gate_in_float32(decay, erase, kind):
    args = case(decay, erase, "after", T=100, K=32, V=16)
    x, plan, *rest = args
    x = x._replace(g=gates(kind, x.g.shape, np.random.default_rng(3)))
    plan = plan._replace(chunk_size=None)
    small, narrow, *rest = single(x, plan, *rest)
    x, *exact = wide(small, *rest)
    expected = both(x, plan, *exact, module=recurrence)
    assert max(errors(both(x, plan, *exact), expected).values()) < 1e-11
    for name, error in errors(both(small, narrow, *rest), expected).items():
        assert error < (OUT if name in ("out", "state") else GRADIENT), (name, error)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta):
    """The same key again and again: a doubling inverse of the unit-lower system is off by 1e9 here."""
    x, plan, state, *_ = case("scalar", "delta", "after", T=130, K=32, V=16)
    x, narrow, state = single(x, plan, state)
    k = np.broadcast_to(x.k[:1, :1], x.k.shape)
    x = x._replace(k=k, r=k, beta=np.full_like(x.beta, beta), g=np.float32(0.01) * x.g)
    plan, narrow = plan._replace(chunk_size=None), narrow._replace(chunk_size=None)
    exact = wide(x, state)
    expected = both(exact[0], plan, exact[1], module=recurrence)
    assert max(errors(both(exact[0], plan, exact[1]), expected).values()) < 1e-11
    found = errors(both(x, narrow, state), expected)
    # beta 2 reflects what is stored: nothing is forgotten, and the definition itself is off by 2e-6 after 130 tokens
    assert max(found.values()) < (2 * OUT if beta == 2 else OUT), found


@pytest.mark.parametrize(
    "cell", [("scalar", "delta", "after"), ("vector", "free", "after"), ("constant", "none", "after")]
)
def test_ragged_sequences(cell):
    args = case(*cell, T=70, B=1, heads=(4, 2, 2), offsets=[0, 0, 5, 38, 38, 70])
    found = errors(both(*args), both(*args, module=recurrence))
    assert max(found.values()) < 1e-11, found


def test_no_batch_axis_and_two_of_them():
    x, plan, state, *_ = case("scalar", "delta", "after", B=6)
    expected = both(x, plan, state)
    for lead in ((2, 3), (6,)):
        y = type(x)(*(None if a is None else a.reshape(*lead, *a.shape[1:]) for a in x))
        found = both(y, plan, state.reshape(*lead, *state.shape[1:]))
        assert found["out"].shape[:-3] == lead
        assert (found["out"].ravel() == expected["out"].ravel()).all()
    one = both(type(x)(*(None if a is None else a[0] for a in x)), plan, state[0])
    assert (one["out"] == expected["out"][0]).all()
    assert (one["state"] == expected["state"][0]).all()


def test_strides_of_any_sign_and_read_only_inputs():
    x, plan, state, *_ = case("vector", "delta", "after", T=40, K=16, V=24)
    expected = both(x, plan, state)

    def odd(y):
        wide = np.full((*y.shape[:-1], 2 * y.shape[-1] + 1), np.nan)
        view = wide[..., -2::-2][..., : y.shape[-1]]
        view[...] = y
        view = np.asfortranarray(view)[:, ::-1][:, ::-1] if y.shape[-1] % 3 == 0 else view
        view.flags.writeable = False
        return view

    found = both(type(x)(*(None if y is None else odd(y) for y in x)), plan, odd(state))
    assert all((found[name] == expected[name]).all() for name in found)


def test_storage_in_16_bits_is_converted_exactly():
    x, plan, state, *_ = case("scalar", "delta", "after", T=40, K=16, V=24)
    plan = plan._replace(dtype=np.float32)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        small = type(x)(*(None if y is None else y.astype(dtype) for y in x))
        wide = type(x)(*(None if y is None else y.astype(np.float32) for y in small))
        out, end, _ = numba_loops.forward(small, plan, state.astype(np.float32))
        out_wide, end_wide, _ = numba_loops.forward(wide, plan, state.astype(np.float32))
        assert out.dtype == dtype
        assert (out == out_wide.astype(dtype)).all()
        assert (end == end_wide).all()


@pytest.mark.parametrize("heads", [(2, 2, 2), (1, 1, 1)])
def test_same_bits_for_any_number_of_threads(heads, monkeypatch):
    monkeypatch.setattr(policy, "FEW_OPERATIONS", 0)
    args = case("vector", "delta", "after", T=150, K=48, V=100, B=1, heads=heads)
    results = []
    for threads in ("1", "2", "3", "7"):
        monkeypatch.setenv("LINATTN_NUM_THREADS", threads)
        results.append([both(*args), both(*single(*args))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert all((a[name] == b[name]).all() for name in a)


def test_write_without_reading():
    x, plan, state, *_ = case("scalar", "delta", "after")
    out, end, _ = numba_loops.forward(x._replace(q=None), plan, state)
    assert out is None
    assert (end == numba_loops.forward(x, plan, state)[1]).all()


def test_a_bad_head_stays_alone():
    """NaN and inf of one head or sequence reach no other, nor what is computed later in the same memory."""
    x, plan, state, *_ = case("scalar", "delta", "after", T=40)
    good = both(x, plan, state)
    v, g = x.v.copy(), x.g.copy()
    v[0, 0, 0, 0], v[0, 30, 0, 1], g[0, 20, 0, 0] = np.inf, np.nan, np.nan
    bad = both(x._replace(v=v, g=g), plan, state)
    assert np.isnan(bad["out"][0, 35, 0]).all()
    assert (bad["out"][0, :, 1] == good["out"][0, :, 1]).all()
    assert (bad["out"][1] == good["out"][1]).all()
    assert (bad["state"][1] == good["state"][1]).all()


@pytest.mark.parametrize("C", [1, 32])
def test_later_tokens_do_not_change_earlier_bits(C):
    """In one form, that is: how long a sequence is may choose another."""
    x, plan, state, *_ = case("vector", "delta", "after", T=60)
    plan = plan._replace(chunk_size=C)
    whole = both(x, plan, state)["out"]
    for T in (1, 9, 31, 32, 33, 50):
        cut = type(x)(*(None if y is None else y[:, :T] for y in x))
        assert (both(cut, plan._replace(sequences=tuple(sequences(T, None))), state)["out"] == whole[:, :T]).all()


def test_read_before_write_of_the_definition_with_delta():
    x, plan, state, *_ = case("scalar", "delta", "after", T=20)
    plan = plan._replace(query_reads=ReadState.PREVIOUS)
    assert max(errors(both(x, plan, state), both(x, plan, state, module=recurrence)).values()) < 1e-11


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(
    "cell",
    [("scalar", "delta", "after"), ("vector", "delta undecayed", "after"), ("vector", "free", "after"),
     ("none", "none", "bonus")],
    ids="-".join,
)  # fmt: skip
def test_backward_in_blocks(cell, chunks, short_blocks):
    """Blocks of few chunks: the states that they begin with are found first, no bit changes."""
    args = case(*cell, T=77, C=8, B=1, heads=(2, 1, 2), offsets=[0, 0, 40, 41, 77])
    whole = both(*args)
    assert max(errors(whole, both(*args, module=recurrence)).values()) < 1e-11

    short_blocks(8 * chunks)
    cut = both(*args)
    assert all((cut[name] == whole[name]).all() for name in whole)


@pytest.mark.parametrize(("heads", "T"), [((2, 2, 2), 513), ((1, 1, 2), 600)])
def test_the_bonus_of_many_tokens(heads, T):
    """u has one gradient over all tokens, however many states a forward keeps."""
    args = case("vector", "none", "bonus", T=T, K=6, V=40, heads=heads, offsets=None, C=None)
    x, plan, *rest = args
    plan = plan._replace(gradients=True)
    expected = both(x, plan, *rest, module=recurrence)
    for C in (None, 16):
        found = errors(both(x, plan._replace(chunk_size=C), *rest), expected)
        assert max(found.values()) < 1e-11, (C, found)
    small, narrow, *rest = single(x, plan, *rest)
    exact, *rest64 = wide(small, *rest)
    expected = both(exact, plan, *rest64, module=recurrence)
    found = errors(both(small, narrow, *rest), expected)
    assert max(found.values()) < GRADIENT, found
    two = errors(both(exact._replace(u=2 * exact.u), plan, *rest64), both(exact, plan, *rest64))
    assert two["du"] < 1e-13  # it does not depend on u
    assert two["out"] > 0.1


def test_the_bonus_of_packed_sequences_longer_than_a_time_block():
    args = case("vector", "none", "bonus", T=820, K=4, V=8, B=1, offsets=[0, 530, 530, 540, 820], C=None)
    x, plan, *rest = args
    plan = plan._replace(gradients=True)
    found = errors(both(x, plan, *rest), both(x, plan, *rest, module=recurrence))
    assert max(found.values()) < 1e-11, found
