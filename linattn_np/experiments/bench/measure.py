"""What is measured: every form of a function, and softmax attention, on vectors that come from a series."""

from __future__ import annotations

import functools
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import linattn_np as la

SIZES: dict[str, int | str | None] = {"recurrent": 1, "chunks": None, "parallel": "parallel"}  # chunk_size of a form
WINDOW = 8  # samples that a token's vectors are made of
ROWS = 256  # queries of softmax attention at once
EPS = float(np.finfo(np.float32).eps)
FARTHEST = 16  # an extrapolation to more than so many times the greatest length is none
EXACT = 1024  # tokens that are compared with float64


@dataclass
class Row:
    """One function in one form."""

    function: str
    form: str
    error: float = float("nan")  # largest difference from float64, in eps of float32 times the largest output
    seconds: dict[int, float] = field(default_factory=dict)  # by number of tokens
    predicted: dict[int, float] = field(default_factory=dict)  # the larger of operations and bytes over measured rates
    peak: int = 0  # bytes that the longest call holds beyond its inputs

    @property
    def name(self) -> str:
        return f"{self.function}, {self.form}" if self.form else self.function


@dataclass(frozen=True)
class Setup:
    """Heads, channels of a head, backend (None: as chosen) and CPU threads of all calls."""

    heads: int
    width: int
    backend: str | None
    threads: int


@dataclass(frozen=True)
class Machine:
    """Measured rates."""

    operations: float  # of a product of float32 matrices, a second
    bytes: float  # read and written by a copy, a second


def machine() -> Machine:
    """The rates of this machine."""
    x = np.ones((768, 768), np.float32)
    y = np.ones(1 << 23, np.float32)
    return Machine(2 * 768**3 / best(lambda: x @ x), 2 * y.nbytes / best(y.copy))


def best(call: Callable[[], Any], times: int = 3) -> float:
    """The least time of a call in seconds; the first one is not counted."""
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes that NumPy holds during a call beyond what it held before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def vectors(fn: Any, series: np.ndarray, T: int, H: int, D: int) -> dict[str, np.ndarray]:
    """Arrays of a call in float64: vectors are random projections of the last samples, gates are drawn."""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(fn, rng, B=(1,), T=T, H=H, K=D, V=D, optional=False)
    padded = np.concatenate([np.zeros((WINDOW - 1, series.shape[1])), series[:T]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=0).reshape(T, -1)
    for name, x in arrays.items():
        axes = fn.spec.arrays[name].axes.split("|")[0].split()
        kind = fn.samples.distribution(name)
        if axes[0] != "T" or "n" in axes or axes[-1] not in "KVN" or kind not in ("normal", "unit"):
            continue
        wide = int(np.prod(x.shape[2:]))
        y = (windows @ rng.standard_normal((windows.shape[1], wide)) / windows.shape[1] ** 0.5).reshape(x.shape)
        arrays[name] = y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-6) if kind == "unit" else y
    return arrays


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal softmax attention, (1, T, H, K), rows of queries at a time."""
    q, k, v = (np.moveaxis(x, 1, 2) for x in (q, k, v))
    out, T = np.empty_like(v), q.shape[2]
    for a in range(0, T, ROWS):
        b = min(a + ROWS, T)
        logits = q[:, :, a:b] @ np.swapaxes(k[:, :, :b], 2, 3) * np.float32(q.shape[-1] ** -0.5)
        logits[..., a:b] += np.triu(np.full((b - a, b - a), -np.inf, q.dtype), 1)
        logits -= logits.max(axis=-1, keepdims=True)
        np.exp(logits, out=logits)
        out[:, :, a:b] = logits @ v[:, :, :b] / logits.sum(axis=-1, keepdims=True)
    return np.moveaxis(out, 1, 2)


def compare_function(fn: Any, series: np.ndarray, lengths: list[int], setup: Setup, rates: Machine) -> list[Row]:
    """The rows of a function: its forms."""
    rows = [Row(fn.__name__, form) for form in SIZES]
    for T in lengths:
        wide = vectors(fn, series, T, setup.heads, setup.width)
        arrays = {n: x.astype(np.float32) for n, x in wide.items()}
        exact = fn(**wide, backend="reference") if min(lengths) == T and T <= EXACT else None
        for row in rows:
            options: dict[str, Any] = {"chunk_size": SIZES[row.form], "backend": setup.backend,
                                       "num_threads": setup.threads}  # fmt: skip
            call = functools.partial(fn, **arrays, **options)
            if exact is not None:
                difference = np.max(np.abs(call() - exact)) / max(np.max(np.abs(exact)), 1e-30)
                row.error = float(difference / EPS)
            row.seconds[T] = best(call)
            found = la.explain(fn, **arrays, **options)
            row.predicted[T] = max(found.operations / rates.operations, found.bytes / rates.bytes)
            if max(lengths) == T:
                row.peak = peak_of(call)
    return rows


def compare_softmax(series: np.ndarray, lengths: list[int], setup: Setup, rates: Machine) -> Row:
    """The row of softmax attention in NumPy."""
    H, D = setup.heads, setup.width
    row = Row("softmax attention", "")
    for T in lengths:
        wide = vectors(la.linear_attention, series, T, H, D)
        q, k, v = (wide[n].astype(np.float32) for n in "qkv")
        if min(lengths) == T:
            exact = softmax_attention(wide["q"], wide["k"], wide["v"])
            row.error = float(np.max(np.abs(softmax_attention(q, k, v) - exact)) / np.max(np.abs(exact)) / EPS)
        call = functools.partial(softmax_attention, q, k, v)
        row.seconds[T] = best(call)
        row.predicted[T] = max(4 * H * D * T * (T + ROWS) / 2 / rates.operations, 4 * T * H * D * 4 / rates.bytes)
        if max(lengths) == T:
            row.peak = peak_of(call)
    return row


def crossover(row: Row, softmax: Row) -> tuple[float, bool]:
    """(T from which the row is faster than softmax attention, whether that lies outside the measured lengths)."""
    lengths = sorted(row.seconds)
    ratio = [np.log(row.seconds[T] / softmax.seconds[T]) for T in lengths]
    if ratio[0] <= 0:
        return float(lengths[0]), True
    for n in range(1, len(lengths)):
        if ratio[n] <= 0:
            a, b = np.log(lengths[n - 1]), np.log(lengths[n])
            return float(np.exp(a + (b - a) * ratio[n - 1] / (ratio[n - 1] - ratio[n]))), False
    if len(lengths) < 2 or ratio[-1] >= ratio[-2]:
        return float("inf"), True
    slope = (ratio[-1] - ratio[-2]) / np.log(lengths[-1] / lengths[-2])
    log_factor = -ratio[-1] / slope
    return (float(lengths[-1] * np.exp(log_factor)) if log_factor < np.log(FARTHEST) else float("inf")), True
