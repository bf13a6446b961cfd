"""From a Python function to machine code: typed and lowered by Numba, optimised once, stored on disk as an object file.

Numba links the code of a function into each caller and optimises it there again. Here a function is an object file of
its own, and a caller holds its name: code is optimised once, and a kernel costs what its own lines cost. A file on disk
is plain machine code behind a digest (runtime/code_cache.py checks it, owner and permissions); nothing is
deserialised. Its name contains a digest of everything that the code depends on: our sources, Numba, Python, LLVM, the
processor and the vector width.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import compiler, registry, typed_passes, types, untyped_passes
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.datamodel import ArgPacker, DataModelManager, default_manager, register
from numba.core.datamodel.models import ArrayModel

from .. import code_cache
from ..compiling import compiling
from .vectors import I64, Builder, Value, make_array, vectors

KIND = "cpu"
LOADED = time.time()
lock = threading.RLock()  # held while code is compiled or loaded, and by a thread that forks


class _Pipeline(compiler.CompilerBase):
    """Numba's passes, except for features that no piece uses: `with`, closures, inlining, array expressions."""

    SKIPPED = (untyped_passes.WithLifting, untyped_passes.InlineClosureLikes, untyped_passes.InlineInlinables,
               typed_passes.InlineOverloads, typed_passes.NopythonRewrites)  # fmt: skip

    def define_pipelines(self) -> list[Any]:
        manager = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [one for one in manager.passes if one[0] not in self.SKIPPED]
        manager.finalize()
        return [manager]


class _Library(CPUCodeLibrary):
    """Collects the code of one function; `_machine_code` optimises it."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def _finalize_specific(self) -> None:
        pass


def compiled(body: Callable[..., Any], signature: Any, symbol: str) -> bytes:
    """The object file of a function, from disk or compiled."""
    name = _fingerprint(body.__code__.co_filename)
    path = None if name is None else code_cache.file_of(KIND, f"{symbol}-{name}.o")
    if path is not None and (stored := code_cache.load(path)) is not None:
        return stored
    with compiling(f"{symbol} by Numba", path):
        code = _compile(body, signature, symbol)
    if path is not None:
        code_cache.store(path, code)
    return code


def _flags() -> compiler.Flags:
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.fastmath = FastMathOptions({"contract", "nsz"})
    return flags


def _compile(body: Callable[..., Any], signature: Any, symbol: str) -> bytes:
    """Numba's code of a function under our own symbol; the other symbols of its module become internal."""
    with global_compiler_lock:
        target = registry.cpu_target
        typing, context = target.typing_context, target.target_context
        typing.refresh()
        context.refresh()
        library = _Library(context.codegen(), symbol)
        result = compiler.compile_extra(
            typing, context, body, signature.args, signature.return_type, _flags(), {}, library, _Pipeline
        )
        library.add_ir_module(_called_by_numbers(context, signature, result.fndesc.llvm_func_name, symbol))
        library.finalize()
        return _machine_code(library._final_module, result.fndesc.llvm_func_name, symbol)


_models = DataModelManager().chain(default_manager)


@register(_models, types.Array)
class _AsNumbers(ArrayModel):
    """An array as an argument of a piece: address, sizes and steps; a contiguous last axis has no step."""

    def get_argument_type(self) -> tuple[ir.Type, ...]:
        kind = self.fe_type
        return (I64,) * (2 if kind.is_c_contig and kind.ndim == 1 else 1 + 2 * kind.ndim)

    def as_argument(self, b: Builder, x: Value) -> list[Value]:
        at, *sizes = (b.extract_value(x, n) for n in [4, *((m, n) for m in (5, 6) for n in range(self.fe_type.ndim))])
        return [b.ptrtoint(at, I64), *sizes][: len(self.get_argument_type())]

    def from_argument(self, b: Builder, numbers: Any) -> Value:
        at, *sizes = numbers
        n = self.fe_type.ndim
        return make_array(b, self.get_value_type(), self.fe_type, at, sizes[:n], sizes[n:])


def arguments(signature: Any) -> ArgPacker:
    """Passes arrays as numbers and tuples as their parts."""
    return ArgPacker(_models, signature.args)


