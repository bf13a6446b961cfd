"""The two ends of a model, and products: embeddings, dense layers, the cross-entropy of its outputs, dropout."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..call.foreign import symbolic_bridge
from ..ops import softmax_rows
from ..ops.rows import times, times_vjp
from ..ops.sums import over_tokens
from ..runtime.arrays import Array, add_to, cast, constant, count_dtype, device, is_numpy
from ..runtime.recorder import refuse
from ..runtime.values import is_finite, is_whole, is_word, shown
from . import doubts, integers
from .declaration import Call, Kind, Pullback, always, piece

Computed = tuple[Any, Pullback]
NUMBERS = 2**20  # of the logits that exist at once, or as many as the weight has
WIDTHS = 8  # times the numbers of x, up to which all logits are kept: the layers before keep more
NUMBERS_ON_DEVICE = 2**25  # up to which they are on a GPU
EACH = 64  # rows of logits that exist at once are a multiple of it
ROWS = 1024  # tokens whose one-hot rows exist at once
REDUCTIONS = ("mean", "sum", "none")
NO_LABEL = -1 << 63  # no label is ignored: only rows with a loss come to the kernels


def _why_blas(given: Any) -> str:
    """Why loops do not compute a dense layer."""
    from ..runtime.pieces.vectors import vectors

    return "" if vectors() != "plain" else "products of BLAS: the processor has neither AVX2 nor NEON"


def _is_narrow(given: Any) -> bool:
    """Whether cuBLAS multiplies arrays in 16 bits as they are stored."""
    from ..runtime.cuda.products import takes

    x, weight = given["x"], given["weight"]
    return x.itemsize == 2 and weight.size > 0 and takes(x.reshape(-1, x.shape[-1]), weight)


def _keeps_kinds(given: Any) -> bool:
    """Whether CUDA kernels compute losses of arrays as they are stored."""
    return given["weight"] is None or _is_narrow(given)


@piece(
    Kind("... M", stored=_is_narrow, array_calls=_why_blas, operations=lambda n: 2 * prod(n["..."]) * n["K"] * n["M"]),
    x="... K",
    weight="K M",
    bias="M?",
)
def linear(c: Call, x: Any, weight: Any, bias: Any = None) -> Computed:
    """A dense layer.

        y = x W + b,   dx = dy W^T,   dW = sum x^T dy,   db = sum dy

    x       (..., K)
    weight  (K, M)    the transpose of PyTorch's
    bias    (M,)

    A row of the result does not depend on the others, not in the last bit: on a CPU products are compiled loops, on a
    GPU those of cuBLAS, 256 rows at a time. Sums of products are float32 there, or float64. The gradient of a weight
    of more than 256 KiB is a product of BLAS on a CPU.
    Returns y (..., M) in x's dtype.
    """

    def pullback(dy: Array) -> dict[str, Any]:
        dy = cast(c.xp, dy, x.dtype)
        dx, dweight = times_vjp(c.xp, x, weight, dy, c.compiled)
        return {"x": dx, "weight": dweight, "bias": None if bias is None else over_tokens(c.xp, dy)}

    if c.stored and bias is not None:
        wide = times(c.xp, x, weight, dtype=c.dtype) + cast(c.xp, bias, c.dtype)
        return cast(c.xp, wide, x.dtype), pullback
    return times(c.xp, x, weight, bias, c.compiled), pullback


@piece(Kind("... D", stored=always, recheck=integers.check_ids), ids="whole ...", weight="V D")
def embedding(c: Call, ids: Any, weight: Any) -> Computed:
    """Rows of a table.

        y_n = W_{ids_n},   dW_v = the sum of dy_n over all n with ids_n = v, in the order of n

    ids     (...)     integers in 0..V - 1
    weight  (V, D)

    Returns y (..., D) in weight's dtype. Raises ValueError for a number outside of the table; on CuPy arrays, whose
    numbers the host does not read, its row is NaN and has no gradient.
    """
    xp, (V, D) = c.xp, weight.shape
    if c.on_device:
        return _gathered(ids, weight)
    if c.compiled and weight.size:
        integers.check_ids({"ids": ids, "weight": weight})
        return _by_loops(ids.shape, ids.reshape(-1), weight)
    flat = _numbers(c, "ids", ids, V)
    y = xp.reshape(xp.take(weight, flat, axis=0), (*ids.shape, D)) if prod(ids.shape) else xp.zeros(
        (*ids.shape, D), dtype=c.dtype, device=device(weight))  # fmt: skip

    def pullback(dy: Array) -> dict[str, Any]:
        rows = xp.reshape(dy, (-1, D)) if prod(dy.shape) else dy
        if not prod(dy.shape):
            return {}
        every, total = xp.arange(V, dtype=flat.dtype, device=device(weight)), xp.zeros_like(weight)
        for n in range(0, rows.shape[0], ROWS):
            last = min(n + ROWS, rows.shape[0])
            hot = cast(xp, flat[n:last, None] == every, c.dtype)
            total = total + xp.matrix_transpose(hot) @ rows[n:last, :]
        return {"weight": total}

    return y, pullback


def _by_loops(shape: tuple[int, ...], flat: Array, weight: Array) -> Computed:
    """embedding by compiled loops."""
    from ..ops.cpu.scatter import add_rows, rows_at

    V, D = weight.shape
    y = rows_at(weight, flat).reshape(*shape, D)
    return y, lambda dy: {"weight": add_rows(dy.reshape(-1, D), flat, V)}


def _gathered(ids: Array, weight: Array) -> Computed:
    """embedding by CUDA kernels."""
    from ..ops.cuda import embedding as launched

    flat = ids.astype(np.int64, copy=False).reshape(-1)
    y = launched.gather(flat, weight).reshape(*ids.shape, weight.shape[1])
    return y, lambda dy: {"weight": launched.gather_vjp(flat, weight, dy)}


class Loss(NamedTuple):
    """How the loss of a row is formed."""

    smoothing: float
    z: float


@piece(
    Kind(
        lambda given: "..." if given["reduction"] == "none" else "",
        wide=True,
        operations=lambda n: 2 * prod(n["..."]) * n["D"] * n.get("V", 0),
        doubts=doubts.of_labels,
        infinite=("x", "bias"),
        stored=_keeps_kinds,
        recheck=integers.check_labels,
    ),
    x="... D",
    labels="whole ...",
    weight="D V?",
    bias="V?",
)
def cross_entropy(c: Call, x: Any, labels: Any, weight: Any = None, bias: Any = None, *, ignore_index: int = -100,
                  label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean") -> Computed:  # fmt: skip
    """The negative log likelihood of labels, of logits or of the hidden states before the last dense layer.

        loss_n = lse - (1 - s) l_label - s mean l + z lse^2,   lse = log sum_v e^{l_v}
        dl_v = (p_v (1 + 2 z lse) - (1 - s) [v = label] - s / V) dloss,   p = e^{l - lse}

    x                (..., D)    logits l (..., V); with a weight hidden states, l = x W + b
    labels           (...)       integers in 0..V - 1; ignore_index: the position has no loss
    weight, bias     (D, V), (V,)
    label_smoothing  s           in [0, 1)
    z_loss           z           keeps lse near 0
    reduction        "mean" over the positions that have a loss, "sum", "none" (0 where there is none)

    Logits of hidden states are computed at positions with a loss only. They are kept for the pullback if they are at
    most a million, 8 times x, or the weight. Otherwise a million of them, or as many as the weight has, exist at a
    time, however many tokens there are, and the pullback computes them again. Returns the loss (), or (...) without a
    reduction, in float32, or float64 if an array is. Raises ValueError for a label that is no column. Of CuPy arrays
    the host does not read the labels: the loss and the gradient of its row are NaN, logits are computed at all
    positions, and up to 2^25 of them are kept; of hidden states in 16 bits they are float32, and their gradient is
    rounded to 16 bits.
    """
    xp, V = c.xp, x.shape[-1] if weight is None else weight.shape[-1]
    if weight is None and bias is not None:
        raise ValueError("cross_entropy: bias was given without a weight, expected both")
    how = _loss_options(c, label_smoothing, z_loss, reduction, ignore_index)
    if c.on_device and weight is None:
        return _of_logits(c, x, labels, how, int(ignore_index), reduction)
    if c.compiled and weight is None:
        integers.check_labels({"x": x, "labels": labels, "weight": None, "ignore_index": ignore_index})
        return _of_rows(x, labels, how, int(ignore_index), reduction)
    at_once = max(NUMBERS, 0 if weight is None else prod(weight.shape))
    most = at_once if weight is None else max(at_once, WIDTHS * prod(x.shape), NUMBERS_ON_DEVICE * c.on_device)
    few = 0 < labels.size * V <= most
    if few and (c.on_device or (c.compiled and integers.have_losses(labels, ignore_index))):
        if c.compiled:
            integers.check_labels({"x": x, "labels": labels, "weight": weight, "ignore_index": ignore_index})
        return _of_hidden(c, x, weight, bias, labels, how, int(ignore_index), reduction)
    refuse("positions without a loss are left out, or logits are computed again")
    total, given = prod(labels.shape), None if c.on_device else _on_host(labels)
    if given is None:  # their values are not known: every position has a loss, some of them 0
        places, has_loss = np.arange(total), xp.reshape(labels != ignore_index, (-1,))
        flat = _numbers(c, "labels", xp.where(labels == ignore_index, xp.zeros_like(labels), labels), V)
        number = xp.sum(xp.astype(has_loss, c.dtype))
        share = 1 / xp.where(number > 0, number, xp.ones_like(number)) if reduction == "mean" else 1.0
    else:
        places, has_loss = np.flatnonzero(given != ignore_index), None
        flat = _numbers(c, "labels", constant(xp, given[places], count_dtype(xp), device(x)), V)
        share = 1.0 / max(len(places), 1) if reduction == "mean" else 1.0
    rows, count = xp.reshape(x, (total, x.shape[-1])), len(places)
    each = count if count * V <= most else max(at_once // V // EACH, 1) * EACH
    each = each if has_loss is None or c.on_device else max(count, 1)

    def part(n: int) -> tuple[Array, Array, Array]:
        """(rows x, logits, labels) of some positions."""
        last = min(n + each, count)
        h = _at(c, rows, places[n:last], total)
        return h, h if weight is None else _logits(c, h, weight, bias), flat[n:last]

    def with_loss(n: int, y: Array) -> Array:
        """y, 0 of positions without a loss."""
        return y if has_loss is None else xp.where(has_loss[n : n + each], y, xp.zeros_like(y))

    def losses_of(n: int) -> Array:
        _, l, at = part(n)
        return with_loss(n, _losses(c, l, at, how))

    starts = range(0, count, max(each, 1))
    whole = [part(n) for n in starts] if len(starts) == 1 and has_loss is None else []  # few logits are kept
    losses = [_losses(c, l, at, how) for _, l, at in whole] or [losses_of(n) for n in starts]
    if reduction == "none":
        loss = xp.reshape(_put(c, losses, places, total), labels.shape)
    else:
        loss = share * sum((xp.sum(y) for y in losses), xp.zeros((), dtype=c.dtype, device=device(x)))

    def pullback(d: Array) -> dict[str, Any]:
        dx, dweight, dbias, d = [], None, None, cast(xp, d, c.dtype)
        each_d = _at(c, xp.reshape(d, (total, 1)), places, total) if reduction == "none" else None
        for n in starts:
            h, l, at = whole[n] if whole else part(n)
            one = share * d if each_d is None else each_d[n : min(n + each, count), 0]
            one = one + xp.zeros(l.shape[:1], dtype=c.dtype, device=device(x))
            dl = _losses_vjp(c, l, at, how, with_loss(n, one))
            if weight is None:
                dx.append(dl)
            else:
                dh, more = _logits_vjp(c, h, weight, dl)
                dx.append(dh)
                dweight = more if dweight is None else add_to(dweight, more)
            if bias is not None:
                dbias = xp.sum(dl, axis=0) if dbias is None else dbias + xp.sum(dl, axis=0)
            del l, dl  # the next rows take their memory
        found = xp.reshape(_put(c, dx, places, total, x.shape[-1:]), x.shape) if dx else None
        return {"x": found, "weight": dweight, "bias": dbias}

    return loss, pullback


@piece(Kind(array_calls=lambda given: "NumPy draws the numbers", stored=always), x="...")
def dropout(c: Call, x: Any, *, rng: Any, p: float = 0.1) -> Computed:
    """Elements set to 0 with probability p, the others divided by 1 - p.

        y = x m / (1 - p),   m = 1 where a uniform number is at least p, else 0,   dx = dy m / (1 - p)

    x    (...)
    rng  numpy.random.Generator, from which one number is drawn, or a whole number, the seed
    p    in [0, 1)

    The mask is that of NumPy's default generator, from the same seed the same with every library. A CUDA graph repeats
    the mask of its capture. Returns y (...) in x's dtype. Raises TypeError without a generator. Srivastava et
    al., 2014.
    """
    if not is_whole(rng, 0):
        raise TypeError(f"dropout: rng is {shown(rng)}, expected a numpy.random.Generator or a whole number >= 0")
    if not is_finite(p) or not 0 <= p < 1:
        raise ValueError(f"dropout: p is {shown(p)}, expected a number in [0, 1)")
    if c.on_device:
        from ..ops.cuda.dropout import dropout as launched

        return launched(x, int(rng), p), lambda dy: {"x": launched(dy, int(rng), p)}
    draws = np.random.default_rng(int(rng)).random(x.shape, np.float32)
    factor = constant(c.xp, np.where(draws >= p, 1 / (1 - p), 0.0), c.dtype, device(x))
    return x * factor, lambda dy: {"x": dy * factor}


def _on_host(x: Array) -> np.ndarray | None:
    """Integers (N,) as a NumPy array; None of arrays whose values are not known, as in a CUDA graph's capture."""
    if symbolic_bridge((x,), {}) is not None:
        return None
    if hasattr(x, "get"):  # CuPy
        from ..runtime.cuda.launch import is_capturing

        if is_capturing():
            return None
        refuse("the host reads labels")
        x = x.get()
    return np.asarray(x if hasattr(x, "__array__") else np.from_dlpack(x)).reshape(-1)


