"""linattn_np in the models of transformers: where they call FLA, mamba_ssm, causal_conv1d or their torch fallbacks.

    from linattn_np.bridges.transformers import patch_transformers
    patch_transformers()                       # or: with patch_transformers(): ...
    model = AutoModelForCausalLM.from_pretrained(...)

Models of transformers (5.23) call functions of their own module, which are replaced there: models that exist
already run on ours too. MiniMax and xLSTM compute in methods of classes, which are replaced likewise.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from importlib import import_module, util
from types import ModuleType, TracebackType
from typing import Any

import torch
import transformers
from transformers.utils.import_utils import is_torchdynamo_exporting

from . import causal_conv1d, fla, mamba_ssm, packed, transformers_layers

log = logging.getLogger(__name__)
MODELS = (
    "bailing_hybrid", "bamba", "falcon_h1", "glm5_next", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "xlstm",
    "zamba2",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {  # by their names in the models' modules
    "torch_chunk_gated_delta_rule": fla.FUNCTIONS["chunk_gated_delta_rule"],
    "torch_recurrent_gated_delta_rule": transformers_layers.step(fla.FUNCTIONS["fused_recurrent_gated_delta_rule"]),
    "chunk_kimi_delta_attention": fla.FUNCTIONS["chunk_kda"],
    "recurrent_kimi_delta_attention": transformers_layers.step(fla.FUNCTIONS["fused_recurrent_kda"]),
    "mamba2_chunk_scan": mamba_ssm.mamba_chunk_scan_combined,
    "mamba2_selective_state_update": mamba_ssm.selective_state_update,
    "causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d.causal_conv1d_update,
}
NORMS = (
    "BailingHybridRMSNormGated", "Glm5NextTextRMSNormGated", "KimiLinearRMSNormGated", "OlmoHybridRMSNormGated",
    "Qwen3NextRMSNormGated", "Qwen3_5MoeRMSNormGated", "Qwen3_5RMSNormGated", "Qwen4ExpTextRMSNormGated",
)  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {  # class -> its forward here
    "MiniMaxLightningAttention": transformers_layers.lightning_attention,
    "xLSTMBackend": transformers_layers.mlstm,
    **dict.fromkeys(NORMS, transformers_layers.gated_norm),
}
Replaced = tuple[Any, str, Any]  # owner, name, what was there
_patch: Patch | None = None


class Patch:
    """What has been replaced; leaving its context, or `undo`, puts everything back."""

    def __init__(self, replaced: list[Replaced]):
        self.replaced = replaced

    def undo(self) -> None:
        global _patch
        while self.replaced:
            setattr(*self.replaced.pop())
        _patch = None if _patch is self else _patch

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def patch_transformers(models: Iterable[str] = MODELS) -> Patch:
    """Let these models (folders of transformers.models) compute with linattn_np, also models that exist already.

    Logs one line that says what has been replaced. A second call does nothing but return the patch that is active.
    Raises RuntimeError for a version of transformers in which there is nothing to replace.
    """
    global _patch
    if _patch is not None:
        return _patch
    found: list[Replaced] = []
    for name in models:
        home = f"transformers.models.{name}.modeling_{name}"
        if util.find_spec(f"transformers.models.{name}") is not None:
            found += patch_module(import_module(home))
    if not found:
        raise RuntimeError(f"patch_transformers: transformers {transformers.__version__} has none of the functions "
                           f"{', '.join(FUNCTIONS)}, expected a version >= 5.23")  # fmt: skip
    _patch = Patch(found)
    where = sorted({getattr(owner, "__module__", None) or owner.__name__ for owner, _, _ in found})
    names = ", ".join(name.rpartition("modeling_")[2] for name in where)
    log.info("linattn_np computes the linear attention of transformers %s: %s", transformers.__version__, names)
    return _patch


def unpatch_transformers() -> None:
    """Put back what patch_transformers has replaced."""
    if _patch is not None:
        _patch.undo()


def patch_module(module: ModuleType) -> list[Replaced]:
    """Replace the functions and methods of one module of a model."""
    found: list[Replaced] = []
    for name, ours in FUNCTIONS.items():
        if callable(theirs := vars(module).get(name)):
            found.append((module, name, theirs))
            setattr(module, name, _in_place_of(theirs, ours))
    for name, body in METHODS.items():
        owner = vars(module).get(name)
        if isinstance(owner, type) and owner.__module__ == module.__name__:
            theirs = vars(owner)["forward"]
            found.append((owner, "forward", theirs))
            setattr(owner, "forward", _method_in_place_of(theirs, body))  # noqa: B010
    if found:
        found += _patch_positions(module)
    return found


RENAMED = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}  # transformers' names of FLA's parameters


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` with the arguments that it knows; `theirs` on devices without it and in torch.export."""
    known = frozenset(inspect.signature(ours).parameters)

    @functools.wraps(theirs)
    def call(*args: Any, **keywords: Any) -> Any:
        if not _supported(args[0] if args else next(iter(keywords.values()))) or is_torchdynamo_exporting():
            return theirs(*args, **keywords)
        keywords = packed.with_sequences(known, {RENAMED.get(n, n): x for n, x in keywords.items()}, args)
        return ours(*args, **{n: x for n, x in keywords.items() if n in known})

    return call


def _method_in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a method, whose parameters are those of `theirs`."""

    @functools.wraps(theirs)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        first = args[0] if args else next(iter(keywords.values()))
        return (ours if _supported(first) else theirs)(self, *args, **keywords)

    return call


def _supported(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" or (x.device.type == "cuda" and _has_cupy())


@functools.cache
def _has_cupy() -> bool:
    return util.find_spec("cupy") is not None


def _patch_positions(module: ModuleType) -> list[Replaced]:
    """Let models of the module keep sequences apart that position_ids alone mark, as their softmax layers do."""
    found: list[Replaced] = []
    for owner in list(vars(module).values()):
        named = isinstance(owner, type) and owner.__module__ == module.__name__ and owner.__name__.endswith("Model")
        if named and "forward" in vars(owner) and "position_ids" in inspect.signature(owner.forward).parameters:
            found.append((owner, "forward", vars(owner)["forward"]))
            setattr(owner, "forward", packed.with_offsets(vars(owner)["forward"]))  # noqa: B010
    return found
