"""The portable chunks of a vector decay compile without a GPU, for every architecture, and fit its shared memory."""

from __future__ import annotations

import pytest

from linattn_np.matrix_state.cuda.portable import plan
from linattn_np.matrix_state.cuda.portable.entries import portable_entries
from linattn_np.matrix_state.types import Erase
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED

from .test_compile import spilled

# Bytes of spilled registers: two blocks share a multiprocessor, a thread that holds 64 floats of a state has 128.
ALLOWANCE = 300


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V", "erase", "bonus"),
    [
        *(
            (arch, "float32", 128, 128, Erase.NONE, False)
            for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
        ),
        ("sm_90a", "float32", 128, 128, Erase.DELTA, False),
        ("sm_86", "bfloat16", 64, 60, Erase.DELTA, False),
        ("sm_90a", "float16", 128, 64, Erase.NONE, True),
        ("sm_90a", "float32", 7, 5, Erase.NONE, False),
    ],
)
def test_every_entry_compiles(arch, dtype, K, V, erase, bonus):
    entries = list(portable_entries(dtype, K, V, int(arch[3:].rstrip("a")), erase, bonus))
    assert len(entries) >= 4
    for entry in entries:
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert spilled(code.log) <= ALLOWANCE, entry.words


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("element", ["bfloat16", "float32"])
def test_what_fits(element, erase):
    """Every device has keys and values of up to 128 channels, one of compute capability 90 those of up to 256."""
    for width, limit in ((64, min(SHARED.values())), (128, min(SHARED.values())), (256, SHARED[90])):
        kind = plan.PortableKind(width, width, element, "float32", 16, erase)
        for name in ("values", "channels"):
            for back in (False, True):
                assert plan.launch_of(name, kind, limit * 1024, back) is not None
