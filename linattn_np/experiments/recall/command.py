"""The command `linattn recall`: needle-in-a-haystack retrieval by linear-attention memories."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...arguments import number, numbers, words
from ..extras import require
from ..files import prepare
from ..tables import write_table, write_text
from ..workers import run_jobs
from .evaluation import CellJob, probe_cell, tokens_read
from .fixed_memories import FIXED
from .gates import SHIPPED, GateSet, check_shapes, load_gate_sets, read_file, save_gate_set
from .learn import READINGS, STEPS, LearningJob, learn
from .memories import LEARNED, MEMORIES
from .report import about_run, as_json, read_json, summary, tables, write_json, write_markdown
from .scores import Scores
from .streams import LEVELS, SHORTEST
from .summary import overview, sentences, verdict_lines
from .text import load_corpus
from .verdict import CAUTION, WORDS, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    words(parser, "--gates", metavar="SET", default=SHIPPED, help="gate sets: prose, mixed, facts, files")
    add("--train", choices=READINGS, metavar="SET", help="learn a gate set (prose, mixed, facts) and exit")
    add("--out", type=Path, help="output file of --train; other sets in it are preserved")
    number(parser, "--steps", default=STEPS, help="optimiser steps of --train")
    add("--text", help="text file used as haystack of levels 2 and 3, instead of CPython's built-in help")
    numbers(parser, "--lengths", SHORTEST, default=(512, 1024, 2048, 4096), help="tokens per stream (512 to 4096)")
    numbers(parser, "--levels", default=tuple(LEVELS), help="levels: 1, 2, 3 (all)")
    words(
        parser,
        "--memories",
        metavar="NAME",
        default=MEMORIES,
        help=f"{', '.join(MEMORIES)}; also available: {', '.join(FIXED)}",
    )
    number(parser, "--seeds", default=5, help="number of seeds, each with its own vectors, needles and learned gates")
    number(parser, "--depths", default=11, help="number of needle depths, 0 to 100 %% of the haystack")
    add("--full", action="store_true", help="print all tables after the summary")
    add("--read", type=Path, metavar="FILE", help="report on all results that --json wrote, without a new run")
    add("--json", type=Path, help="write all results to this file")
    add("--summary", type=Path, help="write the figures of the tables to this file, as JSON")
    add("--markdown", type=Path, help="write the tables to this file")
    add("--pictures", type=Path, metavar="FOLDER", default=Path("recall-output"), help="folder of figures")
    add("--no-pictures", dest="pictures", action="store_const", const=None, help="draw nothing")
    number(parser, "--jobs", default=2, help="number of processes")
    add("--backend", default="numba", choices=("numba", "chunks", "reference"), help="backend of the memories")


def run(args: argparse.Namespace) -> int:
    """Learn gates or evaluate memories; the exit status."""
    try:
        check(args)
        return train(args) if args.train else evaluate(args)
    except (ValueError, OSError, ModuleNotFoundError) as problem:
        print(f"linattn recall: {problem}", file=sys.stderr)
    return 2


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for invalid options."""
    names = ["tqdm", "threadpoolctl", *([] if args.train else ["rich", *(["matplotlib"] if args.pictures else [])])]
    require(*names, without_pictures="--no-pictures")  # here, not in a worker
    for option, chosen, known in (("memories", args.memories, (*MEMORIES, *FIXED)), ("levels", args.levels, LEVELS)):
        unknown = [str(x) for x in chosen if x not in known]
        if unknown:
            raise ValueError(f"--{option}: {', '.join(unknown)} not among {', '.join(map(str, known))}")
    prepare(args.json, args.summary, args.markdown, args.out)  # fail before the work, not after it
    if args.pictures and not args.train:
        args.pictures.mkdir(parents=True, exist_ok=True)
    if (args.train is None) != (args.out is None):
        raise ValueError("--train SET and --out FILE go together")
    if args.train and args.read:
        raise ValueError("--train learns gates, --read reports on results; choose one")
    if args.train and args.text:
        raise ValueError("--train reads CPython's built-in help only; omit --text")


