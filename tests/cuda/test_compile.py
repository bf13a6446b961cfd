"""Sources and their compilation, without a GPU: digests, the cache on disk, errors, every architecture."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

from linattn_np import warmup
from linattn_np.__main__ import main
from linattn_np.matrix_state.cuda import operands as cuda_operands
from linattn_np.matrix_state.cuda.scan import launch as cuda_scan
from linattn_np.matrix_state.cuda.scan import plan as cuda_plan
from linattn_np.matrix_state.cuda.scan.entries import scan_entries
from linattn_np.matrix_state.cuda.token.entries import step_entries
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.ops.cuda.entries import key_entries, raw_entries, step_size_entries
from linattn_np.runtime import code_cache
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.elements import BYTES
from linattn_np.runtime.cuda.entries import SHARED

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
TINY = '#include "tile/one.cuh"\nextern "C" __global__ void entry(float* x) { *x = one() + LA_ADD; }\n'
# Bytes of spilled registers that a scan may store, with the reason. 128 x 128 in bfloat16 keeps 160 accumulators a
# thread with two blocks a multiprocessor, all 255 registers; what spills are addresses, a dozen reloads a chunk.
# In float32 operands are two registers each: gradients with dots reload addresses too, and are faster than when whole
# chunks were summed apart, which spilled nothing (forward and backward 6.9 instead of 7.85 ns a token and head); 60 x
# 100 spills 40 bytes by NVRTC 13.0, 56 by 13.5.
ALLOWANCE = {("bfloat16", 128, 128): 40, ("float32", 60, 100): 56, ("float32", 128, 128): 72}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A source folder of one file with one header."""
    (tmp_path / "src" / "tile").mkdir(parents=True)
    (tmp_path / "src" / "tile" / "one.cuh").write_text("static __device__ float one() { return 1.f; }\n")
    (tmp_path / "src" / "tiny.cu").write_text(TINY)
    return tmp_path / "src"


def build(folder, **kwargs):
    return cuda_compile.compile_source(sources.read("tiny.cu", folder), {"LA_ADD": 1}, "sm_80", **kwargs)


def test_a_source_contains_everything_it_includes():
    source = sources.read("scan/scan.cu")
    assert {"attention/gram.cuh", "tile/types.cuh", "tile/mma.cuh"} <= set(source.headers)
    assert source == sources.read("scan/scan.cu")


def test_an_edited_header_recompiles(tiny, cache):
    first = build(tiny)
    assert build(tiny) == first._replace(log="")  # from the cache
    (tiny / "tile" / "one.cuh").write_text("static __device__ float one() { return 2.f; }\n")
    second = build(tiny)
    assert second.path != first.path
    assert second.cubin != first.cubin


def test_the_key_knows_constants_architecture_and_compiler(tiny, monkeypatch):
    source = sources.read("tiny.cu", tiny)
    keys = {
        cuda_compile.key_of(source, cuda_compile.options_of(c, a))
        for c in ({"LA_ADD": 1}, {"LA_ADD": 2})
        for a in ("sm_80", "sm_90")
    }
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    keys.add(cuda_compile.key_of(source, cuda_compile.options_of({"LA_ADD": 1}, "sm_80")))
    assert len(keys) == 5


def test_code_from_the_cache_needs_no_compiler(tiny, cache):
    """Not loaded until something must be compiled; an invalid cached line is queried anew."""
    program = (
        "import sys; from pathlib import Path; "
        "from linattn_np.runtime.cuda import compile as c, nvrtc, sources as s; "
        "x = c.compile_source(s.read('tiny.cu', Path(sys.argv[1])), {'LA_ADD': 1}, 'sm_80'); "
        "assert c.architecture(90) == 'sm_90a'; print(len(x.log) > 0, nvrtc.library.cache_info().currsize)"
    )

    def run():
        how = [sys.executable, "-c", program, str(tiny)]
        return subprocess.run(how, capture_output=True, text=True, check=True).stdout

    assert run() == "True 1\n"
    assert run() == "False 0\n"
    (line,) = cache.glob("nvrtc-*.txt")
    assert list(map(int, code_cache.load(line).split())) == [*nvrtc.version(), *nvrtc.architectures()]
    line.write_text("13 0 import os")
    assert run() == "False 1\n"
    assert run() == "False 0\n"


def test_an_error_shows_its_line(tiny):
    (tiny / "tile" / "one.cuh").write_text("// first\nstatic __device__ float one() { return wrong; }\n")
    with pytest.raises(nvrtc.CompileError) as error:
        build(tiny, cached=False)
    assert '"wrong" is undefined' in str(error.value)
    line = "static __device__ float one() { return wrong; }"
    assert f"tile/one.cuh:2\n     1 | // first\n>    2 | {line}" in str(error.value)


def test_architectures():
    assert cuda_compile.architecture(80) == "sm_80"
    assert cuda_compile.architecture(90) == "sm_90a"
    assert cuda_compile.architecture(89) == "sm_89"
    with pytest.raises(nvrtc.CompileError, match="knows no architecture"):
        cuda_compile.architecture(70)


def spilled(log):
    """Bytes of registers stored to local memory, from the compiler's report."""
    return sum(map(int, re.findall(r"stack frame, (\d+) bytes spill stores", log)))


