"""What a span of tokens does to any state that enters it: summaries, their composition, states between spans.

Everything is calls of the variant itself, so that every backend and library has it: the offset is the state after the
span, a matrix its final state for v = 0 and the state I. Log decays alone are summed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from array_api_compat import array_namespace, device

from ..composition import AxisDecays, Factors, Summary, added, beginning, composed, folded, has_beginning, mapped, parts
from ..ops.sums import sum_to
from ..runtime.arrays import Array, cast, enter, shared_heads, sum_of_groups
from ..spec import VariantSpec
from .binding import Prepared, axes_of, bind, prepare, spec_of
from .foreign import bridge_of
from .layouts import LAYOUTS
from .results import Result, gradients, gradients_of
from .vjp import vjp

Keywords = dict[str, Any]
Pull = Callable[[Any], Any] | None  # dstate -> gradients by name; None where there is no backward
Pullback = Callable[..., Any]
WITHOUT = ("state", "return_state", "overwrite_state", "state_rows", "fresh", "return_states_at", "reverse")


def summary(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Summary:
    """What a span of tokens does to any state: Summary(transfer, offset).

        state after the span = transfer of the state before it + offset

    arrays, options: those of fn, without a state; queries are not read and may be None. With cu_seqlens there is one
    summary a sequence. offset is the state after the span if nothing comes before it, in the form of fn's states.
    transfer says what is left of an earlier state:

    None            all of it: nothing decays (abc: states are averages, whose weights add)
    (..., H)        e^transfer of it: the sum of the tokens' log decays, in the dtype of states
    (..., H, K)     the same for each key channel, or slot
    AxisDecays      such sums of the key axis, and (..., H, V) of the value axis (gv)
    (..., H, K, K)  transfer @ state: delta rules, free rank-one terms, rotated states
    Factors         of each channel (..., D): the product of the tokens' factors, of recurrences without heads

    mlstm, rwkv4: e^m S is what composes; m is -1e30 where no token came before. The pullback of
    la.vjp(la.summary, fn, *arrays, **options) takes (dtransfer=None, doffset=None) and returns gradients by name.
    Raises TypeError for a fn without such a state, ValueError for options about states, and every error of fn.
    """
    return _summary(fn, arrays, options, _forward)[0]


def compose(left: Summary, right: Summary) -> Summary:
    """The summary of two spans, one after the other.   la.vjp(la.compose, left, right): dsummary -> (dleft, dright)."""
    return composed(_namespace("compose", left, right), left, right)[0]


def entry_states(summaries: Sequence[Summary], state: Any = None) -> tuple[Any, ...]:
    """The states before each span and after the last one: a left fold, from `state` (None: zeros).

    la.vjp(la.entry_states, summaries, state) takes their gradients, each may be None, and returns those of the
    summaries and of the state (None if it was not given). Raises TypeError without a summary.
    """
    xp = _namespace("entry_states", *summaries)
    return folded(xp, summaries, _zeros(xp, summaries[0]) if state is None else state)[0]


def _summary_vjp(arrays: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Summary, Pullback]:
    """The rule of la.vjp: arrays begins with fn."""
    if not arrays:
        raise TypeError("summary: fn is missing, expected a variant of linattn_np and its arrays")
    fn, *rest = arrays
    found, pulls = _summary(fn, tuple(rest), options, _with_pullback)

    def pullback(dtransfer: Any = None, doffset: Any = None) -> Any:
        """Gradients by input name; None for queries, which are not read, and for what was not given."""
        if dtransfer is None and doffset is None:
            raise TypeError("summary: the pullback got neither dtransfer nor doffset, expected at least one")
        sums: list[Any] = [None] * len(fn.spec.arrays)
        for d, pull in zip((dtransfer, doffset), pulls, strict=True):
            if d is not None and pull is not None:
                grads = pull(d)
                sums = [added(a, grads.get(n)) for a, n in zip(sums, fn.spec.arrays, strict=True)]
        return gradients_of((*fn.spec.arrays, "state"), *sums, None)

    return found, pullback


def _compose_vjp(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Summary, Pullback]:
    given = dict(zip(("left", "right"), arrays, strict=False)) | dict(keywords)
    return composed(_namespace("compose", *given.values()), **given)


def _entry_states_vjp(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], Pullback]:
    given = {"state": None} | dict(zip(("summaries", "state"), arrays, strict=False)) | dict(keywords)
    spans, state = given["summaries"], given["state"]
    xp = _namespace("entry_states", *spans)
    states, backward = folded(xp, spans, _zeros(xp, spans[0]) if state is None else state)

    def pullback(dstates: Sequence[Any]) -> tuple[tuple[Summary, ...], Any]:
        """(gradients of the summaries, gradient of the state)."""
        if all(d is None for d in dstates):
            raise TypeError("entry_states: the pullback got no gradient of a state, expected at least one")
        last = _zeros(xp, spans[0]) if dstates[-1] is None else dstates[-1]
        dspans, dstate = backward((*dstates[:-1], last))
        return dspans, None if state is None else dstate

    return states, pullback


summary.vjp = _summary_vjp  # type: ignore[attr-defined]
compose.vjp = _compose_vjp  # type: ignore[attr-defined]
entry_states.vjp = _entry_states_vjp  # type: ignore[attr-defined]


def _namespace(name: str, *spans: Any) -> Any:
    """The array namespace of summaries.   Raises TypeError for anything else."""
    for span in spans or (None,):
        if not isinstance(span, Summary):
            raise TypeError(f"{name}: a {type(span).__qualname__} was given, expected a Summary")
    return array_namespace(parts(spans[0].offset)[0])


def _zeros(xp: Any, span: Summary) -> Any:
    return mapped(xp.zeros_like, span.offset)


# the two parts of a summary; run(fn, call) returns the final state of a call and its pull


def _summary(
    fn: Callable[..., Any], arrays: tuple[Any, ...], options: Mapping[str, Any], run: Callable[..., tuple[Any, Pull]]
) -> tuple[Summary, tuple[Pull, Pull]]:
    """(summary, the pulls of transfer and offset)."""
    spec = spec_of("summary", fn)
    if not spec.composes:
        raise TypeError(
            f"summary: fn is {spec.name}, whose states do not compose, expected a variant whose state after a token is "
            "a linear function of the state before it, of one size"
        )
    for name in WITHOUT:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"summary: {name} is given, expected none: a summary is that of tokens alone")
    bind(spec, arrays, options)  # raises
    given = {**dict(zip(spec.arrays, arrays, strict=False)), **options}
    if spec.change.query is not None:
        given[spec.change.query] = None
    if has_beginning(spec.state.parts):
        zero = _without_tokens(fn, given)
        offset, offset_pull = run(fn, {**given, "state": beginning(array_namespace(zero.m), zero)})
    else:
        offset, offset_pull = run(fn, given)
    if spec.transfers == "decays":
        transfer, pull = run(LogDecays(spec), given)
    elif spec.transfers == "factors":
        xp, value = array_namespace(offset), spec.change.value
        ones = {value: xp.zeros_like(given[value]), "state": xp.ones_like(offset)}  # h_T of h_0 = 1 alone
        factors, whole = run(fn, {**given, **ones})
        transfer = Factors(factors)
        pull = None if whole is None else functools.partial(_others, functools.partial(_of_factors, whole), {value})
    else:
        call, replaced = _of_transfer(spec, given, offset)
        transfer, whole = run(fn, call)
        pull = None if whole is None else functools.partial(_others, whole, replaced)
    return Summary(transfer, offset), (pull, offset_pull)


def _others(pull: Callable[[Any], Keywords], names: set[str], d: Any) -> Keywords:
    """The gradients without these names."""
    return {n: x for n, x in pull(d).items() if n not in names}


def _of_factors(pull: Callable[[Any], Keywords], d: Factors) -> Keywords:
    return pull(d.factors)


def _forward(fn: Callable[..., Any], call: Keywords) -> tuple[Any, Pull]:
    return fn(**call, return_state=True).state, None


def _with_pullback(fn: Callable[..., Any], call: Keywords) -> tuple[Any, Pull]:
    (_, state), pullback = vjp(fn, **call, return_state=True)
    return state, lambda d: pullback(None, d)._asdict()


def _batch(spec: VariantSpec, given: Keywords) -> int:
    """The number of batch axes."""
    return int(given[spec.change.value].ndim) - len(spec.arrays[spec.change.value].axes.split())


def _letters(spec: VariantSpec, given: Keywords, name: str) -> list[str]:
    """The axes of an array after the batch, in the caller's layout; none of what is no array."""
    x: Any = given.get(name)
    layout = LAYOUTS.get(given.get("layout", "time_first"))
    if not hasattr(x, "ndim"):
        return []
    axes = axes_of(spec, given)[name]
    each = [one.split() for one in (axes if layout is None else layout.axes(axes)).split("|")]
    return next((one for one in each if len(one) == int(x.ndim) - ("T" in one) * _batch(spec, given)), [])