def _numbers(c: Call, name: str, ids: Array, V: int) -> Array:
    """Integers (N,) of a table of V rows, checked where their values are known."""
    xp = c.xp
    flat = xp.reshape(xp.astype(ids, count_dtype(xp)), (-1,))
    given = None if c.on_device else _on_host(ids)
    if given is not None:
        integers.check_numbers(c.fn, name, given, V)
    return flat


def _loss_options(c: Call, smoothing: Any, z: Any, reduction: Any, ignored: Any) -> Loss:
    """The checked options of cross_entropy."""
    if not is_finite(smoothing) or not 0 <= smoothing < 1:
        raise ValueError(f"{c.fn}: label_smoothing is {shown(smoothing)}, expected a number in [0, 1)")
    if not is_finite(z) or z < 0:
        raise ValueError(f"{c.fn}: z_loss is {shown(z)}, expected a finite number >= 0")
    if not is_word(reduction, REDUCTIONS):
        raise ValueError(f"{c.fn}: reduction is {shown(reduction)}, expected one of {', '.join(REDUCTIONS)}")
    if not is_whole(ignored, -(1 << 62), 1 << 62):
        raise ValueError(f"{c.fn}: ignore_index is {shown(ignored)}, expected a whole number")
    return Loss(float(smoothing), float(z))


