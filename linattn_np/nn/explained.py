"""What la.explain and la.check say of a piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ..call.foreign import bridge_of
from ..runtime.arrays import Array, Namespace, dtype_name

if TYPE_CHECKING:
    from ..call.explain import Explanation
    from ..call.findings import Finding

FORMS = {"...": "each number", "... T D": "each token and channel", "... T H K": "each row of a token"}
WORDS = {"T": "token", "H": "head", "D": "channel", "K": "channel", "V": "channel", "M": "channel", "W": "tap",
         "S": "slot"}  # of axes  # fmt: skip


def explain(piece: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Explanation:
    """How a call would be computed; operations are those of products."""
    from ..call.explain import COVERED, WIDTH, Explanation

    given = piece.bound(arrays, keywords)
    if (bridge := bridge_of((), given)) is not None:
        seen = bridge.explain(piece.name, lambda **own: explain(piece, (), own), (), given)
        if seen is not NotImplemented:
            return replace(seen[0], arrays=seen[1])
    c, own = piece.entered(given)
    why, slow = _why_array_calls(piece, c, given), ""
    others = {"numba": why} if why else {"reference": COVERED}
    chosen, reason = ("cuda", "CUDA kernels take CuPy arrays") if c.stored else ("numba", COMPILED)
    if why and not c.compiled and why != EMPTY:
        slow = f"array calls: {why}; NumPy arrays take compiled loops"
    tokens = prod(c.sizes.get("...", ())) * c.sizes.get("T", 1)
    kind = piece.kind_of(c)
    each = [(x.shape, c.kinds.get(n, x.dtype)) for n in piece.axes if (x := own[n]) is not None]
    results = zip(piece.results(given | own), (kind, c.kinds.get("state", kind)), strict=False)
    each += [(shape, dtype) for (shape, _), dtype in results]
    moved = sum(prod(shape) * WIDTH.get(_name(c, dtype), 2) for shape, dtype in each)
    operations = piece.kind.operations(c.sizes)
    form = FORMS.get(next(iter(piece.axes.values())), "each row")
    return Explanation(
        piece.name,
        "reference" if why else chosen,
        why or reason,
        others,
        form,
        None,
        _name(c, c.dtype),
        operations,
        operations / max(tokens, 1),
        moved,
        _replay(piece, c, arrays, keywords),
        slow=slow,
    )


def _replay(piece: Any, c: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """How repeated calls are computed."""
    from ..call.replay import plans

    if not plans.ENABLED:
        return "LINATTN_REPLAY is 0"
    if not piece.is_replayed:
        return "each call draws numbers"
    if c.library.name not in ("numpy", "cupy"):
        return f"the arrays are of {c.library.name}"
    if (signature := piece.signature_of(arrays, keywords)) is None:
        return "there are many offsets or row numbers, or an array is on another device"
    if not plans.has_distinct_arrays(signature):
        return "two arrays begin at one address"
    return plans.described(signature[0], "replayed in part: without checks, but what it computes is no recording")


def _name(c: Any, dtype: Any) -> str:
    return dtype_name(c.xp.empty(0, dtype=dtype))


COMPILED = "compiled loops take NumPy arrays"
EMPTY = "the first array has no numbers"


def _why_array_calls(piece: Any, c: Any, given: Mapping[str, Any]) -> str:
    """Why a call runs neither in compiled loops nor in CUDA kernels; "" if it does."""
    if c.stored:
        return ""
    if c.compiled:
        return piece.kind.array_calls(given)
    if given["backend"] == "reference":
        return "as requested"
    return EMPTY if c.library.name == "numpy" else f"the arrays are of {c.library.name}"


def check(piece: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Finding]:
    """What is doubtful about the numbers of a call."""
    given = piece.bound(arrays, keywords)
    c, own = piece.entered(given)
    found = [f for n in piece.names if (x := own.get(n)) is not None for f in _not_finite(piece, c.xp, n, x)]
    return found if found else list(piece.kind.doubts(c, own, given))


def _not_finite(piece: Any, xp: Namespace, name: str, x: Array) -> Iterator[Finding]:
    """NaN and inf."""
    from ..call.findings import Finding

    inf = xp.isinf(x)
    if name in piece.kind.infinite:
        inf = xp.logical_and(inf, x > 0)
    for what, wrong in (("NaN", xp.isnan(x)), ("inf", inf)):
        flat = xp.reshape(xp.astype(wrong, xp.int8), (-1,))
        if prod(x.shape) and (count := int(xp.sum(flat))):
            place = _place(piece.axes[name], x.shape, int(xp.argmax(flat)))
            yield Finding(name, f"is {what} at {count} of {prod(x.shape)} places, first at {place}", True)


def _place(axes: str, shape: tuple[int, ...], n: int) -> str:
    """'batch 0, token 3, channel 1' of number n of an array."""
    index = []
    for size in reversed(shape):
        index.append(n % size)
        n //= size
    letters = [letter for letter in axes.removesuffix("?").split() if letter != "..."]
    known = [WORDS.get(letter) for letter in letters]
    if not index or not letters or None in known or len(letters) > len(shape):
        return str(tuple(reversed(index)))
    words = ["batch"] * (len(shape) - len(letters)) + known
    return ", ".join(f"{word} {i}" for word, i in zip(words, reversed(index), strict=True))
