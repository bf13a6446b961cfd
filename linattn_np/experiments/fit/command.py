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
    parser.add_argument("--variant", action="append", choices=[fn.__name__ for fn in la.VARIANTS], metavar="NAME",
                        help=f"a function to train, repeatable; without it {', '.join(VARIANTS)}")
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
    cells = [[f.name, _digits(np.mean(f.errors)), f"± {_digits(_half(f.errors))}", _digits(min(f.losses))]
             for f in fits]  # fmt: skip
    cells += [["linear prediction", _digits(linear), "", ""], ["the last sample", _digits(last), "", ""]]
    write_table(TextTable("", ["function", "held-out error", "95 %", "while training"], cells, left=1))
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
    """The half-width of the 95 % interval of the mean over seeds."""
    n = len(errors)
    return float("nan") if n < 2 else student_t(n - 1) * float(np.std(errors, ddof=1)) / n**0.5


def _sentences(fits: list[Fit], linear: float, name: str, held_out: int) -> list[str]:
    """What was asked, who predicts best, and what that means."""
    best = min(fits, key=lambda f: float(np.mean(f.errors)))
    worst = max(fits, key=lambda f: float(np.mean(f.errors)))
    error, half = float(np.mean(best.errors)), _half(best.errors)
    asked = (f"Each memory predicted the next sample of {name}; its gates were trained on the first two thirds, the "
             f"error is that of the last {held_out:,} samples, over their variance.")
    verdict = f"{best.name} was best with {_digits(error)} ± {_digits(half)}"
    others = [f for f in fits if f is not best and np.mean(f.errors) - _half(f.errors) <= error + half]
    verdict += f", {worst.name} worst with {_digits(np.mean(worst.errors))}" if worst is not best else ""
    verdict += f"; the intervals of {', '.join(f.name for f in others)} overlap with its own." if others else "."
    against = (f"Linear prediction from the same windows, which the memory adds to, has {_digits(linear)}: " + (
        "the memory helps." if error + half < linear else "on this series no memory is shown to help."
        if error - half <= linear else "the memory does harm: the last third is not like what it was trained on."))
    return [asked, verdict, against]


def _draw(path: Path, fits: list[Fit], linear: float, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for n, f in enumerate(fits):
        half = np.nan_to_num(_half(f.errors))
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
