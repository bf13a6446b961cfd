"""Claims of papers about mixers, measured on small trained models: docs/experiments/claims.md.

    python -m bench claims [--only text] [--processes 2] [--device cuda] [--keep claims.jsonl] [--write]

The settings and six learning rates are those of `linattn compare`; two processors need some hours for all of it, a GPU
with a processor for each of 12 runs some minutes.
Verdicts are those of linattn_np/experiments/compare/claims.py. With --write the page's table is written anew. With
--keep finished runs are lines of a file: after an interruption the same command goes on with the others.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import cpu_model
from linattn_np.experiments.compare.claims import CLAIMS, NEGATIVE, OPEN, UNCONVOLVED, Claim, verdict
from linattn_np.experiments.compare.command import RATES
from linattn_np.experiments.compare.results import Cell, cells
from linattn_np.experiments.compare.sweep import Job, Setup, task_of, train_all
from linattn_np.experiments.train import add_device

PAGE = Path(__file__).parent.parent / "docs" / "experiments" / "claims.md"
BEGIN, END = "<!-- python -m bench claims --write -->\n", "<!-- end -->\n"


class Setting(NamedTuple):
    """Mixers on a task."""

    mixers: tuple[str, ...]
    setup: Setup
    rates: tuple[float, ...] = tuple(float(f"{rate:.2g}") for rate in RATES)
    seeds: int = 5


SETTINGS = {
    "text": Setting(("plain", "plain_elu", "plain_normalised", "decayed", "rotated", "delta_rule", "gated_delta_rule",
                     "comba", "kda", "mesa_net", "softmax_attention", "unrotated", "deltaformer"),
                    Setup(batch=8, steps=250), seeds=8),
    "mqar": Setting(("sums", "delta_rule", "softmax_attention"), Setup(batch=16, steps=600)),
    "capacity": Setting(("sums", "delta_rule", "mamba2", "softmax_attention"), Setup(batch=16, steps=600)),
    "rebinding": Setting(("sums", "delta_rule"), Setup(batch=16, steps=600)),
    "needle2": Setting(("delta_rule", "gated_delta_rule"), Setup(batch=16, steps=2000)),
    "mad_noisy": Setting(("delta_rule", "gated_delta_rule"), Setup(batch=16, steps=300)),
    "s3": Setting((NEGATIVE, "delta_rule"), Setup(layers=1, steps=1000, mlp="swiglu")),
    "parity": Setting((NEGATIVE, "delta_rule"), Setup(layers=1, steps=1000, mlp="swiglu")),
    "s5_swaps": Setting((UNCONVOLVED, "unconvolved"), Setup(layers=1, batch=64, steps=600, mlp="swiglu", decay=0.01)),
}  # fmt: skip


def main(argv: list[str]) -> int:
    from bench import record

    parser = record.parser("claims", __doc__)
    parser.add_argument("--only", choices=[*SETTINGS], action="append", help="these tasks; the others stay as written")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    add_device(parser)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="finished runs, which are not trained again")
    args = parser.parse_args(argv)
    path = record.RESULTS / "claims.json"
    before = json.loads(path.read_text())["tasks"] if path.exists() else {}
    tasks = {n: before[n] for n in SETTINGS if n in before}
    for name in args.only or SETTINGS:
        setting = SETTINGS[name]._replace(setup=SETTINGS[name].setup._replace(device=args.device))
        tasks[name] = measured(name, setting, args.processes, args.keep)
        print(name, record.text(tasks[name]), flush=True)
        if args.write:
            record.write("claims", {"tasks": tasks})
            PAGE.write_text(page(PAGE.read_text(), tasks))
    return 0


def measured(task: str, s: Setting, processes: int, keep: Path | None = None) -> dict[str, Any]:
    """What the runs of a task say."""
    start = time.perf_counter()
    jobs = [Job(task, m, rate, seed, s.setup) for m in s.mixers for rate in s.rates for seed in range(s.seeds)]
    scores = train_all(jobs, lambda j: 1, processes, task, keep)
    found = cells(scores, {task: task_of(task, s.setup).chance})
    rows = {m: {"best": round(c.best, 4), "half": round(c.half, 4), "rate": c.rate, "window": list(c.window)}
            for (_, m), c in found.items() if math.isfinite(c.best)}  # fmt: skip
    said = {c.text: verdict(c, found) for c in CLAIMS if verdict(c, found) != OPEN}
    return {**s.setup._asdict(), "on": _on(s.setup.device), "rates": list(s.rates), "seeds": s.seeds,
            "processes": processes, "minutes": round((time.perf_counter() - start) / 60, 1),
            "mixers": rows, "claims": said}  # fmt: skip


def _on(device: str) -> str:
    """The device of the runs, and the Python whose help is their text."""
    name = cpu_model()
    if device == "cuda":
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    return f"{name}, Python {platform.python_version()}"


SOLVED = 0.9  # of right answers beyond chance
WORDS = {"supported": "shown", "contradicted": "not shown: the other one is better",
         "no difference": "not shown: equal", "inconclusive": "open"}  # fmt: skip


def page(text: str, tasks: Mapping[str, Any]) -> str:
    """The page with a new table."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table(tasks) + END + rest.partition(END)[2]


def table(tasks: Mapping[str, Any]) -> str:
    """A row a claim, and the settings of the tasks."""
    lines = ["| claim | task | scores | difference | verdict |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        if claim.task in tasks and claim.text in tasks[claim.task]["claims"]:
            lines.append(_row(claim, tasks[claim.task]))
    lines += ["", "| task | models | runs | on |", "|---|---|---|---|"]
    for name, t in tasks.items():
        mlp = "" if t["mlp"] == "none" else f", {t['mlp']}"
        rates = ", ".join(f"{rate:g}" for rate in t["rates"])
        lines.append(f"| `{name}` | {_layers(t['layers'])} of {t['width']} channels{mlp} | {t['steps']} steps of "
                     f"{t['batch']} sequences, {t['seeds']} seeds, rates {rates} | {t['on']} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(claim: Claim, task: Mapping[str, Any]) -> str:
    word, _, numbers = task["claims"][claim.text].partition(": ")
    scores = ", ".join(f"`{m}` {_score(task['mixers'].get(m))}" for m in (claim.better, claim.worse))
    best = [task["mixers"].get(m, {"best": 0.0})["best"] for m in (claim.better, claim.worse)]
    found = WORDS.get(word, "open")
    if claim.task != "text" and word == "no difference" and (min(best) > SOLVED or max(best) < 1 - SOLVED):
        found = "open: both solve it" if min(best) > SOLVED else "open: neither learns it"
    elif word == "supported" and claim.costs_nothing:
        found = "shown: not worse"
    numbers = numbers.replace("+-", "±")
    return f"| {claim.text} ({claim.source}) | `{claim.task}` | {scores} | {numbers} | {found} |"


def _layers(n: int) -> str:
    return f"{n} layers" if n > 1 else "one layer"


def _score(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "diverged"
    good, rates = cell.get("window", (0, 1))  # of one rate there is no window
    return f"{cell['best']:.3f} ± {cell['half']:.3f}" + (f" ({good} of {rates})" if rates > 1 else "")


__all__ = ["SETTINGS", "Cell", "main", "page", "table"]
