"""The command `linattn compare`: mixers on tasks, several seeds, six learning rates."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import linattn_np as la

from ...arguments import number, words
from ...train.flat import on_device
from ..extras import require
from ..tables import write_table
from ..train import add_device
from . import report
from .results import cells
from .sweep import Job, Setup, model_of, scores_in, task_of, train_all
from .tasks import TASKS

MIXERS = ("linear_attention", "mamba2", "delta_rule", "delta_rule:allow_neg_eigval", "gated_delta_rule",
          "softmax_attention")  # fmt: skip
NAMES = ("mqar", "parity", "text")
RATES = tuple(10 ** (-3.5 + 0.4 * n) for n in range(6))  # 3e-4 to 3e-2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    s = Setup()
    words(parser, "--mixers", default=MIXERS, metavar="NAME",
          help="variants, perhaps with options: delta_rule:allow_neg_eigval, softmax_attention:window=16")  # fmt: skip
    words(parser, "--tasks", default=NAMES, metavar="NAME", help=f"of {', '.join(TASKS)}, or all")
    number(parser, "--seeds", default=1, help="seeds of each learning rate (1)")
    number(parser, "--rates", default=len(RATES), help="learning rates from 3e-4 to 3e-2 (6)")
    number(parser, "--steps", default=s.steps, help=f"steps of a run ({s.steps})")
    number(parser, "--batch", default=s.batch, help=f"sequences of a step ({s.batch})")
    number(parser, "--width", default=s.width, help=f"channels of the model ({s.width})")
    number(parser, "--layers", default=s.layers, help=f"layers ({s.layers})")
    number(parser, "--heads", default=s.heads, help=f"heads ({s.heads})")
    parser.add_argument("--mlp", choices=["swiglu", "none"], default=s.mlp, help="between the mixers")
    number(parser, "--processes", default=len(os.sched_getaffinity(0)), help="runs at a time (the processors)")
    add_device(parser)
    parser.add_argument("--keep", type=Path, metavar="FILE",
                        help="finished runs, a line each, which are not trained again")  # fmt: skip
    parser.add_argument("--text", metavar="FILE", help="of the task text; without it, Python's help")
    parser.add_argument("--out", type=Path, default=Path("compare-output"), help="folder of picture and JSON")


def run(args: argparse.Namespace) -> int:
    """Train all runs, print and write; the exit status."""
    start = time.perf_counter()
    setup = Setup(args.width, args.layers, args.heads, args.batch, args.steps, args.mlp, text=args.text,
                  device=args.device)  # fmt: skip
    try:
        require("tqdm", "rich", "matplotlib", "threadpoolctl")
        if args.device == "cuda":
            on_device()
        names = tuple(TASKS) if args.tasks == ("all",) else args.tasks
        if unknown := [n for n in names if n not in TASKS]:
            raise ValueError(f"--tasks is {unknown[0]}, expected some of {', '.join(TASKS)}")
        tasks = {n: task_of(n, setup) for n in names}
        rates = [
            float(f"{r:.2g}") for r in (np.geomspace(RATES[0], RATES[-1], args.rates) if args.rates > 1 else (3e-3,))
        ]
        jobs = [Job(t, m, r, seed, setup) for t in names for m in args.mixers for r in rates
                for seed in range(args.seeds)]  # fmt: skip
        counts = {m: model_of(Job(names[0], m, 0.0, 0, setup), tasks[names[0]].vocabulary).loss.count
                  for m in args.mixers}  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        if args.keep is not None:
            scores_in(args.keep)
    except (OSError, ValueError, TypeError, ModuleNotFoundError, RuntimeError) as problem:
        sys.stderr.write(f"linattn compare: {problem}\n")
        return 2
    scores = train_all(jobs, lambda j: tasks[j.task].tokens, args.processes, "compare", args.keep)
    found = cells(scores, {n: task.chance for n, task in tasks.items()})
    sys.stdout.write(explained(setup, len(rates), args.seeds))
    write_table(report.table(found, names, args.mixers, counts))
    if (verdicts := report.claims(found)).rows:
        write_table(verdicts)
    picture, results = args.out / "compare.png", args.out / "compare.json"
    report.draw(picture, scores, found, names, args.mixers)
    about = {"date": datetime.now(UTC).date().isoformat(), "setup": setup._asdict(), "seeds": args.seeds,
             "rates": rates, "seconds": round(time.perf_counter() - start, 1), "linattn_np": la.__version__,
             "numpy": np.__version__, "machine": platform.machine()}  # fmt: skip
    report.write(results, report.document(scores, found, about))
    sys.stdout.write(f"picture: {picture}; numbers: {results}\n")
    return 0


def explained(s: Setup, rates: int, seeds: int) -> str:
    """What the table shows."""
    return (
        f"{s.steps} steps of {s.batch} sequences, {s.layers} layers of {s.width} channels, seeds: {seeds}.\n"
        f"Scores at the best of {rates} learning rates, and how many rates succeed. They are shares of right answers\n"
        "beyond chance; that of text is the loss in nats a byte.\n"
    )
