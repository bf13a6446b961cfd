"""Repeated calls of pieces: their recorded kernels on the new arrays, or the call without its checks (docs/replay.md).

    signature = signature_of(named, arrays, keywords)          None: the call is computed in full
    result = known(signature)                                  None: it is not recorded
    result = recorded(signature, piece, arrays, keywords, compute)
    plan = plan_of_vjp(signature)                              Forward, or Checked; the pullback is
    gradients = pulled(residuals, cotangents, compute)
    result, pullback = vjp_by_kernels(named, arrays, compute)    of a layer, whose pieces are one plan

Keys, plans and kernels are those of the variants (call/replay). A piece that draws numbers is not replayed: its seed
is an option, and each would have a plan. Of cu_seqlens on the host up to MOST_ROWS numbers are part of the key.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call.replay import plans
from ..call.replay.plans import MOST_ROWS, ROWS, Signature, vjp_key
from ..call.replay.vjp import Forward, Residuals, residuals_of
from ..runtime.recorder import Recorder, active, refuse
from ..spec import Call

Pullback = Callable[..., Any]
Check = Callable[[Mapping[str, Any]], bool]  # Kind.recheck
ndarray = np.ndarray


class Named(NamedTuple):
    """What a signature begins with."""

    name: str


def signature_of(named: Named, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Signature | None:
    """The signature of a call on NumPy or CuPy arrays; None for others, and inside of a call that is being recorded."""
    if active.recorder is not None:
        return None
    if (out := keywords.get("out")) is not None and (at := place_among(out, arrays, keywords)) is not None:
        if type(out) is ndarray and not out.flags.writeable:
            return None
        keywords = {**keywords, "out": None, "in place of": at}
    first = type(arrays[0] if arrays else next(iter(keywords.values()), None))
    if first is not ndarray:
        maker = plans.signature_maker(first)
        return None if maker is None else maker(named, arrays, keywords)
    if (offsets := keywords.get("cu_seqlens")) is not None:
        kind, values = getattr(offsets, "dtype", type(offsets)), offsets
        if type(offsets) is ndarray:
            values = offsets.tolist() if offsets.ndim == 1 else ()
        if not isinstance(values, list | tuple) or not 2 <= len(values) <= MOST_ROWS:
            return None
        keywords = {**keywords, "cu_seqlens": None, "offsets": (str(kind), *values)}
    return plans.signature_of(named, arrays, keywords)  # type: ignore[arg-type]


def place_among(out: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> int | None:
    """Which input `out` is; None for another array."""
    each = (*arrays, *(x for n, x in keywords.items() if n != "out"))
    return next((n for n, x in enumerate(each) if x is out), None)


class Checked:
    """The plan of a NumPy call that more than kernels compute: the call on other arrays, without its checks."""

    def __init__(self, piece: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]):
        self.piece, given = piece, piece.bound(arrays, keywords)
        c, _ = piece.entered(given)
        self.c = c if c.states is None else c._replace(states=c.states._replace(whole=None))
        in_key = ("cu_seqlens", *ROWS)
        each = [*zip(piece.positional, arrays, strict=False), *keywords.items()]
        self.names = [n for n, x in each if type(x) is ndarray and n not in in_key]  # in the order of a signature
        self.options = {n: None if n in self.names else x for n, x in given.items()}

    def entered(self, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(call, arguments of the body) for other arguments by name."""
        c = self.c
        if c.states is not None and given["state"] is not None:
            c = c._replace(states=c.states._replace(whole=given["state"]))
        return c, self.piece.own(c, given)

    def given(self, arrays: list[Any]) -> dict[str, Any]:
        """All arguments by name."""
        return self.options | dict(zip(self.names, arrays, strict=True))

    def __call__(self, arrays: list[Any], state: Any, pointers: None) -> Any:
        """The public result."""
        given = self.given(arrays)
        return self.piece.finished(given, *self.entered(given))


