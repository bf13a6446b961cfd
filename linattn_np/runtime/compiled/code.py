"""From what numba_emit.py writes down to a function that Python calls: compiled once a dtype, kept on disk.

LLVM is reached through llvmlite, the part of Numba that compiles. What is kept is a plain object file behind a digest
of its bytes, under a name that says everything it depends on: all sources, LLVM, the processor, the vector width. The
function is called without the interpreter lock. LINATTN_NP_NUMBA_CACHE=0 keeps nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import numpy as np
from llvmlite import ir

from .. import code_cache
from .emit import I64, Emit, Value, vectors

KIND = "cpu"
_lock = threading.RLock()  # held while code is written, compiled or loaded; by the thread that forks, too
_engines: list[Any] = []  # they own the code


def entry(numbers: int, wholes: int) -> Callable[[Callable[..., None]], Callable[[Any], Callable[..., None]]]:
    """body(e, ...) as a function of that many numbers and whole numbers; entry(...)(body)(dtype) compiles it."""

    def decorate(body: Callable[..., None]) -> Callable[[Any], Callable[..., None]]:
        @functools.cache
        def compiled(name: str) -> Callable[..., None]:
            with _lock:
                bits = np.dtype(name).itemsize * 8
                address = _load(_machine_code(body, numbers, wholes, bits), body.__name__)
            number = ctypes.c_float if bits == 32 else ctypes.c_double
            return ctypes.CFUNCTYPE(None, *[number] * numbers, *[ctypes.c_int64] * wholes)(address)

        return functools.cache(lambda dtype: compiled(np.dtype(dtype).name))

    return decorate


def _machine_code(body: Callable[..., None], numbers: int, wholes: int, bits: int) -> bytes:
    """The object file of an entry, from disk or compiled."""
    path = None
    if os.environ.get("LINATTN_NP_NUMBA_CACHE", "1") != "0":
        path = code_cache.file_of(KIND, f"{body.__name__}-{bits}-{_fingerprint()}.o")
    kept = None if path is None else code_cache.load(path)
    if kept is not None and hashlib.sha256(kept[32:]).digest() == kept[:32]:
        return kept[32:]
    code = _compile(_write(body, numbers, wholes, bits))
    if path is not None:
        code_cache.store(path, hashlib.sha256(code).digest() + code)
    return code


def _write(body: Callable[..., None], numbers: int, wholes: int, bits: int) -> str:
    """An entry as LLVM's text."""
    module = ir.Module(body.__name__)
    module.triple = llvm.get_process_triple()
    number = ir.FloatType() if bits == 32 else ir.DoubleType()
    kind = ir.FunctionType(ir.VoidType(), [number] * numbers + [I64] * wholes)
    function = ir.Function(module, kind, body.__name__)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    e = Emit(builder, bits)
    body(e, *[Value(e, x) for x in function.args])
    builder.ret_void()
    return str(module)


def _compile(text: str) -> bytes:
    """LLVM's text as an object file for this processor."""
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine()
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    return machine.emit_object(module)


def _machine() -> Any:
    for start in (llvm.initialize_native_target, llvm.initialize_native_asmprinter):
        start()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True,
        codemodel="jitdefault",
    )  # fmt: skip


def _load(code: bytes, name: str) -> int:
    """The address of a function of an object file, which stays in memory."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


def _locks() -> list[Any]:
    """Ours, and the one that llvmlite holds in every call of LLVM, whoever makes it."""
    return [_lock, getattr(llvm.ffi.lib, "_lock", contextlib.nullcontext())]


def _hold_locks() -> None:
    """Before a fork: what another thread is compiling is finished first, a child cannot finish it."""
    for lock in _locks():
        lock.__enter__()


def _let_go() -> None:
    """After a fork, in both processes."""
    for lock in _locks()[::-1]:
        with contextlib.suppress(RuntimeError):  # not held: a signal raised before the fork
            lock.__exit__(None, None, None)


def _let_go_in_child() -> None:
    global _lock
    _let_go()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_locks, after_in_parent=_let_go, after_in_child=_let_go_in_child)


@functools.cache
def _fingerprint() -> str:
    """Of everything that the machine code depends on."""
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    folders = (package / "runtime" / "compiled", package / "matrix_state" / "cpu")
    written = sorted(path for folder in folders for path in folder.rglob("*.py"))
    for source in (*written, package / "runtime" / "values.py"):  # norms: range_factors
        digest.update(source.read_bytes())
    machine = (llvmlite.__version__, platform.machine(), llvm.get_process_triple(), llvm.get_host_cpu_name(),
               llvm.get_host_cpu_features().flatten(), vectors())  # fmt: skip
    digest.update(repr(machine).encode())
    return digest.hexdigest()[:24]
