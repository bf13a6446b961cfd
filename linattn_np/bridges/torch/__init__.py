"""PyTorch: tensors in every function of linattn_np, differentiable by autograd.

The first call on a tensor imports this package. Nothing of it needs to be called.
"""

from __future__ import annotations

from typing import Any

from ...call.foreign import register
from . import calls
from .views import PLAIN


def bridge_of(kind: type) -> Any:
    """The bridge of a type of tensors; None for subclasses of other people, which torch functions compute."""
    return calls if kind in PLAIN or "__torch_dispatch__" in vars(kind) else None


for kind in PLAIN:
    register(kind, calls)

__all__ = ["bridge_of"]
