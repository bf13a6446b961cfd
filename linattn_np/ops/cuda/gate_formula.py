"""The gate formula g = -e^{A_log} softplus(raw + bias) on CuPy arrays, and its gradients."""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS
from .arguments import GATE_FORMULA, address
from .unit_rows import THREADS, TOKEN_BLOCKS

SOURCE = "step/gate_formula.cu"


def takes(raw: Array) -> bool:
    """Whether the kernel supports a raw gate."""
    return dtype_name(raw) in ELEMENTS and launch.unusable() is None


def log_decay(xp: Any, raw: Array, A_log: Array, bias: Array | None, each: int) -> Array:
    """-e^{A_log} softplus(raw + bias) in float32; raw (..., T, H) or (..., T, H, K), `each` numbers per head."""
    raw, A_log, bias = _dense(xp, raw, A_log, bias)
    g = xp.empty(raw.shape, dtype=xp.float32)
    _formula("gate_formula", -(-raw.size // THREADS), each, 0, (raw, A_log, bias, None, g, None, None))
    return g


def log_decay_vjp(
    xp: Any, raw: Array, A_log: Array, bias: Array | None, dg: Array, each: int
) -> tuple[Array, Array, Array]:
    """Gradients of raw, A_log and bias in float32, summed in the order of the tokens."""
    raw, A_log, bias = _dense(xp, raw, A_log, bias)
    width = each * A_log.shape[0]
    tokens, dg, da = raw.size // width, xp.ascontiguousarray(dg), xp.empty(raw.shape, dtype=xp.float32)
    block = -(-tokens // TOKEN_BLOCKS)
    parts = xp.empty((-(-tokens // block), 2, width), dtype=xp.float32)
    arrays = (raw, A_log, bias, dg, None, da, parts)
    _formula("gate_formula_vjp", len(parts) * -(-width // THREADS), each, block, arrays)
    dbias, product = xp.sum(parts, axis=0)
    return da, xp.sum(xp.reshape(product, (-1, each)), axis=-1), dbias


def _dense(xp: Any, raw: Array, *parameters: Array | None) -> list[Array | None]:
    return [xp.ascontiguousarray(raw),
            *(None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32)) for y in parameters)]  # fmt: skip


def _formula(
    entry: str, blocks: int, each: int, block: int, arrays: tuple[Array, ...]
) -> None:
    raw, A_log, *_ = arrays
    width = each * A_log.shape[0]
    names = ("raw", "A_log", "bias", "dg", "g", "da", "parts")
    packed = GATE_FORMULA.pack(**{n: address(y) for n, y in zip(names, arrays, strict=True)},
                               tokens=raw.size // width, width=width, each=each, block=block)
    launch.launch(SOURCE, entry, (("LA_DTYPE", ELEMENTS[dtype_name(raw)]),), blocks, THREADS, 0, packed,
                  tuple(y for y in arrays if y is not None))
