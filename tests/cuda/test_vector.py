"""The kernels of a vector decay compile without a GPU, for the architecture that they are for."""

from __future__ import annotations

import re

import pytest

from linattn_np.matrix_state.cuda.vector import plan as cuda_vector
from linattn_np.matrix_state.cuda.vector.entries import vector_entries
from linattn_np.matrix_state.types import Erase
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED

from .test_compile import HGMMA, HMMA, operations, spilled

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
# Bytes of spilled registers that an entry may store, with the reason. A scan has 152 registers a thread of the products
# and 104 of the producers, which is faster than 160 and 96: what spills is read once a traversal, or where one is left.
# Its exact form holds three rows of 16 numbers a lane before that; with bounded gates, 160 and 96, three numbers a
# chunk are stored behind its products. The chain has 144 and 112, the least with which its
# products do not wait for one another. Four inverses share a multiprocessor, with 64 registers (float32 log decays:
# three, 80). EXACT: what the functions that recompute a chunk exactly spill, which hold three such rows too.
ALLOWANCE = {"scan": 36, "exact scan": 232, "scan of bounded gates": 12, "inverse of segments": 8, "chain": 36}
EXACT = {"inverse": 400, "inverse of segments": 400, "chain": 240}
KINDS = [
    (128, 128, Erase.NONE, False, False),
    (128, 128, Erase.NONE, True, False),
    (128, 128, Erase.NONE, False, True),
    (64, 40, Erase.NONE, True, True),
    (128, 128, Erase.DELTA, False, False),
    (64, 40, Erase.DELTA, False, True),
]


def spilled_by_function(log):
    """Bytes of registers stored to local memory, in the entry and in the functions that it calls."""
    found = re.findall(r"Function properties for (\S+)\s+ptxas\s+\.\s+\d+ bytes stack frame, (\d+) bytes spill", log)
    own = sum(int(size) for name, size in found if not name.startswith("_Z"))
    return own, spilled(log) - own


def compiled(entry):
    return cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), "sm_90a", cached=False)


@pytest.mark.parametrize(("K", "V", "erase", "bonus", "ragged"), KINDS)
def test_every_entry_compiles(K, V, erase, bonus, ragged):
    """To its products, no more spills than the allowance; those of a scan wait for one another."""
    entries = list(vector_entries("bfloat16", K, V, 90, erase, bonus, ragged))
    assert len(entries) == (8 + 2 * (not bonus) if erase is Erase.NONE else 9)
    for entry in entries:
        code, name = compiled(entry), entry.words.split(", ")[1]
        own, called = spilled_by_function(code.log)
        assert own <= ALLOWANCE.get(name, 0), (entry.words, code.log)
        assert called <= EXACT.get(name, 0), (entry.words, code.log)
        products = HMMA if name.endswith(("inverse", "of segments")) else HGMMA
        assert bool(operations(code.cubin) & products) == (name != "segments"), entry.words
        waits = name.removeprefix("exact ") == "scan"
        assert waits or not re.search(r"C75\d\d", code.log), (entry.words, code.log)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_a_scan_that_a_backward_follows_compiles(gate, keep):
    kind = cuda_vector.VectorKind(128, 128, gate)
    source = sources.read(cuda_vector.KERNELS["scan"].file)
    for name, build in {"scan": {}, "exact scan": {"exact": True}, "scan of bounded gates": {"bounded": True}}.items():
        constants = dict(cuda_vector.constants("scan", kind, cuda_vector.Build(keep=keep, two_term_keys=True, **build)))
        code = cuda_compile.compile_source(source, constants, "sm_90a", cached=False)
        assert spilled(code.log) <= ALLOWANCE.get(name, 0), code.log


@pytest.mark.parametrize(("erase", "name", "two_terms"), [(Erase.NONE, "scan", True), (Erase.DELTA, "chain", False)])
def test_a_forward_that_a_backward_follows_is_compiled_ahead(erase, name, two_terms):
    """The builds that calls with gradients launch."""
    build = cuda_vector.Build(keep=True, two_term_keys=two_terms)
    wanted = cuda_vector.constants(name, cuda_vector.VectorKind(128, 128, "bfloat16"), build)
    for backward in (False, True):
        entries = vector_entries("bfloat16", 128, 128, 90, erase, backward=backward)
        assert (wanted in [entry.constants for entry in entries]) == backward


def test_which_architectures_have_them():
    assert {c for c in SHARED if list(vector_entries("bfloat16", 128, 128, c))} == {90}
    assert not list(vector_entries("float32", 128, 128, 90))
    assert not list(vector_entries("bfloat16", 60, 128, 90))
