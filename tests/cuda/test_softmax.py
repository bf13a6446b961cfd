"""The kernels of softmax attention compile without a GPU, for the architecture that they are for."""

from __future__ import annotations

import re

import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.softmax.cuda import plan
from linattn_np.warmup import SHARED, softmax_entries

from .test_compile import HGMMA, operations, spilled

PRODUCTS = ("forward", "backward")
KINDS = [("bfloat16", 128, 128, False), ("bfloat16", 128, 128, True), ("float16", 64, 40, True)]


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("element", "K", "V", "decay"), KINDS)
def test_every_entry_compiles(element, K, V, decay):
    """To warpgroup products that do not wait for one another; nothing spills beyond the allowance."""
    entries = list(softmax_entries(element, K, V, 90, decay))
    assert len(entries) == (6 if decay else 4)
    for entry in entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), "sm_90a", cached=False)
        name = entry.words.split(", ")[1]
        assert spilled(code.log) == 0, (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)
        assert bool(operations(code.cubin) & HGMMA) == (name in PRODUCTS), entry.words


def test_which_calls_have_them():
    assert {c for c in SHARED if list(softmax_entries("bfloat16", 128, 128, c, True))} == {90}
    assert not list(softmax_entries("float32", 64, 64, 90, False))
    assert not list(softmax_entries("bfloat16", 136, 64, 90, False))
    assert len(list(softmax_entries("bfloat16", 60, 7, 90, True, backward=False))) == 2


def test_shared_memory_fits():
    for K in (8, 64, 128):
        for V in (8, 64, 128):
            for decay in (False, True):
                for name in PRODUCTS:
                    assert plan.shared_memory(name, plan.Kind("bfloat16", K, V, decay)) <= SHARED[90] * 1024


def test_numpy_arrays_say_why_not():
    q = np.ones((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="does not cover this call: the arrays are not CuPy"):
        la.softmax_attention(q, q, q, backend="cuda")
    assert la.explain(la.softmax_attention, q, q, q).others["cuda"] == "the arrays are not CuPy arrays"
