"""`python -m bench NAME [options]`: run the measurement of that name; with `--backend cuda` the one of cuda_NAME.py."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench

HELPERS = ("__main__", "record", "timing", "compare", "peers", "cuda_timing", "cuda_peers")
NAMES = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in HELPERS)


def main() -> int:
    name, options = "".join(sys.argv[1:2]), sys.argv[2:]
    if options[:2] == ["--backend", "cuda"]:
        name, options = f"cuda_{name}", options[2:]
    if name not in NAMES:
        plain = [n for n in NAMES if not n.startswith("cuda_")]
        there = [n.removeprefix("cuda_") for n in NAMES if n.startswith("cuda_")]
        sys.stderr.write(f"usage: python -m bench {{{','.join(plain)}}} [options]\n"
                         f"       python -m bench {{{','.join(there)}}} --backend cuda [options]\n")
        return 2
    return importlib.import_module(f"bench.{name}").main(options)


if __name__ == "__main__":
    sys.exit(main())
