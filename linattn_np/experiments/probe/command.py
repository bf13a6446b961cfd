"""The command `linattn probe NAME`: properties of the recurrences, measured without learning."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .growth import probe as growth
from .kernels import kernels, precision
from .result import ProbeResult, draw, markdown, write_json
from .tracking import probe as tracking
from .writing import least_squares, rebinding

PROBES: dict[str, Callable[[bool], ProbeResult]] = {
    "tracking": tracking, "rebinding": rebinding, "least-squares": least_squares, "growth": growth, "kernels": kernels,
    "precision": precision,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", choices=[*PROBES, "all"], help="which probe")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write tables and sentences to this file")
    parser.add_argument("--pictures", type=Path, help="write probe-NAME.png to this folder")


def run(args: argparse.Namespace) -> int:
    """Run the probes, print and write the results; the exit status."""
    start, results = time.perf_counter(), []
    try:
        for path in (args.json, args.markdown):  # fail before the work, not after it
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if args.pictures:
            importlib.import_module("matplotlib")
        for name in PROBES if args.name == "all" else [args.name]:
            results.append(PROBES[name](args.quick))
            print(markdown(results[-1]), flush=True)
            if args.pictures:
                draw(args.pictures, results[-1])
        if args.json:
            write_json(args.json, results, time.perf_counter() - start)
        if args.markdown:
            args.markdown.write_text("\n".join(map(markdown, results)), "utf8")
    except (OSError, ModuleNotFoundError) as problem:
        print(f"linattn probe: {problem}", file=sys.stderr)
        return 1
    return 0
