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

from ..composition import (
    AxisDecays,
    Factors,
    LateWrite,
    Stacked,
    Summary,
    added,
    beginning,
    composed,
    folded,
    has_beginning,
    mapped,
    parts,
    stacked,
    unstacked,
)
from ..ops.sums import sum_of_groups, sum_to
from ..runtime.arrays import COMPLEX, STORAGE, Array, cast, enter, is_complex, shared_heads
from ..runtime.doorway import expect
from ..spec import Call, VariantSpec
from .binding import axes_of, bind, inputs_of, prepare, spec_of
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
    Stacked         a matrix (..., H, 2 K, 2 K) of S above M: momentum_delta_rule; (..., H, N, N): block_scan
    Factors         of each channel (..., D): the product of the tokens' factors, of recurrences without heads
    LateWrite       mamba3, mamba3_mimo: matrix (S + weight k^T v), k and v of the last token before the span, which is
                    written once more

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
    summaries and of the state (None if it was not given). Raises TypeError without a summary and for other states,
    ValueError for other shapes.
    """
    xp = _namespace("entry_states", *summaries)
    return folded(xp, summaries, _first_state(xp, summaries[0], state))[0]


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
    states, backward = folded(xp, spans, _first_state(xp, spans[0], state))

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
    """The array namespace of summaries.   Raises TypeError for anything else, ValueError for two kinds of states."""
    for span in spans or (None,):
        if not isinstance(span, Summary):
            raise TypeError(f"{name}: a {type(span).__qualname__} was given, expected a Summary")
        if (own := _kind(span)) != (first := _kind(spans[0])):
            raise ValueError(f"{name}: a span has {own}, expected {first} as the first one has")
    return array_namespace(parts(spans[0].offset)[0])


def _kind(span: Summary) -> str:
    """What two summaries that compose have in common."""
    transfer = type(span.transfer).__name__ if isinstance(span.transfer, tuple) else [*_shapes(span.transfer)]
    return f"offset {[*_shapes(span.offset)]} and transfer {transfer}"


def _shapes(x: Any) -> list[tuple[int, ...]]:
    return [] if x is None else [tuple(y.shape) for y in parts(x)]


def _zeros(xp: Any, span: Summary) -> Any:
    return mapped(xp.zeros_like, span.offset)


def _first_state(xp: Any, span: Summary, state: Any) -> Any:
    """The checked state before a span, as exact as the span's; zeros for None."""
    if state is None:
        return _zeros(xp, span)
    names: tuple[str, ...] = getattr(span.offset, "_fields", ("state",))
    if isinstance(state, tuple) != isinstance(span.offset, tuple) or len(parts(state)) != len(names):
        raise TypeError(f"entry_states: state is a {type(state).__qualname__}, expected {', '.join(names)}")
    each = []
    for name, S, U in zip(names, parts(state), parts(span.offset), strict=True):
        expect("entry_states", None, STORAGE + COMPLEX, **{name: (S, " ".join(map(str, range(U.ndim))))})
        if tuple(S.shape) != tuple(U.shape):
            raise ValueError(f"entry_states: {name} has shape {tuple(S.shape)}, expected {tuple(U.shape)}")
        real = not (is_complex(S) or is_complex(U))
        each.append(cast(xp, S, xp.result_type(S.dtype, U.dtype)) if real else S)
    return type(span.offset)(*each) if isinstance(span.offset, tuple) else each[0]


# the two parts of a summary; run(fn, call) returns the final state of a call and its pull


def _summary(
    fn: Callable[..., Any], arrays: tuple[Any, ...], options: Mapping[str, Any], run: Callable[..., tuple[Any, Pull]]
) -> tuple[Summary, tuple[Pull, Pull]]:
    """(summary, the pulls of transfer and offset)."""
    spec = spec_of("summary", fn)
    if not spec.composes:
        raise TypeError(
            f"summary: fn is {spec.name}, whose states do not compose ({spec.no_summary}), expected a variant whose "
            "state after a token is a linear function of the state before it, of one size"
        )
    for name in WITHOUT:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"summary: {name} is given, expected none: a summary is that of tokens alone")
    bind(spec, arrays, options)  # raises
    options = {n: x for n, x in options.items() if n not in WITHOUT}
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
    elif spec.transfers == "stacked":
        of = _of_parts if isinstance(offset, tuple) else _of_columns
        transfer, pull = of(spec, fn, given, offset, run)
    elif spec.transfers == "late":
        transfer, pull = _late_write(spec, fn, given, offset, run)
    else:
        call, replaced = _of_transfer(spec, given, offset)
        transfer, whole = run(fn, call)
        pull = None if whole is None else functools.partial(_others, whole, replaced)
    return Summary(transfer, offset), (pull, offset_pull)


