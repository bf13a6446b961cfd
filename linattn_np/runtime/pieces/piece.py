"""@piece: a function of annotated arguments that Numba compiles once a dtype and that others call by symbol.

    @piece
    def scaled(A: Matrix, factors: Vector, out: Matrix):
        ...

Arrays with the default None are empty where they are left out. A piece that only some kinds of calls need names them,
`@piece(of="vector")`, and is compiled when such a call comes: it is called through a pointer that `load_pieces` fills.
With NUMBA_DISABLE_JIT=1 a piece is the Python function itself.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, lower_setattr_generic, models, register_model

from . import compiler
from .vectors import F64, I64, Builder, Value, as_intrinsic, converted, make_array, word
from .workspace import Workspace

JIT = not config.DISABLE_JIT


# kinds of arguments; those of a floating dtype depend on the dtype that a piece is compiled for


class Kind:
    """A kind of argument: its Numba type for a dtype."""

    def __init__(self, type_of: Callable[[Any], Any], floating: bool = True):
        self.type_of, self.floating = type_of, floating


Whole, Truth = Kind(lambda f: types.int64, False), Kind(lambda f: types.boolean, False)
Double, Wide = Kind(lambda f: types.float64, False), Kind(lambda f: types.float64[::1], False)
WholeVector = Kind(lambda f: types.int64[::1], False)
Wholes = Kind(lambda f: types.Array(types.int64, 2, "A"), False)
Number, Vector, Column = Kind(lambda f: f), Kind(lambda f: f[::1]), Kind(lambda f: f[:])
Matrix = Kind(lambda f: types.Array(f, 2, "A"))
Stored = Kind(lambda f: stored)


class StoredType(types.Type):
    """A row of a workspace's table: an array of the call."""

    def __init__(self) -> None:
        super().__init__("Stored")


class WorkspaceType(types.Type):
    """The address of a workspace's table."""

    def __init__(self, declaration: Workspace, dtype: Any):
        self.declaration, self.dtype = declaration, dtype
        super().__init__(f"{declaration.name}({dtype})")


stored = StoredType()
for kind in (StoredType, WorkspaceType):
    register_model(kind)(type("_Address", (models.PrimitiveModel,), {
        "__init__": lambda self, dmm, fe_type: models.PrimitiveModel.__init__(self, dmm, fe_type, I64)}))  # fmt: skip


@functools.cache
def workspace_kind(declaration: Workspace) -> Kind:
    """The kind of an argument that is a workspace."""
    of = functools.cache(lambda f: WorkspaceType(declaration, f))
    return Kind(of)


@infer_getattr
class _Fields(AttributeTemplate):
    key = WorkspaceType

    def generic_resolve(self, w: WorkspaceType, name: str) -> Any:
        d = w.declaration
        if name in d.wholes:
            return types.int64
        if name in d.numbers:
            return w.dtype
        if name in d.arrays:
            return stored
        m = d.matrices[name]
        dtype = getattr(types, m.dtype) if m.dtype else w.dtype
        return types.Array(dtype, 2, "A") if m.columns else dtype[::1]


@lower_getattr_generic(WorkspaceType)
def _get_field(context: Any, b: Builder, w: WorkspaceType, table: Value, name: str) -> Value:
    d, whole = w.declaration, lambda field: b.load(word(b, table, d.slots[field]))
    slot = d.slots[name]
    if name in d.wholes:
        return whole(name)
    if name in d.numbers:
        return converted(b, b.load(word(b, table, slot, F64)), context.get_value_type(w.dtype))
    if name in d.arrays:
        return b.add(table, I64(8 * slot))
    m, (at, row, step) = d.matrices[name], (b.load(word(b, table, slot + n)) for n in range(3))
    if m.slot:
        at = b.add(at, b.mul(step, whole(m.slot)))
    kind = context.typing_context.resolve_getattr(w, name)
    sizes = [whole(size) for size in (m.rows, m.columns) if size]
    item = kind.dtype.bitwidth // 8
    return make_array(b, context.get_value_type(kind), kind, at, sizes, [row, I64(item)] if m.columns else [I64(item)])


@lower_setattr_generic(WorkspaceType)
def _set_field(context: Any, b: Builder, signature: Any, values: Any, name: str) -> None:
    w, value = values
    declaration = signature.args[0].declaration
    if name in declaration.numbers:
        value = context.cast(b, value, signature.args[1], types.float64)
        b.store(value, word(b, w, declaration.slots[name], F64))
    else:
        b.store(context.cast(b, value, signature.args[1], types.int64), word(b, w, declaration.slots[name]))


# pieces


