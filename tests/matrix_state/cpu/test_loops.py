"""The compiled loops against the definition: every cell, head grouping and size, in float64 and float32."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.matrix_state.types import EraseKey, ReadState
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
