"""Calls to test, drawn from the specs: every variant with every option set and every way to give its arrays."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import linattn_np as la
from linattn_np.call.binding import inputs_of, prepare
from linattn_np.fast_weights.core import FastWeights
from linattn_np.matrix_state.types import Inputs
from linattn_np.runtime.shapes import is_of_pairs
from linattn_np.sampling import draw_array, sizes_by_letter
from linattn_np.testing import sample, sample_state
from tests.naive import NAIVE

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 97)
WIDTHS = (1, 7, 60, 64, 100, 128, 256)
FORMS = ({"chunk_size": 1}, {"chunk_size": 16}, {"chunk_size": 64}, {"chunk_size": "parallel"}, {})


@dataclass(frozen=True)
class Case:
    """A variant, its options, the shape axes of each array that is given; arrays left out are None."""

    fn: Callable[..., Any]
    options: dict[str, Any]
    given: dict[str, str]
    named: dict[str, str]
    loop: Callable[..., Any] | None = None  # token by token; None: the one in tests/naive

    def __str__(self) -> str:
        words = [self.fn.__name__, *(f"{n}={_word(x)}" for n, x in (self.options | self.named).items())]
        words += [f"{n}({s.replace(' ', ',')})" for n, s in self.given.items() if "|" in self.spec.arrays[n].axes]
        words += [f"no {n}" for n, a in self.spec.arrays.items() if a.optional and n not in self.given | self.named]
        return " ".join(words)

    @property
    def spec(self) -> Any:
        return self.fn.spec

    @property
    def normalised(self) -> bool:
        return self.spec.state.type_of(self.spec.options | self.options) is not None

    @property
    def causal(self) -> bool:
        return self.options.get("causal", True)

    @property
    def is_linear(self) -> bool:
        """Whether outputs are linear in the values."""
        return self.spec.change.linear

    @property
    def erases(self) -> bool:
        return self.spec.erase.name != "NONE"

    @property
    def looks_back(self) -> bool:
        """Whether an erase vector reads the state before its decay."""
        return self.spec.erase.name == "FREE" or (self.erases and self.spec.erase_reads.name == "PREVIOUS")

    @property
    def squares(self) -> bool:
        """Whether keys, or directions of maps, are multiplied by each other."""
        return self.erases or self.maps or self.learns or self.spec.readout.name == "SOLVED"

    @property
    def learns(self) -> bool:
        """Whether the state are weights of a model."""
        return isinstance(self.spec.core, FastWeights)

    @property
    def maps(self) -> bool:
        """Whether tokens map the keys, or the state, before them: the maps are multiplied."""
        return not {"direction", "block"}.isdisjoint(map(self.fn.samples.distribution, self.given))

    @property
    def by_channel(self) -> bool:
        """Whether an array other than the values acts on the value channels one by one."""
        value = self.spec.change.value
        last = self.given[value].split()[-1]
        return any(last in axes.split() for name, axes in self.given.items() if name != value)

    @property
    def required(self) -> Case:
        """The case without the arrays that are optional."""
        return replace(self, given={n: s for n, s in self.given.items() if not self.spec.arrays[n].optional})

    def is_readable(self, arrays: dict[str, Any], state: Any) -> bool:
        """Whether la.read of the last query and state is the last output: of no more arrays, queries not mapped."""
        one = self.spec.readout.name in ("LINEAR", "NORMALISED") and self.spec.query_reads.name == "UPDATED"
        return (
            one
            and has_matrices(self.spec)
            and "R" not in self.given[self.spec.change.query]  # several queries, whose outputs are summed
            and not self.maps_outputs(arrays)
            and (parts(state)[0].shape[-2] == arrays[self.spec.change.query].shape[-1])
        )

    def maps_outputs(self, arrays: dict[str, Any]) -> bool:
        """Whether the output is mapped after the read-out, other than by the core's quotient."""
        if self.spec.change.from_core is None or self.normalised:
            return False
        prepared = prepare(self.spec, (), arrays | self.options)
        out = np.ones_like(arrays[self.spec.change.value])
        return self.spec.change.from_core(prepared, out) is not out

    def heads(self, name: str) -> int:
        """The head axis of an array, counted from its end; that of its channels where there are no heads."""
        letters = self.given[name].split()
        return next(n for n, letter in enumerate(letters) if letter in ("H", "Hq", "Hk", "D")) - len(letters)

    def has_heads(self, name: str) -> bool:
        """Whether an array has heads, or channels where there are none."""
        return not {"H", "Hq", "Hk", "D"}.isdisjoint(self.given[name].split())

    def on_tokens(self, name: str) -> bool:
        return self.given[name].split()[0] in ("T", "Tq")


