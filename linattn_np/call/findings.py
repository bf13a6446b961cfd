"""What the numbers of a call say that its shapes do not: NaN, values out of range, growth, exchanged arrays."""

from __future__ import annotations

import dis
import itertools
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..runtime import shapes
from ..runtime.arrays import NARROW, Array, Namespace, accumulate, dtype_name
from ..runtime.callers import caller
from ..spec import Call

AXES = {"T": "token", "Tq": "token", "H": "head", "Hq": "head", "Hk": "head", "K": "channel", "V": "channel",
        "n": "step", "R": "row", "M": "slot", "P": "pair", "D": "channel"}  # fmt: skip
FORGOTTEN = -50.0  # e^-50 is nothing beside 1 in any dtype
LENGTHS = 1e-3, 4e-2  # squares of rows of length 1 may be off by so much in 32 bits and more, in 16 bits
TINY = 1e-300
ROUNDING = 2**-8  # of gates of 16 bits, beside a bound declared for them


class Finding(NamedTuple):
    """One thing that looks wrong. is_error: no such call is meant; else it may be."""

    array: str
    message: str
    is_error: bool

    def __str__(self) -> str:
        return f"{self.array} {self.message}"


def enforce(call: Call) -> None:
    """The option check=True.   Raises ValueError for findings that are errors, warns of the others."""
    found = list(findings(call))
    if errors := [str(f) for f in found if f.is_error]:
        raise ValueError(f"{call.name}: " + "; ".join(errors))
    for finding in found:
        warnings.warn(f"{call.name}: {finding}", UserWarning, stacklevel=caller()[1])
    if not call.options["return_state"] and _is_unpacked():
        raise ValueError(
            f"{call.name}: the result is unpacked into two names but is one array, the outputs; "
            "return_state=True returns (out, state)"
        )


def findings(call: Call) -> Iterator[Finding]:
    """The findings of a call with checked arguments."""
    spec = call.spec
    given = {name: x for name in spec.arrays if (x := getattr(call, name)) is not None and math.prod(x.shape)}
    given |= {n: S for n, S in call.state_parts.items() if math.prod(S.shape)}
    finite = True
    for name, x in given.items():
        for finding in _not_finite(call, name, x):
            finite = False
            yield finding
    if finite:
        outside = list(_ranges(call, given))
        yield from outside
        if call.sizes["T"]:
            yield from _normaliser(call) if outside else itertools.chain(_growth(call), _normaliser(call))
        yield from _lengths(call, given)
        yield from _overflow(call, given)
    yield from _layout(call)
    yield from _transposed(call)
    if call.options.get("scale") == 0:
        yield Finding("scale", "is 0: queries read nothing, and no array but the values can have a gradient", False)


def _not_finite(call: Call, name: str, x: Array) -> Iterator[Finding]:
    xp = call.xp
    limits = _limits(call, name)
    kinds = [("NaN", xp.isnan(x))]
    inf = xp.isinf(x)
    if limits is not None and limits[0] == -math.inf:
        inf = xp.logical_and(inf, x > 0)  # a log decay of -inf is a reset
    for what, wrong in (*kinds, ("inf", inf)):
        count = int(xp.sum(xp.astype(wrong, xp.int8)))  # in the library's default integers
        if count:
            place = _place(call, name, x, int(xp.argmax(xp.reshape(xp.astype(wrong, xp.int8), (-1,)))))
            yield Finding(name, f"is {what} at {count} of {math.prod(x.shape)} places, first at {place}", True)


def _ranges(call: Call, given: dict[str, Array]) -> Iterator[Finding]:
    """Values outside the limits of their array."""
    xp, spec = call.xp, call.spec
    outside = {}
    for name, x in given.items():
        limits = _limits(call, name)
        if limits is None or (name in spec.arrays and _is_raw(call, name)):
            continue
        wide = xp.reshape(accumulate(xp, x), (-1,))
        for value, n, is_low in (
            (float(xp.min(wide)), int(xp.argmin(wide)), True),
            (float(xp.max(wide)), int(xp.argmax(wide)), False),
        ):
            if (value < limits[0]) if is_low else (value > limits[1]):
                outside[name] = value, n, float(xp.min(wide)), float(xp.max(wide))
                break
        bound = call.options.get("gate_lower_bound") if name == "g" else None
        if name not in outside and bound is not None and (low := float(xp.min(wide))) < bound * (1 + ROUNDING):
            yield Finding(
                name,
                f"is {low:.4g} at {_place(call, name, x, int(xp.argmin(wide)))}, below "
                f"gate_lower_bound={bound:g}: CUDA kernels may compute its sequence twice",
                False,
            )
        if name in spec.arrays and name not in outside and limits[0] == -math.inf and float(xp.max(wide)) < FORGOTTEN:
            yield Finding(name, f"is below {FORGOTTEN:g} everywhere: each token forgets everything before it", False)
    names = [n for n in outside if n in ("g", "beta")]
    exchanged = len(names) == 2 and outside["g"][2] >= 0 and outside["beta"][3] <= 0
    for name, (value, n, low, high) in outside.items():
        text = f"is {value:.4g} at {_place(call, name, given[name], n)}, expected {_interval(_limits(call, name))}"
        if _limits(call, name) == (-math.inf, 0.0):
            text += _about_decays(name, low, high, exchanged)
        elif exchanged:
            text += ": g and beta seem to be exchanged"
        yield Finding(name, text, True)


