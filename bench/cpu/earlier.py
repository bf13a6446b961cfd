"""This package against an earlier revision of itself, in one process: CPU time of calls in turn, least and median.

python -m bench earlier REVISION [--only kda ...] [--rounds 9] [--write]
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import record

CASES = {  # B, T, H, K = V
    "gated_delta_rule": [(1, 2048, 8, 64), (1, 2048, 8, 128), (1, 2048, 8, 96)], "delta_rule": [(1, 2048, 8, 64)],
    "simple_gla": [(1, 2048, 8, 64), (1, 2048, 8, 128)], "linear_attention": [(1, 2048, 8, 64)],
    "kda": [(1, 2048, 8, 64), (1, 2048, 8, 128)], "gla": [(1, 2048, 8, 64)], "rwkv7": [(1, 2048, 8, 64)],
    "rwkv6": [(1, 2048, 8, 64)], "hgrn2": [(1, 2048, 8, 64)], "based": [(1, 1024, 4, 16)],
    "performer": [(1, 1024, 4, 64)], "mlstm": [(1, 2048, 8, 64)], "gsa": [(1, 1024, 4, 64)], "dfw": [(1, 512, 4, 64)],
}  # fmt: skip
STEPS = {"gated_delta_rule": [(1, 1, 16, 128), (1, 1, 4, 64), (1, 16, 16, 64)], "kda": [(1, 1, 16, 128)],
         "simple_gla": [(1, 1, 16, 128)], "rwkv7": [(1, 1, 16, 64)]}  # fmt: skip


def earlier(revision: str, folder: Path) -> Any:
    """The package of a revision, under another name."""
    root = Path(la.__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "archive", revision, "linattn_np"]
    archive = subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    (folder / "linattn_np").rename(folder / "linattn_earlier")
    sys.path.insert(0, str(folder))
    return importlib.import_module("linattn_earlier")


def times(calls: list[Callable[[], Any]], rounds: int, each: int) -> list[np.ndarray]:
    """CPU milliseconds of each call, taken in turn."""
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, own in zip(calls, found, strict=True):
            began = time.process_time_ns()
            for _ in range(each):
                call()
            own.append((time.process_time_ns() - began) / 1e6 / each)
    return [np.array(own) for own in found]


def compare(words: str, calls: list[Callable[[], Any]], rounds: int, each: int = 1) -> dict[str, Any]:
    """Print and return a row: least CPU milliseconds of both, and their ratio."""
    old, new = times(calls, rounds, each)
    ratio = old.min() / new.min()
    sys.stdout.write(f"{words:44} {old.min():9.3f} {new.min():9.3f} ms  {ratio:.3f}  "
                     f"(medians {np.median(old) / np.median(new):.3f})\n")  # fmt: skip
    sys.stdout.flush()
    return {"call": words, "earlier_ms": float(old.min()), "now_ms": float(new.min()), "ratio": float(ratio)}


def both(package: Any, name: str, arrays: dict[str, Any]) -> None:
    out, pullback = package.vjp(getattr(package, name), **arrays)
    pullback(out)


def main(options: list[str]) -> int:
    parser = record.parser("earlier", __doc__)
    parser.add_argument("revision")
    parser.add_argument("--only", nargs="+", default=sorted({*CASES, *STEPS}))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(options)
    for name in ("LINATTN_NUM_THREADS", "LINATTN_NP_NUM_THREADS"):  # the second: its name in earlier revisions
        os.environ.setdefault(name, "1")
    rows: dict[str, list[dict[str, Any]]] = {"forward": [], "forward and backward": [], "few tokens": []}
    with tempfile.TemporaryDirectory() as folder:
        packages = [earlier(args.revision, Path(folder)), la]
        for name in args.only:
            for B, T, H, D in CASES.get(name, []):
                given = draw(name, B, T, H, D)
                for words, run in (("forward", lambda p, n, x: getattr(p, n)(**x)), ("forward and backward", both)):
                    calls = [lambda p=p, r=run, n=name, x=given: r(p, n, x) for p in packages]
                    rows[words].append(compare(f"{name} {(B, T, H, D)} {words}", calls, args.rounds))
            for B, T, H, D in STEPS.get(name, []):
                given, S = draw(name, B, T, H, D), np.zeros((2, B, H, D, D), np.float32)
                how = [{"state": s, "return_state": True, "overwrite_state": True} for s in S]
                calls = [lambda p=p, n=name, x=given | own: getattr(p, n)(**x)
                         for p, own in zip(packages, how, strict=True)]  # fmt: skip
                rows["few tokens"].append(compare(f"{name} {(B, T, H, D)} tokens", calls, args.rounds, 300))
    for words, found in rows.items():
        if ratios := [row["ratio"] for row in found]:
            mean = np.exp(np.mean(np.log(ratios)))
            sys.stdout.write(f"{words}: geometric mean {mean:.3f}, least {min(ratios):.3f}\n")
    if args.write:
        print(record.write("earlier", record.rounded({"revision": args.revision, "calls": rows})))
    return 0


def draw(name: str, B: int, T: int, H: int, D: int) -> dict[str, Any]:
    """Random float32 inputs of a variant."""
    arrays = la.testing.sample(getattr(la, name), np.random.default_rng(0), B=(B,), T=T, H=H, K=D, V=D, optional=False)
    return {n: x.astype(np.float32) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
