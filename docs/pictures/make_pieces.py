"""Draw what each piece of linattn_np.nn does: python docs/pictures/make_pieces.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la

HERE = Path(__file__).resolve().parent / "pieces"
INK, WARM, COOL, GREEN, QUIET = "#26355d", "#d97b29", "#5b7fbf", "#7a9e3f", "#9aa3b5"
rng = np.random.default_rng(0)


def mixing(axes: Any) -> None:
    """A pulse through the pieces that mix tokens, and rotations over positions."""
    pulse = np.zeros((1, 12, 1))
    pulse[0, 3] = 1
    conv, shift, turn, distance = axes
    weight = np.array([[0.1, 0.25, 0.4, 0.8]])
    conv.stem(pulse[0, :, 0], linefmt=QUIET, markerfmt="o", basefmt=" ", label="x")
    conv.plot(la.nn.short_conv(pulse, weight)[0, :, 0], "s-", color=INK, label="y")
    conv.plot(la.nn.short_conv(pulse, weight, cu_seqlens=[0, 5, 12])[0, :, 0], "x--", color=WARM, label="y, new at 5")
    conv.set_title("short_conv: weights (0.1, 0.25, 0.4, 0.8)")
    signal = np.sin(np.arange(12) / 1.5)[None, :, None]
    shift.plot(signal[0, :, 0], "o-", color=QUIET, label="x")
    shift.plot(la.nn.token_shift(signal)[0, :, 0], "s-", color=INK, label="the token before")
    shift.plot(la.nn.token_shift(signal, np.array([0.5]))[0, :, 0], "x--", color=WARM, label="mix = 0.5")
    shift.set_title("token_shift")
    ones = np.zeros((24, 1, 6))
    ones[..., :3] = 1
    y = la.nn.rotary(ones, base=30.0)
    for p, color in enumerate((INK, COOL, WARM)):
        turn.plot(y[:, 0, p] + 2.4 * p, y[:, 0, 3 + p], ".-", color=color, label=f"pair {p}")
    turn.set(title="rotary: pairs of channels, 24 positions", ylim=(-1.3, 2.2))
    turn.set_aspect("equal")
    flat = np.ones((64, 1, 32))
    q, k = la.nn.xpos(flat, scale_base=16.0), la.nn.xpos(flat, inverse=True, scale_base=16.0)
    r = la.nn.rotary(flat)
    distance.plot(r[:, 0] @ r[0, 0] / 32, color=QUIET, label="rotary")
    distance.plot(q[:, 0] @ k[0, 0] / 32, color=INK, label="xpos, scale_base=16")
    distance.set_title("q . k over their distance, q = k = 1")


def rows(axes: Any) -> None:
    """Rows before and after the norms, and the softmax."""
    x = 3 + 2 * rng.standard_normal((400, 16)) * rng.uniform(0.3, 2, (400, 1))
    lengths, spread, gated, shares = axes
    for name, y, color in (("x", x, QUIET), ("rms_norm", la.nn.rms_norm(x), INK), ("l2_norm", la.nn.l2_norm(x), WARM)):
        lengths.hist(np.linalg.norm(y, axis=-1), 60, range=(0, 24), color=color, alpha=0.8, label=name)
    lengths.set_title("length of 400 rows of 16")
    spread.scatter(x.mean(-1), x.std(-1), 6, QUIET, label="x")
    for name, y, color in (("layer_norm", la.nn.layer_norm(x), INK),
                           ("group_norm of 4", la.nn.group_norm(x, groups=4), COOL),
                           ("rms_norm", la.nn.rms_norm(x), WARM)):  # fmt: skip
        spread.scatter(y.mean(-1), y.std(-1), 6, color, label=name)
    spread.set_title("mean and standard deviation of each row")
    gate = np.ones((200, 16))
    gate[:, 0] = np.linspace(-6, 6, 200)
    one = np.broadcast_to(x[:1], gate.shape)
    after, before = la.nn.gated_norm(one, gate), la.nn.gated_norm(one, gate, gate_first=True)
    gated.plot(gate[:, 0], after[:, 0], color=INK, label="after the norm")
    gated.plot(gate[:, 0], before[:, 0], "--", color=WARM, label="before it")
    gated.set_title("gated_norm: one channel over its gate")
    logits = np.linspace(-3, 3, 7)
    for scale, color in ((0.5, QUIET), (1, COOL), (2, INK)):
        shares.plot(la.nn.softmax(scale * logits[None])[0], "o-", color=color, label=f"softmax({scale:g} x)")
    shares.set_title("softmax, x = -3 .. 3")


def elements(axes: Any) -> None:
    """Activations with their derivatives, gates, and the loss."""
    x = np.linspace(-5, 5, 400)
    curves, slopes, decays, loss = axes
    each = zip(("sigmoid", "silu", "gelu", "softplus", "squared_relu"), (QUIET, INK, WARM, COOL, GREEN), strict=True)
    for name, color in each:
        y, pullback = la.vjp(getattr(la.nn, name), x)
        curves.plot(x, y, color=color, label=name)
        slopes.plot(x, pullback(np.ones_like(x)).x, color=color, label=name)
    curves.set(title="activations", ylim=(-1, 5))
    slopes.set(title="their derivatives", ylim=(-0.5, 2.5))
    forms = (("softplus", {}, INK), ("bounded", {"bound": -5.0}, WARM), ("log_sigmoid", {"divisor": 16.0}, COOL),
             ("lower_bound", {"bound": 0.5}, GREEN), ("exp", {}, QUIET))  # fmt: skip
    for formula, options, color in forms:
        decays.plot(x, np.exp(la.nn.log_decay(x, formula=formula, **options)), color=color, label=formula)
    decays.set_title("log_decay: the decay $e^g$ of a token")
    margin = np.linspace(-6, 10, 300)
    logits = np.zeros((300, 10))
    logits[:, 0] = margin
    labels = np.zeros(300, int)
    for options, color in (({}, INK), ({"label_smoothing": 0.1}, WARM), ({"z_loss": 0.02}, COOL)):
        y = la.nn.cross_entropy(logits, labels, reduction="none", **options)
        loss.plot(margin, y, color=color, label=", ".join(f"{n}={v}" for n, v in options.items()) or "plain")
    loss.set_title("cross_entropy of 10 classes over the label's logit")


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    HERE.mkdir(exist_ok=True)
    for draw in (mixing, rows, elements):
        figure, axes = plt.subplots(1, 4, figsize=(18, 4))
        draw(axes)
        for each in axes:
            each.legend(frameon=False, fontsize=8)
            each.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(HERE / f"{draw.__name__}.png", dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    main()