def _without_tokens(fn: Callable[..., Any], given: Keywords) -> Any:
    """The variant's state before any token: that of a call on none."""
    spec: VariantSpec = fn.spec  # type: ignore[attr-defined]
    call, batch = {**given, "return_state": True}, _batch(spec, given)
    for name in spec.arrays:
        if "T" in (letters := _letters(spec, given, name)):
            call[name] = given[name][(slice(None),) * (batch + letters.index("T")) + (slice(0, 0), ...)]
    if given.get("cu_seqlens") is not None:
        call["cu_seqlens"] = [0] * len(given["cu_seqlens"])
    return fn(**call).state


def _of_transfer(spec: VariantSpec, given: Keywords, offset: Any) -> tuple[Keywords, set[str]]:
    """(the call whose final state is the matrix: no values, and the identity as the state; the arrays replaced)."""
    xp, (*lead, K, _) = array_namespace(offset), offset.shape
    one = xp.eye(K, dtype=offset.dtype, device=device(offset))
    identity = xp.asarray(xp.broadcast_to(one, (*lead, K, K)), copy=True)
    on_values = {n for n in spec.arrays if _letters(spec, given, n)[-1:] == ["V"]}
    none = {n: xp.zeros((*given[n].shape[:-1], K), dtype=given[n].dtype, device=device(given[n])) for n in on_values}
    return {**given, **none, "state": identity}, on_values


