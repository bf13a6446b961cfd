"""The kernels of gradients token by token compile without a GPU, for every architecture."""

from __future__ import annotations

import pytest

from linattn_np.matrix_state.cuda.token import gradients_plan as plan
from linattn_np.matrix_state.cuda.token.entries import recurrence_entries
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED

from .test_compile import spilled

# Bytes of spilled registers. Two blocks share a multiprocessor, so that a thread that holds 64 floats of a state has
# 128 registers; three of channels, 80.
ALLOWANCE = {"values": 200, "channels": 16}

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V", "erase", "bonus"),
    [
        *(
            (arch, "float32", 128, 128, True, False)
            for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
        ),
        ("sm_90a", "float16", 128, 64, False, True),
        ("sm_90a", "float32", 7, 5, False, False),
        ("sm_80", "bfloat16", 128, 64, False, True),
    ],
)
def test_every_entry_compiles(arch, dtype, K, V, erase, bonus):
    for entry in recurrence_entries(dtype, K, V, erase, bonus):
        source, constants = sources.read(entry.file), dict(entry.constants)
        code = cuda_compile.compile_source(source, constants, arch, cached=False)
        assert spilled(code.log) <= ALLOWANCE["values" if ", values" in entry.words else "channels"], entry.words


@pytest.mark.parametrize("width", [64, 128, 256])
def test_shared_memory_fits(width):
    """On every device, but for states of 256 x 256 with an erase term."""
    for erase in (False, True):
        kind = plan.RecurrenceKind(width, width, "float32", "float32", erase)
        for name in ("values", "channels"):
            assert plan.shared(name, kind) <= min(SHARED.values()) * 1024
