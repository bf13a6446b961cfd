"""Error of feature maps against softmax's exponential by number of features, and rounding errors by dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table, cell

maps = la.feature_maps


def kernels(quick: bool = False) -> ProbeResult:
    """Relative error of phi(q) phi(k) against e^{q k / sqrt K}, for small and large queries and keys."""
    K, pairs, seeds = 8, 200, 2 if quick else 8
    orders = (1, 2, 3, 4) if quick else (1, 2, 3, 4, 5, 6)
    counts = [maps.taylor(n)[0](np.zeros((1, K))).shape[-1] for n in orders]
    tables, panels, sentences = [], [], []
    for size in (0.5, 1.0, 2.0):
        rng = np.random.default_rng(1)
        q, k = size * rng.standard_normal((2, pairs, K))
        z = np.sum(q * k, axis=-1) / np.sqrt(K)
        errors = {
            "Taylor": [_error(maps.taylor(n), q, k, z) for n in orders],
            "FAVOR+": [_mean(partial(maps.favor_plus, m), q, k, z, seeds) for m in counts],
            "FAVOR+ hyperbolic": [_mean(partial(maps.favor_plus, m + m % 2, hyperbolic=True), q, k, z, seeds)
                                  for m in counts],
        }  # fmt: skip
        title = f"entries {size:g} N(0, 1): root mean square relative error"
        tables.append(Table(title, ("map", *(f"M = {m}" for m in counts)), [(n, *y) for n, y in errors.items()]))
        panels.append(
            Panel(
                f"entries {size:g} N(0, 1)",
                "features",
                "relative error",
                [Curve(n, counts, y) for n, y in errors.items()],
            )
        )
        best = min(errors, key=lambda n: errors[n][-1])
        power = _power(counts, errors["FAVOR+"])
        falls = f"falls like M^{power:.2f}" if power < -0.3 else f"does not converge (M^{power:.2f})"
        sentences.append(
            f"Entries {size:g}: the error of the second order ({counts[1]} features) is {cell(errors['Taylor'][1])}, "
            f"that of FAVOR+ with as many {cell(errors['FAVOR+'][1])}; at {counts[-1]} features the best is {best} "
            f"({cell(errors[best][-1])}); the error of FAVOR+ {falls}."
        )
    out, close = _outputs(K, orders, counts, seeds)
    tables.append(out)
    sentences += [
        f"Outputs within a tenth of softmax attention's, entries {size:g}: {', '.join(near) or 'none'}."
        for size, near in close.items()
    ]
    question = "How many features does an approximation of the exponential need?"
    who = ", ".join(f"for entries of {size:g} by {' and '.join(near) or 'none'}" for size, near in close.items())
    known = f"outputs within a tenth of softmax attention's are reached, with up to {counts[-1]} features, {who}."
    sizes = " and ".join(f"{size:g}" for size, near in close.items() if near) or "no size"
    meaning = (
        f"these feature maps can take the place of the exponential for queries and keys with entries of "
        f"{sizes}; it does not mean that other or learned maps need as many features."
    )
    return ProbeResult("kernels", question, tables, sentences, panels, known, meaning)


def _outputs(K: int, orders: tuple[int, ...], counts: list[int], seeds: int) -> tuple[Table, dict[float, list[str]]]:
    """Normalised linear attention with these maps against softmax attention: relative error of the output.

    Also, by size of the entries, the maps whose error is below a tenth.
    """
    rows, close = [], {}
    for size in (0.5, 1.0, 2.0):
        rng = np.random.default_rng(2)
        q, k = size * rng.standard_normal((2, 128, 1, K))
        v = rng.standard_normal((128, 1, 16))
        weights = np.tril(np.exp(q[:, 0] @ k[:, 0].T / np.sqrt(K)))
        exact = weights @ v[:, 0] / weights.sum(axis=1, keepdims=True)

        def error(phi: Any, qkv: tuple[np.ndarray, ...] = (q, k, v), exact: np.ndarray = exact) -> float:
            out = la.linear_attention(*qkv, feature_map=phi, normalize=True)[:, 0]
            return float(np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)))

        even = [n for n in orders if n % 2 == 0]  # odd orders are not positive
        taylor = [error(maps.taylor(n)) if n in even else float("nan") for n in orders]
        favor = [float(np.mean([error(maps.favor_plus(m, s)) for s in range(seeds)])) for m in counts]
        rows += [(f"Taylor, entries {size:g}", *taylor), (f"FAVOR+, entries {size:g}", *favor)]
        close[size] = [n for n, y in (("Taylor", taylor), ("FAVOR+", favor)) if np.nanmin(y) < 0.1]
    columns = ("output against softmax attention's", *(f"M = {m}" for m in counts))
    title = "causal attention, 128 tokens: root mean square error over the output's size"
    return Table(title, columns, rows), close


def _error(phi: Any, q: np.ndarray, k: np.ndarray, z: np.ndarray) -> float:
    """Root mean square of (phi(q) phi(k) - e^z) / e^z."""
    return float(np.sqrt(np.mean((np.sum(phi[0](q) * phi[0](k), axis=-1) / np.exp(z) - 1) ** 2)))


def _mean(make: Callable[[int], Any], q: np.ndarray, k: np.ndarray, z: np.ndarray, seeds: int) -> float:
    return float(np.sqrt(np.mean([_error(make(seed), q, k, z) ** 2 for seed in range(seeds)])))


def _power(x: list[int], y: list[float]) -> float:
    """Least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def precision(quick: bool = False) -> ProbeResult:
    """Chunks and tiles of the parallel form on 4 x 4 heads of 1024 tokens and 100 channels, in every dtype."""
    import ml_dtypes

    B, H, T, D = (1, 1, 256, 100) if quick else (4, 4, 1024, 100)
    inputs = np.random.default_rng(0).standard_normal((3, B, H, T, D))
    options = {"scale": D**-0.5, "layout": "heads_first"}
    rows: list[tuple[Any, ...]] = []
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        x = inputs.astype(dtype)
        chunks = la.linear_attention(*x, chunk_size=64, **options).astype(float)
        tiles = la.linear_attention(*x, chunk_size="parallel", **options).astype(float)
        same = la.linear_attention(*x.astype(float), chunk_size=1, **options)
        largest, eps = np.abs(same).max(), float(ml_dtypes.finfo(dtype).eps)
        off = lambda y, z, n=T, largest=largest, eps=eps: float(np.abs((y - z)[..., :n, :]).max() / largest / eps)  # noqa: E731
        rows.append(
            (
                np.dtype(dtype).name,
                off(chunks, tiles),
                off(chunks, same),
                off(chunks, same, 64),
                float(np.abs(chunks - tiles).max() / largest),
            )
        )
    table = Table(f"linear_attention, {B} x {H} heads, {T} tokens, {D} channels, scale D^-1/2; largest output "
                  f"{largest:.0f}: differences over it, in eps of the dtype",
                  ("dtype", "chunks against tiles", "chunks against float64", "the same, first 64 tokens",
                   "chunks against tiles, plain"), rows)  # fmt: skip
    wide, short = rows[1], [r for r in rows if "16" in str(r[0])]
    panel = Panel("error in eps", "", "eps",
                  [Curve(c, list(range(len(rows))), [r[n + 1] for r in rows], "o")
                   for n, c in enumerate(table.columns[1:4])], log="y", ticks=tuple(r[0] for r in rows))  # fmt: skip
    largest_off = max(r[2] for r in rows)
    known = (
        f"two forms of linear_attention differ by {wide[1]:.2g} eps in float32 and by at most "
        f"{max(r[1] for r in short):.2g} eps in 16 bit."
    )
    amount = "rounding alone" if largest_off < 100 else "more than rounding"
    meaning = (
        f"the choice of a form changes results by {amount} (eps is the spacing of the dtype's numbers at 1); "
        "this is one function with normal inputs, and says nothing about gradients."
    )
    return ProbeResult(
        "precision",
        "How much do two forms of one function differ, in every dtype?",
        [table],
        [
            f"Two forms of one function differ by {wide[1]:.2g} eps in float32 and by at most "
            f"{max(r[1] for r in short):.2g} eps in 16 bit, where sums are float32 and only the result is rounded; "
            f"against float64 on the same numbers the largest error is {largest_off:.2g} eps."
        ],
        [panel],
        known,
        meaning,
    )