class Piece:
    """A function, the kinds of its arguments, and its compiled versions."""

    def __init__(self, body: Callable[..., Any], of: str = ""):
        self.body, self.of = body, frozenset(of.split())  # words that name the calls that need it
        self.signature = inspect.signature(body, eval_str=True)
        self.parameters = list(self.signature.parameters.values())
        self.kinds = [p.annotation for p in self.parameters]
        self.name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        self.slots: dict[str, Any] = {}  # pointers through which it is called if only some calls need it
        self.addresses: dict[str, int] = {}

    def types_of(self, dtype: Any) -> Any:
        """Its Numba signature for a dtype."""
        returned = self.signature.return_annotation
        returned = types.void if returned is inspect.Signature.empty or returned is None else returned.type_of(dtype)
        return returned(*[kind.type_of(dtype) for kind in self.kinds])

    def symbol(self, dtype: Any) -> str:
        """A symbol per revision of the package: `python -m bench earlier` loads two in one process."""
        return f"{__name__.partition('.')[0]}.{self.name}.{dtype}"

    def callees(self) -> list[Piece]:
        """The pieces that its body calls."""
        named = inspect.getclosurevars(self.body)
        return [x.piece for x in (*named.globals.values(), *named.nonlocals.values()) if hasattr(x, "piece")]

    def dtype_of(self, given: Iterable[Any]) -> Any:
        """The dtype for arguments of these types."""
        for kind, x in zip(self.kinds, given, strict=True):
            if kind.floating and isinstance(x, types.Array | WorkspaceType):
                return x.dtype
        return next((x for kind, x in zip(self.kinds, given, strict=True) if kind is Number), types.float32)

    def slot(self, dtype: Any) -> None:
        """The pointer through which the piece is called."""
        name = f"{self.symbol(dtype)}.slot"
        if name not in self.slots:
            self.slots[name] = ctypes.c_int64(self.addresses.get(str(dtype), 0))
            llvm.add_symbol(name, ctypes.addressof(self.slots[name]))


def piece(body: Callable[..., Any] | None = None, *, of: str = "") -> Any:
    """A function that pieces, kernels and users' own compiled code call; its arguments are annotated."""
    if body is None:
        return functools.partial(piece, of=of)
    if not JIT:
        return _in_python(body)
    own = Piece(body, of)

    def call(context: Any, *given: Any, **named: Any) -> Any:
        found = own.signature.bind(*given, **named).arguments
        given = tuple(found.get(p.name, types.Omitted(None)) for p in own.parameters)
        dtype = own.dtype_of(given)

        def write(context: Any, b: Builder, signature: Any, values: Any) -> Value:
            return _call(own, dtype, context, b, signature, values)

        return own.types_of(dtype).return_type(*given), write

    intrinsic = as_intrinsic(call, body, own.signature)
    intrinsic.piece = own
    return intrinsic


def _call(own: Piece, dtype: Any, context: Any, b: Builder, signature: Any, values: Any) -> Value:
    """A call by symbol, or through a pointer if only some calls need the piece; an omitted array is empty."""
    wanted, given = own.types_of(dtype), []
    kind = compiler.c_signature(context, wanted)
    for found, x, taken in zip(signature.args, values, wanted.args, strict=True):
        if not isinstance(taken, types.Array):
            x = context.cast(b, x, found, taken)
        elif not isinstance(found, types.Array):
            x = ir.Constant(context.get_value_type(taken), None)
        given.append(x)
    if own.of:
        name = f"{own.symbol(dtype)}.slot"
        slot = b.module.globals.get(name) or ir.GlobalVariable(b.module, I64, name)
        slot.linkage = "external"
        function = b.inttoptr(b.load(slot), kind.as_pointer())
    else:
        function = cgutils.get_or_insert_function(b.module, kind, own.symbol(dtype))
    result = b.call(function, compiler.arguments(wanted).as_arguments(b, given))
    return context.get_dummy_value() if wanted.return_type == types.void else result


def _in_python(body: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function itself, with empty arrays for omitted ones."""
    own = Piece(body)

    @functools.wraps(body)
    def call(*given: Any, **named: Any) -> Any:
        found = own.signature.bind(*given, **named)
        found.apply_defaults()
        for name, x in found.arguments.items():
            if x is None:
                found.arguments[name] = np.empty((0, 0) if own.signature.parameters[name].annotation is Matrix else 0)
        with np.errstate(all="ignore"):  # compiled code does not warn
            return body(*found.args, **found.kwargs)

    call.piece = own
    return call


# loading


_complete: set[tuple[Piece, str, frozenset[str] | None]] = set()


def load_pieces(wanted: Iterable[Any], dtype: str, words: frozenset[str] | None = None) -> None:
    """Compile and load pieces and their callees; pieces of some calls only if `words` names them (None: all).

    A kernel must not call a piece that was never loaded: its pointer is 0.
    """
    asked = [x.piece for x in wanted]
    if not JIT or all((p, dtype, words) in _complete for p in asked):
        return
    kind, order, todo = getattr(types, dtype), {}, [*asked]
    with compiler.lock:
        while todo:
            own = todo.pop()
            if own in order:
                continue
            order[own] = own.callees()
            for p in order[own]:
                if p.of:
                    p.slot(kind)
            todo += [p for p in order[own] if words is None or p.of <= words]
        symbols = {own.symbol(kind): own for own in reversed(order) if dtype not in own.addresses}
        codes = {name: compiler.compiled(own.body, own.types_of(kind), name) for name, own in symbols.items()}
        for name, address in compiler.load(codes).items():
            own = symbols[name]
            if own.of:  # before its address, which another thread may read
                own.slot(kind)
                own.slots[f"{name}.slot"].value = address
            own.addresses[dtype] = address
        _complete.update((p, dtype, words) for p in asked)


def entry(kernel: Any, dtype: str) -> Callable[..., Any]:
    """A loaded kernel of whole numbers and workspaces' addresses, called from Python without the interpreter lock."""
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(kernel.piece.parameters))
    return prototype(kernel.piece.addresses[dtype])
