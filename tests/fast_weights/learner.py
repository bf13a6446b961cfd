"""Any learner as a public function, for tests."""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from typing import Any

from linattn_np.call.dispatch import public
from linattn_np.fast_weights.core import FastWeights
from linattn_np.fast_weights.types import Adam, Learner
from linattn_np.spec import ArgSpec, Samples, StateFormat, VariantSpec
from linattn_np.variants.shared.arguments import KEYS, QUERIES, VALUES
from linattn_np.variants.shared.learners import DECAY, GAIN, MOMENTUM, RATE, learns

AXES = {  # arrays that learn, of each model: with a norm values have K channels
    ("linear", False): {"W": "H K V"},
    ("linear", True): {"W": "H K V", "b": "H V"},
    ("mlp", False): {"W1": "H K M", "W2": "H M V"},
    ("mlp", True): {"W1": "H K M", "b1": "H M", "W2": "H M V", "b2": "H V"},
    ("swiglu", False): {"A": "H K M", "B": "H K M", "W": "H M V"},
}
NUMBERS = itertools.count()  # replayed plans are looked up by the name of a variant
RATES = {"g": DECAY, "mu": MOMENTUM, "gain": GAIN}


@functools.cache
def function_of(learner: Learner, arrays: Any, rates: tuple[str, ...]) -> Any:
    """The public function of a learner; arrays: ((name, axes), ...) that learn."""
    axes, names = dict(arrays), [n for n, _ in arrays]
    slots = 2 if isinstance(learner.optimiser, Adam) else int("mu" in rates)
    parts = [*names, *(f"{n}_start" for n in names), *(f"{n}_slot{i}" for i in range(slots) for n in names)]
    sums = ["mu"] if learner.every == "mini_batch" and "mu" in rates else []
    kind = namedtuple("kind", [*parts, *sums, "length"])
    state = {p: axes[p.split("_")[0]] for p in parts} | dict.fromkeys(sums, "H") | {"length": ""}
    slow = {"weight": ArgSpec("H K", "weight"), "shift": ArgSpec("H K", "shift")} if learner.normed else {}
    swap = (lambda a: ArgSpec(a.axes.replace("V", "K"), a.description)) if learner.normed else lambda a: a
    weights = {n: swap(ArgSpec(a, n)) for n, a in arrays}
    if learner.normed:
        state = {n: a.replace("V", "K") for n, a in state.items()}
    spec = VariantSpec(
        name=f"learner{next(NUMBERS)}", sentence="It learns.", equation="out_t = scale f(q_t)", paper="",
        arrays={"q": QUERIES, "k": KEYS, "v": swap(VALUES), "eta": RATE, **weights, **slow,
                **{n: RATES[n] for n in rates}},
        change=learns(*names, slow=tuple(slow)),
        core=FastWeights(lambda options: learner, kind, state),
        scaled=False, shares_states=False, state=StateFormat(kind, wide=True),
    )  # fmt: skip
    drawn = {"k": "spread", "q": "spread", "eta": "step", "gain": "positive", "mu": "share", "g": "log decay"}
    drawn |= {n: "spread" if n.startswith("b") else "half unit" for n in names} | {"weight": "ridge"}
    samples = Samples(drawn)
    return public(spec, samples)(lambda **arrays: None)


def call_of(model: str = "linear", biased: bool = False, g: Any = None, mu: Any = None, **learner: Any) -> Any:
    """A call of a learner that returns its state."""
    rates = tuple(n for n, y in (("g", g), ("mu", mu)) if y is not None)
    fn = function_of(Learner(model, **learner), tuple(AXES[model, biased].items()), rates)
    given = {n: y for n, y in (("g", g), ("mu", mu)) if y is not None}
    return lambda q, k, v, **arrays: fn(q, k, v, **arrays, **given, return_state=True)
