"""Operators `torch.ops.linattn_np.nn_NAME` and `nn_NAME_backward` of the pieces of linattn_np.nn, for traced calls.

torch.compile and torch.export put one node into their graphs, which runs the piece on views. The arrays that are given
are one list of tensors, cu_seqlens the last one if it is a tensor; `options` is JSON, with the arrays' names. The
result is a list: out, and the final states with return_state. The backward recomputes the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ...call.results import Result
from ...nn.declaration import PIECES, Piece
from .autograd import SECOND, once
from .operators import NAMESPACE, decoded, encoded, known
from .views import Tensor


@functools.cache
def library() -> torch.library.Library:
    """The operators, defined by the first call."""
    own = torch.library.Library(NAMESPACE, "FRAGMENT")
    for piece in PIECES.values():
        define(own, piece)
    return own


def define(own: torch.library.Library, piece: Piece) -> None:
    """The operator of a piece and its backward."""
    one, other = f"nn_{piece.name}", f"nn_{piece.name}_backward"
    own.define(f"{one}(Tensor[] arrays, str options) -> Tensor[]")
    own.define(f"{other}(Tensor[] arrays, str options, Tensor?[] cotangents) -> Tensor[]")
    for name, function, fake in ((one, _forward, _fake), (other, _backward, _fake_backward)):
        for device in ("CPU", "CUDA"):
            own.impl(name, functools.partial(function, piece), device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(fake, piece), lib=own)
    gradients = functools.partial(_gradients, piece)
    torch.library.register_autograd(f"{NAMESPACE}::{one}", gradients, setup_context=_keep, lib=own)
    torch.library.register_autograd(f"{NAMESPACE}::{other}", functools.partial(_no_second, piece), lib=own)


def defined() -> bool:
    """Define the operators; always true."""
    return library() is not None


defined._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced(piece: Piece, keywords: Mapping[str, Any]) -> Any:
    """The result of a piece by its operator."""
    if keywords.get("out") is not None:
        raise TypeError(f"{piece.name}: out was given in a traced call, expected None")
    names = [n for n in (*piece.axes, "cu_seqlens") if isinstance(keywords.get(n), Tensor)]
    plain = {n: known(x) for n, x in keywords.items() if n not in names and x is not None} | {"arrays": names}
    operator = getattr(getattr(torch.ops, NAMESPACE), f"nn_{piece.name}")
    found = operator([keywords[n] for n in names], encoded(piece.name, tuple(plain.items())))
    return Result(*found) if keywords.get("return_state") else found[0]


def _keywords(arrays: list[Tensor], options: str) -> dict[str, Any]:
    """The arguments of the piece."""
    plain = dict(decoded(options))
    return dict(zip(plain.pop("arrays"), arrays, strict=True)) | plain


def _listed(result: Any) -> list[Tensor]:
    return [x.contiguous() for x in (result if isinstance(result, Result) else (result,))]


def _forward(piece: Piece, arrays: list[Tensor], options: str) -> list[Tensor]:
    with torch.no_grad():
        return _listed(piece(**_keywords(arrays, options)))


def _backward(piece: Piece, arrays: list[Tensor], options: str, cotangents: list[Tensor | None]) -> list[Tensor]:
    keywords = _keywords(arrays, options)
    with torch.no_grad():
        grads = piece.vjp((), keywords)[1](*cotangents)
    return [getattr(grads, n).contiguous() for n in keywords if n in piece.names]


def _fake(piece: Piece, arrays: list[Tensor], options: str) -> list[Tensor]:
    keywords = _keywords(arrays, options)
    first = next(keywords[n] for n in piece.names if n in keywords)
    return [first.new_empty(shape, dtype=getattr(torch, kind)) for shape, kind in piece.results(keywords)]


def _fake_backward(piece: Piece, arrays: list[Tensor], options: str, cotangents: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for n, x in _keywords(arrays, options).items() if n in piece.names]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    arrays, ctx.options = inputs
    ctx.save_for_backward(*arrays)
    ctx.set_materialize_grads(False)


def _gradients(piece: Piece, ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, None]:
    arrays = list(ctx.saved_tensors)
    backward = getattr(getattr(torch.ops, NAMESPACE), f"nn_{piece.name}_backward")
    found = list(once(piece.name, backward(arrays, ctx.options, list(cotangents)), (*arrays, *cotangents)))
    names = decoded(ctx.options)["arrays"]
    return [found.pop(0) if n in piece.names else None for n in names], None


def _no_second(piece: Piece, ctx: Any, cotangents: Any) -> Any:
    raise RuntimeError(SECOND.format(piece.name))
