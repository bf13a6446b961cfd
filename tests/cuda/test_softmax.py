"""The kernels of softmax attention compile without a GPU, for the architecture that they are for."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED
from linattn_np.softmax.cuda import plan, portable_plan, stick_plan, system_plan
from linattn_np.softmax.cuda.entries import portable_entries, softmax_entries, stick_entries, system_entries

from .test_compile import HGMMA, HMMA, operations, spilled

PRODUCTS = ("forward", "backward")
PRODUCTS_OF_WARPS = HMMA
KINDS = [("bfloat16", 128, 128, False), ("bfloat16", 128, 128, True), ("float16", 64, 40, True)]


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("element", "K", "V", "decay"), KINDS)
def test_every_entry_compiles(element, K, V, decay):
    """To warpgroup products that do not wait for one another; nothing spills beyond the allowance."""
    entries = list(softmax_entries(element, K, V, 90, decay))
    assert len(entries) == (7 if decay else 4)
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
    assert len(list(softmax_entries("bfloat16", 60, 7, 90, True, backward=False))) == 3


def test_shared_memory_fits():
    for K in (8, 64, 128):
        for V in (8, 64, 128):
            for decay in (False, True):
                for name in PRODUCTS:
                    assert plan.shared_memory(name, plan.SoftmaxKind("bfloat16", K, V, decay)) <= SHARED[90] * 1024


def test_numpy_arrays_say_why_not():
    q = np.ones((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="does not cover this call: the arrays are not CuPy"):
        la.softmax_attention(q, q, q, backend="cuda")
    assert la.explain(la.softmax_attention, q, q, q).others["cuda"] == "the arrays are not CuPy arrays"


ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}
PORTABLE_KINDS = [("bfloat16", 128, 128, False), ("float16", 256, 200, True), ("float32", 128, 128, True),
                  ("float32", 7, 60, False)]  # fmt: skip
# of a kernel that needs all 255 registers: its bytes are addresses, stored once and reloaded a tile at most
PORTABLE_ALLOWANCE = 80


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        *(("sm_80", kind) for kind in PORTABLE_KINDS[:2]),
        ("sm_90a", PORTABLE_KINDS[2]),
        ("sm_120a", PORTABLE_KINDS[0]),
        *((arch, PORTABLE_KINDS[3]) for arch in ("sm_86", "sm_89", "sm_100a")),
    ],
)
def test_every_portable_entry_compiles(arch, kind):
    """For every architecture, to products of warps where there are any."""
    capability = ARCHITECTURES[arch]
    entries = list(portable_entries(*kind[:3], capability, kind[3]))
    assert len(entries) == 3 + (3 + (kind[1] > 128))
    for entry in entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert spilled(code.log) <= PORTABLE_ALLOWANCE, (entry.words, code.log)
        if arch in ("sm_80", "sm_90a"):
            assert bool(operations(code.cubin) & PRODUCTS_OF_WARPS) != entry.file.endswith("cache.cu"), entry.words


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("sm_80", PORTABLE_KINDS[1]),
        ("sm_90a", PORTABLE_KINDS[2]),
        ("sm_120a", PORTABLE_KINDS[0]),
        ("sm_89", PORTABLE_KINDS[3]),
    ],
)
def test_every_entry_of_systems_compiles(arch, kind):
    """For every architecture, without spills in the systems themselves."""
    dtype, K, V, decay = kind
    entries = list(system_entries(dtype, K, V, ARCHITECTURES[arch], decay))
    assert len(entries) == 4
    for entry in entries[:2] if arch != "sm_90a" else entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert spilled(code.log) <= PORTABLE_ALLOWANCE * ("portable_" in entry.file), (entry.words, code.log)
        if arch in ("sm_80", "sm_90a"):
            assert operations(code.cubin) & PRODUCTS_OF_WARPS, entry.words


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("arch", "kind"), [("sm_80", PORTABLE_KINDS[1]), ("sm_90a", PORTABLE_KINDS[0]), ("sm_120a", PORTABLE_KINDS[3])]
)
def test_every_kernel_of_sticks_compiles(arch, kind):
    """For every architecture, to products of warps."""
    entries = list(stick_entries(*kind[:3], ARCHITECTURES[arch]))
    assert len(entries) == 3 + (kind[1] > 128)
    for entry in entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert spilled(code.log) <= PORTABLE_ALLOWANCE, (entry.words, code.log)
        if arch in ("sm_80", "sm_90a"):
            assert operations(code.cubin) & PRODUCTS_OF_WARPS, entry.words


@pytest.mark.parametrize("how", [system_plan, stick_plan])
def test_blocks_of_systems_and_sticks_fit_everywhere(how):
    for size in SHARED.values():
        for element, K, V in itertools.product(("bfloat16", "float32"), (7, 128, 256), (7, 256)):
            for name in how.KERNELS:
                made = how.constants(name, portable_plan.PortableKind(element, K, V, True, 2), size * 1024)
                assert dict(made)["LA_SHARED"] <= size * 1024


def test_portable_blocks_fit_everywhere():
    for size in SHARED.values():
        for element, K, V, cache in itertools.product(("bfloat16", "float32"), (7, 128, 256), (7, 256),
                                                      (None, "float32")):  # fmt: skip
            kind = portable_plan.PortableKind(element, K, V, True, 2, cache)
            for name in portable_plan.KERNELS.keys() - {"cache"}:
                assert dict(portable_plan.constants(name, kind, size * 1024))["LA_SHARED"] <= size * 1024
