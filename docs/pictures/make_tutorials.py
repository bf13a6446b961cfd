"""Draw the pictures of the tutorials, from their own code: python docs/pictures/make_tutorials.py [NAME ...]."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la

DOCS = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names_of(page: str) -> dict[str, Any]:
    """What the blocks of a page define."""
    names: dict[str, Any] = {"__name__": page}
    os.chdir(tempfile.mkdtemp())
    exec("\n".join(BLOCK.findall((DOCS / page).read_text("utf-8"))), names)
    return names


def training(plt: Any) -> Any:
    """The loss by step, with the variance of the series."""
    names = names_of("tutorials/training.md")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.semilogy(names["losses"], color="C0")
    axes.axhline(np.var(names["series"](64, 192)), color="0.6", linestyle="--")
    axes.annotate("variance of the series", (60, np.var(names["series"](64, 192))), (0, 4), textcoords="offset points")
    axes.set_ylim(top=0.1)
    axes.set(xlabel="training step", ylabel="mean squared error", title="Next value of a chaotic map")
    return figure


def language_model(plt: Any) -> Any:
    """The loss of some hundred steps, and of the mean of 20."""
    names = names_of("tutorials/language_model.md")
    losses = names["train"](names["start"](0), 400)
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(losses, color="0.8")
    axes.plot(np.arange(19, 400), np.convolve(losses, np.full(20, 1 / 20), mode="valid"), color="C0")
    axes.axhline(np.log(256), color="0.6", linestyle="--")
    axes.annotate("equal shares", (300, np.log(256)), (0, -12), textcoords="offset points")
    axes.set(xlabel="training step", ylabel="nats a byte", title="Next byte of a text", ylim=0)
    return figure


def torch_layer(plt: Any) -> Any:
    """The loss by step, with that of a guess."""
    losses = names_of("tutorials/torch_layer.md")["losses"]
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(losses, color="C0")
    axes.axhline(np.log(15), color="0.6", linestyle="--")
    axes.annotate("a guess among 15 symbols", (40, np.log(15)), (0, -13), textcoords="offset points")
    axes.set(xlabel="training step", ylabel="cross entropy, nats", title="The second half of a repeated text", ylim=0)
    return figure


def ragged(plt: Any) -> Any:
    """The influence matrix of the packed call: a block per sequence."""
    names = names_of("tutorials/ragged.md")
    packed, ends = names["packed"], names["cu_seqlens"]
    matrix = np.zeros((ends[-1], ends[-1]))
    for n, one in enumerate(names["sequences"]):
        if ends[n + 1] > ends[n]:
            part = slice(ends[n], ends[n + 1])
            matrix[part, part] = la.influence_matrix(la.gated_delta_rule, **one)[0, 0]
    packed_out = la.gated_delta_rule(**packed, cu_seqlens=ends)[0, :, 0]
    assert np.allclose(matrix @ packed["v"][0, :, 0], packed_out)  # the picture is of the packed call
    figure, axes = plt.subplots(figsize=(4.4, 4), layout="constrained")
    with np.errstate(divide="ignore"):
        image = axes.imshow(np.log10(np.abs(matrix)), cmap="viridis", vmin=-12, vmax=0)
    for end in ends[1:-1]:
        axes.axhline(end - 0.5, color="0.5", linewidth=0.6)
        axes.axvline(end - 0.5, color="0.5", linewidth=0.6)
    axes.set(xticks=[0, *ends[2:4]], yticks=[0, *ends[2:4]], xlabel="token j of the packed row", ylabel="token i")
    axes.set_title("Influence of token j on token i", fontsize=10)
    figure.colorbar(image, shrink=0.8, label=r"$\log_{10}$ of its size; white: 0")
    return figure


def long_streams(plt: Any) -> Any:
    """A channel of the recording, and the error of its prediction."""
    names = names_of("tutorials/long_streams.md")
    x, N = np.asarray(names["recording"])[:, 0], names["N"]
    _, v = names["regressors"](np.asarray(names["recording"]))
    error = names["whole"][0, :, 0, 0] - v[:, 0, 0]
    size = 2000
    blocks = error[: len(error) // size * size].reshape(-1, size)
    figure, (top, low) = plt.subplots(2, 1, figsize=(5, 3.6), sharex=True, layout="constrained")
    top.plot(np.arange(0, len(x), 100), x[::100], color="C0", linewidth=0.8)
    low.plot(N + size * np.arange(len(blocks)), np.sqrt((blocks**2).mean(1)), color="C3", linewidth=0.8)
    for border in range(0, len(x) + 1, 50_000):
        for axes in (top, low):
            axes.axvline(border, color="0.7", linestyle=":", linewidth=0.8)
    top.set(ylabel="recording", title="Channel 0; dotted: where a segment begins")
    low.set(ylabel="error, r.m.s.", xlabel="sample", ylim=0, xticks=range(0, len(x) + 1, 50_000))
    return figure


def feature_map(plt: Any) -> Any:
    """The features of one channel, and the kernel beside the one it is near to."""
    cosines = names_of("tutorials/feature_map.md")["cosines"]
    x = np.linspace(-np.pi, np.pi, 200)[:, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 2.7), layout="constrained")
    left.plot(x, cosines(x))
    left.legend(["cos x", "sin x"], fontsize=8)
    left.set(xlabel="x", title="features of a channel")
    right.plot(x, cosines(x) @ cosines(np.zeros((1, 1))).T, label=r"$\phi(q)\cdot\phi(k)$")
    right.plot(x, np.exp(-(x**2) / 2), "--", color="0.5", label=r"$e^{-(q-k)^2/2}$")
    right.legend(fontsize=8)
    right.set(xlabel="q - k", title="weight of a pair")
    return figure


def decoding(plt: Any) -> Any:
    """What a sequence holds after t tokens: its row of the pool, or keys and values."""
    pool = names_of("decoding.md")["pool"]
    H, K, V = pool.shape[1:]
    row, token = pool[0].nbytes, H * (K + V) * pool.itemsize
    t = np.arange(1, 257)
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(t, token * t / 1024, color="0.4", label="keys and values, for softmax attention")
    axes.axhline(row / 1024, color="C0", label="a row of the pool")
    axes.set(
        xlabel="tokens of the sequence",
        ylabel="kB",
        ylim=0,
        title=f"One sequence: {H} heads, K = {K}, V = {V}, {pool.dtype}",
    )
    axes.title.set_fontsize(10)
    axes.legend(fontsize=8)
    return figure


def filters(plt: Any) -> Any:
    """The error of three filters on the EEG, averaged over 50 samples and the channels."""
    names = names_of("filters.md")
    x, d = names["x"], names["d"]
    found = {"rls": la.rls(x, d).error, "nlms": la.nlms(x, d, 0.1).error, "lms": la.lms(x, d, 0.02).error,
             "the last sample": d - names["u"][:, :-1].T}  # fmt: skip
    figure, (top, low) = plt.subplots(2, 1, figsize=(5, 4), sharex=True, layout="constrained")
    top.plot(d[:, 0], color="0.4", linewidth=0.8)
    top.set(ylabel="channel 0", title="Prediction of the next sample of an EEG")
    for name, error in found.items():
        smooth = np.convolve((error**2).mean(-1), np.full(50, 1 / 50), mode="valid")
        low.plot(
            np.arange(49, len(d)),
            np.sqrt(smooth),
            label=name,
            linewidth=1,
            color=None if name in "rls nlms lms" else "0.6",
        )
    low.set(ylabel="error, r.m.s. of 50", xlabel="sample", ylim=0)
    low.legend(fontsize=8, ncols=2)
    return figure


PICTURES = (training, language_model, torch_layer, ragged, long_streams, feature_map, decoding, filters)


def main() -> None:
    """Write the pictures, or those whose names are given."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for draw in PICTURES:
        if draw.__name__ in (sys.argv[1:] or [draw.__name__]):
            draw(plt).savefig(DOCS / "pictures" / "tutorials" / f"{draw.__name__}.png", dpi=90)


if __name__ == "__main__":
    main()
