"""Write docs/performance.md from the measurements under bench/results/: python docs/make_performance.py [--check].

Whatever result files exist are shown; --pictures draws the figures too (matplotlib).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import performance_gpu

TOP = Path(__file__).resolve().parent.parent
PAGE, PICTURES, RESULTS = TOP / "docs" / "performance.md", TOP / "docs" / "pictures", TOP / "bench" / "results"
OWN_TABLES = ("scaling", "memory", "import_time", "recall")
HEAD = """# Performance

Every number on this page was measured by a program under `bench/` and kept as JSON under `bench/results/`; the page
is made from those files by `python docs/make_performance.py`. What is not here was not measured.

`python -m bench NAME --write` measures again (`python -m bench` lists the names). Results are checked against float64
before they are timed. CPU time is compared, as a median over rounds in turn; beside each sample a matrix product is
timed, and ratios are ratios of *CPU time times the rate of that product*, so that a machine that was busy or throttled
for a while does not show. `share` is the operations that are useful (lower triangles only, chunks of 32) over what that
product would have done in the same time. With several threads the ratio is one of wall times; `quiet` says how many
samples were taken while others left the machine alone, and where that is few, such a row says little. Threads of other
libraries go on spinning after their work: rows of several threads of gated_delta_rule, forward, were taken after a
pause; those of the other records of 2026-11-21 were not, and each call in them is slower than alone. Peaks of memory
are above the inputs, the result included. Other operators, as softmax attention, are in the tables for their time
only.
"""


def machine(result: dict[str, Any]) -> str:
    """Where and when a file was measured."""
    versions = result.get("versions", {})
    names = ("numpy", "numba", "torch", "cupy-cuda12x", "cupy")
    seen = [f"{name} {versions[name]}" for name in names if name in versions]
    where = result.get("card") or result.get("cpu", "an unknown machine")
    text = f"{where}, {result['cores']} cores" if "cores" in result and "card" not in result else where
    load = f", load {result['load']}" if result.get("load") is not None else ""
    return f"*{result.get('date', 'undated')}, {text}{load}; {', '.join(seen)}.*"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"
    return "" if x is None else str(x)


def comparison(name: str, result: dict[str, Any]) -> str:
    """Times of a call beside its peers."""
    what = result.get("what", "forward")
    parts = [f"## {name.removesuffix('_backward')}, {what}", machine(result)]
    for threads in sorted({row["threads"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["threads"] == threads]
        ratio = "ratio" if threads == 1 else "ratio (wall)"
        head = ["(B, T, H, D)", "call", "CPU ms", "wall ms", ratio, "share, %", "MiB", "quiet"]
        body = [[str(tuple(row["shape"])), f"`{row['name']}`", number(row["cpu_ms"]), number(row["wall_ms"]),
                 number(row["ratio"]), "" if row.get("share") is None else f"{row['share']:.0f}",
                 number(row.get("peak_mib")), f"{row['quiet']}/{row['samples']}"] for row in rows]  # fmt: skip
        parts += [f"{threads} thread{'s' * (threads > 1)}:", table(head, body)]
    return "\n\n".join(parts)


def in_short(results: dict[str, Any]) -> str:
    """How many times as long the peers take, one thread."""
    body = []
    for name, result in results.items():
        rows = [row for row in result["rows"] if row["threads"] == 1]
        for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
            found = {row["name"]: row["ratio"] for row in rows if tuple(row["shape"]) == shape}
            for peer in [n for n in found if not n.startswith("linattn_np")]:
                ours = [found.get(f"linattn_np_{kind}") for kind in ("numba", "chunks")]
                body.append([f"`{name}`, {result.get('what', 'forward')}", str(shape), f"`{peer}`",
                             *("" if x is None else number(found[peer] / x) for x in ours)])  # fmt: skip
    head = ["call", "(B, T, H, D)", "peer", "over compiled loops", "over NumPy chunks"]
    return "\n\n".join(["## In short", "How many times as long a peer takes as each of our two CPU paths, one thread.",
                        table(head, body)])  # fmt: skip


def scaling(result: dict[str, Any]) -> str:
    """Predicted beside measured, then the curves."""
    parts = ["## How it scales", machine(result),
             "One thread, gated delta rule, float32; milliseconds of a core that multiplies at 200 GFLOP/s. "
             "Forms that are slow by their nature stop at fewer tokens, as the ranges say.",
             "![Time against T, both axes logarithmic](pictures/performance-tokens.png)"]  # fmt: skip
    answers = [[a["what"], number(a["predicted"]), number(a["measured"])]
               for part in result["parts"].values() for a in part["answers"]]  # fmt: skip
    parts.append(table(["question", "predicted", "measured"], answers))
    for name, part in result["parts"].items():
        if name in ("chunk_size", "step"):
            parts.append(f"![{part['question']}](pictures/performance-{name.replace('_', '-')}.png)")
        at = sorted({x for curve in part["curves"].values() for x in curve["at"]})
        body = []
        for curve, values in part["curves"].items():
            for what, kind in (("ms", "ms"), ("peak_mib", "MiB"), ("bytes", "bytes touched")):
                if what in values:
                    found = dict(zip(values["at"], values[what], strict=False))
                    body.append([f"{curve}, {kind}", *(number(found.get(x)) for x in at)])
        parts += [f"**{part['question']}**", table([part["x"], *map(str, at)], body)]
    return "\n\n".join(parts)


def memory(result: dict[str, Any]) -> str:
    """Peaks of every variant on a long sequence."""
    sizes = ", ".join(f"{k} = {v}" for k, v in result["sizes"].items())
    body = [[f"`{name}`", *(number(m[k]) for k in ("inputs_gib", "outputs_gib", "forward_gib", "peak_gib"))]
            for name, m in result["variants"].items()]  # fmt: skip
    head = ["function", "inputs, GiB", "outputs, GiB", "peak of forward", "peak of both"]
    what = f"Resident size of the process, forward and backward: {sizes}."
    return "\n\n".join(["## Memory of a long sequence", machine(result), what, table(head, body)])


def plain(name: str, result: dict[str, Any]) -> str:
    """Any other file with rows: a column a key."""
    flat = [dict(_leaves(row)) for row in result["rows"]]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    told = {k: v for k, v in result.items() if isinstance(v, str | int | float) and k not in ("date", "cpu", "cores")}
    notes = [f"{k}: {v}" for k, v in told.items()]
    body = [[number(row.get(key)) for key in keys] for row in flat]
    return "\n\n".join([f"## {name}", machine(result), "; ".join(notes), table(keys, body)])


def _leaves(row: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """(path, value) of a row whose values may be rows."""
    found = []
    for key, x in row.items():
        found += _leaves(x, f"{before}{key} ") if isinstance(x, dict) else [(f"{before}{key}", x)]
    return found


def page() -> str:
    """The whole page."""
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    timed = {n: r for n, r in results.items()
             if n not in OWN_TABLES and r.get("rows") and "threads" in r["rows"][0]}  # fmt: skip
    parts = [HEAD.rstrip()] + ([in_short(timed)] if timed else [])
    if "scaling" in results:
        parts.append(scaling(results["scaling"]))
    for name, result in results.items():
        if name in timed:
            parts.append(comparison(name, result))
        elif name not in OWN_TABLES and not name.startswith("cuda_") and result.get("rows"):
            parts.append(plain(name, result))
    if "memory" in results:
        parts.append(memory(results["memory"]))
    parts += performance_gpu.sections(results, machine, table)
    return "\n\n".join(parts) + "\n"


def draw() -> None:
    """The curves of `python -m bench scaling`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = json.loads((RESULTS / "scaling.json").read_text("utf-8"))["parts"]
    for name, xlabel in (("tokens", "tokens T"), ("chunk_size", "chunk size"), ("step", "position of the token")):
        figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for curve, values in parts[name]["curves"].items():
            ax.plot(values["at"], values["ms"], marker="o", label=curve)
        ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="ms at 200 GFLOP/s", title=parts[name]["question"])
        ax.title.set_fontsize(9)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
        figure.savefig(PICTURES / f"performance-{name.replace('_', '-')}.png", dpi=80)
        plt.close(figure)


    if (gpu := RESULTS / "cuda_scaling.json").exists():
        performance_gpu.draw(json.loads(gpu.read_text("utf-8")), PICTURES)


def main(arguments: list[str]) -> int:
    """Write the page; with --check write nothing, and give 1 if it is out of date."""
    text = page()
    if "--check" in arguments:
        stale = not PAGE.exists() or PAGE.read_text("utf-8") != text
        if stale:
            sys.stderr.write("docs/performance.md is out of date: run python docs/make_performance.py\n")
        return int(stale)
    PAGE.write_text(text, "utf-8")
    if "--pictures" in arguments:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
