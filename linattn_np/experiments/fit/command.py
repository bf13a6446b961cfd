"""The command `linattn fit [SERIES]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la

from ...arguments import number
from ..extras import require
from ..progress import progress
from ..series import load
from ..statistics import student_t
from ..tables import TextTable, write_table
from .model import Model, Parameters, ridge_regression, train, windows

VARIANTS = ("linear_attention", "simple_gla", "delta_rule", "gated_delta_rule")
LEAST = 64  # samples


class Fit(NamedTuple):
    """One variant: held-out error of each seed over the variance; of the best seed parameters and errors by step.

    The errors by step are those on samples that choose the step, and are not held out.
    """

    name: str
    errors: list[float]
    parameters: Parameters
    losses: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("series", nargs="?", help="a file .npy, .npz, .csv or a text; without it, an EEG of 4 channels")
    parser.add_argument(
        "--variant",
        action="append",
        choices=[fn.__name__ for fn in la.VARIANTS],
        metavar="NAME",
        help=f"a function to train, repeatable; without it {', '.join(VARIANTS)}",
    )
    number(parser, "--steps", default=150, help="training steps (150)")
    number(parser, "--seeds", default=3, help="repetitions with other random features (3)")
    number(parser, "--most", LEAST, default=2000, help="samples that are used (2000)")
    parser.add_argument("--out", type=Path, default=Path("fit-output"), help="folder of picture and parameters")


def run(args: argparse.Namespace) -> int:
    """Train, print and write; the exit status."""
    names = args.variant or list(VARIANTS)
    try:
        require("tqdm", "rich", "matplotlib")  # before the work, not after it
        series = load(args.series, "eeg")
        x = series.x[: args.most]
        if len(x) < LEAST:
            raise ValueError(f"{series.name} has {len(x)} samples, expected {LEAST} or more")
        split = 2 * len(x) // 3
        R = ridge_regression(x[:split])
        models = [Model(getattr(la, name), R) for name in names]
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, ModuleNotFoundError) as problem:
        sys.stderr.write(f"linattn fit: {problem}\n")
        return 2
    variance = float(x[split:].var())
    fits = []
    with progress("fit", len(models) * args.seeds, "runs") as done:
        for model in models:
            fits.append(_fit(model, x, split, args.seeds, args.steps, done))
    linear = float(np.mean((windows(x)[split - 1 : -1] @ R - x[split:]) ** 2) / variance)
    last = float(np.mean((x[split:] - x[split - 1 : -1]) ** 2) / variance)
    sys.stdout.write("\n\n".join(_sentences(fits, linear, series.name, len(x) - split)) + "\n\n")
    cells = [[f.name, _digits(np.mean(f.errors)), _spread(f.errors), _digits(min(f.losses))] for f in fits]
    cells += [["linear prediction", _digits(linear), "", ""], ["the last sample", _digits(last), "", ""]]
    write_table(TextTable("", ["function", "held-out error", "95 % over seeds", "while training"], cells, left=1))
    picture = args.out / "fit.png"
    _draw(picture, fits, linear, series.name)
    for f in fits:
        arrays: Any = f.parameters
        np.savez(args.out / f"{f.name}.npz", **arrays)
    sys.stdout.write(f"picture: {picture}; parameters: {args.out}/NAME.npz\n")
    return 0


def _fit(model: Model, x: np.ndarray, split: int, seeds: int, steps: int, done: Callable[[int], object]) -> Fit:
    errors, every = [], []
    for seed in range(seeds):
        P, losses = train(model, x[:split], seed, steps)
        errors.append(float(model.loss(P, x)[0][split - 2 :].mean() / x[split:].var()))
        every.append((P, losses))
        done(1)
    return Fit(model.fn.__name__, errors, *every[int(np.argmin(errors))])


def _digits(error: Any) -> str:
    """An error over the variance: four decimal places, or three digits of a smaller number."""
    return f"{error:.4f}" if error >= 0.001 else f"{error:.2e}"


def _half(errors: list[float]) -> float:
    """The half-width of the 95 % interval of the mean over seeds; infinite with one seed, whose spread is unknown."""
    n = len(errors)
    return float("inf") if n < 2 else student_t(n - 1) * float(np.std(errors, ddof=1)) / n**0.5


def _spread(errors: list[float]) -> str:
    """The half-width as text."""
    return f"± {_digits(_half(errors))}" if len(errors) > 1 else "spread unknown with one seed"


def _sentences(fits: list[Fit], linear: float, name: str, held_out: int) -> list[str]:
    """The question, the least error, and each memory against linear prediction, with the spread over seeds."""
    best = min(fits, key=lambda f: float(np.mean(f.errors)))
    asked = (
        f"Each memory predicted the next sample of {name}; its gates were trained on the first two thirds, the "
        f"error is that of the last {held_out:,} samples, over their variance."
    )
    least = f"{best.name} has the least error, {_digits(np.mean(best.errors))} ({_spread(best.errors)})"
    others = [
        f
        for f in fits
        if f is not best
        and len(f.errors) > 1
        and np.mean(f.errors) - np.mean(best.errors) <= _half(f.errors) + _half(best.errors)
    ]
    least += f"; {', '.join(f.name for f in others)} lie within the spread." if others else "."
    found: dict[str, list[str]] = {}
    for f in fits:
        gain = linear - float(np.mean(f.errors))
        size = f"{'less' if gain >= 0 else 'more'} by {_digits(abs(gain))}"
        found.setdefault(_word(gain, f.errors), []).append(f"{f.name} ({size}, {_spread(f.errors)})")
    against = ". ".join(f"{word}: {', '.join(names)}" for word, names in found.items())
    return [
        asked,
        least,
        f"Linear prediction from the same windows, which a memory adds to, has {_digits(linear)}. "
        f"{against}. The spread is over seeds, on the same samples of one series.",
    ]


def _word(gain: float, errors: list[float]) -> str:
    """The conclusion on an error that is smaller than another by `gain`."""
    if len(errors) < 2:
        return "No conclusion with one seed"
    if abs(gain) <= _half(errors):
        return "No conclusion within the spread"
    return "Smaller error with" if gain > 0 else "Larger error with"


def _draw(path: Path, fits: list[Fit], linear: float, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for n, f in enumerate(fits):
        half = _half(f.errors) if len(f.errors) > 1 else 0.0
        left.errorbar([n], [np.mean(f.errors)], yerr=[half], fmt="o", color=f"C{n}", capsize=4)
        right.semilogy(f.losses, color=f"C{n}", label=f.name)
    left.axhline(linear, color="0.5", linestyle="--", label="linear prediction")
    left.set_xticks(range(len(fits)), [f.name for f in fits], rotation=20, ha="right", fontsize=8)
    left.set(ylabel="held-out error over the variance", title=title)
    left.legend(fontsize=7)
    right.set(xlabel="training step", ylabel="error on samples apart")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