# sums of log decays


class LogDecays:
    """The sums of a call's log decays, in the place of the final state: of a library's own arrays by its bridge."""

    def __init__(self, spec: VariantSpec):
        self._spec = spec

    def __call__(self, return_state: bool = True, **given: Any) -> Result:
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.apply("summary", self, self.vjp, tuple(self._spec.arrays), given)
            if found is not NotImplemented:
                return found
        return self.vjp((), given)[0]

    def vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Result, Pullback]:
        """((None, sums), pullback)."""
        given = {n: x for n, x in keywords.items() if n != "return_state"}
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.run_vjp("summary", None, self.vjp, (), given)
            if found is not NotImplemented:
                return found
        call = prepare(self._spec, (), given)
        logs = self._log_decays(call)
        sums = {n: _summed(call, g) for n, g in logs.items()}
        by_head = len(sums) == 1 and sums["g"].shape[-1] == 1
        each = [call.library.give_back(y[..., 0] if by_head else y) for y in sums.values()]
        total = None if not each else each[0] if len(each) == 1 else AxisDecays(*each)

        def pullback(dout: Any, d: Any) -> Any:
            """Gradients by input name."""
            entered = enter("summary", {f"dtransfer.{n}": y for n, y in enumerate(parts(d))}, call.library)[1].values()
            rows = [y[..., None] if by_head else y for y in entered]
            dlogs = {n: _summed_vjp(call, g, dy) for (n, g), dy in zip(logs.items(), rows, strict=True)}
            return gradients(call, self._log_decays_vjp(call, dlogs), None)

        return Result(None, total), pullback

    def _log_decays(self, call: Prepared) -> dict[str, Array]:
        """The tokens' log decays (..., T, heads, width) by their name in the core."""
        own = self._spec.state.log_decays
        x = call.inputs() if own is None else SimpleNamespace(g=own[0](call.variables))
        return {n: g for n in ("g", "gv") if (g := getattr(x, n, None)) is not None}

    def _log_decays_vjp(self, call: Prepared, d: dict[str, Array]) -> dict[str, Array]:
        """The change of variables transposed; no other input of the core has a gradient."""
        spec, c, plan = self._spec, call.variables, call.plan
        if spec.state.log_decays is not None:
            return spec.state.log_decays[1](c, d["g"])
        x = call.inputs()
        zeros = {n: plan.xp.zeros(y.shape, dtype=plan.dtype, device=device(y))
                 for n, y in x._asdict().items() if getattr(y, "ndim", 0) > 1}  # fmt: skip
        return spec.change.to_core_vjp(c, x._replace(**zeros | d))


def _summed(call: Prepared, g: Array) -> Array:
    """(..., T, heads, width) to (..., H, width), or (N, H, width), in the dtype of states."""
    xp, c, dtype = call.plan.xp, call.variables, call.plan.dtype
    g = cast(xp, g, dtype)
    g = shared_heads(xp, g, c.sizes.letters.get("H", g.shape[-2]))
    if c.sizes.ragged is None:
        total = sum_to(xp, g, (*g.shape[:-3], 1, *g.shape[-2:]))[..., 0, :, :]
        return xp.asarray(xp.broadcast_to(total, (*c.sizes.batch, *total.shape[-2:])), copy=True)
    each = [xp.sum(xp.reshape(g, g.shape[-3:])[s.start : s.stop, ...], axis=0) for s in c.sequences]
    return xp.stack(each, axis=0)


def _summed_vjp(call: Prepared, g: Array, d: Array) -> Array:
    """Every token of a sequence gets the gradient of its sum."""
    xp, c = call.plan.xp, call.variables
    full = (*c.sizes.batch, *g.shape[-3:-2], *d.shape[-2:])
    if c.sizes.ragged is None:
        d = xp.broadcast_to(d[..., None, :, :], full)
    else:
        rows = [xp.broadcast_to(d[s.row, ...], (s.stop - s.start, *d.shape[-2:])) for s in c.sequences]
        d = xp.reshape(xp.concat(rows, axis=0), full)
    return sum_to(xp, sum_of_groups(xp, cast(xp, d, call.plan.dtype), g.shape[-2]), g.shape)