def c_signature(context: Any, signature: Any) -> ir.FunctionType:
    """The type of a piece's function."""
    returned = signature.return_type
    returned = ir.VoidType() if returned == types.void else context.get_value_type(returned)
    return ir.FunctionType(returned, arguments(signature).argument_types)


def _called_by_numbers(context: Any, signature: Any, name: str, symbol: str) -> ir.Module:
    """A function `symbol` of numbers that calls Numba's function `name`."""
    module = context.codegen()._create_empty_module(symbol)
    convention, returned = context.call_conv, signature.return_type
    callee = ir.Function(module, convention.get_function_type(returned, signature.args), name)
    function = ir.Function(module, c_signature(context, signature), symbol)
    b = Builder(function.append_basic_block())
    given = arguments(signature).from_arguments(b, function.args)
    result = convention.call_function(b, callee, returned, signature.args, given)[1]
    if returned == types.void:
        b.ret_void()
    else:
        b.ret(result)
    return module


def _machine_code(module: Any, name: str, symbol: str) -> bytes:
    """Optimised code of a module that exports only `symbol`; the function `name` is inlined into it."""
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration and variable.linkage in (llvm.Linkage.external, llvm.Linkage.common):
            variable.linkage = "internal"
    module.get_function(name).add_function_attribute("alwaysinline")
    machine = _machine()
    module.data_layout = str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _machine() -> Any:
    """The target machine of this processor, with vectors of full width."""
    for start in (llvm.initialize_native_target, llvm.initialize_native_asmprinter):
        start()
    features = llvm.get_host_cpu_features().flatten()
    if vectors() == "avx512":
        features += ",-prefer-256-bit"
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True, codemodel="jitdefault"
    )


@functools.cache
def _engine() -> Any:
    """The JIT engine; it owns all machine code until the process ends."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


def load(codes: dict[str, bytes]) -> dict[str, int]:
    """Addresses by symbol of functions loaded from object files; the functions may call one another."""
    engine = _engine()
    for code in codes.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = {symbol: engine.get_function_address(symbol) for symbol in codes}
    for symbol, address in addresses.items():
        llvm.add_symbol(symbol, address)
    return addresses


def sources_of(source: str) -> list[Path]:
    """The files that code of a file may depend on: loops, policies, and what lies beside it, as layouts of tables."""
    package, own = Path(__file__).resolve().parents[2], Path(source).resolve()
    beside = [own.parent] if package in own.parents else []
    folders = [package / "runtime" / "pieces", *package.glob("*/cpu"), *beside]
    found = {path for folder in folders for path in folder.rglob("*.py")}
    return sorted({*found, *package.glob("*/policy.py"), package / "runtime" / "values.py", own})


@functools.cache
def _fingerprint(source: str) -> str | None:
    """Hash of everything that the machine code of a function depends on.

    None if a source was written after this process had loaded it: its text then differs from the compiled one.
    """
    digest = hashlib.sha256()
    for path in (*sources_of(source), Path(source)):  # the last one tells functions of one name apart
        if not path.is_file():
            continue
        if LOADED < path.stat().st_mtime <= time.time():
            return None
        digest.update(path.read_bytes())
    machine = (numba.__version__, llvmlite.__version__, sys.version, platform.machine(), llvm.get_process_triple(),
               llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), vectors())  # fmt: skip
    digest.update(repr(machine).encode())
    return digest.hexdigest()[:24]


# a process that forks while another thread compiles


def _locks() -> list[Any]:
    """Our lock, and the lock that llvmlite holds in every call of LLVM."""
    return [lock, getattr(llvm.ffi.lib, "_lock", contextlib.nullcontext())]


def _hold_locks() -> None:
    """Before a fork: waits until no other thread compiles; the child could not finish that compilation."""
    for each in _locks():
        each.__enter__()


def _release_locks() -> None:
    for each in _locks()[::-1]:
        with contextlib.suppress(RuntimeError):  # not held: a signal raised before the fork
            each.__exit__(None, None, None)


def _release_in_child() -> None:
    global lock
    _release_locks()
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_locks, after_in_parent=_release_locks, after_in_child=_release_in_child)
