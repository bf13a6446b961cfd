"""The command `linattn probe NAME`: properties of the recurrences, measured without learning."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..extras import require
from ..files import prepare
from ..progress import progress
from ..tables import write_table, write_text
from .growth import probe as growth
from .kernels import kernels, precision
from .lookups import probe as lookups
from .normalisers import probe as normalisers
from .result import ProbeResult, draw, markdown, text_table, write_json
from .writing import least_squares, rebinding

PROBES: dict[str, Callable[[bool], ProbeResult]] = {
    "rebinding": rebinding, "least-squares": least_squares, "growth": growth, "kernels": kernels,
    "precision": precision, "lookups": lookups, "normalisers": normalisers,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", nargs="?", default="all", choices=[*PROBES, "all"], help="which probe; without it, all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--full", action="store_true", help="print all tables after the summary")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write tables and sentences to this file")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", default=Path("probe-output"), help="folder of probe-NAME.png"
    )
    parser.add_argument("--no-pictures", dest="pictures", action="store_const", const=None, help="draw nothing")


def run(args: argparse.Namespace) -> int:
    """Run the probes, print and write the results; the exit status."""
    start, results = time.perf_counter(), []
    try:
        require("tqdm", "rich", *(["matplotlib"] if args.pictures else []), without_pictures="--no-pictures")
        prepare(args.json, args.markdown)  # fail before the work, not after it
        if args.pictures:
            args.pictures.mkdir(parents=True, exist_ok=True)
        names = list(PROBES) if args.name == "all" else [args.name]
        with progress("probe", len(names), "runs") as done:
            for name in names:
                results.append(PROBES[name](args.quick))
                done(1)
        report(results, args.full)
        if args.pictures:
            drawn = [draw(args.pictures, result) for result in results]
            sys.stdout.write(f"pictures: {args.pictures}{os.sep} ({', '.join(drawn)})\n")
        if args.json:
            write_json(args.json, results, time.perf_counter() - start)
        if args.markdown:
            args.markdown.write_text("\n".join(map(markdown, results)), "utf8")
    except (OSError, ModuleNotFoundError) as problem:
        print(f"linattn probe: {problem}", file=sys.stderr)
        return 2
    return 0


def report(results: list[ProbeResult], full: bool) -> None:
    """Three sentences for each probe; its tables and what they show, if asked for."""
    for result in results:
        write_text(f"{result.name} (nothing learned: vectors and gates are set by hand or drawn)")
        for sentence in result.summary:
            write_text(sentence, "  ")
        sys.stdout.write("\n")
        if full:
            for table in result.tables:
                write_table(text_table(table))
            for sentence in result.sentences:
                write_text(sentence, "  ")
            sys.stdout.write("\n")
    if not full:
        sys.stdout.write("all tables: --full\n")
