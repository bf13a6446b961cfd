"""What lies between the products of a learner on CuPy arrays, one kernel each (cuda_src/fast_weights/between.cu).

Arrays are dense, or copied, of one dtype, float32 or float64, which the results have too.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...ops.cuda.arguments import address
from ...ops.cuda.row_arrays import dense
from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from .arguments import BETWEEN

SOURCE, THREADS, PER = "fast_weights/between.cu", 256, 4
KINDS = {name: n for n, name in enumerate(
    ("gelu", "gelu_vjp", "gelu_vjps", "swiglu", "factors", "factors_vjp", "swiglu_vjp", "combined", "masked",
     "norm", "norm_vjp", "norm_vjps", "renormed", "renormed_vjp"))}  # fmt: skip


def constants(dtype: str, kind: str) -> Constants:
    """Of the compiler."""
    return ("LA_DOUBLE", int(dtype == "float64")), ("LA_KIND", KINDS[kind])


def takes(*arrays: Array | None) -> bool:
    """Whether the kernels read these arrays."""
    names = {dtype_name(y) for y in arrays if y is not None}
    return len(names) == 1 and names <= {"float32", "float64"} and launch.unusable() is None


def numbers(kind: str, results: int, *x: Array | None) -> tuple[Array, ...]:
    """Results of a formula of numbers; arrays of one shape, None for those that are 0."""
    return _run(kind, results, x, x[0].shape, prod(x[0].shape), PER * THREADS)  # type: ignore[union-attr]


def combined(arrays: Any, factors: Any, a: float = 1.0, b: float = 1.0) -> Array:
    """a c_0 x_0 + b c_1 x_1 + c_2 x_2; c_n (..., 1, 1) of the matrices x_n, None: 1."""
    shape = arrays[0].shape
    lead = shape[:-2]
    own = {f"c{n}": None if c is None else _of_matrices(c, lead) for n, c in enumerate(factors)}
    each = max(prod(shape[-2:]), 1)
    return _run("combined", 1, arrays, shape, prod(shape), PER * THREADS, own, each=each, a=a, b=b)[0]


def _of_matrices(c: Array, lead: tuple[int, ...]) -> Array:
    """(..., 1, 1) as one number for each matrix of these axes."""
    shape = (*(1,) * (len(lead) + 2 - c.ndim), *c.shape)
    c = c.reshape(shape)
    return c if shape[:-2] == lead else launch.cupy().broadcast_to(c, (*lead, 1, 1))


def masked(x: Array, mask: Array, a: float) -> Array:
    """(x + a) mask; mask (..., rows, columns) for all matrices before its own axes."""
    each = max(prod(mask.shape), 1)
    return _run("masked", 1, (x, mask), x.shape, prod(x.shape), PER * THREADS, each=each, a=a)[0]


def rows(
    kind: str, results: int, x: tuple[Array, ...], gamma: Array, beta: Array | None, eps: float
) -> tuple[Array, ...]:
    """Formulas of the rows of x (..., H, n, D), with gamma and beta (H, 1, D)."""
    (*lead, n, D), H = x[0].shape, gamma.shape[-3]
    own = {"gamma": gamma, "beta": beta}
    each, count = max(n, 1), prod(lead) * n
    return _run(kind, results, x, x[0].shape, count, THREADS // 32, own, each=each, D=D, heads=H, a=eps)


def columns(kind: str, results: int, x: tuple[Array, ...], a: float) -> tuple[Array, ...]:
    """Formulas of the columns of matrices x (..., K, M)."""
    *lead, K, M = x[0].shape
    return _run(kind, results, x, x[0].shape, prod(lead) * -(-M // 32), 1, each=K, D=M, a=a)


def _run(
    kind: str, results: int, x: Any, shape: Any, count: int, per: int, more: Any = None, **sizes: Any
) -> tuple[Array, ...]:
    """`results` arrays of a shape; count: numbers, rows or blocks, `per` of them in a block."""
    given = {f"x{n}": None if y is None else dense(y) for n, y in enumerate(x)}
    given |= {n: None if y is None else dense(y) for n, y in (more or {}).items()}
    dtype = x[0].dtype
    made = {f"y{n}": record.empty(tuple(shape), dtype) for n in range(results)}
    if not prod(shape):
        return tuple(made.values())
    names = (*(f"x{n}" for n in range(5)), *(f"y{n}" for n in range(3)), *(f"c{n}" for n in range(3)), "gamma", "beta")
    arrays = given | made
    packed = BETWEEN.pack(
        **{n: address(arrays.get(n)) for n in names}, count=count,
        **{"each": 1, "D": 1, "heads": 1, "a": 0.0, "b": 0.0} | sizes,
    )  # fmt: skip
    held = tuple(y for y in arrays.values() if y is not None)
    launch.launch(SOURCE, "between", constants(dtype_name(x[0]), kind), -(-count // per), THREADS, 0, packed, held)
    return tuple(made.values())
