"""The gate formulas of ops/gate_formula.py on CuPy arrays, and their gradients."""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS
from .arguments import GATE_FORMULA, address
from .sums import over_middle, over_tokens
from .unit_rows import THREADS, TOKEN_BLOCKS

SOURCE = "ops/gate_formula.cu"
Sizes = tuple[int, int]  # numbers per head, numbers per token


def takes(raw: Array) -> bool:
    """Whether the kernel supports a raw gate."""
    return dtype_name(raw) in ELEMENTS and launch.unusable() is None


def log_decay(xp: Any, raw: Array, A_log: Array, bias: Array | None, sizes: Sizes) -> Array:
    """-e^{A_log} softplus(raw + bias) in float32; raw (..., T, H) or (..., T, H, K)."""
    return _forward(xp, "gate_formula", raw, (A_log, bias), sizes, 0.0)


def log_decay_vjp(
    xp: Any, raw: Array, A_log: Array, bias: Array | None, dg: Array, sizes: Sizes
) -> tuple[Array, Array, Array]:
    """Gradients of raw, A_log and bias in float32, summed in the order of the tokens."""
    return _backward(xp, "gate_formula_vjp", raw, (A_log, bias), dg, sizes, 0.0)


def bounded(xp: Any, raw: Array, bound: float, A_log: Array | None, bias: Array | None, sizes: Sizes) -> Array:
    """bound sigmoid(e^{A_log} (raw + bias)) in float32."""
    return _forward(xp, "bounded_gate", raw, (A_log, bias), sizes, bound)


def bounded_vjp(
    xp: Any, raw: Array, bound: float, A_log: Array | None, bias: Array | None, dy: Array, sizes: Sizes
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of raw, A_log and bias in float32, for the given parameters."""
    da, dA, dbias = _backward(xp, "bounded_gate_vjp", raw, (A_log, bias), dy, sizes, bound)
    return da, None if A_log is None else dA, None if bias is None else dbias


def _forward(
    xp: Any, entry: str, raw: Array, parameters: tuple[Array | None, ...], sizes: Sizes, bound: float
) -> Array:
    raw, A_log, bias = _dense(xp, raw, *parameters)
    g = xp.empty(raw.shape, dtype=xp.float32)
    _launch(entry, -(-raw.size // THREADS), sizes, (0, bound), (raw, A_log, bias, None, g, None, None))
    return g


def _backward(
    xp: Any, entry: str, raw: Array, parameters: tuple[Array | None, ...], dg: Array, sizes: Sizes, bound: float
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of raw and of the parameters; None if there are no parameters."""
    raw, A_log, bias = _dense(xp, raw, *parameters)
    each, width = sizes
    tokens, dg, da = raw.size // width, xp.ascontiguousarray(dg), xp.empty(raw.shape, dtype=xp.float32)
    block = -(-tokens // TOKEN_BLOCKS)
    parts = xp.empty((-(-tokens // block), 2, width), dtype=xp.float32)
    arrays = (raw, A_log, bias, dg, None, da, parts)
    _launch(entry, len(parts) * -(-width // THREADS), sizes, (block, bound), arrays)
    if A_log is bias is None:
        return da, None, None
    dbias, product = over_tokens(parts, axes=2)
    return da, over_middle(product.reshape(width // each, each, 1))[:, 0], dbias


def _dense(xp: Any, raw: Array, *parameters: Array | None) -> list[Array | None]:
    return [xp.ascontiguousarray(raw),
            *(None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32)) for y in parameters)]  # fmt: skip


def _launch(entry: str, blocks: int, sizes: Sizes, how: tuple[int, float], arrays: tuple[Array | None, ...]) -> None:
    """how: (tokens of a block, the bound)."""
    raw: Any = arrays[0]
    each, width = sizes
    names = ("raw", "A_log", "bias", "dg", "g", "da", "parts")
    packed = GATE_FORMULA.pack(
        **{n: address(y) for n, y in zip(names, arrays, strict=True)},
        tokens=raw.size // width,
        width=width,
        each=each,
        block=how[0],
        bound=how[1],
    )
    launch.launch(
        SOURCE,
        entry,
        (("LA_DTYPE", ELEMENTS[dtype_name(raw)]),),
        blocks,
        THREADS,
        0,
        packed,
        tuple(y for y in arrays if y is not None),
    )