def _of_logits(c: Call, x: Array, labels: Array, how: Loss, ignored: int, reduction: str) -> Computed:
    """cross_entropy of logits by CUDA kernels; the host does not read the labels."""
    from ..ops.cuda import softmax_rows as launched

    xp, rows, flat = c.xp, x.reshape(-1, x.shape[-1]), labels.astype(np.int64, copy=False).reshape(-1)
    losses, lse = launched.cross_entropy(rows, flat, *how, ignored)
    sums = None if reduction == "none" else launched.loss_sums(rows, flat, losses, ignored)
    loss = losses.reshape(labels.shape) if sums is None else sums.mean if reduction == "mean" else sums.total

    def pullback(d: Array) -> dict[str, Any]:
        d = cast(xp, d, c.dtype)
        number = sums.number if sums is not None and reduction == "mean" else None
        dx = launched.cross_entropy_vjp(rows, flat, *how, ignored, d if sums else d.reshape(-1), lse, number)
        return {"x": dx.reshape(x.shape)}

    return loss, pullback


def _of_rows(x: Array, labels: Array, how: Loss, ignored: int, reduction: str) -> Computed:
    """cross_entropy of logits by compiled loops."""
    from ..ops.cpu import softmax_rows as loops

    rows, flat, own = x.reshape(-1, x.shape[-1]), labels.reshape(-1), loops.Rows(*how, ignored)
    losses, sums = loops.cross_entropy(rows, flat, own), None
    if reduction != "none":
        sums = loops.loss_sums(rows, flat, own, losses, reduction == "mean")
    loss = losses.reshape(labels.shape) if sums is None else sums[:1].reshape(())

    def pullback(d: Array) -> dict[str, Any]:
        return {"x": loops.cross_entropy_vjp(rows, flat, own, d.reshape(-1), sums).reshape(x.shape)}

    return loss, pullback


