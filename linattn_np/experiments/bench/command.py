"""The command `linattn bench [SERIES]`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import linattn_np as la

from ...arguments import number, numbers
from ..extras import require
from ..progress import progress
from ..series import load
from ..tables import TextTable, write_table
from .measure import Row, Setup, compare_function, compare_softmax, machine
from .report import document, draw, sentences, table

VARIANTS = ("linear_attention", "gla", "gated_delta_rule")
LENGTHS = (256, 1024, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("series", nargs="?", help="a file .npy, .npz, .csv or a text; without it, Python's help")
    parser.add_argument(
        "--variant",
        action="append",
        choices=[fn.__name__ for fn in la.VARIANTS if fn.spec.row_axes == 2],
        metavar="NAME",
        help=f"a function to compare, repeatable; without it {', '.join(VARIANTS)}",
    )
    numbers(parser, "--lengths", 2, default=LENGTHS, help="numbers of tokens (256, 1024, 4096)")
    number(parser, "--threads", default=1, help="CPU threads of every call, NumPy's products too (1)")
    number(parser, "--heads", default=4, help="heads (4)")
    number(parser, "--width", default=64, help="key and value channels of a head (64)")
    parser.add_argument("--backend", choices=["chunks", "numba"], help="of all calls; without it, as chosen")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder of picture and JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, print and write; the exit status."""
    try:
        require("tqdm", "rich", "matplotlib", "threadpoolctl")  # before the work, not after it
        series = load(args.series)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, ModuleNotFoundError) as problem:
        sys.stderr.write(f"linattn bench: {problem}\n")
        return 2
    lengths = sorted({T for T in args.lengths if len(series.x) >= T})
    if not lengths:
        sys.stderr.write(
            f"linattn bench: {series.name} has {len(series.x)} samples, expected {min(args.lengths)} or "
            "more, or shorter --lengths\n"
        )
        return 2
    names, rows = args.variant or list(VARIANTS), list[Row]()
    from threadpoolctl import threadpool_limits

    setup = Setup(args.heads, args.width, args.backend, args.threads)
    with threadpool_limits(args.threads), progress("bench", len(names) + 1, "functions") as done:
        rates = machine()
        for name in names:
            rows += compare_function(getattr(la, name), series.x, lengths, setup, rates)
            done(1)
        softmax = compare_softmax(series.x, lengths, setup, rates)
        done(1)
    threads = f"{args.threads} CPU thread{'s' * (args.threads > 1)}"
    sys.stdout.write("\n\n".join(sentences(rows, softmax, series.name, threads)) + "\n\n")
    write_table(TextTable("", *table(rows, softmax)))
    picture, results = args.out / "bench.png", args.out / "bench.json"
    draw(picture, rows, softmax, f"{args.heads} heads of {args.width}, float32, {threads}")
    about = {"date": datetime.now(UTC).date().isoformat(), "series": series.name, "heads": args.heads,
             "width": args.width, "threads": args.threads, "linattn_np": la.__version__, "numpy": np.__version__,
             "machine": platform.machine(),
             "operations_per_second": rates.operations, "bytes_per_second": rates.bytes}  # fmt: skip
    results.write_text(json.dumps(document(rows, softmax, **about), indent=1) + "\n", "utf8")
    sys.stdout.write(f"picture: {picture}; numbers: {results}\n")
    return 0
