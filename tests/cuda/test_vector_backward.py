"""The backward kernels of a vector decay compile without a GPU, for the architecture that they are for."""

from __future__ import annotations

import re

import pytest

from linattn_np.matrix_state.cuda.vector.entries import vector_backward_entries
from linattn_np.matrix_state.types import Erase
from linattn_np.runtime.cuda import nvrtc
from linattn_np.runtime.cuda.entries import SHARED

from .test_compile import HGMMA, operations, spilled
from .test_vector import compiled

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
# Bytes of spilled registers that an entry may store, with the reason. The reverse chain with N has 144 registers a
# thread of the products, the least with which they do not wait for one another, and 112 of the copies: with float32 log
# decays, and with narrow keys, where these lie is set once and read once a chunk. The gradients share a multiprocessor
# in twos, 128 registers a thread, of which two sums of the delta rule take 64 while second terms of copies are made.
ALLOWANCE = {("reverse", Erase.NONE): 16, ("reverse", Erase.DELTA): 32, ("reverse of segments", Erase.DELTA): 32,
             ("exact gradients", Erase.NONE): 48, ("exact gradients with keys of log decays", Erase.NONE): 64,
             ("gradients", Erase.DELTA): 288}  # fmt: skip
KINDS = [(128, 128, Erase.NONE, False), (128, 128, Erase.NONE, True), (64, 40, Erase.NONE, True),
         (128, 128, Erase.DELTA, False), (40, 120, Erase.DELTA, False)]  # fmt: skip


@pytest.mark.parametrize(("K", "V", "erase", "bonus"), KINDS)
def test_every_entry_compiles(K, V, erase, bonus):
    """To products of warpgroups that do not wait for one another, no more spills than the allowance."""
    entries = list(vector_backward_entries("bfloat16", K, V, 90, erase, bonus))
    assert len(entries) == 2 * (5 if erase is Erase.DELTA or bonus else 7)
    for entry in entries:
        code, name = compiled(entry), entry.words.split(", ")[1]
        assert spilled(code.log) <= ALLOWANCE.get((name, erase), 0), (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)
        assert bool(operations(code.cubin) & HGMMA) == (name not in ("strengths", "bonus")), entry.words


def test_which_architectures_have_them():
    assert {c for c in SHARED if list(vector_backward_entries("bfloat16", 128, 128, c))} == {90}
    assert not list(vector_backward_entries("float32", 128, 128, 90))
