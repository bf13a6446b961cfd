"""Results of measurements on a CUDA device: command-line options, the device, JSON files, rows as text."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import record
from linattn_np.doctor import versions


def parser(name: str, doc: str | None, peers: bool = True) -> argparse.ArgumentParser:
    """The parser of `python -m bench NAME --backend cuda`; its description is the first line of `doc`."""
    description = (doc or "").partition("\n")[0]
    command = argparse.ArgumentParser(prog=f"python -m bench {name} --backend cuda", description=description)
    command.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    if peers:
        command.add_argument("--no-peers", action="store_true", help="do not measure other libraries")
    return command


def device(cp: Any) -> dict[str, Any]:
    """GPU, driver, CPU, versions, date."""
    about = cp.cuda.runtime.getDeviceProperties(0)
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"\d+\.\d+(\.\d+)*", Path("/proc/driver/nvidia/version").read_text())
    return {
        "date": datetime.date.today().isoformat(), "gpu": about["name"].decode(), "driver": driver and driver[0],
        "driver_api": cp.cuda.runtime.driverGetVersion(), "runtime": cp.cuda.runtime.runtimeGetVersion(),
        "multiprocessors": about["multiProcessorCount"], "cpu": record.cpu_model(), "versions": versions(),
    }  # fmt: skip


def write(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write the result, floats rounded, to FOLDER/NAME.json."""
    return record.save(folder / f"{name}.json", record.rounded(result))


def write_each(folder: Path, name: str, result: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Write the result with the rows measured so far, after each row; a row that comes again has got more times."""
    result["rows"] = []
    for row in rows:
        if not result["rows"] or result["rows"][-1] is not row:
            result["rows"].append(row)
        path = write(folder, name, result)
    sys.stdout.write(f"{path}\n")


def replace(
    folder: Path,
    name: str,
    now: dict[str, Any],
    measured: Iterable[dict[str, Any]],
    case: Callable[[Any], Any],
    cases: Sequence[Any],
) -> None:
    """Replace single rows of FOLDER/NAME.json, each with the device and the limits of its own run.

    case: the case of a row, as it appears in `cases`, which gives the order. Times and errors of other libraries
    ("what: library") that were not measured in this run are carried over.
    """
    run = {n: now[n] for n in ("date", "gpu", "driver", "copy_gbs", "matrix_tflops")}
    result = json.loads((folder / f"{name}.json").read_text())
    result["errors"] = _merged(result["errors"], now["errors"])
    rows = {case(row): row for row in result["rows"]}
    for row in measured:
        times = row["times"]
        for what, x in rows.get(case(row), {"times": {}})["times"].items():
            if ": " in what and what not in times:
                own = times[what.split(": ")[0]]["ms"]
                times[what] = x | ({"times_ours": x["ms"] / own} if "ms" in x else {})
        rows[case(row)] = row | {"measured_apart": run}
        result["rows"] = [rows[c] for c in cases if c in rows]
        write(folder, name, result)


def _merged(old: Any, new: Any) -> Any:
    """`new`, extended by those entries of nested dictionaries that only `old` has."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {n: _merged(old[n], new[n]) if n in old and n in new else (new if n in new else old)[n] for n in new | old}


def show(row: dict[str, Any], names: tuple[str, ...]) -> None:
    """Print the times of a row, each line headed by the row's values of `names`."""
    head = " ".join(str(row[n]) for n in names)
    for name, x in row["times"].items():
        sys.stdout.write(f"{head:32s} {name:10s} {record.cells(x)}\n")
    sys.stdout.flush()
