"""From a source, -D constants and an architecture to machine code: one function, with a GPU and without.

Cubins are kept on disk under a key of everything that they depend on; what is read back is handed to the driver as
it is, nothing is deserialised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from . import nvrtc
from .sources import Source

FLAGS = ("-std=c++17", "-default-device", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
MAGIC = b"\x7fELF"


class Code(NamedTuple):
    """Machine code, the compiler's log (empty where the code came from the cache), and its file, if it has one."""

    cubin: bytes
    log: str
    path: Path | None


def architecture(capability: int) -> str:
    """The architecture to compile for on a device of compute capability 80, 86, 90, ...

    The newest that the compiler knows of the same generation and not newer than the device, with the instructions of
    its own ("a") from 90 on where it is the device's exactly.   Raises CompileError if there is none.
    """
    known = [c for c in nvrtc.architectures() if c // 10 == capability // 10 and c <= capability]
    if not known:
        raise nvrtc.CompileError(f"NVRTC {'.'.join(map(str, nvrtc.version()))} knows no architecture of {capability}")
    return f"sm_{max(known)}{'a' if max(known) == capability >= 90 else ''}"


def options_of(constants: Mapping[str, int], arch: str) -> tuple[str, ...]:
    """The compiler's options, in an order of their own."""
    return (f"--gpu-architecture={arch}", *FLAGS, *(f"-D{name}={constants[name]}" for name in sorted(constants)))


def key_of(source: Source, options: tuple[str, ...]) -> str:
    """Hash of the source and its includes, the options, the compiler's version."""
    text = "\n".join([source.name, source.digest, *options, ".".join(map(str, nvrtc.version()))])
    return hashlib.sha256(text.encode()).hexdigest()


def compile_source(source: Source, constants: Mapping[str, int], arch: str, cached: bool = True) -> Code:
    """The machine code of a source.   Raises nvrtc.CompileError with the log and numbered source."""
    options = options_of(constants, arch)
    path = _cache_file(key_of(source, options)) if cached else None
    if path is not None and (cubin := _load(path)) is not None:
        return Code(cubin, "", path)
    cubin, log = nvrtc.compile_program(source.name, source.text, source.headers, options)
    return Code(cubin, log, path if path is not None and _store(path, cubin) else None)


def cache_folder() -> Path:
    """Where cubins are kept: $LINATTN_CACHE_DIR, else linattn_np/cubin in the user's cache folder."""
    own = os.environ.get("LINATTN_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "linattn_np" / "cubin"


def _cache_file(key: str) -> Path | None:
    """The file of a key; None where the folder cannot be made or is not this user's alone to write."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
    except OSError:
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        return None
    return folder / f"{key}.cubin"


def _load(path: Path) -> bytes | None:
    try:
        cubin = path.read_bytes()
    except OSError:
        return None
    return cubin if cubin.startswith(MAGIC) else None


def _store(path: Path, cubin: bytes) -> bool:
    """Write under another name, then rename: readers find the whole file or none. False where that fails."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")  # readable by its owner only
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
