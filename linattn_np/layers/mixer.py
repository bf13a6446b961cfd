"""A token mixer is a variant of the catalog with an array for each of its arguments, a norm, an output gate.

    q, k, v, g, ... = sources of x          projections, short convolutions, activations, gates
    o = variant(q, k, v, g, ...; options)
    y = norm(o) act(x W_z) W_o

The default source is x W, with the shape that the variant's spec says; `published.py` has what each layer adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import nn
from . import init
from .functions import by_heads, function, merged, variant
from .layer import Layer, Step, chain, compose, made
from .parts import gated_norm, linear, linears, rms_norm, short_conv


class Sizes(NamedTuple):
    """Sizes of a mixer, and its place in the stack."""

    D: int  # channels of the model
    H: int = 4  # heads
    K: int = 16  # key channels of a head
    V: int = 16  # value channels of a head
    M: int = 16  # slots
    n: int = 2  # micro-steps
    levels: int = 16  # of log-linear attention: of sequences of up to 2^15 tokens
    R: int = 4  # rows of a token
    layer: int = 0
    layers: int = 1

    @property
    def out_scale(self) -> float:
        """Of the initial output projection: 2 projections of each layer are added to the residual stream."""
        return (2 * self.layers) ** -0.5

    def shape(self, axes: str, groups: int | None = None) -> tuple[int, ...]:
        """The axes of an array of a variant without its tokens."""
        own = {"Hq": groups or self.H, "Hk": groups or self.H, "P": self.K // 2, "D": self.H * self.V, "N": self.K}
        letters = self._asdict() | own  # D of a variant: its channels; N: its states of a channel
        return tuple(letters[letter] for letter in axes.split("|")[0].split() if letter != "T")


class Projected(NamedTuple):
    """An array of a mixer: a dense layer of x, and a layer of its result."""

    width: int
    bias: init.Init | None = None
    then: Layer | None = None


Source = Callable[[Sizes, tuple[int, ...]], Projected]  # of sizes and the shape of a token's array


class Mixer(NamedTuple):
    """What a published layer adds to its variant."""

    sources: Mapping[str, Source] = {}  # by array; others are x W
    parameters: Mapping[str, Callable[..., init.Init]] = {}  # arrays that are parameters, of their shape
    more: Callable[[Sizes], list[Step]] = lambda c: []  # arrays that depend on others
    options: Callable[[Sizes], dict[str, Any]] = lambda c: {}
    norm: str | None = "heads"  # "all": of all heads together, "plain": of each head without weights
    gate: str | None = None  # the activation of the output gate
    gate_first: bool = False  # before the norm
    gate_rank: int | None = None
    groups: int | None = None  # heads of queries and keys, if they are fewer
    sizes: Callable[[Sizes], Sizes] = lambda c: c  # other sizes of its arrays
    eps: float = 1e-5


@made
def mix(name: str, mixer: Mixer, c: Sizes) -> Layer:
    """The layer x (B, T, D) -> (B, T, D) of a variant.   Its steps call it "input": some variants have an array x."""
    fn, c = variant(name), mixer.sizes(c)
    arrays, more = fn.spec.arrays, mixer.more(c)
    values = arrays["v" if "v" in arrays else "x"]
    computed = [n for outputs, _, _ in more for n in outputs.split()]
    own = [n for n, arg in arrays.items()
           if n in mixer.sources or not (arg.optional or n in computed or n in mixer.parameters)]  # fmt: skip
    given = " ".join(n for n in arrays if n in own or n in computed)
    shape = {n: c.shape(arg.axes, mixer.groups) for n, arg in arrays.items()}
    heads = c.shape(values.axes[max(values.axes.find("H"), 0) :])  # of a token's output: without micro-steps
    sources = {n: mixer.sources.get(n, projected())(c, shape[n]) for n in own}
    if mixer.gate is not None:
        has_bias = mixer.gate_rank is not None
        one = heads if mixer.norm != "all" else (init.size(heads),)
        sources["z"] = projected(rank=mixer.gate_rank, bias=init.zeros if has_bias else None)(c, one)
    return compose(
        *_sources(c.D, sources),
        *more,
        ("o", function(fn, given, {n: at(*shape[n]) for n, at in mixer.parameters.items()}, **mixer.options(c)), given),
        *_output(mixer, c, heads),
        given="input",
    ).named(name, "x")


def _sources(D: int, sources: Mapping[str, Projected]) -> list[Step]:
    """The arrays of a mixer by name: their dense layers are one product."""
    project = linears(D, {n: s.width for n, s in sources.items()},
                      {n: s.bias for n, s in sources.items() if s.bias is not None})  # fmt: skip
    names = [n if s.then is None else f"{n}_in" for n, s in sources.items()]
    return [
        (f"project: {' '.join(names)}", project, "input"),
        *((n, s.then, f"{n}_in") for n, s in sources.items() if s.then is not None),
    ]


def _output(mixer: Mixer, c: Sizes, heads: tuple[int, ...]) -> list[Step]:
    """norm, gate, output projection; heads: the shape of a token's output."""
    width = init.size(heads)
    steps: list[Step] = []
    out, whole, shape = "o", mixer.norm == "all", heads
    if whole:
        steps, out, shape = [("flat", merged(*heads), "o")], "flat", (width,)
    if mixer.gate is not None:
        how = {"activation": mixer.gate, "gate_first": mixer.gate_first, "eps": mixer.eps}
        steps.append(("norm", gated_norm(shape[-1], mixer.norm != "plain", **how), f"{out} z"))
    elif mixer.norm is not None:
        steps.append(("norm", rms_norm(shape[-1], mixer.eps), out))
    last = steps[-1][0] if steps else out
    if not whole:
        steps.append(("flat", merged(*heads), last))
        last = "flat"
    return [*steps, ("out", linear(width, c.D, std=c.out_scale * width**-0.5), last)]


# sources


def projected(conv: int | None = None, activation: Callable[..., Any] | None = None, rank: int | None = None,
              bias: Callable[..., init.Init] | None = None, conv_bias: bool = False,
              then: Mapping[str, Callable[[Sizes], Layer]] = {}) -> Source:  # fmt: skip
    """x W, convolved with `conv` weights and silu, an activation, by heads, and other layers on (..., H, K).

    rank: x W_1 W_2. bias: its initialisation, of a shape.
    """

    def source(c: Sizes, shape: tuple[int, ...]) -> Projected:
        width, layers = init.size(shape), dict[str, Layer]()
        own = None if bias is None else bias(width)
        if rank is not None:
            layers["up"] = linear(rank, width, own or False)
        if conv is not None:
            layers["conv"] = short_conv(width, conv, bias=conv_bias)
        if activation is not None:
            layers["activation"] = function(activation)
        if len(shape) > 1:
            layers["heads"] = by_heads(*shape)
        layers |= {n: make(c) for n, make in then.items()}
        rest = chain(**layers) if layers else None
        return Projected(width, own, rest) if rank is None else Projected(rank, None, rest)

    return source


def decayed(formula: str = "log_sigmoid", rank: int | None = None, bias: Callable[..., init.Init] | None = None,
            **options: Any) -> Source:  # fmt: skip
    """The log decay nn.log_decay(x W + b)."""
    gate = lambda c: function(nn.log_decay, "a", formula=formula, **options)  # noqa: E731
    return projected(rank=rank, bias=bias, then={"gate": gate})