class Rechecked:
    """The recorded kernels of a NumPy call, whose integers are checked before: kernels trust them."""

    def __init__(self, sequence: Any, call: Checked, check: Callable[[Mapping[str, Any]], bool]):
        self.sequence, self.call, self.check = sequence, call, check
        self.nbytes = sequence.nbytes

    def __call__(self, arrays: list[Any], state: Any, pointers: None) -> Any:
        """The public result; None if the call must be computed in full."""
        return self.sequence(arrays, state, pointers) if self.check(self.call.given(arrays)) else None


def checked(signature: Signature, piece: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Checked | None:
    """The plan without checks; None on CuPy, for swapped bytes, and for a state that is overwritten."""
    on_host = signature[3] is None and all(type(x) is ndarray and x.dtype.isnative for x in signature[1])
    if not on_host or keywords.get("overwrite_state") is True:
        return None
    return Checked(piece, arrays, keywords)


def recorder(on_device: bool) -> Recorder:
    """A recorder; without a limit of memory on a device, where a piece allocates its result and little else."""
    found = Recorder()
    if on_device:
        found.left = 1 << 62
    return found


def known(signature: Signature) -> Any:
    """The result of a recorded call; None if it is not known, or must be computed in full."""
    key, given, state, pointers = signature
    plan = plans.by_key.get(key)
    return None if plan is None else plan(given, state, pointers)


def recorded(
    signature: Signature, piece: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any], compute: Callable[[], Any]
) -> Any:
    """The result of a call, whose plan is recorded; piece: whose checks may be left out, None for none."""
    if not plans.is_storable(signature):
        return compute()
    (key, given, state, pointers), out = signature, keywords.get("out")
    with recorder(pointers is not None) as kernels:
        found = compute()
    plan: Any = None
    reason = ""
    try:
        if not kernels.launches:
            raise LookupError(kernels.obstacle or "no kernel computed the call")
        written = (state if keywords.get("overwrite_state") is True else None, out)
        if type(out) is ndarray:  # it is the caller's, or a view of it
            kernels.allocated = [x for x in kernels.allocated if not np.may_share_memory(x, out)]
        plan = _module(signature).LaunchSequence(kernels, given, found, written)
    except LookupError as why:
        reason = str(why)
    in_place = out is not None and place_among(out, arrays, keywords) is not None
    if piece is not None and not in_place and (plan is None or piece.kind.recheck is not None):
        call = checked(signature, piece, arrays, keywords)
        if call is not None:
            plan = call if plan is None else Rechecked(plan, call, piece.kind.recheck)
    plans.store(key, plan or plans.computed_in_full, reason)
    return found


def _module(signature: Signature) -> Any:
    """The module of recorded kernels."""
    if signature[3] is not None:
        from ..runtime.cuda import record

        return record
    from ..runtime.pieces import record as loops

    return loops


def plan_of_vjp(signature: Signature | None) -> Any:
    """The plan of a vjp that can be replayed, Forward or Checked; None without one."""
    if signature is None or (plan := plans.by_key.get(vjp_key(signature))) is None:
        return None
    if type(plan) is Forward and not plan.replayable:
        return plan.otherwise if plan.pullbacks else None
    return plan


def recorded_forward(
    signature: Signature | None, kernels: Recorder | None, result: Any, pull: Pullback, otherwise: Checked | None
) -> Residuals | None:
    """What the pullback of a computed forward is recorded with; None where there is nothing to replay.

    otherwise: the plan of a vjp of more than kernels.
    """
    if signature is None or kernels is None or not plans.ENABLED:
        return None
    key, found = vjp_key(signature), None
    if kernels.launches:
        with contextlib.suppress(LookupError):
            module = _module(signature)
            found = residuals_of(module, key, kernels, signature, result, [*_held(pull)], otherwise)
    if found is None and otherwise is not None and key not in plans.by_key:
        plans.store(key, otherwise)
    return found


