"""The formulas of ops/cpu/formulas.py on CuPy arrays, by one kernel (cuda_src/ops/formula.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch, record
from ...runtime.recorder import active as recording
from ...runtime.recorder import refuse
from .arguments import FORMULA
from .unit_rows import THREADS

SOURCE = "ops/formula.cu"
OF_NUMBERS = ("copy", "filled", "scaled", "product", "added", "complement", "complement_vjp", "log_rest",
              "log_rest_vjp", "step_size", "step_size_vjp", "skip_and_gate", "gate_vjp", "capped", "capped_vjp",
              "log_forget", "log_forget_vjp", "log_decay", "bounded", "log_sigmoid", "log_sigmoid_vjp", "lower_bound",
              "lower_bound_vjp", "exponential", "feature", "feature_vjp", "activation", "activation_vjp",
              "swiglu", "decayed_sum", "average")  # fmt: skip
PAIRS = ("log_decay_vjp", "bounded_vjp", "exponential_vjp", "swiglu_vjp")  # two results of numbers
OF_ROWS = ("appended", "quotient", "quotient_vjp", "normed", "softmax", "softmax_vjp", "strength", "strength_vjp",
           "inner", "cos_sin", "rotated", "rotated_pair", "over_length", "favor", "fourier", "monomials",
           "monomials_vjp", "dpfp")  # fmt: skip
PRODUCTS = {"favor": 1, "fourier": 2}  # of rows with a matrix: results of each product
MOST_PARTS = 16  # warps of a row of products
ACTIVATIONS = ("sigmoid", "silu", "softplus", "gelu", "gelu_tanh", "squared_relu")  # LA_HOW
FORMULAS = {name: n for n, name in enumerate((*OF_NUMBERS, *PAIRS, *OF_ROWS))}  # LA_KIND
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
NO_KIND = 7  # of an array that is not given
NAMES = ("x", "y", "z", "u")
NONE = (0, 0, 0, 0, 0, 0, 0)
PER = 8  # neighbouring columns of a thread, where arrays allow it
FEW = 1 << 12  # numbers up to which a thread has one


def takes(*arrays: Array | None) -> bool:
    """Whether the kernels read these arrays."""
    here = launch.current_device()
    known = all(y is None or (name_of(y.dtype) in KINDS and y.device.id == here) for y in arrays)
    return known and launch.unusable() is None


def compiled(
    name: str, arrays: Sequence[Array | None], out: Any, dtype: Any, a: float = 0.0, b: float = 0.0, how: int = 0
) -> Array:
    """`out`, filled by a formula of arrays x, y, z, u; None: one that the formula does not have.

    out: an array, or (shape, dtype) of a new one. dtype: that of the computation, float32 for 16 bits.
    """
    return _computed(name, arrays, out, None, dtype, (a, b, how))


def both(
    name: str, arrays: Sequence[Array | None], out: Any, dtype: Any, a: float = 0.0, how: int = 0, more: bool = True
) -> tuple[Array, Array | None]:
    """The two results of a transpose, of one shape and dtype; more: whether the second one is wanted."""
    second = record.empty(*out) if more and isinstance(out, tuple) else None
    return _computed(name, arrays, out, second, dtype, (a, 0.0, how)), second


def _computed(
    name: str,
    arrays: Sequence[Array | None],
    out: Any,
    more: Array | None,
    dtype: Any,
    numbers: tuple[float, float, int],
) -> Array:
    out = record.empty(*out) if isinstance(out, tuple) else out
    if out.size:
        each = [*arrays, *(None,) * (len(NAMES) - len(arrays))]
        _launch(name, each, out, more, np.dtype(dtype) == np.float64, numbers)
    return out


def working(shape: tuple[int, ...], dtype: Any) -> Array:
    """A new array that formulas fill in parts."""
    return record.empty(shape, dtype)


def interleaved(x: Array, n: int, at: int) -> Array:
    """(..., T, n, heads, D) with x (..., T, heads, D) at place `at` of n, and zeros at the others."""
    *lead, heads, D = x.shape
    out = record.empty((*lead, n, heads, D), x.dtype)
    for part in (out[..., :at, :, :], out[..., at + 1 :, :, :]):
        compiled("filled", (), part, x.dtype)
    put(out[..., at, :, :], x)
    return out


def rotated_rows(S: Array, c: Array, s: Array, back: bool) -> Array:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by cosines c and sines s (..., P, 1); the others are unchanged."""
    (*lead, K, V), P = S.shape, c.shape[-2]
    if 2 * P == K and S.flags.c_contiguous:
        pairs = (*lead, P, 2 * V)  # rows side by side
        return compiled("rotated_pair", (S.reshape(pairs), c, s), (pairs, S.dtype), S.dtype, how=back).reshape(S.shape)
    out = compiled("copy", (S,), (S.shape, S.dtype), S.dtype)
    if P:
        own = out[..., : 2 * P, :].reshape(*lead, P, 2 * V) if 2 * P == K else _pairs(out, P)
        compiled("rotated_pair", (own, c, s), own, S.dtype, how=back)
    return out


