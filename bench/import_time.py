"""Time of `import linattn_np` beyond `import numpy, array_api_compat`, in fresh processes with bytecode on disk.

    python -m bench import_time [--runs 9] [--write]

The package loads its names on first use, so the import of one function is measured too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from bench import record

DEPENDENCIES, OURS, FUNCTION = (
    "import numpy, array_api_compat", "import linattn_np", "from linattn_np import gated_delta_rule")  # fmt: skip
CASES = {"dependencies": ("", DEPENDENCIES), "with": ("", OURS), "beyond": (DEPENDENCIES, OURS),
         "function": (DEPENDENCIES, FUNCTION)}  # fmt: skip
WORDS = {"dependencies": DEPENDENCIES, "with": f"{OURS}, alone", "beyond": f"{OURS}, beyond these",
         "function": f"{FUNCTION}, beyond these"}  # fmt: skip
CODE = """
import time
{before}
began = time.perf_counter()
{statement}
print(1e3 * (time.perf_counter() - began))
"""


def import_ms(before: str, statement: str, bytecode: str) -> float:
    """Milliseconds of `statement` after `before`, in a fresh process; `bytecode` is a cache folder."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": bytecode}
    command = [sys.executable, "-c", CODE.format(before=before, statement=statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def measure(runs: int) -> dict[str, dict[str, float]]:
    """Median and least milliseconds of each case."""
    with tempfile.TemporaryDirectory() as bytecode:
        for case in CASES.values():  # write the bytecode
            import_ms(*case, bytecode)
        rounds = [{name: import_ms(*case, bytecode) for name, case in CASES.items()} for _ in range(runs)]
    found = {name: [times[name] for times in rounds] for name in CASES}
    return {name: {"median": statistics.median(times), "least": min(times)} for name, times in found.items()}


def main(argv: list[str]) -> int:
    parser = record.parser("import_time", __doc__)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args(argv)
    found = measure(args.runs)
    for name, text in WORDS.items():
        print(f"{text:60s} median {found[name]['median']:8.1f} ms, least {found[name]['least']:8.1f} ms")
    if args.write:
        print(record.write("import_time", record.rounded({"runs": args.runs, "milliseconds": found})))
    return 0
