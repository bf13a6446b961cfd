"""dask arrays in every function: one task for each block of batch rows and heads, which calls the function on it.

Nothing is computed by a call. Tokens and channels are not cut: their axes become one chunk. Chunks along the batch axes
are the blocks of the values, along the heads too, at multiples of the heads in a group; the blocks of all other arrays
follow. The pullback is one task a block that repeats the forward. Gradients of arrays that several blocks read are sums
over these blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from ..call import dispatch, vjp
from ..call.binding import axes_of_states, normalise, prepare
from ..call.explain import Explanation
from ..call.layouts import LAYOUTS
from ..call.pieces import time_of
from ..call.results import Result, gradients_of
from ..catalog import modules
from ..runtime.arrays import enter
from ..runtime.shapes import HEADS, check_dtype, flatten, has_time, letters_of
from ..spec import Call, VariantSpec

Arrays = tuple[Any, ...]
Keywords = Mapping[str, Any]
Labels = tuple[str | None, ...]  # of the axes of an array: "b0", "b1", ... batch, "h" heads, None: not cut


def run(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function; NotImplemented for a call by array-API calls."""
    blocks = _blocks(spec, arrays, keywords)
    return NotImplemented if blocks is None else blocks.result()


def run_vjp(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """(result, pullback); NotImplemented for a call by array-API calls."""
    blocks = _blocks(spec, arrays, keywords)
    if blocks is None or blocks.call.options["overwrite_state"]:  # an error, which the other path raises
        return NotImplemented
    return blocks.result(), blocks.pullback


def explain(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Explanation | None:
    """How a block is computed, on arrays without memory; None for a call by array-API calls."""
    blocks = _blocks(spec, arrays, keywords)
    if blocks is None:
        return None
    parts = {name: x.chunks for name, x in blocks.given.items()}
    fake = {name: np.broadcast_to(np.zeros((), blocks.given[name].dtype), tuple(n[0] for n in each))
            for name, each in parts.items()}  # fmt: skip
    found: Explanation = import_module("linattn_np").explain(_function(spec.name), **_arguments(fake), **blocks.options)
    return found


def _blocks(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Blocks | None:
    """The blocks of a checked call; None with an option that speaks of more than a block, or for another's function."""
    if spec.name not in modules():  # a task finds its function by name
        return None
    given = dict(zip(spec.arrays, arrays, strict=False)) | dict(keywords)
    for name, x in given.items():
        if any(math.isnan(n) for n in getattr(x, "shape", ())):
            raise ValueError(
                f"{spec.name}: {name} has chunks of unknown sizes, expected known ones: "
                "x.compute_chunk_sizes() finds them"
            )
    call = prepare(spec, arrays, {**keywords, "check": False} if keywords.get("check") is True else keywords)
    if call.rows is None and call.options["return_states_at"] is None:
        return Blocks(call, given)
    if spec.grows:
        name = next(n for n in ("return_states_at", "state_rows", "fresh") if call.options[n] is not None)
        raise TypeError(
            f"{spec.name}: {name} is given with dask arrays, expected None where the state is a cache: "
            "x.compute() is a NumPy array"
        )
    return None


class Blocks:
    """A checked call, cut into blocks.

    given: the arrays, and the parts of the state, by name, in blocks that belong together. cuts: of each label the
    numbers of rows (heads: of groups) of its blocks.
    """

    def __init__(self, call: Call, given: dict[str, Any]):
        self.call, self._batch = call, len(call.batch)
        arrays = {n: given[n] for n in call.spec.arrays if getattr(call, n) is not None}
        state = {} if call.given_state is None else flatten("state", call.given_state)
        self.labels: dict[str, Labels] = {n: self._labels_of(n, x.ndim) for n, x in arrays.items()}
        self.labels |= {n: self._state_labels(n) for n in state}
        self._cut(arrays)
        self.given = {n: self._rechunked(x, self.labels[n]) for n, x in (arrays | state).items()}
        dropped = {"state", "overwrite_state", "return_state", *arrays}
        self.options = {n: x for n, x in given.items() if n not in dropped}
        if math.prod(map(len, self.cuts.values())) > 1:  # blocks run side by side
            self.options.setdefault("num_threads", 1)
        self._outputs()

    def _labels_of(self, name: str, ndim: int) -> Labels:
        """The labels of an array in the caller's layout."""
        axes, layout = self.call.axes[name], LAYOUTS.get(self.call.options["layout"])
        for choice in (axes if layout is None else layout.axes(axes)).split("|"):
            letters = letters_of(choice)
            batch = self._batch if has_time(choice) else 0
            if len(letters) + batch == ndim:
                rest = ("h" if letter in HEADS else None for letter in letters)
                return (*(f"b{n}" for n in range(batch)), *rest)
        raise LookupError(name)

    def _state_labels(self, name: str) -> Labels:
        """(batch or sequences, axes of the part of a state)."""
        letters = letters_of(axes_of_states(self.call.spec)[name.removeprefix("state.")])
        own: Labels = tuple("h" if letter in HEADS else None for letter in letters)
        return (None, *own) if self.call.options["cu_seqlens"] is not None else (
            *(f"b{n}" for n in range(self._batch)), *own)  # fmt: skip

    def _cut(self, arrays: dict[str, Any]) -> None:
        """Set the cuts, from the chunks of the values."""
        value = self.call.spec.change.value
        heads = {x.shape[labels.index("h")] for n, x in arrays.items() if "h" in (labels := self.labels[n])}
        self.groups = math.gcd(*heads)
        self.cuts = {f"b{n}": arrays[value].chunks[n] for n in range(self._batch)}
        if "h" in self.labels[value]:
            chunks = arrays[value].chunks[self.labels[value].index("h")]
            ends, H = itertools.accumulate(chunks), sum(chunks)
            groups = {end * self.groups // H for end in ends if end * self.groups % H == 0} if H else set()
            bounds = sorted(groups - {0} if _splits_heads(self.call) and groups else {self.groups})
            self.cuts["h"] = tuple(b - a for a, b in itertools.pairwise([0, *bounds]))

    def _chunks(self, shape: Sequence[int], labels: Labels) -> tuple[tuple[int, ...], ...]:
        """The chunks of an array."""

        def along(n: int, label: str | None) -> tuple[int, ...]:
            if label is None:
                return (n,)
            return tuple(m * n // self.groups for m in self.cuts[label]) if label == "h" else self.cuts[label]

        return tuple(along(n, label) for n, label in zip(shape, labels, strict=True))

    def _rechunked(self, x: Any, labels: Labels) -> Any:
        return x.rechunk(self._chunks(x.shape, labels))

    def _outputs(self) -> None:
        """Shapes, dtypes and labels of the results, by name: "out" if there are queries, "state" or its parts."""
        call, sizes = self.call, self.call.sizes
        out, out_dtype, parts = _probe(call)
        states, kinds = ({n: getattr(S, of) for n, S in parts.items()} for of in ("shape", "dtype"))
        self.results: dict[str, tuple[tuple[int, ...], Any, Labels]] = {}
        if out is not None:
            shape = (*sizes["..."], sizes.get("Tq", sizes["T"]), *out)
            labels: Labels = (*(f"b{n}" for n in range(self._batch)), None, *(("h", None) if len(out) > 1 else (None,)))
            if call.options["layout"] != "time_first":
                shape = LAYOUTS[call.options["layout"]].shape(shape, len(out))
                labels = (*labels[:-3], "h", *(None,) * (len(shape) - self._batch - 1))
            self.results["out"] = shape, out_dtype, labels
        lead = call.lead
        for name, one in states.items():
            shape = call.spec.core.end_shape(call.plan, call.given_state, name.removeprefix("state."), one)
            counts = name.rpartition(".")[2] in call.spec.core.STATE_COUNTS
            dtype = np.dtype(np.int64 if counts else kinds[name] if kinds[name].kind == "c" else call.dtype)
            self.results[name] = (*lead, *shape), dtype, self._state_labels(name)

    def result(self) -> Any:
        """The public result."""
        spec, options = self.call.spec, self.call.options
        each = {n: how for n, how in self.results.items() if n == "out" or options["return_state"] or
                "out" not in self.results}  # fmt: skip
        task = functools.partial(_forward, spec.name, tuple(self.given), self.options, tuple(each))
        found = dict(zip(each, self._arrays(task, self.given, self.labels, list(each.values())), strict=True))
        out = found.pop("out", None)
        state, kind = list(found.values()), spec.state.type_of(options)
        if not state:
            return out
        return Result(out, state[0] if kind is None else kind(*state))

    def pullback(self, dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        spec = self.call.spec
        if dout is None and dstate is None:
            raise TypeError(f"{spec.name}: the pullback got neither dout nor dstate, expected at least one")
        given = self._cotangents(dout, dstate)
        labels = self.labels | {n: self.results[n[1:]][2] for n in given}
        given = self.given | {n: self._rechunked(x, labels[n]) for n, x in given.items()}
        task = functools.partial(_backward, spec.name, tuple(given), self.options, tuple(self.given))
        wanted = [(x.shape, x.dtype, self.labels[n]) for n, x in self.given.items()]
        found = dict(zip(self.given, self._arrays(task, given, labels, wanted), strict=True))
        state = [found.pop(n) for n in [*found] if n.split(".")[0] == "state"]
        like = self.call.given_state
        whole = None if not state else type(like)(*state) if isinstance(like, tuple) else state[0]
        return gradients_of((*spec.arrays, "state"), *(found.get(n) for n in spec.arrays), whole)

    def _cotangents(self, dout: Any, dstate: Any) -> dict[str, Any]:
        """The checked cotangents by name: dout, dstate, dstate.S, ..."""
        fn = self.call.name
        dstate = normalise(self.call.spec, "dstate", dstate, self.call.options)
        each = {"dout": dout} | ({} if dstate is None else flatten("dstate", dstate))
        given = {n: d for n, d in enter(fn, each, self.call.library)[1].items() if d is not None}
        for name, d in given.items():
            if name[1:] not in self.call.spec.counts:
                check_dtype(fn, name, d, bool(self.call.spec.complex_arrays))
            wanted = self.results[name[1:]][0] if name[1:] in self.results else "None: there is no out"
            if tuple(d.shape) != wanted:
                raise ValueError(f"{fn}: {name} has shape {tuple(d.shape)}, expected {wanted}")
        return given

    def _arrays(self, task: Any, given: dict[str, Any], labels: dict[str, Labels], wanted: list[Any]) -> list[Any]:
        """The results of a task of each block, as arrays; wanted: (shape, dtype, labels) of each.

        What lacks the axis of a label is summed over its blocks.
        """
        name = f"{self.call.name}-{tokenize(task, *given.values())}"
        blocks = [dict(zip(self.cuts, index, strict=True))
                  for index in itertools.product(*(range(len(n)) for n in self.cuts.values()))]  # fmt: skip
        calls: dict[Any, Any] = {}
        for n, block in enumerate(blocks):
            calls[name, n] = (task, *((x.name, *_at(labels[m], block)) for m, x in given.items()))
        graph = HighLevelGraph.from_collections(name, calls, dependencies=list(given.values()))
        return [self._array(graph, name, n, blocks, how) for n, how in enumerate(wanted)]

    def _array(self, graph: HighLevelGraph, name: str, number: int, blocks: list[dict[str, int]], how: Any) -> Any:
        """Result `number` of the tasks; a result without the axis of a label is summed over its blocks.

        Whole numbers, those of the tokens, are the same in every block.
        """
        shape, dtype, labels = how
        own, chunks = f"{name}-{number}", self._chunks(shape, labels)
        missing = [n for n in self.cuts if n not in labels and len(self.cuts[n]) > 1]
        count = math.prod(len(self.cuts[n]) for n in missing)
        layer: dict[Any, Any] = {}
        for n, block in enumerate(blocks):
            part = (
                (int(np.ravel_multi_index([block[m] for m in missing], [len(self.cuts[m]) for m in missing])),)
                if missing
                else ()
            )
            layer[own, *part, *_at(labels, block)] = (_part if missing else operator.getitem, (name, n), number)
        whole = HighLevelGraph({**graph.layers, own: layer}, {**graph.dependencies, own: {name}})
        if not missing:
            return da.Array(whole, own, chunks, dtype=dtype)
        each = da.Array(whole, own, ((1,) * count, *chunks), dtype=dtype)
        return each.max(axis=0) if dtype.kind == "i" else each.sum(axis=0, dtype=dtype)


# tasks


def _forward(fn: str, names: tuple[str, ...], options: Keywords, wanted: tuple[str, ...], *blocks: Any) -> list[Any]:
    """The results of a block."""
    returns_state = wanted != ("out",)
    given = _arguments(dict(zip(names, blocks, strict=True))) | dict(options) | {"return_state": returns_state}
    found = dispatch.run(_function(fn).spec, (), given)
    out, state = found if returns_state else (found, None)
    each = {"out": out} | flatten("state", state)
    return [each[n] for n in wanted]


def _backward(fn: str, names: tuple[str, ...], options: Keywords, wanted: tuple[str, ...], *blocks: Any) -> list[Any]:
    """The gradients of a block."""
    given = dict(zip(names, blocks, strict=True))
    dout = given.pop("dout", None)
    dstate = _arguments({n[1:]: given.pop(n) for n in [*given] if n.split(".")[0] == "dstate"}).get("state")
    _, pull = vjp.run_vjp(_function(fn).spec, (), _arguments(given) | dict(options) | {"return_state": True})
    grads = pull(dout, dstate)
    each = grads._asdict() | flatten("state", grads.state)
    return [each[n] for n in wanted]


def _part(found: list[Any], number: int) -> Any:
    """A result of a block, as one of the parts of a sum."""
    return found[number][None]


def _function(name: str) -> Any:
    return getattr(import_module("linattn_np"), name)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name, with the parts of a state as one."""
    own = {n: x for n, x in given.items() if n.split(".")[0] != "state"}
    state = [x for n, x in given.items() if n.split(".")[0] == "state"]
    return own | ({"state": state[0] if "state" in given else tuple(state)} if state else {})


# shapes


def _at(labels: Labels, block: Mapping[str, int]) -> tuple[int, ...]:
    """The place of a block along each axis of an array."""
    return tuple(0 if label is None else block[label] for label in labels)


def _splits_heads(call: Call) -> bool:
    """Whether no default array depends on the number of heads, and none of a state is of all heads, as a length is."""
    spec = call.spec
    has_state = call.given_state is not None or call.options["return_state"] or _lacks_queries(call)
    if spec.grows and has_state:
        return False
    defaults = [*spec.rules, *([spec.change.gate] if spec.change.gate is not None else [])]
    return all(getattr(call, name) is not None for name in defaults)


def _lacks_queries(call: Call) -> bool:
    """Whether a call only writes its state."""
    query = call.spec.change.query
    return query is not None and getattr(call, query) is None


def _probe(call: Call) -> tuple[tuple[int, ...] | None, Any, dict[str, Any]]:
    """((heads, channels) of the output, its dtype, parts of the state by name), from one token of ones."""
    spec, batch = call.spec, len(call.batch)
    given: dict[str, Any] = {}
    for name in spec.arrays:
        if (x := getattr(call, name)) is not None:
            time = time_of(call, name)
            shape = tuple(x.shape) if time is None else (min(x.shape[time], 1), *x.shape[batch + 1 :])
            given[name] = np.ones(shape, x.dtype)
    given |= {n: call.options[option] for n, (option, _) in spec.rules.items() if n not in given}
    options = {n: call.options[n] for n in spec.options}
    backend = "reference" if "reference" in spec.core.BACKENDS else None
    with np.errstate(all="ignore"):
        out, state = dispatch.run(spec, (), given | options | {"return_state": True, "backend": backend})
    states = flatten("state", state)
    return (None, None, states) if out is None else (out.shape[out.ndim - spec.row_axes :], out.dtype, states)
