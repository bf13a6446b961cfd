"""The command line: `linattn COMMAND`, also `python -m linattn_np COMMAND`."""

from __future__ import annotations

import importlib
import sys

from .arguments import Parser

COMMANDS = {
    "train": (".experiments.train", "train a language model on files, or on the text of Python's help"),
    "generate": (".experiments.generate", "continue a prompt with a trained model"),
    "serve": (".experiments.serve.command", "answer requests over HTTP with a trained model, many at a time"),
    "compare": (".experiments.compare.command", "mixers on tasks: small models trained at several learning rates"),
    "bench": (
        ".experiments.bench.command",
        "forms of linear attention, and softmax, on a series: numbers, time, memory",
    ),
    "doctor": (".doctor", "show the installation and check every variant on every backend"),
    "docstring": (".docstring", "the docstring that follows from a variant's spec, to start from"),
    "warmup": (".warmup", "compile CPU loops and CUDA kernels ahead of their first use; needs no GPU"),
    "probe": (".experiments.probe.command", "properties of the recurrences, measured on constructed inputs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="linattn", description="Linear attention for NumPy and CuPy arrays.")
    package = importlib.import_module(__package__)
    parser.add_argument("--version", action="version", version=f"linattn_np {package.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, words) in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=f"linattn {name}: {words}.")
        if argv[:1] == [name]:  # import only the selected command
            chosen = importlib.import_module(module, __package__)
            chosen.add_arguments(sub)
            sub.set_defaults(run=chosen.run)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