def _late_write(spec: VariantSpec, fn: Callable[..., Any], given: Keywords, offset: Any,
                run: Callable[..., tuple[Any, Pull]]) -> tuple[LateWrite, Pull]:  # fmt: skip
    """The transfer of a state with the last token's key and value, and its pull."""
    zeros, kind = array_namespace(offset.S).zeros_like, type(offset)
    call, replaced = _of_transfer(spec, given, offset.S)
    identity = call["state"]
    end, whole = run(fn, call | {"state": kind(identity, zeros(offset.k), zeros(offset.k))})
    (weight, retained), of_first = run(FirstWrites(spec), given)
    if whole is None or of_first is None:
        return LateWrite(end.S, weight, retained), None

    def pull(d: LateWrite) -> Keywords:
        matrix = _others(whole, replaced, kind(d.matrix, zeros(end.k), zeros(end.v)))
        first = of_first((d.weight, d.retained))
        return {n: added(matrix.get(n), first.get(n)) for n in first}

    return LateWrite(end.S, weight, retained), pull


def _of_parts(spec: VariantSpec, fn: Callable[..., Any], given: Keywords, offset: Any,
              run: Callable[..., tuple[Any, Pull]]) -> tuple[Stacked, Pull]:  # fmt: skip
    """The matrix of all parts of a state, and its pull: the final state of the identity, without values."""
    xp, (*lead, K, _), count = array_namespace(offset[0]), offset[0].shape, len(offset)
    one = xp.eye(count * K, dtype=offset[0].dtype, device=device(offset[0]))
    identity = xp.asarray(xp.broadcast_to(one, (*lead, count * K, count * K)), copy=True)
    none = _no_values(spec, given, count * K)
    end, whole = run(fn, {**given, **none, "state": unstacked(identity, offset)})
    if whole is None:
        return Stacked(stacked(xp, end)), None
    return Stacked(stacked(xp, end)), lambda d: _others(whole, set(none), unstacked(d.matrix, offset))


def _of_columns(spec: VariantSpec, fn: Callable[..., Any], given: Keywords, offset: Any,
                run: Callable[..., tuple[Any, Pull]]) -> tuple[Stacked, Pull]:  # fmt: skip
    """The same of a state without a value axis: each column of the identity is the state of a head of its own."""
    xp, (*lead, N), value = array_namespace(offset), offset.shape, str(spec.change.value)
    places = {n: _letters(spec, given, n).index("H") - len(_letters(spec, given, n)) for n in spec.arrays}
    copies = {n: xp.repeat(given[n], N, axis=at) for n, at in places.items()}
    one = xp.eye(N, dtype=offset.dtype, device=device(offset))
    identity = xp.reshape(xp.asarray(xp.broadcast_to(one, (*lead, N, N)), copy=True), (*lead[:-1], lead[-1] * N, N))
    end, whole = run(fn, {**given, **copies, value: xp.zeros_like(copies[value]), "state": identity})
    matrix = xp.matrix_transpose(xp.reshape(end, (*lead, N, N)))
    if whole is None:
        return Stacked(matrix), None

    def pull(d: Stacked) -> Keywords:
        columns = xp.reshape(xp.matrix_transpose(d.matrix), identity.shape)
        grads = _others(whole, {value, "state"}, columns)
        return {n: _sum_of_copies(xp, x, places[n], N) for n, x in grads.items()}

    return Stacked(matrix), pull