def _of_hidden(c: Call, x: Array, weight: Array, bias: Any, labels: Array, how: Loss, ignored: int,
               reduction: str) -> Computed:  # fmt: skip
    """cross_entropy of hidden states, of few logits: by compiled loops, if all have a loss, or by CUDA kernels."""
    logits = _logits(c, x, weight, bias)
    if c.on_device:
        loss, pull = _of_logits(c, logits, labels, how, ignored, reduction)
    else:
        loss, pull = _of_rows(logits, labels, how, ignored, reduction)

    def pullback(d: Array) -> dict[str, Any]:
        dl = pull(d)["x"]
        dx, dweight = _logits_vjp(c, x, weight, dl)
        return {"x": dx, "weight": dweight, "bias": None if bias is None else over_tokens(c.xp, dl)}

    return loss, pullback


def _logits(c: Call, x: Array, weight: Array, bias: Any) -> Array:
    """x W + b, in the dtype of the computation."""
    bias = None if bias is None else cast(c.xp, bias, c.dtype)
    return times(c.xp, x, weight, bias, c.compiled, c.dtype)


def _logits_vjp(c: Call, x: Array, weight: Array, dl: Array) -> tuple[Array, Array]:
    """(dx, dW), dW in the dtype of the computation; arrays in 16 bits are multiplied by dl in 16 bits."""
    return times_vjp(c.xp, x, weight, cast(c.xp, dl, x.dtype), c.compiled, c.dtype)


