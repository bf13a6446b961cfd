"""The command line: `linattn doctor`, `linattn probe`, `linattn recall`; also `python -m linattn_np`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": (".doctor", "what is installed, and whether every variant computes what it should"),
    "warmup": (".warmup", "compile the CPU's loops and CUDA kernels ahead of their first use; needs no GPU"),
    "probe": (".lab.probe_command", "what each memory can do, exactly and without training"),
    "recall": (".lab.recall_command", "a needle in a haystack of real text, asked of eleven memories"),
}
LAB = ("tqdm", "rich", "matplotlib", "threadpoolctl")


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="linattn", description="Linear attention for NumPy and CuPy arrays.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, words) in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=f"linattn {name}: {words}.")
        if argv[:1] == [name]:  # only the command that runs is imported
            try:
                chosen = importlib.import_module(module, __package__)
            except ModuleNotFoundError as missing:
                if missing.name not in LAB:
                    raise
                parser.exit(2, f"linattn {name} needs {missing.name}: pip install 'linattn_np[lab]'\n")
            chosen.add_arguments(sub)
            sub.set_defaults(run=chosen.run)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
