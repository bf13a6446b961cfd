"""Features of rows of bfloat16, and their transposes: random ones by products of warps (cuda_src/ops/features.cu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.arrays import Array, Namespace, device, dtype_name
from ...runtime.constants import constant_array
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from . import monomials
from .arguments import FEATURES, address
from .formulas import compiled
from .monomials import Rows, packed_rows
from .row_arrays import dense

if TYPE_CHECKING:
    from ..map_steps import Steps

SOURCE = "ops/features.cu"
WIDEST = 128  # channels: a warp holds its rows in registers
PANEL = 128  # features are stored in a multiple of it if there are more than two panels; two are equal
TILE, NARROW_TILE = 128, 64  # columns of the table of a block
THREADS, ROWS_BACK = 256, 128  # of a block
ROWS = {"exponentials": 256, "waves": 128}  # of a step of a block of features
MOST_ROWS = 1024  # of all steps


def takes(steps: Steps, *arrays: Array) -> bool:
    """Whether the kernels make the features of these rows."""
    K = arrays[0].shape[-1]
    rows = all(dtype_name(x) == "bfloat16" and x.size and x.device.id == launch.current_device() for x in arrays)
    if not rows or K % 8 or K > WIDEST or launch.unusable() is not None:
        return False
    if steps.kind == "monomials":
        return monomials.takes(steps, K)
    return steps.kind == "exponentials" or (steps.width(K) % 16 == 0 and width(steps, K) == steps.width(K))


def width(steps: Steps, K: int) -> int:
    """The number of features that are stored, the last ones being 0: whole vector loads, and whole panels."""
    M = steps.width(K)
    return M + -M % (8 if M <= PANEL else 16 if M <= 2 * PANEL else PANEL)


def of_heads(x: Array, heads: int) -> Array:
    """x (..., few, K) as (..., heads, K), each of its heads being shared by a group: a launch, no array call."""
    *lead, few, K = x.shape
    if few == heads:
        return x
    y = compiled("copy", (x[..., None, :],), ((*lead, few, heads // few, K), x.dtype), np.float32)
    return y.reshape((*lead, heads, K))


def features(xp: Namespace, steps: Steps, arrays: Sequence[Array]) -> list[Array]:
    """phi (..., width) of rows x (..., K) of one array, or of two by one launch."""
    K, n = arrays[0].shape[-1], width(steps, arrays[0].shape[-1])
    rows = [Rows(x, record.empty((*x.shape[:-1], n), x.dtype)) for x in arrays]
    if steps.kind == "monomials":
        monomials.call("monomials", steps, rows, n)
    else:
        tile = _tile(steps, K)
        W = _table(xp, arrays[0], steps, f"features {tile}", lambda: two_terms(steps, K, tile, arrays[0].dtype))
        _launch("features", steps, rows, W)
    return [of.phi for of in rows]


def features_vjp(
    xp: Namespace, steps: Steps, arrays: Sequence[Array], phi: Sequence[Array], dphi: Sequence[Array]
) -> list[Array]:
    """dx (..., K) of phi and dphi (..., width), of each array."""
    K, n = arrays[0].shape[-1], phi[0].shape[-1]
    each = zip(arrays, phi, dphi, strict=True)
    rows = [Rows(x, dense(f), dense(d), record.empty(tuple(x.shape), x.dtype)) for x, f, d in each]
    if steps.kind == "monomials":
        monomials.call("monomials_vjp", steps, [of._replace(phi=None) for of in rows], n)
    else:
        dtype = arrays[0].dtype
        W = _table(
            xp, arrays[0], steps, "features_vjp", lambda: padded(steps.tables(K, np.float32).W, KP(K), TILE, dtype)
        )
        _launch("features_vjp", steps, rows, W)
    return [of.dx for of in rows]


def KP(K: int) -> int:
    """The channels of a table."""
    return K + -K % 32


def padded(W: Any, rows: int, step: int, dtype: Any) -> np.ndarray:
    """W with zeros up to `rows` rows and a multiple of `step` columns, in `dtype`."""
    return np.pad(W, ((0, rows - W.shape[0]), (0, -W.shape[1] % step))).astype(dtype)


def two_terms(steps: Steps, K: int, tile: int, dtype: Any) -> np.ndarray:
    """(2, columns, KP): W^T rounded to `dtype`, and the rest."""
    W: Any = steps.tables(K, np.float32).W
    first = W.astype(dtype).astype(np.float32)
    return np.stack([np.ascontiguousarray(padded(x, KP(K), tile, dtype).T) for x in (first, W - first)])


def constants(kind: str, K: int, tile: int) -> Constants:
    """The constants of features.cu."""
    return ("LA_K", K), ("LA_TILE", tile), ("LA_WAVES", int(kind == "waves"))


def shared_bytes(K: int, tile: int) -> int:
    """Shared memory of a block of `features`: two terms of the table."""
    row = 2 * KP(K)
    return 2 * tile * (row if row % 128 else row + 64)


def _columns(steps: Steps, K: int) -> int:
    return steps.width(K) // (2 if steps.kind == "waves" else 1)


def _tile(steps: Steps, K: int) -> int:
    return TILE if _columns(steps, K) > NARROW_TILE else NARROW_TILE


def _table(xp: Namespace, x: Array, steps: Steps, words: str, make: Callable[[], np.ndarray]) -> Array:
    """A table on the device of x, cached."""
    where = device(x)
    return constant_array(xp, (words, *steps[:2], x.shape[-1]), where, lambda: xp.asarray(make(), device=where))


def _launch(entry: str, steps: Steps, rows: Sequence[Rows], W: Array) -> None:
    K, tile = rows[0].x.shape[-1], _tile(steps, rows[0].x.shape[-1])
    numbers = [float(n) for n in steps.tables(K, np.float32).numbers]
    square, less, size = (0.0, 0.0, numbers[0]) if steps.kind == "waves" else (*numbers, 0.0)
    rows, each = [of.strided() for of in rows], ROWS_BACK
    tiles, count, most = 1, 1, 1
    if entry == "features":
        tiles, each = -(-_columns(steps, K) // tile), ROWS[steps.kind]
        most = MOST_ROWS // each
        count = sum(of.rows for of in rows) * tiles // (each * 2 * launch.multiprocessors())
    count = min(max(count, 1), most)
    blocks = [-(-of.rows // (each * count)) * tiles for of in rows]
    packed = FEATURES.pack(of=packed_rows(rows), W=address(W), first=blocks[0], columns=_columns(steps, K),
                           width=width(steps, K), steps=count, square=square, less=less, size=size)  # fmt: skip
    shared = shared_bytes(K, tile) if entry == "features" else 0
    named = (W, *(y for of in rows for y in of.arrays))
    launch.launch(SOURCE, entry, constants(steps.kind, K, tile), sum(blocks), THREADS, shared, packed, named)
