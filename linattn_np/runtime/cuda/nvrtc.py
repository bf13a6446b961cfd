"""NVRTC through ctypes: finds the library and compiles programs. Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence

from .. import code_cache

WHEELS = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu*/bin/x64", "nvidia/cuda_nvrtc/bin")
KIND = "cubin"  # kind of the cache folder of machine code
NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")


class CompileError(RuntimeError):
    """A source does not compile; the text is the compiler's log with the lines that it names."""


def _folders() -> Iterator[str]:
    """Folders that may contain the library: NVIDIA's wheels, then a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        for pattern in WHEELS:
            yield from sorted(glob.glob(os.path.join(os.path.dirname(base), pattern)), reverse=True)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if variable in os.environ:
            yield from (os.path.join(os.environ[variable], part) for part in ("lib64", "lib", "bin"))
    if sys.platform != "win32":
        yield "/usr/local/cuda/lib64"


def _file() -> str | None:
    """The library in those folders."""
    paths = (os.path.join(folder, name) for folder in _folders() for name in NAMES)
    return next(filter(os.path.isfile, paths), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The NVRTC library.   Raises OSError if there is none; the error names the package."""
    if path := _file():
        # the compiler opens its builtins by name: loaded first, they are found without LD_LIBRARY_PATH
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "*nvrtc-builtins*.so.*[0-9]")):
            if ".alt." not in builtins:
                ctypes.CDLL(builtins)
        return ctypes.CDLL(path)
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("no NVRTC library was found: pip install 'linattn_np[cuda-compile]', or set CUDA_PATH")


def available() -> bool:
    """Whether a compiler is installed."""
    try:
        _about()
    except OSError:
        return False
    return True


def version() -> tuple[int, int]:
    """(major, minor) of the compiler."""
    major, minor, *_ = _about()
    return major, minor


def architectures() -> tuple[int, ...]:
    """Compute capabilities that the compiler knows, as 80, 90, 100, ... ."""
    return _about()[2:]


@functools.cache
def _about() -> tuple[int, ...]:
    """(major, minor, capability, ...). Loading the library takes longer than loading machine code that is on disk.

    These numbers are therefore cached too, under the library's path, size and time.
    """
    path = _file()
    cached = None if path is None else code_cache.file_of(KIND, f"nvrtc-{_digest(path)}.txt")
    if cached is not None and (line := code_cache.load(cached)) is not None:
        return tuple(map(int, line.split()))
    numbers = _queried()
    if cached is not None:
        code_cache.store(cached, " ".join(map(str, numbers)).encode())
    return numbers


def _digest(path: str) -> str:
    about = os.stat(path)
    return hashlib.sha256(f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()


def _queried() -> tuple[int, ...]:
    """The numbers that the library reports."""
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    _check(library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(library().nvrtcGetSupportedArchs(numbers))
    return major.value, minor.value, *numbers


def compile_program(name: str, text: str, headers: dict[str, str], options: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, log).   Raises CompileError with the log and the source around each line it names."""
    lib, program = library(), ctypes.c_void_p()
    array = ctypes.c_char_p * len(headers)
    _check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            len(headers),
            array(*(h.encode() for h in headers.values())),
            array(*(h.encode() for h in headers)),
        )
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = lib.nvrtcCompileProgram(program, len(options), flags)
        log = _take(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(_explain(name, text, headers, options, log or _words(status)))
        return _take(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _take(program: ctypes.c_void_p, size_of: object, read: object) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))  # type: ignore[operator]
    return buffer.raw


def _words(status: int) -> str:
    library().nvrtcGetErrorString.restype = ctypes.c_char_p
    return library().nvrtcGetErrorString(status).decode()


def _check(status: int) -> None:
    if status:
        raise CompileError(f"NVRTC: {_words(status)}")


def _explain(name: str, text: str, headers: dict[str, str], options: Sequence[str], log: str) -> str:
    """The log, then every line that it names with two lines around it, numbered."""
    texts, shown = {name: text, **headers}, []
    for file, line in sorted({(f, int(n)) for f, n in re.findall(r"^([^\s(]+)\((\d+)\): error", log, re.MULTILINE)}):
        if file in texts:
            lines = texts[file].splitlines()
            near = range(max(line - 3, 0), min(line + 2, len(lines)))
            shown += [f"{file}:{line}"] + [f"{'>' if n + 1 == line else ' '}{n + 1:5d} | {lines[n]}" for n in near]
    return "\n".join([f"{name} with {' '.join(options)}", log.rstrip(), *shown])
