"""`python -m bench NAME [options]`: run the measurement of that name."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench

HELPERS = ("__main__", "record", "timing", "compare", "peers")
NAMES = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in HELPERS)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.stderr.write(f"usage: python -m bench {{{','.join(NAMES)}}} [options]\n")
        return 2
    return importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
