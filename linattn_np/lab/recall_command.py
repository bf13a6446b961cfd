"""`linattn recall`: a needle in a haystack of real text, asked of eleven memories."""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import numpy as np

from .gates import SHIPPED, GateSet, load_gate_sets, save_gate_set
from .learn import READINGS, STEPS, LearningJob, learn
from .memories import LEARNED, MEMORIES
from .more_memories import MORE
from .recall import CellJob, probe_cell
from .scores import Scores
from .streams import LEVELS, SHORTEST
from .text import load_corpus
from .verdict import verdict
from .workers import run_jobs


def whole_numbers(text: str) -> tuple[int, ...]:
    """1,2,3 as numbers."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """a,b,c as words."""
    return tuple(part for part in text.split(",") if part)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--gates", type=names, default=SHIPPED, help="learned gate sets: prose, mixed, facts, or files; commas between")
    add("--train", choices=READINGS, metavar="SET", help="learn a gate set again (prose, mixed or facts) and stop")
    add("--out", type=Path, help="the file that --train writes; what else it holds stays")
    add("--steps", type=int, default=STEPS, help="steps of --train")
    add("--text", help="a text file as haystack of levels 2 and 3, instead of CPython's own help")
    add("--lengths", type=whole_numbers, default=(512, 1024, 2048, 4096), help="tokens a stream")
    add("--levels", type=whole_numbers, default=tuple(LEVELS), help="1, 2, 3")
    add("--memories", type=names, default=MEMORIES, help=f"{', '.join(MEMORIES)}; beside these: {', '.join(MORE)}")
    add("--seeds", type=int, default=5, help="seeds, each with its own vectors, needles and learned gates")
    add("--depths", type=int, default=11, help="places of the needle, 0 to 100 %% of the haystack")
    add("--json", type=Path, help="write all figures to this file")
    add("--markdown", type=Path, help="write the tables to this file")
    add("--pictures", type=Path, help="draw the figures into this folder")
    add("--jobs", type=int, default=2, help="processes")
    add("--backend", default="numba", choices=("numba", "chunks", "reference"), help="what computes the memories")


def run(args: argparse.Namespace) -> int:
    """Learns or tests as asked; the exit status."""
    try:
        check(args)
        return train(args) if args.train else probe(args)
    except ModuleNotFoundError as missing:
        print(f"linattn recall: {missing.name} not installed: pip install 'linattn_np[lab]'", file=sys.stderr)
    except (ValueError, OSError) as problem:
        print(f"linattn recall: {problem}", file=sys.stderr)
    return 2


def check_installed(args: argparse.Namespace) -> None:
    """Raises ModuleNotFoundError that names what the run and its worker processes import later and is not there."""
    names = ["tqdm", "threadpoolctl", *([] if args.train else ["rich"]), *(["matplotlib"] if args.pictures else [])]
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ModuleNotFoundError(name=", ".join(missing))


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be served."""
    check_installed(args)
    for option, given, known in (("memories", args.memories, (*MEMORIES, *MORE)), ("levels", args.levels, LEVELS)):
        unknown = [str(x) for x in given if x not in known]
        if unknown:
            raise ValueError(f"--{option}: {', '.join(unknown)} not among {', '.join(map(str, known))}")
    for option in ("steps", "seeds", "depths", "jobs"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option} is {getattr(args, option)}, expected 1 or more")
    if min(args.lengths) < SHORTEST:
        raise ValueError(f"--lengths: {min(args.lengths)} is too short, needle and question need {SHORTEST} tokens")
    for path in (args.json, args.markdown, args.out):  # found out before the work, not after it
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if (args.train is None) != (args.out is None):
        raise ValueError("--train SET and --out FILE go together")
    if args.train and args.text:
        raise ValueError("--train reads CPython's own help only; leave --text out")


def train(args: argparse.Namespace) -> int:
    """Learns one gate set and writes it."""
    memories = [name for name in LEARNED if name in args.memories]
    if not memories:
        raise ValueError(f"--train: none of {', '.join(args.memories)} learns anything")
    jobs = [LearningJob(args.train, name, seed, args.steps) for seed in range(args.seeds) for name in memories]
    learned = run_jobs(learn, jobs, learning_cost, args.jobs, f"learning {args.train}")
    gate_set: GateSet = {}
    for job, found in learned:
        gate_set.setdefault(job.seed, {})[job.memory] = found
    save_gate_set(args.out, args.train, gate_set)
    print(f"{args.out} holds the gates; test them with: linattn recall --gates {args.out}")
    return 0


def learning_cost(job: LearningJob) -> int:
    """Steps, the dearer memories counted more often."""
    return job.steps * {"kda": 3, "write_gate": 1, "mamba2": 1}.get(job.memory, 2)


def probe(args: argparse.Namespace) -> int:
    """Tests the memories and reports."""
    from rich.console import Console

    from .report import print_report, write_json, write_markdown

    begun = time.perf_counter()
    scores = measure(args)
    claims = verdict(scores)
    print_report(scores, claims, Console(width=None if sys.stdout.isatty() else 160))
    seconds = time.perf_counter() - begun
    print(f"{seconds:.0f} s, {args.jobs} processes")
    if args.json:
        run = {"seconds": round(seconds), "processes": args.jobs, "backend": args.backend}
        run["load"] = (
            round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
        )  # of the machine, own work included
        write_json(args.json, scores, claims, run)
    if args.markdown:
        write_markdown(args.markdown, scores, claims)
    if args.pictures:
        from .pictures import draw_all

        draw_all(args.pictures, scores)
    return 0


def measure(args: argparse.Namespace) -> Scores:
    """All cells, the same streams for every memory."""
    gate_sets = load_gate_sets(args.gates)
    seeds = sorted(set(range(args.seeds)).intersection(*gate_sets.values()))
    if not seeds:
        raise ValueError(f"the gate sets {', '.join(gate_sets)} have no seed in common")
    if len(seeds) < args.seeds:
        print(f"the gates were learned with {len(seeds)} of {args.seeds} seeds; these are tested", file=sys.stderr)
    load_corpus(args.text)  # an unreadable text is told here, not in a worker
    depths = tuple(float(depth) for depth in np.linspace(0, 1, args.depths))
    jobs = [
        CellJob(seed, level, length, depths, args.memories, only_seed(gate_sets, seed), args.text, args.backend)
        for length in args.lengths
        for level in args.levels
        for seed in seeds
    ]
    results = run_jobs(probe_cell, jobs, lambda job: job.length, args.jobs, "recall")
    tested = {name: {seed: gate_set[seed] for seed in seeds} for name, gate_set in gate_sets.items()}
    return Scores([score for _, cell in results for score in cell], depths, tested, args.text)


def only_seed(gate_sets: dict[str, GateSet], seed: int) -> dict[str, GateSet]:
    """Of each gate set what one seed learned."""
    return {name: {seed: gate_set[seed]} for name, gate_set in gate_sets.items()}
