"""linattn_np: linear attention for NumPy and CuPy arrays, forward and hand-derived backward.

    import linattn_np as la
    out = la.gated_delta_rule(q, k, v, g, beta)
    out, state = la.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True)
    result, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(dout)

One function per variant (`VARIANTS` lists them); arrays are (..., T, H, K), time before heads. Names load on first use.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

# Type checkers and editors read __init__.pyi, which `python docs/make_lists.py` writes.
_HOMES = {  # name -> module; the variants are found by catalog.py
    "BoundedState": ".matrix_state.types",
    "Explanation": ".call.explain",
    "Filtered": ".filters.arguments",
    "GatedCache": ".softmax.types",
    "HouseholderCache": ".softmax.types",
    "KeyValueCache": ".softmax.types",
    "LevelState": ".matrix_state.types",
    "LinearMomentum": ".fast_weights.types",
    "LinearState": ".fast_weights.types",
    "MLPMomentum": ".fast_weights.types",
    "MLPState": ".fast_weights.types",
    "Mamba3State": ".matrix_state.types",
    "MomentumState": ".fast_weights.types",
    "NormalisedState": ".matrix_state.types",
    "Options": ".call.options",
    "PastState": ".filters.arguments",
    "PreconditionedState": ".matrix_state.types",
    "ProjectionState": ".filters.arguments",
    "RLSState": ".filters.arguments",
    "SPECS": ".catalog",
    "SlotState": ".matrix_state.types",
    "SmallState": ".serving.small",
    "SolvedState": ".matrix_state.types",
    "StabilisedState": ".matrix_state.types",
    "StateLog": ".serving.log",
    "StateStore": ".serving.store",
    "Summary": ".composition",
    "SwiGLUMomentum": ".fast_weights.types",
    "VARIANTS": ".catalog",
    "VariantSpec": ".spec",
    "WindowState": ".fast_weights.types",
    "affine_projection": ".filters",
    "associative_scan": ".filters.associative",
    "check": ".call.check",
    "clear_cache": ".call.replay.plans",
    "compose": ".call.summary",
    "config": ".runtime.config",
    "delay_line": ".filters",
    "entry_states": ".call.summary",
    "explain": ".call.explain",
    "family_table": ".catalog",
    "influence_matrix": ".call.influence",
    "lms": ".filters",
    "merge": ".nn.merging",
    "nlms": ".filters",
    "pack_state": ".serving.small",
    "read": ".call.read",
    "rls": ".filters",
    "show_versions": ".runtime.versions",
    "step": ".call.step",
    "summary": ".call.summary",
    "unpack_state": ".serving.small",
    "vjp": ".call.vjp",
    "window_least_squares": ".filters",
}
_MODULES = {n: f".{n}" for n in ("distributed", "layers", "nn", "testing", "train")}
_MODULES["feature_maps"] = ".ops.feature_maps"


def __getattr__(name: str) -> _Any:
    if name in _HOMES:
        value = getattr(_import_module(_HOMES[name], __name__), name)
    elif name in _MODULES:
        value = _import_module(_MODULES[name], __name__)
    elif name == "__all__":
        value = sorted([*_HOMES, *_MODULES, *_import_module(".catalog", __name__).modules()])
    elif not name.startswith("_") and name in _import_module(".catalog", __name__).modules():
        value = getattr(_import_module(".catalog", __name__), name)
    else:
        hint = _import_module(".runtime.hints", __name__).function(name, __dir__()) if name[:1] != "_" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]
