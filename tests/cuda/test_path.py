"""The kernels of PaTH attention compile without a GPU; sizes of what they store."""

from __future__ import annotations

import re

import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED
from linattn_np.softmax.cuda import path_plan
from linattn_np.softmax.cuda.entries import path_entries
from linattn_np.softmax.cuda.plan import SoftmaxKind

from .test_compile import HGMMA, operations, spilled

KINDS = [(128, 128, True), (64, 128, False)]
# bytes a thread: of kernels whose rows are read once, and of a number or two of `keys` beside its tiles
SPILLED = {"path/diagonal.cu": 400, "path/groups_adjoint.cu": 320, "path/factors_adjoint.cu": 160, "path/keys.cu": 32}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("K", "V", "decay"), KINDS)
def test_every_entry_compiles(K, V, decay):
    """To warpgroup products that do not wait for one another; the tiles of no loop spill."""
    entries = list(path_entries("bfloat16", K, V, 90, decay))
    assert len(entries) == len(path_plan.KERNELS)
    for entry in entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), "sm_90a", cached=False)
        assert spilled(code.log) <= SPILLED.get(entry.file, 0), (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)
        assert operations(code.cubin) & HGMMA, entry.words


def test_which_calls_have_them():
    assert {c for c in SHARED if list(path_entries("bfloat16", 128, 128, c, False))} == {90}
    assert not list(path_entries("float16", 64, 64, 90, False))


def test_shared_memory_fits():
    for K in (8, 64, 128):
        for V in (8, 64, 128):
            for name in path_plan.KERNELS:
                assert path_plan.shared_memory(name, SoftmaxKind("bfloat16", K, V, True)) <= SHARED[90] * 1024


@pytest.mark.parametrize(("blocks", "levels"), [(1, 1), (8, 1), (9, 2), (64, 2), (65, 3)])
def test_groups_that_a_query_reads(blocks, levels):
    """A group of 8^l blocks ends before the last block of queries."""
    assert path_plan.sizes(SoftmaxKind("bfloat16", 64, 64, False), 1, blocks, blocks).levels == levels


def test_slots_of_groups_are_apart():
    """The groups of a sequence whose first block is in slot F are from F // 8^l on (cuda_src/path/place.cuh)."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(0, 3000, 12)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        slots = offsets[-1] // 128 + len(lengths)
        for level in range(3):
            taken = []
            for n, T in enumerate(lengths):
                first = (offsets[n] // 128 + n) >> 3 * level
                taken += range(first, first + ((-(-int(T) // 128)) >> 3 * level))
            assert len(set(taken)) == len(taken)
            assert not taken or max(taken) < slots >> 3 * level


@pytest.mark.parametrize("blocks", [1, 2, 8, 9, 33, 64, 65, 200])
def test_groups_that_blocks_meet(blocks):
    """As many tiles of queries as there are groups on the way from each block to the first."""
    sizes = path_plan.sizes(SoftmaxKind("bfloat16", 64, 64, False), 1, blocks, blocks)
    total = 0
    for block in range(blocks):
        left = block
        while left:
            level = 0
            while level + 1 < sizes.levels and left % path_plan.RADIX ** (level + 1) == 0:
                level += 1
            left -= path_plan.RADIX**level
            total += 1
    assert sizes.earlier_groups(blocks) == total


def test_numpy_arrays_say_why_not():
    q = np.ones((3, 2, 4), np.float32)
    assert la.explain(la.path_attention, q, q, q, q, q[..., 0]).others["cuda"] == "the arrays are not CuPy arrays"
