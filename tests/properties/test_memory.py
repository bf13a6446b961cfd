"""Memory grows with the number of tokens, not with its square, forward and backward."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import linattn_np as la
from bench.memory import in_fresh_process
from linattn_np.matrix_state.types import Decay, Erase, EraseKey
from tests.cases import PLAIN, RECURRENT, draw, one_per


def peak(case, T, form):
    """Bytes at the peak of one forward and backward call, its inputs left out."""
    arrays, _ = draw(case, T=T, B=(1,), H=1, K=4, V=4, dtype=np.float32)
    if "a" in arrays:
        arrays["b"] = -0.5 * arrays["a"]  # or the state grows without bound
    tracemalloc.start()
    try:
        (out, state), pullback = la.vjp(case.fn, **arrays, **case.options, **form, return_state=True, backend="chunks")
        pullback(out, state)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def kind(spec):
    return spec.decay, spec.erase, spec.query_reads, spec.erase_reads


def gated_erase(spec):
    """The kind of a variant with a decay whose keys, or two vectors, erase."""
    others = spec.erase is Erase.DELTA and spec.change.erase_key is not EraseKey.KEY
    return None if spec.micro_steps or others or Decay.NONE is spec.decay or Erase.NONE is spec.erase else kind(spec)


@pytest.mark.parametrize("form", [{"chunk_size": 64}, {"chunk_size": "parallel"}], ids=str)
@pytest.mark.parametrize("case", one_per(kind, PLAIN), ids=str)
def test_memory_grows_linearly(case, form):
    """Four times the tokens cost at most four times as much (5% of slack), half a matrix (T, T) of float32."""
    T = 640
    small, large = peak(case, T, form), peak(case, 4 * T, form)
    assert large <= 4.2 * small
    assert large <= (4 * T) ** 2 * 4 / 2


def test_nothing_of_the_size_of_a_state_is_kept_for_each_chunk():
    """K = V = 64 and one head: a state (K, V) a token or a chunk of 16 would be 16 or 1 MiB a thousand tokens."""
    case = next(c for c in PLAIN if c.fn is la.simple_gla)
    arrays, _ = draw(case, T=4096, B=(1,), H=1, K=64, V=64, dtype=np.float32)
    given = sum(x.nbytes for x in arrays.values())
    la.simple_gla(**arrays, chunk_size=16, backend="chunks")  # imports
    tracemalloc.start()
    out = la.simple_gla(**arrays, chunk_size=16, backend="chunks")
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used <= out.nbytes + given / 2
    tracemalloc.start()
    out, pullback = la.vjp(la.simple_gla, **arrays, chunk_size=16, backend="chunks")
    pullback(out)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used <= out.nbytes + 2 * given


@pytest.mark.parametrize("fn", one_per(gated_erase), ids=lambda fn: fn.__name__)
def test_compiled_loops_take_16_mib_a_thread(fn, monkeypatch):
    """Forward and backward above inputs and outputs, K = V = 128, however long the sequence."""
    pytest.importorskip("numba")
    from linattn_np.runtime.pieces.memory import forget_scratch

    monkeypatch.setenv("LINATTN_NUM_THREADS", "1")
    case = next(c for c in PLAIN if c.fn is fn)
    used = []
    for T in (40, 2048, 8192):  # the first compiles
        arrays, _ = draw(case, T=T, B=(1,), H=1, K=128, V=128, dtype=np.float32)
        if "a" in arrays:
            arrays["b"] = -0.5 * arrays["a"]
        forget_scratch()
        tracemalloc.start()
        out, pullback = la.vjp(fn, **arrays, backend="numba")
        grads = pullback(out)
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        results = out.nbytes + sum(d.nbytes for d in grads if d is not None)
        results += grads.k.nbytes if fn.spec.erase is Erase.DELTA else 0  # r's, before it is added to k's
        used[-1] -= results
    assert max(used[1:]) <= 16 << 20, used


def is_of_matrices(axes):
    """Whether a token has a matrix."""
    letters = axes.split("|")[0].split()
    return letters[0] == "T" and ({"K", "V"} <= set(letters) or letters[-2:] == ["N", "N"])


# variants whose arrays have no entry for each of the state's in every token, nor those of every level
LONG = [
    fn
    for fn in RECURRENT
    if not any(is_of_matrices(a.axes) for a in fn.spec.arrays.values()) and fn.spec.readout.name != "LEVELS"
]


@pytest.mark.slow
@pytest.mark.parametrize("fn", LONG, ids=lambda fn: fn.__name__)
def test_a_long_sequence_fits(fn):
    """T = 131072, H = 4, K = V = 64, float32, forward and backward: 4 GiB of resident memory, inputs included.

    T counts rows where a token has R = 2 of them: its B, C, values and their gradients are twice those of one row.

    Attention over all tokens would take a quarter of an hour; its memory is measured in tests/softmax.
    """
    found = in_fresh_process(fn.__name__, 131072 // (2 if fn.spec.micro_steps == "R" else 1))
    assert found["finite"]
    assert found["peak_gib"] <= 4
