"""Activations and gates of every element."""

from __future__ import annotations

from typing import Any

from ..ops import activations, gates
from ..runtime.values import is_word, shown
from .declaration import Call, Kind, Pullback, always, piece

Computed = tuple[Any, Pullback]
STORED = Kind(stored=always)


@piece(STORED, x="...")
def sigmoid(c: Call, x: Any) -> Computed:
    """The logistic function.

        y = 1 / (1 + e^-x),   dx = y (1 - y) dy

    x (...). Returns y (...) in x's dtype.
    """
    return _mapped(c, x, gates.sigmoid, gates.sigmoid_vjp)


@piece(STORED, x="...")
def silu(c: Call, x: Any) -> Computed:
    """x times its sigmoid, also called swish.

        y = x s,   s = 1 / (1 + e^-x),   dx = s (1 + x (1 - s)) dy

    x (...). Returns y (...) in x's dtype.
    """
    return _mapped(c, x, gates.silu, gates.silu_vjp)


@piece(STORED, x="...")
def softplus(c: Call, x: Any) -> Computed:
    """A smooth maximum of x and 0.

        y = log(1 + e^x),   dx = sigmoid(x) dy

    x (...). Returns y (...) in x's dtype; no x overflows.
    """
    return _mapped(c, x, gates.softplus, gates.softplus_vjp)


@piece(STORED, x="...")
def log_sigmoid(c: Call, x: Any) -> Computed:
    """The logarithm of the sigmoid: a log decay in [-inf, 0].

        y = -log(1 + e^-x),   dx = sigmoid(-x) dy

    x (...). Returns y (...) in x's dtype; no x overflows.
    """
    return _mapped(c, x, gates.log_sigmoid, gates.log_sigmoid_vjp)


@piece(STORED, x="...")
def gelu(c: Call, x: Any, *, approximate: str = "none") -> Computed:
    """x times the probability that a normal variable is below x.

        y = x Phi(x),   dx = (Phi(x) + x Phi'(x)) dy

    approximate="tanh" is the form of GPT-2, Phi(x) ~ (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    x (...). Returns y (...) in x's dtype. Raises ValueError for another word in approximate.
    Hendrycks and Gimpel, arXiv 1606.08415.
    """
    if not is_word(approximate, ("none", "tanh")):
        raise ValueError(f"gelu: approximate is {shown(approximate)}, expected 'none' or 'tanh'")
    if approximate == "tanh":
        return _mapped(c, x, activations.gelu_tanh, activations.gelu_tanh_vjp)
    return _mapped(c, x, activations.gelu, activations.gelu_vjp)


@piece(STORED, x="...")
def squared_relu(c: Call, x: Any) -> Computed:
    """The square of the positive part.

        y = max(x, 0)^2,   dx = 2 max(x, 0) dy

    x (...). Returns y (...) in x's dtype.
    So et al., Primer, arXiv 2109.08668.
    """
    return _mapped(c, x, activations.squared_relu, activations.squared_relu_vjp)


@piece(STORED, x="...", gate="...")
def swiglu(c: Call, x: Any, gate: Any) -> Computed:
    """Values times the silu of their gates, the hidden layer of most MLPs today.

        y = x silu(gate),   dx = silu(gate) dy,   dgate = silu'(gate) x dy

    x, gate (...), of one shape. Returns y (...) in x's dtype.
    Shazeer, arXiv 2002.05202.
    """
    xp = c.xp
    if c.on_device:
        from ..ops.cuda.activations import swiglu as launched
        from ..ops.cuda.activations import swiglu_vjp

        return launched(x, gate), lambda dy: dict(zip(("x", "gate"), swiglu_vjp(x, gate, dy), strict=True))
    if c.compiled:
        from ..ops.cpu.activations import swiglu as loops

        return loops.forward(x, gate), lambda dy: dict(zip(("x", "gate"), loops.backward(x, gate, dy), strict=True))

    def pullback(dy: Any) -> dict[str, Any]:
        return {"x": dy * gates.silu(xp, gate), "gate": gates.silu_vjp(xp, gate, dy * x)}

    return x * gates.silu(xp, gate), pullback


def _mapped(c: Call, x: Any, f: Any, f_vjp: Any) -> Computed:
    """A function of each element, and its derivative times the cotangent."""
    if c.on_device:
        from ..ops.cuda import activations as launched

        return launched.forward(f.__name__, x), lambda dy: {"x": launched.backward(f.__name__, x, dy)}
    if c.compiled:
        from ..ops.cpu import activations as compiled

        loops = getattr(compiled, f.__name__)
        return loops.forward(x), lambda dy: {"x": loops.backward(x, dy)}
    return f(c.xp, x), lambda dy: {"x": f_vjp(c.xp, x, dy)}
