"""The public function: a variant or a piece of layers, over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..call.binding import bind, spec_of
from ..call.foreign import bridge_of
from . import halo, sequence
from .comm import Comm
from .parts import Ranks

OWN = ("lengths", "segment", "cu_seqlens")  # options that say how the tokens lie


def run(fn: Callable[..., Any], *arrays: Any, comm: Comm, **options: Any) -> Any:
    """fn(*arrays, **options) on sequences whose tokens lie on the ranks of `comm`, in their order.

    fn               a variant whose states compose (`la.summary`), or a piece of `la.nn` with a state: `short_conv`
    arrays, options  those of fn; every rank gives its own tokens, (..., T, H, K), and gets its own outputs. Arrays
                     without an axis of tokens are the same on all ranks
    comm             the ranks: `Threads`, `MPI`, `NCCL`, `TorchDistributed`, or your own `Comm`
    state            before the first token of the first rank; return_state=True: after the last token of the last
                     rank. Both are the same on all ranks
    cu_seqlens       offsets of a ragged batch over the tokens of all ranks: sequences may cross ranks. States (N, ...)
    lengths          tokens of each rank; None: as many as here. Without cu_seqlens and segment they do not matter
    segment          None, or how many tokens are computed in one go, counted from the first token of all: the bits are
                     the same on any number of ranks, if each begins at a multiple of it. None: all tokens of a rank

    Every rank sends the summary of its tokens once, or of each segment: as many bytes for any number of tokens. With
    return_state the last rank sends its state. la.vjp(la.distributed.run, fn, *arrays, comm=comm, ...) gives
    pullback(dout, dstate): dout of the rank's own outputs, dstate the same on all ranks. Gradients of arrays without
    an axis of tokens are the rank's share: their sum over the ranks is the gradient.

    Raises TypeError for a fn whose states do not compose, ValueError for options about states that lie elsewhere,
    RankError if another rank fails or does not answer in time, and every error of fn.
    """
    given, names = _by_name(fn, arrays, options)
    if (bridge := bridge_of((), given)) is not None:
        rule = functools.partial(_rule, fn)
        found = bridge.apply("distributed.run", functools.partial(_run, fn), rule, names, given | {"comm": comm})
        if found is not NotImplemented:
            return found
    return _run(fn, comm=comm, **given)


def _vjp(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """The rule of la.vjp: arrays begins with fn."""
    if not arrays or keywords.get("comm") is None:
        missing = (
            "fn is missing, expected a variant of linattn_np" if not arrays else "comm is missing, expected the ranks"
        )
        raise TypeError(f"distributed.run: {missing}")
    options = {n: x for n, x in keywords.items() if n != "comm"}
    fn, given = arrays[0], _by_name(arrays[0], arrays[1:], options)[0] | {"comm": keywords["comm"]}
    if (bridge := bridge_of((), given)) is not None:
        found = bridge.run_vjp("distributed.run", None, functools.partial(_rule, fn), (), given)
        if found is not NotImplemented:
            return found
    return _rule(fn, (), given)


run.vjp = _vjp  # type: ignore[attr-defined]


def _by_name(fn: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(arguments by name, the names of those with a gradient)."""
    if (piece := getattr(fn, "piece", None)) is not None:
        return {**dict(zip(piece.positional, arrays, strict=False)), **options}, piece.names
    spec = spec_of("distributed.run", fn)
    bind(spec, arrays, {n: x for n, x in options.items() if n not in OWN})  # raises
    return {**dict(zip(spec.arrays, arrays, strict=False)), **options}, (*spec.arrays, "state")


def _taken(given: Mapping[str, Any]) -> tuple[Ranks, dict[str, Any]]:
    """(how the tokens lie, the arguments of fn)."""
    ranks = Ranks(given["comm"], *(given.get(n) for n in OWN))
    return ranks, {n: x for n, x in given.items() if n not in ("comm", *OWN)}


def _run(fn: Callable[..., Any], **given: Any) -> Any:
    home = halo if hasattr(fn, "piece") else sequence
    return home.run(fn, *_taken(given))


def _rule(fn: Callable[..., Any], _: Any, given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    home = halo if hasattr(fn, "piece") else sequence
    return home.run_vjp(fn, *_taken(given))