def _limits(call: Call, name: str) -> tuple[float, float] | None:
    """The least and the largest sensible value of an array, or of a part of the state; None without any."""
    spec = call.spec
    if name in spec.arrays:
        return spec.arrays[name].limits
    return spec.core.STATE_LIMITS.get(name.removeprefix("state."))


def _about_decays(name: str, low: float, high: float, exchanged: bool) -> str:
    """What a positive log decay probably is."""
    if exchanged:
        return ": g and beta seem to be exchanged"
    if name == "A":
        return ": with A_log, A is -exp(A_log)"
    if low >= 0 and high <= 1:
        return f": a decay between 0 and 1 enters as its logarithm, log({name})"
    return f": it is the log of a decay; perhaps -{name} is meant" if low >= 0 else ": the state would grow"


def _is_raw(call: Call, name: str) -> bool:
    """Whether another array or an option says that this one is something else than its limits are for."""
    spec = call.spec
    others = [n for n, arg in spec.arrays.items() if arg.reinterprets == name and getattr(call, n) is not None]
    raw = spec.arrays[name].raw_with
    return bool(others) or any(call.options.get(n) or getattr(call, n, None) is not None for n in raw)


def _growth(call: Call) -> Iterator[Finding]:
    """Steps that multiply the state, or queries and keys, by more than 1 in absolute value."""
    found = call.spec.core.growth(call.spec.change.to_core(call), call.plan)
    if found is None:
        return
    text = f"{found.message}, expected 0 to 2: the step multiplies {found.what} by {found.factor:.4g} "
    text += "along one direction"
    if "qk_l2norm" in call.spec.options:
        text += "; qk_l2norm=True divides keys and queries by their length"
    elif found.is_error:
        text += f"; divide {'keys' if found.array == 'k' else found.array} by their length"
    yield Finding(found.array, text, found.is_error)


def _normaliser(call: Call) -> Iterator[Finding]:
    """Weights that a sum normaliser divides by and that may be negative."""
    spec, options, xp = call.spec, call.options, call.xp
    if not options.get("normalize") or options.get("feature_map") != "identity":
        return
    for name in filter(None, (spec.change.query, spec.change.key)):
        x = getattr(call, name)
        if x is not None and math.prod(x.shape) and float(xp.min(x)) < 0:
            yield Finding(
                name,
                "has negative entries and feature_map is 'identity': normalize=True divides by q.z, "
                "which then passes through zero; feature_map='elu+1' keeps it positive",
                True,
            )
            return


def _lengths(call: Call, given: dict[str, Array]) -> Iterator[Finding]:
    """Queries and keys that were divided by their length along another axis than the channels."""
    xp, change = call.xp, call.spec.change
    for name in dict.fromkeys(filter(None, (change.query, change.key))):
        x = given.get(name)
        if x is None or x.ndim < 3 or min(x.shape[-3:]) < 2:
            continue
        wide, slack = accumulate(xp, x), LENGTHS[dtype_name(x) in NARROW]
        if float(xp.max(xp.abs(wide))) > 1 + slack:
            continue
        for axis, what in ((-3, "tokens"), (-2, "heads")):
            if _is_unit(xp, wide, axis, slack) and not _is_unit(xp, wide, -1, slack):
                yield Finding(
                    name,
                    f"has length 1 along its {what}, expected along its channels, the last axis: "
                    f"{name} / norm({name}, axis=-1, keepdims=True)",
                    True,
                )


def _is_unit(xp: Namespace, x: Array, axis: int, slack: float) -> bool:
    return bool(xp.all(xp.abs(xp.sum(x * x, axis=axis) - 1) <= slack))


