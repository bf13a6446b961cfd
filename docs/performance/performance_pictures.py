"""The pictures of the GPU sections of performance.md, from bench/results/cuda_*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENS, BARS = "performance-gpu-tokens.png", "performance-vector-decay.png"
BYTES = 4 * 128 * 2 + 4  # of a token and head, forward: q, k, v, out of 128 in bfloat16, and g
SHAPE = {"B": 8, "T": 4096, "H": 32, "K": 128}


def draw(results: Path, folder: Path) -> None:
    """Every picture whose results exist."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, function, picture in (("scaling", tokens, TOKENS), ("vector_decay", bars, BARS)):
        if (path := results / f"cuda_{name}.json").exists():
            figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
            function(ax, json.loads(path.read_text("utf-8")))
            ax.grid(alpha=0.3)
            figure.savefig(folder / picture, dpi=80)
            plt.close(figure)


def tokens(ax: Any, result: dict[str, Any]) -> None:
    """Time against T with its lower bound: the bytes that must move at the rate of a copy."""
    at = [row["T"] for row in result["tokens"]]
    for name, key in (("chunks", "chunks_ms"), ("recurrence", "recurrence_ms")):
        ax.plot(at, [row[key] for row in result["tokens"]], marker="o", label=name)
    bound = [T * 32 * BYTES / result["copy_gbs"] / 1e6 for T in at]
    ax.plot(at, bound, "--", label="lower bound: bytes at the rate of a copy")
    ax.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="ms", title=f"simple GLA, 32 heads, {result['gpu']}")
    ax.legend(fontsize=8)


def bars(ax: Any, result: dict[str, Any]) -> None:
    """Forward and both of each function with a decay per channel, of other libraries, the least time for the bytes."""
    rows = {row["function"]: row["times"] for row in result["rows"]
            if row["gate"] == "bfloat16" and row["gates"] == "mild" and row.get("bound") is None
            and all(row[n] == size for n, size in SHAPE.items())}  # fmt: skip
    libraries = {"fla-core": "xr", "cudnn-frontend": "+g"}
    for shift, what, words in ((-0.2, "forward", "forward"), (0.2, "both", "forward and backward")):
        at = [i + shift for i in range(len(rows))]
        ax.barh(at, [times[what]["ns"] for times in rows.values()], height=0.36, label=words)
        least = [times[what]["ns"] * times[what]["share_of_copy"] for times in rows.values()]
        ax.plot(least, at, "|k", markersize=12, label="bytes at the rate of a copy" if what == "both" else None)
        for library, mark in libraries.items():
            others = [(x["ns"], y) for times, y in zip(rows.values(), at, strict=True) for n, x in times.items()
                      if n.startswith(f"{what}: {library}")]  # fmt: skip
            ax.plot(*zip(*others, strict=True), mark, label=library if what == "both" else None)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    sizes = ", ".join(str(size) for size in SHAPE.values())
    ax.set(xscale="log", xlabel="ns per token and head", title=f"({sizes}), bfloat16, mild gates, {result['gpu']}")
    ax.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