def one_per(key: Callable[[Any], Any], among: Any = None) -> list[Any]:
    """The first function (or case) for each value of key(spec), not None; without `among` none whose state grows."""
    found: dict[Any, Any] = {}
    for one in RECURRENT if among is None else among:
        if (value := key(one.spec)) is not None:
            found.setdefault(value, one)
    return list(found.values())


def has_decay(fn: Callable[..., Any]) -> bool:
    return fn.spec.decay.name != "NONE"


def has_matrices(spec: Any) -> bool:
    """Whether the states are those of the matrix-state core, or made of them."""
    return spec.core is la.gla.spec.core


def has_plain_state(spec: Any) -> bool:
    """Whether state and output are those of the matrix-state core."""
    return has_matrices(spec) and spec.state.pack is None and spec.change.from_core is None


def cell(spec: Any) -> Any:
    """The kind of recurrence of matrix states; None if state or output are not the core's."""
    if not has_plain_state(spec):
        return None
    return spec.decay, spec.erase, spec.erase_reads, spec.query_reads, spec.change.erase_key, spec.micro_steps


def passes_through(fn: Callable[..., Any]) -> bool:
    """Whether every input of the core is an array of the caller, unchanged, or a constant."""
    arrays, constant = sample(fn, np.random.default_rng(0), optional=False), fn.spec.change.gate is not None
    x = inputs_of(prepare(fn.spec, (), arrays))
    return isinstance(x, Inputs) and all(
        y is None or (name == "g" and constant) or any(np.shares_memory(y, given) for given in arrays.values())
        for name, y in x._asdict().items()
    )


def required(fn: Callable[..., Any]) -> list[str]:
    """The arrays that are not optional."""
    return [n for n, a in fn.spec.arrays.items() if not a.optional]


def recurrences() -> list[Any]:
    """One function for each recurrence of the core, of those whose arrays are its inputs as they come.

    Not variants with a constant decay, or that need a decay on the value axis.
    """
    found: dict[Any, Any] = {}
    for fn in filter(passes_through, la.VARIANTS):
        s = fn.spec
        kind = s.decay, s.erase, s.erase_reads, s.query_reads, s.change.erase_key, s.micro_steps
        if s.change.gate is None and "gv" not in required(fn):
            found.setdefault(kind, fn)
    return list(found.values())


def with_arrays(names: str, **kind: str) -> Any:
    """The first function whose required arrays have these names, of this decay and erase, as the core takes them."""
    for fn in filter(passes_through, la.VARIANTS):
        if required(fn) == names.split() and all(getattr(fn.spec, n).name == x for n, x in kind.items()):
            return fn
    raise LookupError(names)


def _word(x: Any) -> str:
    return "(" + ",".join(map(_word, x)) + ")" if isinstance(x, tuple) else str(x)


def cases_of(fn: Callable[..., Any], loop: Callable[..., Any] | None = None) -> list[Case]:
    """Every option set of a function, every alternative shape of an array, optional arrays given and left out."""
    spec = fn.spec
    first = {n: a.axes.split("|")[0] for n, a in spec.arrays.items() if not is_of_pairs(a.axes)}
    needed = {n: s for n, s in first.items() if not spec.arrays[n].optional}
    plain = {n: s for n, s in first.items() if not spec.arrays[n].reinterprets}
    found = [Case(fn, dict(options), first, {}, loop) for options in fn.samples.options]
    options = dict(fn.samples.options[-1])
    for name, given in spec.arrays.items():
        found += [Case(fn, options, first | {name: other}, {}, loop) for other in given.axes.split("|")[1:]]
    return found + [Case(fn, {}, given, {}, loop) for n, given in enumerate((needed, plain))
                    if given not in (first, needed)[: n + 1]]  # fmt: skip


