"""The kernels of the delta rule compile without a GPU, for every architecture that they are for."""

from __future__ import annotations

import re

import pytest

from linattn_np.matrix_state.cuda import operands as cuda_operands
from linattn_np.matrix_state.cuda import shared_memory
from linattn_np.matrix_state.cuda.delta import plan as cuda_delta_plan
from linattn_np.matrix_state.cuda.delta.entries import delta_entries
from linattn_np.matrix_state.cuda.portable import delta_plan as cuda_delta_portable
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED

from .test_compile import HGMMA, HMMA, operations, spilled

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
# Bytes of spilled registers that an entry may store, with the reason. grads: 96 registers a thread beside two tiles of
# 32 accumulators in flight, changed together with raw projections. bfloat16: two tiles of the state are 128 registers,
# what a chunk writes 64 and its operands 32 more. Float32 and float16 keep one or two words an operand: 255 registers
# hold the state and one product, not all operands of a chunk; 256 columns take 128 registers for the state alone.
ALLOWANCE = {
    "grads": 16, "raw grads": 88, ("bfloat16", 128): 112, ("float16", 64): 16, ("float16", 128): 80,
    ("float32", 64): 16, ("float32", 128): 200, ("float32", 100): 200, ("float32", 256): 2500,
}  # fmt: skip
WITHOUT_PRODUCTS = (cuda_operands.HEAD_SUMS, cuda_delta_portable.SEGMENTS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_separate_erase_vectors_compile(dtype):
    kind = cuda_delta_portable.PortableDeltaKind(dtype, 64, 64, 16, True, separate_erase_key=True, before=True)
    for how in cuda_delta_portable.passes(kind, 163 * 1024, True).values():
        code = cuda_compile.compile_source(sources.read(how.file), dict(how.constants), "sm_80", cached=False)
        assert spilled(code.log) <= ALLOWANCE.get((dtype, 64), 0), code.log


@pytest.mark.parametrize(
    ("raw", "steps", "decay"), [(True, 1, True), (True, 1, False), (False, 4, True), (True, 2, True)]
)
def test_raw_projections_and_tokens_of_several_steps_compile(raw, steps, decay):
    for entry in delta_entries("bfloat16", 128, 128, 90, decay, raw=raw, steps=steps):
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), "sm_90a", cached=False)
        allowed = ALLOWANCE["raw grads" if raw else "grads"] if entry.words.endswith("grads") else 0
        assert spilled(code.log) <= allowed, code.log
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)


@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V", "decay"),
    [
        ("sm_90a", "bfloat16", 128, 128, True),
        ("sm_90a", "bfloat16", 128, 128, False),
        ("sm_90a", "bfloat16", 64, 40, True),
        ("sm_90a", "float32", 256, 256, True),
        ("sm_80", "bfloat16", 128, 128, True),
        ("sm_80", "float16", 128, 128, True),
        ("sm_80", "float32", 60, 100, False),
        ("sm_100a", "bfloat16", 128, 128, True),
        ("sm_120a", "float32", 128, 128, True),
    ],
)
def test_every_entry_compiles(arch, dtype, K, V, decay):
    """To machine code of the architecture: products on its matrix units, no more spills than the allowance."""
    capability = int(arch.strip("sm_a"))
    wgmma = cuda_delta_plan.takes(dtype, K, V, capability)
    for entry in delta_entries(dtype, K, V, capability, decay):
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert code.cubin.startswith(b"\x7fELF")
        allowed = ALLOWANCE["grads"] * entry.words.endswith("grads") if wgmma else ALLOWANCE.get((dtype, max(K, V)), 0)
        assert spilled(code.log) <= allowed, (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)  # products that wait for one another
        if arch in ("sm_80", "sm_90a") and entry.file not in WITHOUT_PRODUCTS:
            warps = not wgmma or entry.file in (cuda_delta_plan.FACTORS, cuda_delta_plan.SEGMENTS)
            assert operations(code.cubin) & (HMMA if warps else HGMMA), entry.words


def test_shared_memory_of_every_plan_fits():
    for name in cuda_delta_plan.KERNELS:
        assert shared_memory.delta(name, True) <= 227 * 1024
    for capability, size in SHARED.items():
        for dtype in ("bfloat16", "float16", "float32"):
            for K in (1, 16, 100, 128, 129, 256):
                for V in (1, 64, 128, 256):
                    if cuda_delta_portable.too_large(dtype, K, V, size * 1024) is None:
                        for entry in delta_entries(dtype, K, V, capability):
                            assert dict(entry.constants).get("LA_SHARED", 0) <= size * 1024, (capability, dtype, K, V)


def test_which_sequences_are_cut_into_segments():
    assert cuda_delta_portable.segments(32, 512, 132) == 3  # three sums and one product for each of 32 heads at once
    assert cuda_delta_portable.segments(67, 512, 132) == 1
    assert cuda_delta_portable.segments(16, 20, 132) == 2
    assert cuda_delta_plan.segments(32, 512, 132) == 4
    assert cuda_delta_plan.segments(256, 64, 132) == 1
    assert cuda_delta_plan.segments(8, 2048, 132) == 16
    assert cuda_delta_plan.segments(16, 128, 132) == 7  # eight would be 416 blocks of sums on 396 places
    assert cuda_delta_plan.segments(5, 27, 132) == 3