def train(args: argparse.Namespace) -> int:
    """Learn one gate set and write it."""
    memories = [name for name in LEARNED if name in args.memories]
    read_file(args.out)  # fail before the work, not after it
    if not memories:
        raise ValueError(f"--train: none of {', '.join(args.memories)} has learned gates")
    jobs = [LearningJob(args.train, name, seed, args.steps) for seed in range(args.seeds) for name in memories]
    learned = run_jobs(learn, jobs, learning_cost, args.jobs, f"learning {args.train}")
    gate_set: GateSet = {}
    for job, gates in learned:
        gate_set.setdefault(job.seed, {})[job.memory] = gates
    save_gate_set(args.out, args.train, gate_set)
    print(f"gates written to {args.out}; evaluate them with: linattn recall --gates {args.out}")
    return 0


def learning_cost(job: LearningJob) -> int:
    """Steps, weighted by the cost of the memory."""
    return job.steps * {"kda": 3, "mesa_net": 4, "write_gate": 1, "mamba2": 1, "retention": 1}.get(job.memory, 2)


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate the memories, or read the results of a run, and report."""
    begun = time.perf_counter()
    scores, run = read_json(args.read) if args.read else (measure(args), None)
    claims = verdict(scores)
    for sentence in sentences(scores):
        write_text(sentence)
        sys.stdout.write("\n")
    write_table(overview(scores))
    sys.stdout.write("\n")
    for indent, line in verdict_lines(claims):
        write_text(line, indent)
    if claims:
        sys.stdout.write("\n")
        write_text(WORDS)
    if args.full:
        for table in tables(scores, claims):
            write_table(table)
        write_text(CAUTION)
    run = run or about_run(scores) | about_process(args, time.perf_counter() - begun)
    sys.stdout.write(
        f"\n{run['seconds']} s, {run['processes']} process{'es' * (run['processes'] > 1)}"
        f"{'' if args.full else '; all tables: --full'}\n"
    )
    if args.json:
        write_json(args.json, as_json(scores, claims, run))
    if args.summary:
        write_json(args.summary, summary(scores, claims, run))
    if args.markdown:
        write_markdown(args.markdown, scores, claims)
    if args.pictures:
        from .pictures import draw_all

        drawn = draw_all(args.pictures, scores)
        sys.stdout.write(f"pictures: {args.pictures}{os.sep} ({len(drawn)} files, from {drawn[0]} to {drawn[-1]})\n")
    return 0


def about_process(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """How long the run took, and where."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None  # including this run
    return {"seconds": round(seconds), "processes": args.jobs, "backend": args.backend, "load": load}


def measure(args: argparse.Namespace) -> Scores:
    """Evaluate all cells, with the same streams for every memory."""
    gate_sets = load_gate_sets(args.gates)
    check_shapes(gate_sets)
    seeds = sorted(set(range(args.seeds)).intersection(*gate_sets.values()))
    if not seeds:
        raise ValueError(f"the gate sets {', '.join(gate_sets)} have no seed in common")
    if len(seeds) < args.seeds:
        print(f"gates exist for {len(seeds)} of {args.seeds} seeds; these are evaluated", file=sys.stderr)
    load_corpus(args.text)  # reports an unreadable text here, not in a worker
    depths = tuple(float(depth) for depth in np.linspace(0, 1, args.depths))
    jobs = [
        CellJob(seed, level, length, depths, args.memories, only_seed(gate_sets, seed), args.text, args.backend)
        for length in args.lengths
        for level in args.levels
        for seed in seeds
    ]
    results = run_jobs(probe_cell, jobs, tokens_read, args.jobs, "recall", tokens_read)
    tested = {name: {seed: gate_set[seed] for seed in seeds} for name, gate_set in gate_sets.items()}
    return Scores([score for _, cell in results for score in cell], depths, tested, args.text)


def only_seed(gate_sets: dict[str, GateSet], seed: int) -> dict[str, GateSet]:
    """The entries of one seed in each gate set."""
    return {name: {seed: gate_set[seed]} for name, gate_set in gate_sets.items()}