def pulled(residuals: Residuals | None, cotangents: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """Gradients of a pullback, replayed if it is known; compute: in full."""
    if residuals is None or active.recorder is not None:
        return compute()
    if (found := residuals.pullback(cotangents)) is not None:
        return found
    with recorder(residuals.pointers is not None) as kernels:
        found = compute()
    if residuals.add_pullback(cotangents, kernels, found):
        plans.store(residuals.forward.key, residuals.forward)
    return found


def vjp_by_kernels(named: Named, arrays: tuple[Any, ...], compute: Callable[[], tuple[Any, Pullback]]) -> Any:
    """compute() = (results, pullback), one plan where both are kernels alone and take few bytes.

    Results and gradients are nested tuples of arrays that depend on `arrays` alone. What computes inside is recorded as
    a part of it, or replayed by plans of its own if this is not recorded.
    """
    signature = signature_of(named, arrays, {}) if plans.ENABLED and type(arrays[0]) is ndarray else None
    if signature is None:
        return compute()

    def computed() -> tuple[Any, Pullback]:
        with recorder(False) as kernels:
            kernels.checks = []
            results, pull = compute()
        residuals, checks = None, bound_checks(kernels.checks, arrays)
        if checks is not None:
            residuals = recorded_forward(signature, kernels, results, pull, None)
        if checks is not None and residuals is not None:
            residuals.forward.checks = checks
        if residuals is None and vjp_key(signature) not in plans.by_key:
            plans.store(vjp_key(signature), plans.computed_in_full)
        return results, lambda *d: pulled(residuals, d, lambda: pull(*d))

    plan = plans.by_key.get(vjp_key(signature))
    if plan is None or (type(plan) is Forward and not plan.pullbacks):
        return computed() if plans.has_distinct_arrays(signature) else compute()
    if type(plan) is not Forward or not plan.replayable or not all(check(arrays) for check in plan.checks):
        return compute()
    if (found := plan(signature[1], None)) is None:
        return compute()
    results, residuals = found

    def pullback(*d: Any) -> Any:
        grads = residuals.pullback(d)
        return computed()[1](*d) if grads is None else grads

    return results, pullback


def refuse_inside(name: str) -> None:
    """A layer that is being recorded has a piece that looks at numbers, or draws some."""
    if active.recorder is not None:
        refuse(f"{name} looks at numbers, or draws some")


def recheck_inside(name: str, check: Check, given: Mapping[str, Any]) -> None:
    """A layer that is being recorded has a piece with a check of integers, which its plan repeats."""
    if active.recorder is not None and active.recorder.checks is not None:
        active.recorder.checks.append((check, given))
    else:
        refuse_inside(name)


def bound_checks(
    checks: list[tuple[Check, Mapping[str, Any]]], arrays: tuple[Any, ...]
) -> list[Callable[[Any], bool]] | None:
    """The checks of a layer's pieces as functions of its arrays; None if one is of integers that are none of them."""
    found = list[Callable[[Any], bool]]()
    for check, given in checks:
        at = {name: n for name, x in given.items() for n, y in enumerate(arrays) if x is y}
        others = {name: x for name, x in given.items() if name not in at}
        if any(type(x) is ndarray and x.dtype.kind in "iu" for x in others.values()):
            return None
        of = {n: np.broadcast_to(x.dtype.type(0), x.shape) if type(x) is ndarray else x for n, x in others.items()}
        found.append(functools.partial(_checked, check, at, of))  # which holds shapes, and no array of the call
    return found


def _checked(check: Check, at: Mapping[str, int], others: dict[str, Any], arrays: tuple[Any, ...]) -> bool:
    return check(others | {name: arrays[n] for name, n in at.items()})


def _held(x: Any) -> Iterator[Any]:
    """The arrays that a pullback holds."""
    if isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            yield from _held(cell.cell_contents)
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _held(part)
    elif isinstance(x, Call):
        yield from _held(tuple(vars(x).values()))
    else:
        yield x
