"""Sources and their compilation, without a GPU: digests, the cache on disk, errors, every architecture."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from linattn_np import warmup
from linattn_np.__main__ import main
from linattn_np.matrix_state.cuda.token import log
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.runtime import code_cache
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.elements import BYTES

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
TINY = '#include "tile/one.cuh"\nextern "C" __global__ void entry(float* x) { *x = one() + LA_ADD; }\n'


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
    *_, headers = source
    assert {"attention/gram.cuh", "tile/types.cuh", "tile/mma.cuh"} <= set(headers)
    assert source == sources.read("scan/scan.cu")


def test_an_edited_header_recompiles(tiny, cache):
    cubin, _, path = build(tiny)
    assert build(tiny) == (cubin, "", path)  # from the cache
    (tiny / "tile" / "one.cuh").write_text("static __device__ float one() { return 2.f; }\n")
    changed, _, elsewhere = build(tiny)
    assert elsewhere != path
    assert changed != cubin


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
    """The compiler is not loaded until needed; an invalid line in the cache is replaced."""
    program = (
        "import sys; from pathlib import Path; "
        "from linattn_np.runtime.cuda import compile as c, nvrtc, sources as s; "
        "x = c.compile_source(s.read('tiny.cu', Path(sys.argv[1])), {'LA_ADD': 1}, 'sm_80'); "
        "assert c.architecture(90) == 'sm_90a'; print(len(x[1]) > 0, nvrtc.library.cache_info().currsize)"
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


def test_warmup_compiles_once(cache, capsys):
    arguments = ["warmup", "--arch", "sm_80", "--key", "16", "--forward-only", "--only", "cuda"]
    assert main(arguments) == 0
    assert "compiled" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "compiled" not in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    warmup.add_arguments(parser)
    options = parser.parse_args([n for n in arguments[1:] if n not in ("--only", "cuda")])
    assert len(os.listdir(cache)) == len({str(entry) for *_, entry in warmup.selected(options, "bfloat16", 80)}) > 4
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
        own = parser.parse_args([*cell, "--dtype", dtype, "--key", "60", "--log", "--state", "float32", "int8"])
        logs = [entry.constants for *_, entry in warmup.selected(own, dtype, capability) if entry.file == log.FILE]
        assert len(logs) == len(set(logs)) == (0 if dtype == "tf32" or erase is Erase.FREE else 2)
