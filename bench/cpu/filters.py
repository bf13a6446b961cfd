"""Adaptive filters on a CPU beside padasip's: lms, nlms and rls on one signal and on many.

    python -m bench filters [--rounds 5] [--write]

One thread, float64, 10 000 samples of 16 taps. padasip filters one signal in a Python loop; 32 signals are 32 calls of
it and one call here. Reported are CPU times and the largest difference of the predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import record, timing

SAMPLES, TAPS, SIGNALS = 10_000, 16, (1, 32)
OURS: dict[str, Callable[[Any, Any], Any]] = {
    "lms": lambda x, d: la.lms(x, d, 0.01), "nlms": lambda x, d: la.nlms(x, d, 0.5, eps=0.001),
    "rls": lambda x, d: la.rls(x, d, 0.999, delta=0.1),
}  # fmt: skip


def draw(signals: int) -> tuple[np.ndarray, np.ndarray]:
    """Delay lines of coloured noise, and what a random filter makes of them, with noise."""
    rng = np.random.default_rng(0)
    u = rng.standard_normal((signals, SAMPLES))
    u[:, 1:] += 0.7 * u[:, :-1]
    x, w = la.delay_line(u, TAPS), rng.standard_normal((signals, TAPS, 1))
    return x, x @ w + 0.1 * rng.standard_normal((signals, SAMPLES, 1))


def peers(x: np.ndarray, d: np.ndarray) -> dict[str, Callable[[], Any]]:
    """padasip's predictions of all signals, if it is installed."""
    try:
        from padasip import filters
    except ImportError:
        return {}
    made = {"lms": lambda: filters.FilterLMS(TAPS, mu=0.01, w="zeros"),
            "nlms": lambda: filters.FilterNLMS(TAPS, mu=0.5, eps=0.001, w="zeros"),
            "rls": lambda: filters.FilterRLS(TAPS, mu=0.999, eps=0.1, w="zeros")}  # fmt: skip
    return {
        name: lambda make=make: np.stack([make().run(e[:, 0], y)[0] for y, e in zip(x, d, strict=True)])
        for name, make in made.items()
    }


def main(arguments: list[str]) -> int:
    parser = record.parser("filters", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options, rows = parser.parse_args(arguments), []
    for signals in SIGNALS:
        x, d = draw(signals)
        others = peers(x, d)
        for name, ours in OURS.items():
            calls: dict[str, Callable[[], Any]] = {"linattn_np": lambda ours=ours, x=x, d=d: ours(x, d)}
            calls |= {"padasip": others[name]} if name in others else {}
            found = timing.interleaved(calls, options.rounds)
            row: dict[str, Any] = {"filter": name, "signals": signals,
                                   **{f"{n} CPU ms": each["cpu_ms"] for n, each in found.items()}}  # fmt: skip
            if name in others:
                difference = np.abs(calls["linattn_np"]().prediction[..., 0] - others[name]()).max()
                row |= {"ratio": row["padasip CPU ms"] / row["linattn_np CPU ms"], "difference": float(difference)}
            rows.append(row)
            print(record.cells(row), flush=True)
    if options.write:
        print(record.write("filters", {"threads": 1, "dtype": "float64", "rows": rows}))
    return 0
