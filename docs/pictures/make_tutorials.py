"""Draw the pictures of the tutorials from what their code computes: python docs/pictures/make_tutorials.py."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names_of(page: str) -> dict[str, Any]:
    """What the blocks of a page define."""
    names: dict[str, Any] = {"__name__": page}
    os.chdir(tempfile.mkdtemp())
    exec("\n".join(BLOCK.findall((DOCS / "tutorials" / page).read_text("utf-8"))), names)
    return names


def training(plt: Any) -> Any:
    """The loss by step, with the variance of the series."""
    names = names_of("training.md")
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.semilogy(names["losses"], color="C0")
    axes.axhline(np.var(names["series"](64, 192)), color="0.6", linestyle="--")
    axes.annotate("variance of the series", (60, np.var(names["series"](64, 192))), (0, 4), textcoords="offset points")
    axes.set(xlabel="training step", ylabel="mean squared error", title="Next value of a chaotic map")
    return figure


def main() -> None:
    """Write the pictures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    training(plt).savefig(DOCS / "pictures" / "training.png", dpi=110)


if __name__ == "__main__":
    main()