def _sum_of_copies(xp: Any, x: Array, axis: int, N: int) -> Array:
    """The transpose of xp.repeat."""
    at = x.ndim + axis
    return xp.sum(xp.reshape(x, (*x.shape[:at], x.shape[at] // N, N, *x.shape[at + 1 :])), axis=at + 1)


def _no_values(spec: VariantSpec, given: Keywords, width: int) -> Keywords:
    """Zeros in the place of the arrays on the value axis, of another width."""
    on_values = [n for n in spec.arrays if _letters(spec, given, n)[-1:] == ["V"]]
    return {n: array_namespace(given[n]).zeros((*given[n].shape[:-1], width), dtype=given[n].dtype,
                                               device=device(given[n])) for n in on_values}  # fmt: skip


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
    none = _no_values(spec, given, K)
    return {**given, **none, "state": identity}, set(none)


# sums of log decays


class OfTokens:
    """What is computed of a call's tokens in the place of the final state: of a library's own arrays by its bridge."""

    def __init__(self, spec: VariantSpec):
        self._spec = spec

    def __call__(self, return_state: bool = True, **given: Any) -> Result:
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.apply("summary", self, self.vjp, tuple(self._spec.arrays), given)
            if found is not NotImplemented:
                return found
        return self.vjp((), given)[0]

    def vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Result, Pullback]:
        """((None, what is computed), pullback)."""
        given = {n: x for n, x in keywords.items() if n != "return_state"}
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.run_vjp("summary", None, self.vjp, (), given)
            if found is not NotImplemented:
                return found
        return self.computed(prepare(self._spec, (), given))

    def computed(self, call: Call) -> tuple[Result, Pullback]:
        """The same, of a checked call."""
        raise NotImplementedError


class FirstWrites(OfTokens):
    """(weight, retained) of a LateWrite."""

    def computed(self, call: Call) -> tuple[Result, Pullback]:
        xp, first_weight = call.xp, self._spec.state.first_weight
        assert first_weight is not None
        h = cast(xp, first_weight[0](call), call.dtype)
        each = [xp.full(h.shape[1:] if call.is_ragged else h.shape, float(s.stop == s.start), dtype=h.dtype,
                        device=device(h)) for s in call.sequences]  # fmt: skip
        retained = xp.stack(each) if call.is_ragged else each[0]

        def pullback(dout: Any, d: Any) -> Any:
            (dh,) = enter("summary", {"dtransfer.weight": d[0]}, call.library)[1].values()
            return gradients(call, first_weight[1](call, cast(xp, dh, call.dtype)), None)

        return Result(None, (call.library.give_back(h), call.library.give_back(retained))), pullback


class LogDecays(OfTokens):
    """The sums of a call's log decays."""

    def computed(self, call: Call) -> tuple[Result, Pullback]:
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

    def _log_decays(self, call: Call) -> dict[str, Array]:
        """The tokens' log decays (..., T, heads, width) by their name in the core."""
        own = self._spec.state.log_decays
        x = inputs_of(call) if own is None else SimpleNamespace(g=own[0](call))
        return {n: g for n in ("g", "gv") if (g := getattr(x, n, None)) is not None}

    def _log_decays_vjp(self, call: Call, d: dict[str, Array]) -> dict[str, Array]:
        """The change of variables transposed; no other input of the core has a gradient."""
        spec, plan = self._spec, call.plan
        if spec.state.log_decays is not None:
            return spec.state.log_decays[1](call, d["g"])
        x = inputs_of(call)
        zeros = {n: plan.xp.zeros(y.shape, dtype=plan.dtype, device=device(y))
                 for n, y in x._asdict().items() if getattr(y, "ndim", 0) > 1}  # fmt: skip
        return spec.change.to_core_vjp(call, x._replace(**zeros | d))


def _summed(call: Call, g: Array) -> Array:
    """(..., T, heads, width) to (..., H, width), or (N, H, width), in the dtype of states."""
    xp, dtype = call.xp, call.dtype
    g = cast(xp, g, dtype)
    g = shared_heads(xp, g, call.sizes.get("H", g.shape[-2]))
    if not call.is_ragged:
        total = sum_to(xp, g, (*g.shape[:-3], 1, *g.shape[-2:]))[..., 0, :, :]
        return xp.asarray(xp.broadcast_to(total, (*call.batch, *total.shape[-2:])), copy=True)
    each = [xp.sum(xp.reshape(g, g.shape[-3:])[s.start : s.stop, ...], axis=0) for s in call.sequences]
    return xp.stack(each, axis=0)


def _summed_vjp(call: Call, g: Array, d: Array) -> Array:
    """Every token of a sequence gets the gradient of its sum."""
    xp = call.xp
    full = (*call.batch, *g.shape[-3:-2], *d.shape[-2:])
    if not call.is_ragged:
        d = xp.broadcast_to(d[..., None, :, :], full)
    else:
        rows = [xp.broadcast_to(d[s.row, ...], (s.stop - s.start, *d.shape[-2:])) for s in call.sequences]
        d = xp.reshape(xp.concat(rows, axis=0), full)
    return sum_to(xp, sum_of_groups(xp, cast(xp, d, call.dtype), g.shape[-2]), g.shape)