def _overflow(call: Call, given: dict[str, Array]) -> Iterator[Finding]:
    """Products of the largest numbers of queries, keys and values that the dtypes do not hold."""
    xp, change, options = call.xp, call.spec.change, call.options
    names = [n for n in dict.fromkeys((change.query, change.key, change.value)) if n in given]
    largest = {n: math.log2(max(float(xp.max(xp.abs(accumulate(xp, given[n])))), TINY)) for n in names}
    stored = given[change.value].dtype if change.value in names else call.dtype
    is_average = bool(options.get("normalize")) or call.spec.readout.name != "LINEAR"
    states = sum(largest[n] for n in names if n != change.query)
    if states > _exponent(xp, call.dtype):
        text = "the products of keys and values"
    elif not is_average and change.query in names and sum(largest.values()) > _exponent(xp, stored):
        text = "the outputs"
    else:
        return
    each = ", ".join(f"{n} up to {2.0 ** min(largest[n], 1023):.3g}" for n in names)
    yield Finding(max(names, key=lambda n: largest[n]), f"is too large: {each}; {text} may overflow", False)


def _exponent(xp: Namespace, dtype: Any) -> float:
    """The binary logarithm of the largest number of a dtype."""
    return {"float16": 16.0, "float64": 1024.0}.get(dtype_name(xp.empty(0, dtype=dtype)), 128.0)


def _transposed(call: Call) -> Iterator[Finding]:
    """States of as many key as value channels that are transposed views: shapes do not show an exchange."""
    for name, S in call.state_parts.items():
        steps = getattr(S, "strides", None)
        if name in ("state", "state.S") and steps and S.ndim > 1 and S.shape[-1] == S.shape[-2] > 1 and (
            0 < steps[-2] < steps[-1]):  # fmt: skip
            yield Finding(
                name,
                f"is a transposed view {tuple(S.shape)}, whose memory is (..., V, K) if it is read as "
                "(..., K, V): a state of this library needs no transpose",
                False,
            )


def _layout(call: Call) -> Iterator[Finding]:
    sizes, options, value = call.sizes, call.options, call.spec.change.value
    T, H = sizes["T"], sizes.get("H", 0)
    has_state = options["return_state"] or call.given_state is not None
    if options["layout"] == "heads_first" and H > T > 1:
        yield Finding(
            value,
            f"has {H} heads of {T} tokens in the layout (..., H, T, V): if it is (..., T, H, V), "
            "leave out layout='heads_first'",
            False,
        )
    if options["layout"] != "time_first":
        return
    if H > T > 1:
        yield Finding(
            value,
            f"has {T} tokens of {H} heads in the layout (..., T, H, V): if it is (..., H, T, V), pass "
            "layout='heads_first'",
            False,
        )
    elif not call.lead and T > 1 and has_state:
        yield Finding(
            value,
            f"has no batch axis: its first axis, {T}, is read as time; one token of {T} sequences is "
            f"la.step(la.{call.name}, ...)",
            False,
        )


def _interval(limits: Any) -> str:
    low, high = limits
    return f"<= {high:g}" if low == -math.inf else f">= {low:g}" if high == math.inf else f"{low:g} to {high:g}"


def _place(call: Call, name: str, x: Array, n: int) -> str:
    """'batch 0, token 3, head 1' of element n of x, an array in time-first layout."""
    index = []
    for size in reversed(x.shape):
        index.append(n % size)
        n //= size
    index.reverse()
    axes = call.axes.get(name)
    if axes is None:
        return str(tuple(index))
    ranks = (0, len(call.batch))
    letters = next((one for one in map(shapes.letters_of, axes.split("|")) if x.ndim - len(one) in ranks), [])
    names = ["batch"] * (x.ndim - len(letters)) + [AXES.get(letter, letter) for letter in letters]
    return ", ".join(f"{word} {i}" for word, i in zip(names, index, strict=True))


def _is_unpacked() -> bool:
    """Whether the caller unpacks the result of this call into two names: `out, state = fn(...)`, not that of `vjp`."""
    frame, _ = caller()
    if frame is None:
        return False
    entered: Any = sys._getframe()
    while entered.f_back is not frame:
        entered = entered.f_back
    if entered.f_code.co_name == "vjp":
        return False
    after = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "CACHE")
    following = next(after, None)
    return following is not None and following.opname == "UNPACK_SEQUENCE" and following.arg == 2
