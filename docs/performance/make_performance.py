"""Write performance.md from bench/results/: python docs/performance/make_performance.py [--check] [--pictures].

The page shows every result file that exists; --pictures also draws the figures (matplotlib).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import performance_gpu
import performance_pictures

HERE = Path(__file__).resolve().parent
PAGE, PICTURES, RESULTS = HERE / "performance.md", HERE / "pictures", HERE.parents[1] / "bench" / "results"
OWN_TABLES = ("scaling", "memory", "import_time", "recall", "training")
HEAD = """# Performance

A program under `bench/` measured every number on this page and stored it as JSON under `bench/results/`; `python
docs/performance/make_performance.py` generates the page from those files. Anything not listed was not measured.

`python -m bench NAME --write` repeats a measurement (`python -m bench` lists the names). It prints every row and writes
a summary, whose rows its own program chooses:

- variants on a CPU: all rows of one thread, and of two threads the last shape;
- `changes`: the largest state, and of each function its first pair of calls and the one with the largest ratio;
- one token on a GPU: 1, 32 and 256 sequences, and 16 tokens of 32; states in 16 bits: one token of 32 and 256;
- vector decay, errors: mild gates, and, with 128 channels and g in bfloat16, no decay and equal keys;
- all others: every row.

Since these rows were measured `based` and `rebased` in float32 have become slower on a CPU (their features and states
are float64), float32 gradients of scalar decays slower on a GPU, calls with raw gates or norms faster.

Results are compared with float64 before they are timed.

- **CPU time** is a median over alternating rounds. A matrix product is timed with each sample, and ratios compare *CPU
  time times the rate of that product*, so that load or throttling of the machine cancels. A sample lasts 50 ms or
  more, because calls take longer after a pause.
- **share** is the number of useful operations (lower triangles only, chunks of 32) divided by what that product would
  do in the same time.
- **Several threads:** ratios are ratios of wall times. Threads of other libraries keep spinning after their work: this
  library and its peers have a process each.
- **MiB** is the peak above the inputs, including the result.
- Other operators, such as softmax attention, appear for their time only.
"""


def machine(result: dict[str, Any]) -> str:
    """Machine and date of a file."""
    versions = result.get("versions", {})
    names = ("numpy", "numba", "torch", "cupy-cuda12x", "cupy")
    seen = [f"{name} {versions[name]}" for name in names if name in versions]
    where = result.get("gpu") or result.get("cpu", "an unknown machine")
    text = f"{where}, {result['cores']} cores" if "cores" in result and "gpu" not in result else where
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


COMPARED = """## Variants on a CPU