def _pairs(S: Array, P: int) -> Array:
    """The first 2 P rows of dense S (..., K, V) as (..., P, 2 V), a view."""
    (*lead, _, V), strides = S.shape, S.strides
    from numpy.lib.stride_tricks import as_strided

    shape, steps = (*lead, P, 2 * V), (*strides[:-2], 2 * strides[-2], strides[-1])
    if isinstance(S, np.ndarray):
        return as_strided(S, shape, steps)
    return type(S)(shape, S.dtype, S.data, steps)


def _launch(
    name: str, arrays: list[Array | None], out: Array, more: Array | None, double: bool,
    numbers: tuple[float, float, int],
) -> None:  # fmt: skip
    results = (out,) if more is None else (out, more)
    given, has_rows = [y for y in (*arrays, *results) if y is not None], name in OF_ROWS
    if recording.recorder is not None:
        _refuse_filled(given[: -len(results)])
    flat = not has_rows and _is_flat(given)
    layout: Any = [((y.size,), (y.itemsize,)) for y in given] if flat else [(y.shape, y.strides) for y in given]
    if more is not None:  # lies as the first result
        layout.pop()
    sizes, steps = _grid(layout, has_rows)
    if len(sizes) > 3:  # a launch for each place along the first axis
        n = out.ndim
        for i in range(out.shape[0]):
            cut = [y if y is None or y.ndim < n else y[i if y.shape[0] > 1 else 0] for y in (*arrays, out, more)]
            _launch(name, cut[:-2], cut[-2], cut[-1], double, numbers)
        return
    batch, heads, tokens = (*(1,) * (3 - len(sizes)), *sizes)
    steps += steps[-1:] if more is not None else []
    rest, fields = iter(steps), dict[str, Any]()
    for field, y in zip((*NAMES, "out", "more"), (*arrays, out, more), strict=True):
        own = None if y is None else next(rest)
        fields[field] = NONE if own is None else (y.data.ptr, *(0,) * (3 - len(sizes)), *own, KINDS[name_of(y.dtype)],
                                                  y.size if flat else y.shape[-1] if y.ndim else 1)  # fmt: skip
    rows, columns = batch * heads * tokens, out.size if flat else out.shape[-1] if out.ndim else 1
    (a, b, how), per = numbers, 1
    if not has_rows and out.size > FEW and _is_aligned(given, steps, flat, double):
        per = PER
    packed = FORMULA.pack(**fields, rows=rows, heads=heads, tokens=tokens, a=a, b=b, how=how)
    parts = 1
    if name in PRODUCTS:
        products = columns // (2 if how else PRODUCTS[name])
        parts = 1 << min(max(-(-products // 32) - 1, 0).bit_length(), MOST_PARTS.bit_length() - 1)
    blocks = -(-rows * parts // (THREADS // 32)) if has_rows else -(-rows * -(-columns // per) // THREADS)
    constants = {"LA_DOUBLE": int(double), "LA_KIND": FORMULAS[name], "LA_PER": per}
    if name.startswith("activation"):
        constants["LA_HOW"] = how
    if parts > 1:
        constants["LA_PARTS"] = parts
    if per > 1:
        kinds = [NO_KIND if y is None else KINDS[name_of(y.dtype)] for y in (*arrays, out, more)]
        constants["LA_KINDS"] = sum(kind << 3 * n for n, kind in enumerate(kinds))
        if all(y.itemsize == 2 for y in results):
            constants["LA_NARROW"] = 1
    launch.launch(SOURCE, "formula", tuple(sorted(constants.items())), blocks, THREADS, 0, packed, tuple(given))


def _is_flat(arrays: Sequence[Array]) -> bool:
    """Whether arrays of numbers are one row each: dense and of one shape, or single numbers."""
    *_, out = arrays
    if out.size >= 2**31:
        return False
    return all(y.size == 1 or (y.shape == out.shape and y.flags.c_contiguous) for y in arrays)


def _is_aligned(arrays: Sequence[Array], steps: Sequence[tuple[int, ...]], flat: bool, double: bool) -> bool:
    """Whether PER neighbours of every array lie together from a multiple of 16 bytes on, or are one number."""
    *_, out = arrays
    if not flat and (not out.ndim or out.shape[-1] % PER):
        return False
    for y, own in zip(arrays, steps, strict=True):
        if y.itemsize == 8 and not double:
            return False
        if y.size == 1 or (y.ndim and y.shape[-1] == 1):
            continue
        if own[-1] != y.itemsize or y.data.ptr % 16 or any(step % 16 for step in own[:-1]):
            return False
    return True


def _refuse_filled(arrays: list[Array]) -> None:
    """Refuse where an array was allocated for launches and no launch has taken it: array calls have filled it."""
    if (recorder := recording.recorder) is None:
        return
    taken = {y.data.ptr for one in recorder.launches for y in one.arrays or () if y is not None}
    for x in recorder.allocated:
        begin = x.data.ptr
        if begin not in taken and any(begin <= y.data.ptr < begin + max(x.nbytes, 1) for y in arrays):
            refuse("array calls fill an array")


def _grid(
    arrays: list[tuple[tuple[int, ...], tuple[int, ...]]], has_rows: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """(lengths of the outer axes, merged where they are one in all arrays; strides of each array, the column's last).

    arrays: shapes and strides, the result last.   Raises ValueError unless they are broadcast to the result.
    """
    *given, (shape, _) = arrays
    lead = [s[: len(s) - has_rows] for s, _ in given]
    if np.broadcast_shapes(*lead, shape[: len(shape) - has_rows]) != shape[: len(shape) - has_rows]:
        raise ValueError(f"arrays have shapes {[s for s, _ in given]}, expected to be broadcast to {shape}")
    n = len(shape)
    each = [(*(0,) * (n - len(s)), *(0 if k == 1 else t for k, t in zip(s, own, strict=True))) for s, own in arrays]
    columns = [own[-1] if own else 0 for own in each]
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for axis in range(n - 2, -1, -1):
        own = tuple(one[axis] for one in each)
        if shape[axis] == 1:
            continue
        if sizes and own == tuple(t * sizes[0] for t in steps[0]):
            sizes[0] *= shape[axis]
            continue
        sizes.insert(0, shape[axis])
        steps.insert(0, own)
    return sizes, [(*(one[i] for one in steps), column) for i, column in enumerate(columns)]


def put(to: Array, x: Array) -> None:
    """to[...] = x"""
    compiled("copy", (x,), to, "float64" if np.float64 in (to.dtype, x.dtype) else "float32")
