"""`linattn probe NAME`: what each memory can do, exactly and without training."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .found import Found, draw, markdown, write_json
from .probe_growth import probe as growth
from .probe_kernels import kernels, precision
from .probe_tracking import probe as tracking
from .probe_writing import least_squares, rebinding

PROBES: dict[str, Callable[[bool], Found]] = {
    "tracking": tracking, "rebinding": rebinding, "least-squares": least_squares, "growth": growth, "kernels": kernels,
    "precision": precision,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", choices=[*PROBES, "all"], help="which question")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write tables and sentences to this file")
    parser.add_argument("--pictures", type=Path, help="draw probe-NAME.png into this folder")


def run(args: argparse.Namespace) -> int:
    """Probe, print and write; the exit status."""
    begun, results = time.perf_counter(), []
    try:
        for path in (args.json, args.markdown):  # found out before the work, not after it
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
            write_json(args.json, results, time.perf_counter() - begun)
        if args.markdown:
            args.markdown.write_text("\n".join(map(markdown, results)), "utf8")
    except (OSError, ModuleNotFoundError) as problem:
        print(f"linattn probe: {problem}", file=sys.stderr)
        return 1
    return 0