# states of one size; a cache grows: its tests are in tests/softmax
RECURRENT = [fn for fn in la.VARIANTS if "state" in fn.spec.core.STATE_AXES]
GROWING = [fn for fn in la.VARIANTS if fn.spec.grows]


def _cases() -> list[Case]:
    found = [case for fn in RECURRENT for case in cases_of(fn)]
    for rule in ("lightning", "minimax", "fla"):
        given = {n: la.lightning_attention.spec.arrays[n].axes for n in ("q", "k", "v")}
        found.append(Case(la.lightning_attention, {"layer": 1, "num_layers": 3}, given, {"slopes": rule}))
    return found


CASES = _cases()
RECURRENCES = recurrences()
WITHOUT_ERASE = [
    fn
    for fn in filter(passes_through, la.VARIANTS)  # with no decay, or one a head
    if (fn.spec.erase.name, fn.spec.decay.name) in (("NONE", "NONE"), ("NONE", "SCALAR"))
]


def plain_case(fn: Callable[..., Any]) -> Case:
    """The first options of a function, with every optional array except those that reinterpret another."""
    given = {n: a.axes.split("|")[0] for n, a in fn.spec.arrays.items() if not a.reinterprets}
    return Case(fn, dict(fn.samples.options[0]), given, {})


PLAIN = [plain_case(fn) for fn in RECURRENT]
COMPOSING = [fn for fn in la.VARIANTS if fn.spec.composes]  # variants with a la.summary
SPANS = [case for case in CASES if case.spec.composes]
SPANS += [case for fn in COMPOSING if fn not in RECURRENT for case in cases_of(fn)]


class Pairs(list[Any]):
    """Rows of (case, one of first, one of second)."""


def pairwise(cases: Iterable[Any], first: Iterable[Any], second: Iterable[Any]) -> Pairs:
    """Every case with each of first and each of second, and across cases each of first with each of second.

    A triple is left out where other cases have its pair of first and second.
    """
    first, second = list(first), list(second)
    count = max(len(first), len(second))
    return Pairs((case, first[i % len(first)], second[(i + n) % len(second)])
                 for n, case in enumerate(cases) for i in range(count))  # fmt: skip


def of_matrices(cases: list[Case]) -> list[Case]:
    """Those of the matrix-state core: queries read keys and values."""
    return [case for case in cases if case.spec.core is la.gla.spec.core]


def draw(case: Case, B=(2,), T=12, H=2, K=5, V=3, Hq=None, Hk=None, Tq=None, N=None, seed=0, dtype=np.float64):
    """(arrays by name, an initial state); N: the state of a ragged batch of N sequences."""
    rng = np.random.default_rng(seed)
    sizes = sizes_by_letter(T=T, Tq=Tq, H=H, Hq=Hq, Hk=Hk, K=K, V=V)
    arrays: dict[str, Any] = {}
    for name, axes in case.given.items():
        letters = axes.split()
        if not case.causal and name == case.spec.change.query:
            letters[0] = "Tq"
        lead = B if letters[0] in ("T", "Tq") else ()
        shape = lead + tuple(sizes[letter] for letter in letters)
        arrays[name] = in_dtype(draw_array(case.fn, name, rng, shape), dtype)
    lead = B if N is None else (N,)
    own = {n: sizes[n] for n in ("H", "K", "V", "Hq", "Hk")}
    state = sample_state(case.fn, rng, lead, case.options | case.named, **own)
    return arrays | case.named, parts_like(state, [in_dtype(S, dtype) for S in parts(state)])


def in_dtype(S: Any, dtype: Any) -> Any:
    """An array in a dtype, or in its complex one; numbers of tokens are integers."""
    return S if S.dtype.kind == "i" else S.astype(kind_like(S, dtype))


def kind_like(x: Any, dtype: Any) -> Any:
    """A dtype; for complex numbers its complex one."""
    wide = np.complex128 if np.dtype(dtype) in (np.float64, np.complex128) else np.complex64
    return np.dtype(wide if x.dtype.kind == "c" else dtype)


