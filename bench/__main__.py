"""`python -m bench NAME [options]`: run one measurement; `--backend cuda` selects its GPU version."""

from __future__ import annotations

import importlib
import os
import sys

from bench.compare import THREADS
from linattn_np import catalog

COMPARED = ("step", *catalog.modules())  # cpu/variants.py
PLAIN = {
    **dict.fromkeys(COMPARED, "cpu.variants"),  # but mesa_net, which has a measurement of its own
    "accuracy": "cpu.accuracy", "earlier": "cpu.earlier", "feature_maps": "cpu.feature_maps", "filters": "cpu.filters",
    "frameworks": "cpu.frameworks", "mesa_net": "cpu.mesa_net", "scaling": "cpu.scaling", "changes": "changes",
    "distributed": "distributed", "pieces": "cpu.pieces", "scans": "cpu.scans", "selective_scan": "cpu.selective_scan",
    "learners": "cpu.learners", "claims": "claims",
    "softmax": "cpu.softmax", "training": "cpu.training",
    "first_call": "first_call", "host": "host", "import_time": "import_time", "memory": "memory",
    "same_bits": "cpu.same_bits", "small_states": "cpu.small_states", "small_steps": "cpu.small_steps",
    "states": "cpu.states", "transformers": "cpu.transformers",
}  # fmt: skip
CUDA = {
    name: f"cuda.{name}"
    for name in (
        "all",
        "deltaformer",
        "gated_delta_rule",
        "jax_bridge",
        "path_attention",
        "pieces",
        "portable_attention",
        "raw_projections",
        "scaling",
        "scans",
        "selective_scan",
        "simple_gla",
        "softmax",
        "state_log",
        "states",
        "step",
        "torch_bridge",
        "training",
        "vector_decay",
    )
}
ONE_THREAD = (
    "earlier",
    "feature_maps",
    "filters",
    "learners",
    "mesa_net",
    "same_bits",
    "scaling",
    "scans",
    "selective_scan",
    "small_steps",
    "softmax",
    "states",
    "training",
)


def main() -> int:
    name, options = "".join(sys.argv[1:2]), sys.argv[2:]
    known = PLAIN | {f"cuda_{n}": module for n, module in CUDA.items()}
    if options[:2] == ["--backend", "cuda"]:
        name, options = f"cuda_{name}", options[2:]
    if name not in known:
        sys.stderr.write(
            f"usage: python -m bench {{{','.join(sorted(PLAIN))}}} [options]\n"
            f"       python -m bench {{{','.join(CUDA)}}} --backend cuda [options]\n"
        )
        return 2
    if name in ONE_THREAD:
        os.environ.update(dict.fromkeys(THREADS, "1"))  # libraries read these when they are imported, below
    module = importlib.import_module(f"bench.{known[name]}")
    return module.main([name, *options] if known[name] == "cpu.variants" else options)


if __name__ == "__main__":
    sys.exit(main())