A row is a call of `linattn_np_numba` (of `step` the default backend): CPU ms of one thread, wall ms of several; then
the time of the same call in NumPy chunks, and of its peers, divided by it."""


def compared(results: dict[str, Any]) -> str:
    """Times of calls on a CPU, and of their peers over ours."""
    body = []
    for name, result in results.items():
        for threads in sorted({row["threads"] for row in result["rows"]}):
            rows = [row for row in result["rows"] if row["threads"] == threads]
            for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
                ours, *others = [row for row in rows if tuple(row["shape"]) == shape]
                body.append([f"`{name.removesuffix('_backward')}`, {result.get('what', 'forward')}", str(shape),
                             str(threads), number(ours["cpu_ms" if threads == 1 else "wall_ms"]),
                             "" if ours.get("share") is None else f"{ours['share']:.0f}", number(ours.get("peak_mib")),
                             ", ".join(f"`{row['name']}` {number(row['ratio'])}" for row in others)])  # fmt: skip
    head = ["call", "(B, T, H, D)", "threads", "ms", "share, %", "MiB", "times of others over ours"]
    return "\n\n".join(
        [COMPARED, *dict.fromkeys(machine(result | {"load": None}) for result in results.values()), table(head, body)]
    )


def scaling(result: dict[str, Any]) -> str:
    """Predictions and measurements, then the curve of the tokens."""
    parts = ["## Scaling", machine(result),
             "One thread, gated delta rule, float32; milliseconds normalised to a core that multiplies at 200 GFLOP/s. "
             "Slow forms were measured for fewer tokens.",
             "![Time against T, both axes logarithmic](pictures/performance-tokens.png)"]  # fmt: skip
    answers = [[a["what"], number(a["predicted"]), number(a["measured"])]
               for part in result["parts"].values() for a in part["answers"]]  # fmt: skip
    parts.append(table(["question", "predicted", "measured"], answers))
    for name in ("chunk_size", "step"):
        if name in result["parts"]:
            picture = f"pictures/performance-{name.replace('_', '-')}.png"
            parts.append(f"![{result['parts'][name]['question']}]({picture})")
    if "tokens" in result["parts"]:
        part = result["parts"]["tokens"]
        at = sorted({x for curve in part["curves"].values() for x in curve["at"]})
        found = {(f"{curve}, {kind}"): dict(zip(values["at"], values[what], strict=False))
                 for curve, values in part["curves"].items()
                 for what, kind in (("ms", "ms"), ("peak_mib", "MiB")) if what in values}  # fmt: skip
        body = [[name, *(number(values.get(x)) for x in at)] for name, values in found.items()]
        parts += [f"**{part['question']}**", table([part["x"], *map(str, at)], body)]
    return "\n\n".join(parts)


def memory(result: dict[str, Any]) -> str:
    """Peak memory of every variant on a long sequence."""
    sizes = ", ".join(f"{k} = {v}" for k, v in result["sizes"].items())
    body = [[f"`{name}`", *(number(m[k]) for k in ("inputs_gib", "outputs_gib", "forward_gib", "peak_gib"))]
            for name, m in result["variants"].items()]  # fmt: skip
    head = ["function", "inputs, GiB", "outputs, GiB", "peak of forward", "peak of both"]
    what = f"Resident size of the process, forward and backward: {sizes}."
    return "\n\n".join(["## Memory of a long sequence", machine(result), what, table(head, body)])


def training(result: dict[str, Any]) -> str:
    """A step of training, by who computes it; the other over ours: CPU times of one thread, wall times of several."""
    rows = []
    for row in result["rows"]:
        kind = "ms" if row["threads"] > 1 else "CPU ms"
        for name in [key.removesuffix(": ms") for key in row if key.endswith(": ms")]:
            ratio = "" if name == "ours" else number(row[f"{name}: {kind}"] / row[f"ours: {kind}"])
            times = (number(row[f"{name}: {key}"]) for key in ("CPU ms", "ms", "quiet"))
            rows.append([name, str(row["threads"]), *times, ratio])
    B, T = result["batch"]
    what = (f"A byte model of {result['parameters']} parameters, two layers of Gated DeltaNet and SwiGLU, {B} x {T} "
            "tokens, float32: loss, gradient, clipping and AdamW, against the same model in PyTorch (eager), whose "
            "gated delta rule is transformers' chunk form. `ours, ranks`: a rank a thread, each with its part of the "
            f"batch. Losses of {result['steps']} steps from the same parameters differ by at most "
            f"{result['largest difference of losses']:.1e}. quiet: samples without other load.")  # fmt: skip
    head = ["", "threads", "CPU ms", "ms", "quiet", "time / ours"]
    return "\n\n".join(["## A step of training", machine(result), what, table(head, rows)])


def plain(name: str, result: dict[str, Any]) -> str:
    """Any other file with rows: one column per key."""
    flat = [dict(_leaves(row)) for row in result["rows"]]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    skip = ("date", "cpu", "cores", "gpu", "driver", "driver_api", "runtime", "multiprocessors", "load")
    notes = [f"{k}: {v}" for k, v in result.items() if k not in (*skip, "versions", "rows") and not isinstance(v, dict)]
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
    parts = [HEAD.rstrip()] + ([compared(timed)] if timed else [])
    if "scaling" in results:
        parts.append(scaling(results["scaling"]))
    for name, result in results.items():
        if name not in (*timed, *OWN_TABLES) and not name.startswith("cuda_") and result.get("rows"):
            parts.append(plain(name, result))
    if "memory" in results:
        parts.append(memory(results["memory"]))
    if "training" in results:
        parts.append(training(results["training"]))
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

    performance_pictures.draw(RESULTS, PICTURES)


def main(arguments: list[str]) -> int:
    """Write the page; with --check write nothing, and give 1 if it is out of date."""
    text = page()
    if "--check" in arguments:
        stale = not PAGE.exists() or PAGE.read_text("utf-8") != text
        if stale:
            sys.stderr.write("performance.md is out of date: run python docs/performance/make_performance.py\n")
        return int(stale)
    PAGE.write_text(text, "utf-8")
    if "--pictures" in arguments:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
