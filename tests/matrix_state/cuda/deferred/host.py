"""Kernels of array calls compiled for the host: one lane computes what a warp does, without a GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from linattn_np.matrix_state.cuda.arguments import STEP
from linattn_np.runtime.cuda import sources

SHIM = r"""
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define LA_HOST
#define LA_WARPS 1
#define LA_DEVICE static inline
#define LA_INF __builtin_inff()
#define LA_NAN __builtin_nanf("")
#define memcpy __builtin_memcpy
#define LA_DECLARED(name) extern "C" float name##f(float) noexcept; extern "C" double name(double) noexcept;
LA_DECLARED(exp) LA_DECLARED(expm1) LA_DECLARED(log) LA_DECLARED(log1p) LA_DECLARED(sqrt) LA_DECLARED(fabs)
LA_DECLARED(sin) LA_DECLARED(cos) LA_DECLARED(tanh)
extern "C" float powf(float, float) noexcept;
extern "C" double pow(double, double) noexcept;
template <class T> LA_DEVICE T min(T x, T y) { return x < y ? x : y; }
template <class T> LA_DEVICE T max(T x, T y) { return x > y ? x : y; }
LA_DEVICE float bits_as(u32 x) { float y; memcpy(&y, &x, 4); return y; }
LA_DEVICE u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
#define LA_ARITHMETIC(T) \
    LA_DEVICE T f_add(T x, T y) { return x + y; } LA_DEVICE T f_sub(T x, T y) { return x - y; } \
    LA_DEVICE T f_mul(T x, T y) { return x * y; } LA_DEVICE T f_div(T x, T y) { return x / y; }
LA_ARITHMETIC(float)
LA_ARITHMETIC(double)
LA_DEVICE float from_f16(u16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
LA_DEVICE u16 to_f16(float x) { const _Float16 y = (_Float16)x; u16 z; memcpy(&z, &y, 2); return z; }
"""
PREFIX, STEP_PREFIX, HEAD_PREFIX = "array_calls/", "step_calls/", "head_calls/"


@functools.cache
def compiled(text):
    """The library of a source."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name, content in (
            ("tile/types.cuh", SHIM),
            ("kernel.cpp", text),
            ("token/array_calls.cuh", (sources.root() / "token/array_calls.cuh").read_text()),
        ):
            (base / name).parent.mkdir(exist_ok=True)
            (base / name).write_text(content)
        command = [
            compiler,
            "-O0",
            "-ffp-contract=off",
            "-std=c++17",
            "-shared",
            "-fPIC",
            "-I",
            folder,
            str(base / "kernel.cpp"),
            "-o",
            str(base / "kernel.so"),
        ]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr + text
        return ctypes.CDLL(str(base / "kernel.so"))


def run(file, blocks, arguments):
    """What a launch of a registered source does."""
    call = compiled(sources.installed(file).text).array_calls
    buffer = ctypes.create_string_buffer(bytes(arguments), len(arguments))
    for warp in range(4 * blocks):
        call(buffer, warp)


def run_heads(file, blocks, arguments):
    """What a launch of array calls by a block for each head does."""
    library, text = compiled(sources.installed(file).text), sources.installed(file).text
    heads = int(re.search(r"blockIdx.x % (\d+)u", text)[1])
    buffer = ctypes.create_string_buffer(bytes(arguments), len(arguments))
    for block in range(blocks):
        library.after(buffer, *divmod(block, heads))


def size_of(file):
    """Bytes of the arguments of a registered source: its pointers."""
    text = sources.installed(file).text
    return 8 * text[: text.index("#ifndef")].count("void* ")


def run_step(file, blocks, arguments, step):
    """What a launch of step.cu with array calls does; step(arguments) is that of the kernel alone."""
    library, at = compiled(sources.installed(file).text), STEP.size
    properties = STEP.unpack(arguments[:at])
    buffer = ctypes.create_string_buffer(arguments[at:], len(arguments) - at)
    each = [divmod(block, properties["heads"]) for block in range(blocks)]
    for n, head in each:
        library.before(buffer, n, head)
    step(arguments[:at])
    for n, head in each:
        library.after(buffer, n, head)