def operations(cubin):
    """The lowest 12 bits of every instruction of 16 bytes: the operation and the kinds of its operands."""
    start, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + n * size) for n in range(count)]
    table = cubin[sections[names][4] :]
    found = set()
    for section in sections:
        if table[section[0] :].startswith(b".text."):
            code = np.frombuffer(cubin, dtype="<u8", count=section[5] // 8, offset=section[4])[::2]
            found |= set((code & 0xFFF).tolist())
    return found


HMMA, HGMMA = {0x23C}, {0x9F0, 0xDF0}  # products of a warp; of a warpgroup, A in registers or in shared memory
SMALL = (cuda_scan.SEGMENTS, cuda_scan.GATE, cuda_operands.HEAD_SUMS)  # entries without products


@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V"),
    [
        *(
            (arch, *kind)
            for arch in ("sm_80", "sm_90a", "sm_100a")
            for kind in (("bfloat16", 128, 128), ("float16", 64, 64), ("float32", 60, 100))
        ),
        ("sm_90a", "tf32", 128, 128),
        ("sm_90a", "float32", 128, 128),
        ("sm_90a", "bfloat16", 64, 64),
        ("sm_90a", "bfloat16", 128, 64),
        ("sm_90a", "bfloat16", 40, 120),
    ],
)
def test_every_entry_compiles(arch, dtype, K, V):
    """To machine code of the architecture: products on its matrix units, no more spills than the allowance."""
    for entry in scan_entries(dtype, K, V, int(arch.strip("sm_a"))):
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert code.cubin.startswith(b"\x7fELF")
        wgmma = "wgmma" in entry.file
        allowed = 0 if wgmma else ALLOWANCE.get((dtype, K, V), 0)
        assert spilled(code.log) <= allowed, (entry.words, code.log)
        assert not re.search(r"C75\d\d", code.log), (entry.words, code.log)  # products that wait for one another
        if arch in ("sm_80", "sm_90a") and entry.file not in SMALL:
            assert operations(code.cubin) & (HGMMA if wgmma else HMMA), entry.words


HEAVY = [(Decay.VECTOR, Erase.FREE), (Decay.SCALAR, Erase.DELTA)]
BONUS = {("sm_100a", 13, 2): 24}  # bytes that this compiler spills of a token with a bonus; 13.0 and 13.5 spill none


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("dtype", "K", "V", "cells", "state"),
    [
        ("bfloat16", 128, 128, list(itertools.product(Decay, Erase)), "float32"),
        ("float32", 256, 256, HEAVY, "float32"),
        ("float32", 255, 7, HEAVY[:1], "float32"),
        ("float16", 128, 64, HEAVY[:1], "float32"),
        ("bfloat16", 128, 128, HEAVY, "bfloat16"),
        ("float32", 256, 256, HEAVY[:1], "float16"),
        ("float16", 255, 7, HEAVY[:1], "bfloat16"),
    ],
)
def test_every_step_compiles(arch, dtype, K, V, cells, state):
    """To machine code of the architecture; nothing of a state spills."""
    for cell in cells:
        for entry in step_entries(dtype, K, V, *cell, state):
            code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
            assert code.cubin.startswith(b"\x7fELF")
            allowed = dict(entry.constants)["LA_BONUS"] * BONUS.get((arch, *nvrtc.version()), 0)
            assert spilled(code.log) <= allowed, (cell, entry.words, code.log)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [1, 7, 60, 128, 500])
def test_row_kernels_compile(arch, dtype, width):
    """Lengths, gates, step sizes, keys of log decays."""
    for entry in (*raw_entries(dtype, width), *step_size_entries(dtype, width), *key_entries(dtype)):
        code = cuda_compile.compile_source(sources.read(entry.file), dict(entry.constants), arch, cached=False)
        assert spilled(code.log) == 0, (entry.words, code.log)


def test_shared_memory_of_every_plan_fits():
    for capability, size in SHARED.items():
        for dtype in cuda_plan.ELEMENTS:
            for K in (1, 16, 100, 128, 129, 256):
                for V in (1, 64, 128, 256):
                    for entry in scan_entries(dtype, K, V, capability):
                        assert dict(entry.constants).get("LA_SHARED", 0) <= size * 1024, (capability, dtype, K, V)


def test_warmup_compiles_once(cache, capsys):
    arguments = ["warmup", "--arch", "sm_80", "--key", "16", "--forward-only", "--only", "cuda"]
    assert main(arguments) == 0
    assert "compiled" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "compiled" not in capsys.readouterr().out
    assert len(os.listdir(cache)) == 5
    shutil.rmtree(cache)


def test_warmup_names_what_is_wrong(cache, capsys):
    assert main(["warmup", "--arch", "sm_12", "--only", "cuda"]) == 1
    assert "expected sm_ and one of 80" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", BYTES)
def test_every_choice_of_warmup_has_kernels(dtype):
    """But vector decays and their erase terms in tf32, which are computed in float32."""
    parser = argparse.ArgumentParser()
    warmup.add_arguments(parser)
    for capability, decay, erase in itertools.product((80, 90, 120), Decay, Erase):
        cell = ["--decay", decay.name.lower(), "--erase", erase.name.lower()]
        chosen = parser.parse_args([*cell, "--dtype", dtype, "--key", "60", "64", "--raw", "--softmax"])
        found = list(warmup.selected(chosen, dtype, capability))
        assert bool(found) == (dtype != "tf32" or (erase is Erase.NONE and decay is not Decay.VECTOR)), cell
        assert all((sources.root() / entry.file).is_file() for *_, entry in found)
