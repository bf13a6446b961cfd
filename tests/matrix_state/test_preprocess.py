"""Keys cut along their channels: the same function, whatever module computes the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy, preprocess
from linattn_np.matrix_state.array import chunks
from linattn_np.testing import relative_error
from tests.core_cases import CELLS, case

CUT = [c for c in CELLS if c[1] == "none"]


class Split:
    """A module behind the step of the preprocessing that cuts keys, with blocks of at most `most` channels."""

    def __init__(self, module, most, monkeypatch):
        monkeypatch.setattr(policy, "WIDEST_CUDA", most)
        self.step, self.module = preprocess.PREPROCESSING["wide_keys"], module

    def forward(self, x, plan, state):
        assert len(preprocess.cuts(x)) > 1
        return self.step[0](self.module.forward, self.module, x, plan, state)

    def backward(self, saved, dout, dstate):
        return self.step[1](self.module.backward, saved, dout, dstate)


def both(module, x, plan, state, dout, dstate):
    out, end, saved = module.forward(x, plan, state)
    grads, dS = module.backward(saved, dout, dstate)
    return {"out": out, "state": end, "dstate": dS} | {
        "d" + n: d for n, d in grads._asdict().items() if d is not None}  # fmt: skip


@pytest.mark.parametrize("module", [recurrence, chunks], ids=["reference", "chunks"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("cell", CUT, ids="-".join)
def test_blocks_of_channels_add_up(cell, most, module, monkeypatch):
    args = case(*cell, K=7, heads=(4, 2, 2))
    if most == 7:
        monkeypatch.setattr(policy, "WIDEST_CUDA", most)
        assert matrix_state.preprocessing(matrix_state.CUDA, *args[:2]) == ()
        return
    split = Split(module, most, monkeypatch)
    assert len(preprocess.cuts(args[0])) == -(-7 // most)
    found, expected = both(split, *args), both(module, *args)
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        assert relative_error(found[name], y) < 1e-13, name


def test_no_state_no_queries_and_sequences_of_a_packed_row(monkeypatch):
    x, plan, state, _, dstate = case("vector", "none", "after", K=7, B=1, offsets=[0, 5, 5, 21])
    split = Split(chunks, 3, monkeypatch)
    for given in (state, None):
        out, end, _ = split.forward(x, plan, given)
        wanted, last, _ = chunks.forward(x, plan, given)
        assert relative_error(out, wanted) < 1e-13
        assert relative_error(end, last) < 1e-13
    silent = x._replace(q=None)
    out, end, saved = split.forward(silent, plan, state)
    assert out is None
    grads, _ = split.backward(saved, None, dstate)
    _, _, kept = chunks.forward(silent, plan, state)
    wanted, _ = chunks.backward(kept, None, dstate)
    assert grads.q is None
    assert relative_error(grads.g, wanted.g) < 1e-13


def test_what_erases_is_not_cut(monkeypatch):
    x = case("scalar", "delta", "after", K=7)[0]
    monkeypatch.setattr(policy, "WIDEST_CUDA", 3)
    assert preprocess.cuts(x) == [slice(0, 7)]


def test_the_final_state_of_blocks_is_not_the_callers_memory(monkeypatch):
    x, plan, state, *_ = case("scalar", "none", "after", K=7)
    before = state.copy()
    _, end, _ = Split(chunks, 3, monkeypatch).forward(x, plan._replace(overwrite=True), state)
    np.testing.assert_array_equal(state, before)
    assert not np.shares_memory(end, state)


def test_sixteen_bit_outputs_are_rounded_once(monkeypatch):
    x, plan, state, *_ = case("none", "none", "after", K=7, dtype=np.float32)
    narrow = x._replace(v=x.v.astype(np.float16))
    out = Split(recurrence, 3, monkeypatch).forward(narrow, plan._replace(dtype=np.float32), state)[0]
    wide = narrow._replace(v=narrow.v.astype(np.float32))
    exact = recurrence.forward(wide, plan._replace(dtype=np.float32), state)[0]
    assert out.dtype == np.float16
    assert np.abs(out.astype(float) - exact).max() <= 0.51 * 2.0**-10 * np.abs(exact).max()
