"""Compiles a source with -D constants for an architecture, with or without a GPU.

Cubins are cached on disk under a key of everything that they depend on, and passed to the driver unchanged; nothing is
deserialised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from .. import code_cache
from ..compiling import compiling
from . import nvrtc
from .sources import Source, digest

FLAGS = ("-std=c++17", "-default-device", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")


Code = tuple[bytes, str, Path | None]  # machine code, the log (empty from the cache), the file in the cache


def architecture(capability: int) -> str:
    """The architecture to compile for on a device of compute capability 80, 86, 90, ...

    The newest of the same generation that the compiler knows and the device supports; from 90 on with
    architecture-specific instructions ("a") if it is that of the device.   Raises CompileError if there is none.
    """
    known = [c for c in nvrtc.architectures() if c // 10 == capability // 10 and c <= capability]
    if not known:
        raise nvrtc.CompileError(f"NVRTC {'.'.join(map(str, nvrtc.version()))} knows no architecture of {capability}")
    return f"sm_{max(known)}{'a' if max(known) == capability >= 90 else ''}"


def options_of(constants: Mapping[str, int], arch: str) -> tuple[str, ...]:
    """The compiler's options, in a fixed order."""
    return (f"--gpu-architecture={arch}", *FLAGS, *(f"-D{name}={constants[name]}" for name in sorted(constants)))


def key_of(source: Source, options: tuple[str, ...]) -> str:
    """Hash of the source and its includes, the options, the compiler's version."""
    text = "\n".join([source[0], digest(*source), *options, ".".join(map(str, nvrtc.version()))])
    return hashlib.sha256(text.encode()).hexdigest()


def compile_source(source: Source, constants: Mapping[str, int], arch: str, cached: bool = True) -> Code:
    """The code of a source.   Raises nvrtc.CompileError with the log and numbered source."""
    options = options_of(constants, arch)
    path = code_cache.file_of(nvrtc.KIND, f"{key_of(source, options)}.cubin") if cached else None
    if path is not None and (cubin := code_cache.load(path)) is not None:
        return cubin, "", path
    with compiling(f"{source[0]} by NVRTC", path):
        cubin, log = nvrtc.compile_program(*source, options)
    return cubin, log, path if path is not None and code_cache.store(path, cubin) else None