def _losses(c: Call, l: Array, labels: Array, how: Loss) -> Array:
    if c.on_device:
        from ..ops.cuda.softmax_rows import cross_entropy as launched

        return launched(l, labels, *how, NO_LABEL).loss
    if c.compiled:
        from ..ops.cpu import softmax_rows as loops

        return loops.cross_entropy(l, labels, loops.Rows(*how, NO_LABEL))
    return softmax_rows.cross_entropy(c.xp, l, labels, *how)


def _losses_vjp(c: Call, l: Array, labels: Array, how: Loss, d: Array) -> Array:
    if c.on_device:
        from ..ops.cuda.softmax_rows import cross_entropy_vjp as launched

        return launched(l, labels, *how, NO_LABEL, d)
    if c.compiled:
        from ..ops.cpu import softmax_rows as loops

        return loops.cross_entropy_vjp(l, labels, loops.Rows(*how, NO_LABEL), d)
    return softmax_rows.cross_entropy_vjp(c.xp, l, labels, *how, d)


def _at(c: Call, rows: Array, places: np.ndarray, count: int) -> Array:
    """Some of `count` rows."""
    if len(places) == count:
        return rows
    if is_numpy(c.xp) and len(places) and places[-1] - places[0] == len(places) - 1:
        return rows[places[0] : places[-1] + 1]
    return c.xp.take(rows, constant(c.xp, places, count_dtype(c.xp), device(rows)), axis=0)


def _put(c: Call, parts: list[Array], places: np.ndarray, count: int, tail: tuple[int, ...] = ()) -> Array:
    """Rows at their places among `count`, 0 elsewhere."""
    xp, where = c.xp, c.library.device
    if not parts:
        return xp.zeros((count, *tail), dtype=c.dtype, device=where)
    rows = xp.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    if len(places) == count:
        return rows
    source = np.full(count, len(places))
    source[places] = np.arange(len(places))
    none = xp.zeros((1, *tail), dtype=c.dtype, device=where)
    return xp.take(xp.concat([rows, none], axis=0), constant(xp, source, count_dtype(xp), where), axis=0)
