"""linattn_np: linear attention for NumPy and CuPy arrays, forward and hand-derived backward.

    import linattn_np as la
    out = la.gated_delta_rule(q, k, v, g, beta)
    out, state = la.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True)
    result, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(dout)

One function per variant (`VARIANTS` lists them); arrays are (..., T, H, K), time before heads. Names load on first use.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:  # what type checkers and editors see
    from . import testing as testing
    from .call.explain import Explanation as Explanation
    from .call.explain import explain as explain
    from .call.influence import influence_matrix as influence_matrix
    from .call.options import Options as Options
    from .call.read import read as read
    from .call.vjp import vjp as vjp
    from .catalog import family_table as family_table
    from .matrix_state.types import BoundedState as BoundedState
    from .matrix_state.types import NormalisedState as NormalisedState
    from .matrix_state.types import SlotState as SlotState
    from .matrix_state.types import SolvedState as SolvedState
    from .matrix_state.types import StabilisedState as StabilisedState
    from .ops import feature_maps as feature_maps
    from .runtime.versions import show_versions as show_versions
    from .spec import VariantFunction as _VariantFunction
    from .spec import VariantSpec as VariantSpec
    from .variants.delta.comba import comba as comba
    from .variants.delta.delta_product import delta_product as delta_product
    from .variants.delta.delta_rule import delta_rule as delta_rule
    from .variants.delta.gated_delta_rule import gated_delta_rule as gated_delta_rule
    from .variants.delta.kda import kda as kda
    from .variants.delta.longhorn import longhorn as longhorn
    from .variants.free.dplr import dplr as dplr
    from .variants.free.dplr import rwkv7 as rwkv7
    from .variants.free.iplr import iplr as iplr
    from .variants.no_erase.based import based as based
    from .variants.no_erase.dfw import dfw as dfw
    from .variants.no_erase.gla import gla as gla
    from .variants.no_erase.gsa import abc as abc
    from .variants.no_erase.gsa import gsa as gsa
    from .variants.no_erase.hgrn2 import hgrn2 as hgrn2
    from .variants.no_erase.lightning_attention import lightning_attention as lightning_attention
    from .variants.no_erase.linear_attention import linear_attention as linear_attention
    from .variants.no_erase.mamba2 import mamba2 as mamba2
    from .variants.no_erase.mamba2 import transxssm as transxssm
    from .variants.no_erase.mesa_net import mesa_net as mesa_net
    from .variants.no_erase.mlstm import mlstm as mlstm
    from .variants.no_erase.performer import performer as performer
    from .variants.no_erase.rebased import rebased as rebased
    from .variants.no_erase.retention import retention as retention
    from .variants.no_erase.retention import retnet as retnet
    from .variants.no_erase.rfa import rfa as rfa
    from .variants.no_erase.rwkv6 import rwkv6 as rwkv6
    from .variants.no_erase.simple_gla import simple_gla as simple_gla

    VARIANTS: tuple[_VariantFunction, ...]
    SPECS: tuple[VariantSpec, ...]

__version__ = "0.1.0"

_HOMES = {  # name -> module
    "BoundedState": ".matrix_state.types",
    "Explanation": ".call.explain",
    "NormalisedState": ".matrix_state.types",
    "Options": ".call.options",
    "SPECS": ".catalog",
    "SlotState": ".matrix_state.types",
    "SolvedState": ".matrix_state.types",
    "StabilisedState": ".matrix_state.types",
    "VARIANTS": ".catalog",
    "VariantSpec": ".spec",
    "explain": ".call.explain",
    "family_table": ".catalog",
    "influence_matrix": ".call.influence",
    "read": ".call.read",
    "show_versions": ".runtime.versions",
    "vjp": ".call.vjp",
    "abc": ".catalog",
    "based": ".catalog",
    "comba": ".catalog",
    "delta_product": ".catalog",
    "delta_rule": ".catalog",
    "dfw": ".catalog",
    "dplr": ".catalog",
    "gated_delta_rule": ".catalog",
    "gla": ".catalog",
    "gsa": ".catalog",
    "hgrn2": ".catalog",
    "iplr": ".catalog",
    "kda": ".catalog",
    "lightning_attention": ".catalog",
    "linear_attention": ".catalog",
    "longhorn": ".catalog",
    "mamba2": ".catalog",
    "mesa_net": ".catalog",
    "mlstm": ".catalog",
    "performer": ".catalog",
    "rebased": ".catalog",
    "retention": ".catalog",
    "retnet": ".catalog",
    "rfa": ".catalog",
    "rwkv6": ".catalog",
    "rwkv7": ".catalog",
    "simple_gla": ".catalog",
    "transxssm": ".catalog",
}
_MODULES = {"feature_maps": ".ops.feature_maps", "testing": ".testing"}
__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> _Any:
    if name in _HOMES:
        value = getattr(_import_module(_HOMES[name], __name__), name)
    elif name in _MODULES:
        value = _import_module(_MODULES[name], __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