def covered(case: Case, hows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options among `hows` whose backend the core of the case has; its default if there are none."""
    own = [name for name in case.spec.core.BACKENDS if not case.learns or _computes(case, name)]
    return [how for how in hows if how.get("backend") in (None, *own)] or [{}]


def _computes(case: Case, backend: str) -> bool:
    """Whether a backend computes the case."""
    arrays = sample(case.fn, np.random.default_rng(0))
    try:
        la.explain(case.fn, **arrays, **case.options, backend=backend)
    except ValueError:
        return False
    return True


def call(case: Case, arrays, **options):
    """The public function on these arrays; (out, state)."""
    return case.fn(**arrays, **case.options, return_state=True, **options)


def naive(case: Case, arrays, state=None):
    """The loop of the variant on arrays with any number of batch axes; (out, state)."""
    v = arrays[case.spec.change.value]
    batch = v.shape[: v.ndim - len(case.given[case.spec.change.value].split())]

    def flat(name: str, x: Any) -> Any:
        """One batch axis where there are any number."""
        if name != "state" and (name not in case.given or not case.on_tokens(name)):
            return x
        return x.reshape((math.prod(batch), *x.shape[len(batch) :]))

    given = {n: flat(n, x) for n, x in arrays.items()}
    begin = None if state is None else parts_like(state, [flat("state", S) for S in parts(state)])
    loop = case.loop or NAIVE[case.fn.__name__]
    out, end = loop(**given, state=begin, **case.options)
    ends = [S.reshape(batch + S.shape[1:]) for S in parts(end)]
    kind = case.spec.state.type_of(case.spec.options | case.options)
    return out.reshape(batch + out.shape[1:]), ends[0] if kind is None else kind(*ends)


def parts(x: Any) -> list[Any]:
    """The arrays of a result, a state or gradients, without None."""
    if x is None or isinstance(x, str):
        return []
    return [y for item in x for y in parts(item)] if isinstance(x, tuple) else [x]


def parts_like(x: Any, values: list[Any]) -> Any:
    """A state (or gradient of one) with these arrays."""
    return type(x)(*values) if isinstance(x, tuple) else values[0]


def cotangents(result: Any, seed: int = 1) -> tuple[Any, Any]:
    """(dout, dstate) at random, as large as the result's."""
    rng = np.random.default_rng(seed)
    out, state = result
    dout = None if out is None else rng.standard_normal(out.shape).astype(out.dtype)
    return dout, parts_like(state, [_cotangent(rng, S, isinstance(state, la.LevelState)) for S in parts(state)])


def _cotangent(rng: Any, S: Any, has_gaps: bool) -> Any:
    """Random, 0 for whole numbers, and for empty levels."""
    d = rng.standard_normal(S.shape) * (S.dtype.kind != "i")
    return (d * (S != 0) if has_gaps else d).astype(S.dtype)


def is_count(name: str) -> bool:
    """Whether a part of a state, such as state.length, is a whole number, in int64 and without a gradient."""
    return name.rpartition(".")[2] in ("length", "position")


def with_gradients(case: Case, arrays, cotangent=None, **options):
    """{"out": ..., "state": ..., "d<name>": ...} of one call, gradients of every array and of the initial state."""
    result, pullback = la.vjp(case.fn, **arrays, **case.options, return_state=True, **options)
    grads = pullback(*(cotangent or cotangents(result)))
    named = dict(enumerate_parts("out", result[0])) | dict(enumerate_parts("state", result[1]))
    for name, d in grads._asdict().items():
        named |= dict(enumerate_parts("d" + name, d))
    return named


def enumerate_parts(name: str, x: Any):
    """(name, array) pairs; a named tuple gives name.S, name.z."""
    if isinstance(x, tuple):
        return [(f"{name}.{n}", y) for n, y in x._asdict().items() if y is not None]
    return [] if x is None else [(name, x)]


def worst(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest error relative to the largest entry of each array, and which array has it."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return max(((la.testing.relative_error(found[n], expected[n]), n) for n in found), default=(0.0, ""))


def tokens(case: Case, arrays, start: int, stop: int):
    """Tokens start..stop of every array that has them (time first)."""
    cut = {}
    for name, x in arrays.items():
        if name in case.given and case.on_tokens(name):
            axis = x.ndim - len(case.given[name].split())
            x = x[(slice(None),) * axis + (slice(start, stop),)]
        cut[name] = x
    return cut


def peak_memory(call: Callable[[], Any]) -> int:
    """Peak of the bytes that a call allocates."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
