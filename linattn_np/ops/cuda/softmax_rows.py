"""The softmax of rows of CuPy arrays, losses of rows of logits, and their gradients (cuda_src/nn/softmax.cu)."""

from __future__ import annotations

from ...runtime.arrays import Array
from ...runtime.cuda import launch, record
from .arguments import SOFTMAX, address
from .row_arrays import dense, grid_of, is_narrow, kind_of, launched, rows_of, strided, strides_of, working_dtype

SOURCE = "nn/softmax.cu"


def softmax(x: Array) -> Array:
    """y of rows (..., D)."""
    y = record.empty(tuple(x.shape), x.dtype)
    _launch("softmax", x, None, y)
    return y


def softmax_vjp(x: Array, dy: Array) -> Array:
    """dx of rows (..., D), in the dtype of x."""
    dx = record.empty(tuple(x.shape), x.dtype)
    _launch("softmax_vjp", x, dy, dx)
    return dx


def cross_entropy(x: Array, labels: Array, smoothing: float, z: float, ignored: int) -> Array:
    """Losses (R,) of rows (R, D) in the dtype of the computation, 0 of labels `ignored`; labels int64 (R,)."""
    loss = record.empty((x.shape[0],), working_dtype(x))
    _launch("cross_entropy", x, None, None, dense(labels), loss, smoothing, z, ignored)
    return loss


def cross_entropy_vjp(x: Array, labels: Array, smoothing: float, z: float, ignored: int, d: Array) -> Array:
    """dx (R, D) in the dtype of x; d (R,) in the dtype of the computation."""
    dx = record.empty(tuple(x.shape), x.dtype)
    _launch("cross_entropy_vjp", x, None, dx, dense(labels), dense(d), smoothing, z, ignored)
    return dx


def is_capturing() -> bool:
    """Whether launches on the current stream are recorded in a CUDA graph."""
    cuda = launch.cupy().cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))


def _launch(
    entry: str,
    x: Array,
    dy: Array | None,
    y: Array | None,
    labels: Array | None = None,
    loss: Array | None = None,
    smoothing: float = 0.0,
    z: float = 0.0,
    ignored: int = 0,
) -> None:
    D = x.shape[-1]
    inner, (x, dy) = strided(D, x, dy)
    grid, rows = grid_of(D, x, dy), rows_of(x, D)
    constants: dict[str, int] = {
        "LA_D": D, "LA_PER": grid.per, "LA_LANES": grid.lanes, "LA_DOUBLE": int(working_dtype(x, dy).itemsize == 8),
        "LA_DTYPE": kind_of(x), "LA_GRAD": kind_of(x if dy is None else dy),
        "LA_NARROW": int(loss is None and is_narrow(y)),
    }  # fmt: skip
    packed = SOFTMAX.pack(x=strides_of(x, D, inner), dy=strides_of(dy, D, inner), y=address(y), labels=address(labels),
                          loss=address(loss), ignored=ignored, smoothing=smoothing, z=z, rows=rows,
                          inner=inner)  # fmt: skip
    blocks, arrays = -(-rows // grid.beside), (x, dy, y, labels, loss)
    launched(SOURCE, entry, constants, blocks, grid.threads, packed, *arrays)
