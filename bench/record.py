"""Command-line options, the machine of a measurement, and the JSON file of its result.

A file under bench/results/ is a summary: the program that measures prints every row and writes those that it chooses,
at most fifty. Nobody edits a file by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from linattn_np.doctor import versions

RESULTS = Path(__file__).parent / "results"
ROW = 2  # levels of dictionaries that share a line of a file


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m bench NAME` with the option --write; its description is the first line of `doc`."""
    command = argparse.ArgumentParser(prog=f"python -m bench {name}", description=(doc or "").partition("\n")[0])
    command.add_argument("--write", action="store_true", help="write the result as JSON to bench/results/")
    return command


def cpu_model() -> str:
    """The processor's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> dict[str, Any]:
    """Processor, cores, load, versions, date."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,  # mean of the last minute
        "versions": versions(),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write machine() and the result to bench/results/NAME.json."""
    return save(RESULTS / f"{name}.json", machine() | result)


def save(path: Path, result: dict[str, Any]) -> Path:
    """Write the result to `path` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(result) + "\n")
    return path


def text(x: Any, depth: int = 0) -> str:
    """JSON with a row a line; the numbers and words of a dictionary share a line before its rows."""
    rows = isinstance(x, list) and depth == 1 and _levels(x) > 0
    if _levels(x) <= min(depth, ROW) and not rows:
        return json.dumps(x)
    if isinstance(x, list):
        lines = [text(y, depth + 1) for y in x]
    else:
        plain = {n: y for n, y in x.items() if not isinstance(y, dict | list)}
        lines = [json.dumps(plain)[1:-1]] if plain else []
        lines += [f"{json.dumps(n)}: {text(y, depth + 1)}" for n, y in x.items() if n not in plain]
    opening, closing = "[]" if isinstance(x, list) else "{}"
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    return opening + ",".join(inner + line for line in lines) + outer + closing


def _levels(x: Any) -> int:
    """Levels of dictionaries; lists have none of their own."""
    inner = max(map(_levels, x.values() if isinstance(x, dict) else x), default=0) if isinstance(x, dict | list) else 0
    return inner + isinstance(x, dict)


def rounded(x: Any, digits: int = 4) -> Any:
    """A copy of nested dictionaries and lists in which every float has `digits` significant digits."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {n: rounded(y, digits) for n, y in x.items()}
    return [rounded(y, digits) for y in x] if isinstance(x, list) else x


def cells(row: dict[str, Any], skip: tuple[str, ...] = ()) -> str:
    """A row as text: name and value pairs, floats with four digits."""
    return "  ".join(f"{n} {x:.4g}" if isinstance(x, float) else f"{n} {x}" for n, x in row.items() if n not in skip)
