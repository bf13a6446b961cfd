"""linattn_np: linear attention for NumPy and CuPy arrays, forward and hand-derived backward.

    import linattn_np as la
    out = la.gated_delta_rule(q, k, v, g, beta)
    out, state = la.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True)
    result, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(dout)

One function a variant (`VARIANTS` lists them); arrays are (..., T, H, K), time before heads. Names load on first use.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

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
        found = getattr(_import_module(_HOMES[name], __name__), name)
    elif name in _MODULES:
        found = _import_module(_MODULES[name], __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
