"""What `import linattn_np` costs beside NumPy and array_api_compat, in fresh processes, from compiled files.

    python -m bench import_time [--runs 9] [--write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from bench import record


def cumulative_ms(code: str, module: str, compiled: str) -> float:
    """Cumulative milliseconds of the first import of `module` while `code` runs; bytecode lies in `compiled`."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": compiled}
    command = [sys.executable, "-X", "importtime", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    for line in ran.stderr.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[2].strip() == module:
            return int(fields[1]) / 1000
    raise LookupError(f"{module} was not imported")


def measure(runs: int) -> dict[str, dict[str, float]]:
    """Median and least milliseconds: everything, and what linattn_np adds to its imported dependencies."""
    with tempfile.TemporaryDirectory() as compiled:
        return _measure(runs, compiled)


def _measure(runs: int, compiled: str) -> dict[str, dict[str, float]]:
    first = "import numpy, array_api_compat, array_api_compat.numpy; import linattn_np"
    cumulative_ms(first, "linattn_np", compiled)  # compiles
    own = [cumulative_ms(first, "linattn_np", compiled) for _ in range(runs)]
    everything = [cumulative_ms("import linattn_np", "linattn_np", compiled) for _ in range(runs)]
    numpy = [cumulative_ms("import numpy", "numpy", compiled) for _ in range(runs)]
    found = {"linattn_np alone": own, "linattn_np with its dependencies": everything, "numpy": numpy}
    return {name: {"median": statistics.median(times), "least": min(times)} for name, times in found.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench import_time", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="keep the result as bench/results/import_time.json")
    args = parser.parse_args(argv)
    found = measure(args.runs)
    for name, ms in found.items():
        print(f"{name:34s} median {ms['median']:8.1f} ms, least {ms['least']:8.1f} ms")
    if args.write:
        print(record.write("import_time", {"runs": args.runs, "milliseconds": found}))
    return 0
