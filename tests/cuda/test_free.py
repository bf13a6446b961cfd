"""The kernels of erase FREE compile without a GPU, for the architecture that they are for."""

from __future__ import annotations

import re

import pytest

from linattn_np.matrix_state.cuda.free import delta, plan
from linattn_np.matrix_state.cuda.free.entries import free_entries
from linattn_np.runtime.cuda import nvrtc
from linattn_np.runtime.cuda.entries import SHARED, Entry

from .test_compile import HGMMA, operations, spilled
from .test_vector import compiled

# Bytes of spilled registers. The exact factors hold the pairs of all levels, 64 numbers a thread, over their products;
# two blocks of the gradients share a multiprocessor, or one of 512 threads has it, with 128 registers: what spills is
# read once a chunk, of the gradients a part of what rounding leaves. With up to 64 key channels three blocks of the
# factors do, with 80.
ALLOWANCE = {"factors": 40, "exact factors": 200, "exact grads": 32, "grads": 16}
GRADS_OF_TWO_BLOCKS = 48

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


def allowed(entry):
    name = entry.words.split(", ")[1].removesuffix(" for a backward")
    two = name == "grads" and dict(entry.constants)["LA_BLOCKS"] == 2
    return GRADS_OF_TWO_BLOCKS if two else ALLOWANCE.get(name, 0)


@pytest.mark.parametrize(
    ("gate", "K", "V", "ragged"),
    [("bfloat16", 128, 128, False), ("bfloat16", 64, 64, False), ("float32", 64, 40, True)],
)
def test_every_entry_compiles(gate, K, V, ragged):
    """To warpgroup products, with no more spilled registers than the allowance."""
    entries = [x for x in free_entries("bfloat16", K, V, 90, ragged=ragged) if f"in {gate}," in x.words]
    assert len(entries) == 9
    for entry in entries:
        code = compiled(entry)
        assert spilled(code.log) <= allowed(entry), (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)
        assert operations(code.cubin) & HGMMA, entry.words


@pytest.mark.parametrize(
    ("gate", "erasers", "before", "K", "V"),
    [("bfloat16", "bfloat16", False, 128, 128), ("float32", "float32", True, 64, 40)],
)
def test_erase_vectors_compile(gate, erasers, before, K, V):
    code = compiled(Entry("erase vectors", delta.SOURCE, delta.constants(K, V, gate, erasers, before)))
    assert spilled(code.log) == 0


def test_which_architectures_have_them():
    assert {c for c in SHARED if list(free_entries("bfloat16", 128, 128, c))} == {90}
    assert not list(free_entries("float32", 128, 128, 90))


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 128])
def test_shared_memory_fits(gate, width):
    for name in plan.KERNELS:
        constants = dict(plan.constants(name, plan.FreeKind(width, width, gate)))
        assert constants["LA_BLOCKS"] * (constants["LA_SHARED"] + 1024) <= 228 * 1024
