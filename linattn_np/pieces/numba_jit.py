"""How functions are compiled here: lazily, without the interpreter lock, kept on disk where that is safe.

A kernel is an entry that Python calls; it is compiled once a dtype and kept in a directory of its own, named after
everything its machine code depends on: all sources, Numba, the processor, the vector width. Processes that compile the
same kernel at once then write the same bytes under the same name. Nothing is kept where no directory can be written
to, or with LINATTN_NP_NUMBA_CACHE=0.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numba.core import config as _config
from numba.extending import intrinsic

# Sums may be taken in any order and products fused; NaN, inf and the sign of zero keep their meaning.
REORDER = {"reassoc", "contract"}
# Only kernels are called from Python; the other functions go without a wrapper.
LEAN = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_lock = threading.Lock()
config: Any = _config  # its names are made when it is imported
_njit: Any = numba.njit


def jit(function: Callable[..., Any] | None = None, *, reorder: bool = False) -> Any:
    """A function that kernels call; `reorder` lets its sums run in vector lanes."""
    if function is None:
        return functools.partial(jit, reorder=reorder)
    return _by_type(_compile(function, fastmath=REORDER if reorder else {"contract"}))


def part(function: Callable[..., Any]) -> Any:
    """A step that a kernel is told in: it becomes part of the kernel before anything is compiled."""
    return _compile(function, fastmath={"contract"}, inline="always")


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    return _njit(**LEAN, **options)(function)


def _by_type(dispatcher: Any) -> Any:
    """Compile once a type: a constant argument is a number like any other, not a type of its own."""
    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: template(
        tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()}
    )
    return dispatcher


def kernel(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """An entry: kernel(f)(dtype) is f compiled for one dtype of computation."""

    @functools.cache
    def compiled(name: str) -> Any:
        entry = _njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, fastmath={"contract"})(function)
        _keep(entry, f"{function.__name__}-{name}")
        return entry

    return lambda dtype: compiled(np.dtype(dtype).name)


def _keep(entry: Any, name: str) -> None:
    """Let Numba keep the machine code of `entry` in a directory that no other kernel writes to."""
    if os.environ.get("LINATTN_NP_NUMBA_CACHE", "1") == "0":
        return
    with _lock:
        before = config.CACHE_DIR
        try:
            folder = _folder(before) / name
            folder.mkdir(parents=True, exist_ok=True)
            config.CACHE_DIR = str(folder)
            entry.enable_caching()
        except (OSError, RuntimeError):  # read-only, or no home: compile in every process
            pass
        finally:
            config.CACHE_DIR = before


def _folder(given: str) -> Path:
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "linattn_np" / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    """Of everything that the machine code depends on."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("numba_*.py")):
        digest.update(source.read_bytes())
    machine = (numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine(),
               llvm.get_host_cpu_name(), str(config.CPU_NAME), str(config.CPU_FEATURES), vectors())
    digest.update(repr(machine).encode())
    return digest.hexdigest()[:20]


@functools.cache
def vectors() -> str:
    """"avx512", "avx2", "neon" or "plain": which registers there are taken to be. LINATTN_NP_VECTORS forces one."""
    wanted = os.environ.get("LINATTN_NP_VECTORS")
    if wanted is not None:
        if wanted not in ("avx512", "avx2", "neon", "plain"):
            raise ValueError(f"LINATTN_NP_VECTORS is {wanted!r}, expected 'avx512', 'avx2', 'neon' or 'plain'")
        return wanted
    if config.CPU_NAME:
        return "plain"  # compiled for another machine than this one
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    has = llvm.get_host_cpu_features()
    if has.get("avx512f") and has.get("avx512dq") and has.get("avx512vl"):
        return "avx512"
    return "avx2" if has.get("avx2") and has.get("fma") else "plain"


@intrinsic
def apart(context):
    """The calling function stays one function, however many call it: its tiles are compiled once."""

    def emit(context, b, signature, given):
        b.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit
