"""linattn_np in the models of transformers: where they call FLA, mamba_ssm, causal_conv1d or their torch fallbacks.

    from linattn_np.bridges.transformers import patch_transformers
    patch_transformers()                       # or: with patch_transformers(): ...
    model = AutoModelForCausalLM.from_pretrained(...)

Models of transformers (5.23, 5.24) call functions of their own module, which are replaced there: models that exist
already run on ours too. MiniMax and xLSTM compute in methods of classes, which are replaced likewise.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module, util
from types import ModuleType, TracebackType
from typing import Any

import torch
import transformers
from transformers.utils.import_utils import is_torchdynamo_exporting

from . import causal_conv1d, fla, mamba_ssm, packed, transformers_layers

log = logging.getLogger(__name__)
TESTED = (5, 23), (5, 24)  # the oldest and the newest transformers
MODELS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "qwen4_exp", "recurrent_gemma", "xlstm", "zamba2",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {  # by their names in the models' modules
    "torch_chunk_gated_delta_rule": fla.FUNCTIONS["chunk_gated_delta_rule"],
    "torch_recurrent_gated_delta_rule": transformers_layers.step(fla.FUNCTIONS["fused_recurrent_gated_delta_rule"]),
    "chunk_kimi_delta_attention": fla.FUNCTIONS["chunk_kda"],
    "recurrent_kimi_delta_attention": transformers_layers.step(fla.FUNCTIONS["fused_recurrent_kda"]),
    "mamba2_chunk_scan": mamba_ssm.mamba_chunk_scan_combined,
    "mamba2_selective_state_update": mamba_ssm.selective_state_update,
    "mamba_selective_scan": transformers_layers.selective_scan,
    "mamba_selective_state_update": mamba_ssm.selective_state_update,
    "causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d.causal_conv1d_update,
}
NORMS = (
    "BailingHybridRMSNormGated", "Glm5NextTextRMSNormGated", "KimiLinearRMSNormGated", "OlmoHybridRMSNormGated",
    "Qwen3NextRMSNormGated", "Qwen3_5MoeRMSNormGated", "Qwen3_5RMSNormGated", "Qwen4ExpTextRMSNormGated",
)  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {  # methods of classes
    "MiniMaxLightningAttention.forward": transformers_layers.lightning_attention,
    "RecurrentGemmaRglru._rnn_scan": transformers_layers.rnn_scan,
    "xLSTMBackend.forward": transformers_layers.mlstm,
    **{f"{name}.forward": transformers_layers.gated_norm for name in NORMS},
}
HANDED_ON = ("Mamba2Model", "Mamba2ForCausalLM", "MambaModel", "MambaForCausalLM", "FalconMambaModel",
             "FalconMambaForCausalLM", "xLSTMModel")  # classes that positions reach as other keywords  # fmt: skip
RENAMED = {"query": "q", "key": "k", "value": "v", "hidden_states": "x", "past_key_values": "cache",
           "cache_params": "cache"}  # transformers' names of our parameters  # fmt: skip
WITHOUT_EFFECT = frozenset((  # keywords that models hand to all layers: of softmax layers, experts, outputs, losses
    "cu_seq_lens_k", "is_causal", "max_length_q", "max_length_k", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "use_cache",
))  # fmt: skip
Replaced = tuple[Any, str, Any]  # owner, name, the original
_patch: Patch | None = None


class Patch:
    """What has been replaced; leaving its context, or `undo`, puts everything back."""

    def __init__(self, models: tuple[str, ...]):
        self.models = models
        self.replaced: list[Replaced] = []

    def undo(self) -> None:
        global _patch
        while self.replaced:
            setattr(*self.replaced.pop())
        _patch = None if _patch is self else _patch

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def by_model(self) -> dict[str, list[str]]:
        """Model -> the functions, and methods as class.forward, that are replaced in its module."""
        found: dict[str, list[str]] = {model: [] for model in self.models}
        for owner, name, _ in self.replaced:
            place = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
            label = name if owner.__name__ == place else f"{owner.__name__}.{name}"
            found[place.rpartition("modeling_")[2]].append(label)
        return {model: names for model, names in found.items() if names}

    def __repr__(self) -> str:
        models = self.by_model()
        lines = [f"  {model}: {', '.join(names)}" for model, names in models.items()]
        return "\n".join([f"Patch of transformers {transformers.__version__}, {len(models)} models", *lines])


def patch_transformers(models: Iterable[str] | None = None) -> Patch:
    """Let these models (names of MODELS, None for all) compute with linattn_np, also models that exist already.

    Logs one line that names the replaced functions. A second call returns the patch that is active.
    Warns of a version of transformers that has not been tested. Raises TypeError for a string or a model, ValueError
    for unknown names, RuntimeError for models that the active patch lacks and for a version of transformers in which
    there is nothing to replace.
    """
    global _patch
    names = _names(models)
    if _patch is not None:
        if missing := [n for n in names if n not in _patch.models]:
            raise RuntimeError(f"patch_transformers: a patch without {', '.join(missing)} is active, expected "
                               "unpatch_transformers() first")  # fmt: skip
        log.info("linattn_np: transformers is patched already")
        return _patch
    if not TESTED[0] <= _version() <= TESTED[1]:
        oldest, newest = map(_text, TESTED)
        warnings.warn(f"patch_transformers: transformers {transformers.__version__} is untested, {oldest} to {newest} "
                      "are tested: compare a model's outputs with and without the patch", stacklevel=2)  # fmt: skip
    patch = Patch(names)
    try:
        for name in names:
            patch.replaced += patch_module(import_module(f"transformers.models.{name}.modeling_{name}"))
    except BaseException:
        patch.undo()
        raise
    if not patch.replaced:
        raise RuntimeError(f"patch_transformers: transformers {transformers.__version__} has none of the functions "
                           f"{', '.join(FUNCTIONS)}, expected a version >= {_text(TESTED[0])}")  # fmt: skip
    _patch = patch
    log.info("linattn_np computes the linear attention of transformers %s: %s", transformers.__version__,
             ", ".join(sorted(patch.by_model())))  # fmt: skip
    return _patch


def unpatch_transformers() -> None:
    """Restore the functions that patch_transformers replaced."""
    if _patch is not None:
        _patch.undo()


def patch_module(module: ModuleType) -> list[Replaced]:
    """Replace the functions and methods of one module of a model."""
    found: list[Replaced] = []
    for name, ours in FUNCTIONS.items():
        if callable(theirs := vars(module).get(name)):
            found.append((module, name, theirs))
            setattr(module, name, _in_place_of(theirs, ours, name))
    for label, body in METHODS.items():
        name, method = label.split(".")
        owner = vars(module).get(name)
        if isinstance(owner, type) and owner.__module__ == module.__name__:
            found.append(_replace(owner, _in_place_of(vars(owner)[method], body, name), method))
    return found + _patch_sequences(module) if found else found


def _names(models: Any) -> tuple[str, ...]:
    """The names of models that are to be patched."""
    fn = "patch_transformers"
    if models is None:
        return tuple(n for n in MODELS if util.find_spec(f"transformers.models.{n}") is not None)
    if isinstance(models, str):
        raise TypeError(f"{fn}: models is the string {models!r}, expected a list of names, [{models!r}]")
    if isinstance(models, torch.nn.Module):
        raise TypeError(f"{fn}: models is a {type(models).__name__}, expected a list of names such as "
                        "['qwen3_next']: the patch is of classes, and models that exist already follow it")  # fmt: skip
    if not isinstance(models, Iterable):
        raise TypeError(f"{fn}: models is a {type(models).__name__}, expected a list of names or None")
    names = tuple(models)
    for n in names:
        if n not in MODELS:
            raise ValueError(f"{fn}: models has {n!r}, expected names among {', '.join(MODELS)}")
        if util.find_spec(f"transformers.models.{n}") is None:
            raise ValueError(f"{fn}: models has {n!r}, which transformers {transformers.__version__} lacks")
    return names


def _version() -> tuple[int, ...]:
    return tuple(int(n) for n in transformers.__version__.split(".")[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`ours`, called as `theirs` is; `theirs` on devices without it and in torch.export.

    Raises TypeError for a keyword with a value that `ours` does not know, except the keywords of WITHOUT_EFFECT.
    """
    names, known = tuple(inspect.signature(theirs).parameters), frozenset(inspect.signature(ours).parameters)
    renamed = {n: new for n, new in RENAMED.items() if new in known}

    @functools.wraps(theirs)
    def call(*args: Any, **keywords: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | keywords
        first = next(x for x in given.values() if isinstance(x, torch.Tensor))
        if not _supported(first) or is_torchdynamo_exporting():
            return theirs(*args, **keywords)
        given = packed.with_sequences(known, {renamed.get(n, n): x for n, x in given.items()})
        for n, x in given.items():
            if n not in known and n not in WITHOUT_EFFECT and x is not None and x is not False:
                raise TypeError(f"{name}: linattn_np does not know the argument {n} of transformers "
                                f"{transformers.__version__}, expected None or a call without the patch")  # fmt: skip
        return ours(**{n: x for n, x in given.items() if n in known})

    return call


def _supported(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" or (x.device.type == "cuda" and _has_cupy())


@functools.cache
def _has_cupy() -> bool:
    return util.find_spec("cupy") is not None


def _patch_sequences(module: ModuleType) -> list[Replaced]:
    """Let models of the module keep packed sequences apart, or refuse them, however a call marks them."""
    found: list[Replaced] = []
    for name, owner in list(vars(module).items()):
        if not isinstance(owner, type) or owner.__module__ != module.__name__ or "forward" not in vars(owner):
            continue
        by_position = name.endswith("Model") and "position_ids" in inspect.signature(vars(owner)["forward"]).parameters
        if by_position or name in HANDED_ON:
            found.append(_replace(owner, packed.apart(vars(owner)["forward"], name)))
    return found


def _replace(owner: type, body: Callable[..., Any], method: str = "forward") -> Replaced:
    """Give a class a method; returns the original."""
    theirs = vars(owner)[method]
    setattr(owner, method, body)
    return owner, method, theirs
