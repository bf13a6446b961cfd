"""Models of transformers as models of la.layers, with their parameters, and back: Qwen3-Next and Mamba-2.

    model, params = from_transformers(AutoModelForCausalLM.from_pretrained(...))
    logits = model.logits(params, ids)                     NumPy alone
    to_transformers(params, theirs)                        trained parameters back into the model

Each of their tensors is a stack of rows that belong to arrays of ours: a `Tensor` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..layers import Model, Sizes, block, mix, model_of, projected
from ..layers.attention import gated_attention
from ..layers.parts import swiglu
from ..layers.published import MAMBA, PUBLISHED

Rows = Any  # indices of a tensor's rows
Form = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # theirs to ours, and back

SAME: Form = (lambda x: x, lambda x: x)
DENSE: Form = (lambda x: x.T, lambda x: x.T)  # (M, D) to (D, M)
CONV: Form = (lambda x: x[:, 0], lambda x: x[:, None])  # (D, 1, W) to (D, W)
FROM_ONE: Form = (lambda x: 1 + x, lambda x: x - 1)  # weights of a norm that begin at 0


class Tensor(NamedTuple):
    """One of their tensors: its rows by our paths, and what is done to them."""

    name: str
    rows: Mapping[str, Rows]
    form: Form = SAME


def from_transformers(theirs: Any) -> tuple[Model, dict[str, np.ndarray]]:
    """(model, parameters) of a Qwen3NextForCausalLM with dense layers or a Mamba2ForCausalLM.

    Raises TypeError for another class and ValueError for a configuration that the layers do not have.
    """
    model, tensors = _form_of(theirs)
    given = {n: x.detach().float().cpu().numpy() for n, x in theirs.state_dict().items()}
    if left := given.keys() - {t.name for t in tensors}:
        raise ValueError(f"from_transformers: the model has {min(left)}, expected no other parameters")
    params = {
        path: np.ascontiguousarray(t.form[0](given[t.name][rows])) for t in tensors for path, rows in t.rows.items()
    }
    return model, {path: params[path] for path in model.loss.parameters}


def to_transformers(params: Mapping[str, Any], theirs: Any) -> None:
    """Writes parameters into a model of transformers, in place.

    Raises ValueError for parameters that are missing, and where the model shares two tensors whose parameters differ.
    """
    import torch

    model, tensors = _form_of(theirs)
    if missing := model.loss.parameters.keys() - params.keys():
        raise ValueError(f"to_transformers: params has no {min(missing)!r}")
    shared: dict[int, tuple[str, np.ndarray]] = {}
    with torch.no_grad():
        for t in tensors:
            x = theirs.get_parameter(t.name)
            whole = np.empty(tuple(x.shape), np.float32)
            for path, rows in t.rows.items():
                whole[rows] = t.form[1](np.asarray(params[path]))
            name, before = shared.setdefault(x.data_ptr(), (t.name, whole))
            if not np.array_equal(before, whole):
                raise ValueError(f"to_transformers: {t.name} and {name} are one tensor, expected equal parameters")
            x.copy_(torch.from_numpy(whole))


def _form_of(theirs: Any) -> tuple[Model, list[Tensor]]:
    name = type(theirs).__name__
    if name not in FORMS:
        raise TypeError(f"from_transformers: the model is a {name}, expected one of {', '.join(FORMS)}")
    return FORMS[name](theirs.config)


def _need(config: Any, **expected: Any) -> None:
    for name, value in expected.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"from_transformers: {name} is {found!r}, expected {value!r}")


def _ranges(**counts: int) -> dict[str, Rows]:
    """Rows one after the other, so many for each name."""
    ends = np.cumsum([0, *counts.values()]).tolist()
    return {name: slice(first, last) for name, first, last in zip(counts, ends, ends[1:], strict=False)}


def _by_head(heads: int, **counts: int) -> dict[str, Rows]:
    """Each head has so many rows of each name, one after the other."""
    all_rows = np.arange(heads * sum(counts.values())).reshape(heads, -1)
    return {name: all_rows[:, rows].reshape(-1) for name, rows in _ranges(**counts).items()}


def _under(path: str, rows: Mapping[str, Rows], end: str = "") -> dict[str, Rows]:
    return {f"{path}/{name}{end}": r for name, r in rows.items()}


ALL = slice(None)


def _around(embedding: str) -> list[Tensor]:
    """The tensors before and after the blocks."""
    return [Tensor(f"{embedding}.weight", {"embedding/weight": ALL}),
            Tensor("lm_head.weight", {"head/weight": ALL}, DENSE)]  # fmt: skip


def mamba2(config: Any) -> tuple[Model, list[Tensor]]:
    """Mamba2ForCausalLM: [z, x, B, C, dt] is one projection, [x, B, C] one convolution."""
    _need(config, n_groups=1, use_bias=False, hidden_act="silu")
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        raise ValueError(f"from_transformers: time_step_limit is {config.time_step_limit}, expected (0, inf)")
    D, H, V, K, eps = (
        config.hidden_size,
        config.num_heads,
        config.head_dim,
        config.state_size,
        config.layer_norm_epsilon,
    )
    source = projected(conv=config.conv_kernel, conv_bias=config.use_conv_bias)
    mixer = MAMBA._replace(sources=dict.fromkeys("xBC", source), eps=eps)
    layers = range(config.num_hidden_layers)
    blocks = [block(D, mix("mamba2", mixer, Sizes(D, H, K, V, layer=n, layers=len(layers))), None, eps) for n in layers]
    tensors = [*_around("backbone.embeddings"), Tensor("backbone.norm_f.weight", {"norm/weight": ALL})]
    conv = _ranges(x=H * V, B=K, C=K)
    for n in layers:
        theirs, ours = f"backbone.layers.{n}", f"blocks/{n}/mixer"
        tensors += [
            Tensor(f"{theirs}.norm.weight", {f"blocks/{n}/norm1/weight": ALL}),
            Tensor(f"{theirs}.mixer.in_proj.weight",
                   _under(f"{ours}/project", _ranges(z=H * V, x=H * V, B=K, C=K, dt=H), "/weight"), DENSE),
            Tensor(f"{theirs}.mixer.conv1d.weight", _under(ours, conv, "/conv/weight"), CONV),
            *([Tensor(f"{theirs}.mixer.conv1d.bias", _under(ours, conv, "/conv/bias"))] * config.use_conv_bias),
            Tensor(f"{theirs}.mixer.A_log", {f"{ours}/A/a": ALL}),
            Tensor(f"{theirs}.mixer.D", {f"{ours}/o/D": ALL}),
            Tensor(f"{theirs}.mixer.dt_bias", {f"{ours}/o/dt_bias": ALL}),
            Tensor(f"{theirs}.mixer.norm.weight", {f"{ours}/norm/weight": ALL}),
            Tensor(f"{theirs}.mixer.out_proj.weight", {f"{ours}/out/weight": ALL}, DENSE),
        ]  # fmt: skip
    return model_of(config.vocab_size, D, blocks, eps), tensors


def qwen3_next(config: Any) -> tuple[Model, list[Tensor]]:
    """Qwen3NextForCausalLM with dense hidden layers: gated delta rule and gated softmax attention."""
    _need(config, hidden_act="silu", attention_bias=False)
    layers = range(config.num_hidden_layers)
    sparse = [n for n in layers if n not in config.mlp_only_layers and config.num_experts
              and (n + 1) % config.decoder_sparse_step == 0]  # fmt: skip
    if sparse:
        raise ValueError(
            f"from_transformers: layer {sparse[0]} has {config.num_experts} experts, expected dense layers"
        )
    rope, D, eps = config.rope_parameters, config.hidden_size, config.rms_norm_eps
    if rope["rope_type"] != "default":
        raise ValueError(f"from_transformers: rope_type is {rope['rope_type']!r}, expected 'default'")
    blocks, tensors = [], _around("model.embed_tokens")
    tensors.append(Tensor("model.norm.weight", {"norm/weight": ALL}, FROM_ONE))
    for n in layers:
        theirs, ours = f"model.layers.{n}", f"blocks/{n}"
        make = _delta if config.layer_types[n] == "linear_attention" else _attention
        mixer, own = make(config, theirs, f"{ours}/mixer")
        blocks.append(block(D, mixer, swiglu(D, config.intermediate_size), eps))
        tensors += own
        tensors += [Tensor(f"{theirs}.{a}.weight", {f"{ours}/{b}/weight": ALL}, FROM_ONE)
                    for a, b in (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"))]  # fmt: skip
        tensors += [Tensor(f"{theirs}.mlp.{a}_proj.weight", {f"{ours}/mlp/{b}/weight": ALL}, DENSE)
                    for a, b in (("up", "project/up"), ("gate", "project/gate"), ("down", "down"))]  # fmt: skip
    return model_of(config.vocab_size, D, blocks, eps), tensors


def _delta(config: Any, theirs: str, ours: str) -> tuple[Any, list[Tensor]]:
    """A layer of the gated delta rule: rows of in_proj_qkvz and in_proj_ba by key head."""
    Hk, H = config.linear_num_key_heads, config.linear_num_value_heads
    K, V, W = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    sources = {**PUBLISHED["gated_delta_rule"].sources, **dict.fromkeys("qkv", projected(conv=W))}
    mixer = PUBLISHED["gated_delta_rule"]._replace(sources=sources, groups=Hk, eps=config.rms_norm_eps)
    r, theirs = H // Hk, f"{theirs}.linear_attn"
    return mix("gated_delta_rule", mixer, Sizes(config.hidden_size, H, K, V)), [
        Tensor(f"{theirs}.in_proj_qkvz.weight",
               _under(f"{ours}/project", _by_head(Hk, q=K, k=K, v=r * V, z=r * V), "/weight"), DENSE),
        Tensor(f"{theirs}.in_proj_ba.weight", _under(f"{ours}/project", _by_head(Hk, beta=r, g=r), "/weight"), DENSE),
        Tensor(f"{theirs}.conv1d.weight", _under(ours, _ranges(q=Hk * K, k=Hk * K, v=H * V), "/conv/weight"), CONV),
        Tensor(f"{theirs}.A_log", {f"{ours}/o/A_log": ALL}),
        Tensor(f"{theirs}.dt_bias", {f"{ours}/o/dt_bias": ALL}),
        Tensor(f"{theirs}.norm.weight", {f"{ours}/norm/weight": ALL}),
        Tensor(f"{theirs}.out_proj.weight", {f"{ours}/out/weight": ALL}, DENSE),
    ]  # fmt: skip


def _attention(config: Any, theirs: str, ours: str) -> tuple[Any, list[Tensor]]:
    """A layer of softmax attention: rows of q_proj are queries and gates by head."""
    H, K, rope, theirs = config.num_attention_heads, config.head_dim, config.rope_parameters, f"{theirs}.self_attn"
    dims = int(K * rope["partial_rotary_factor"])
    layer = gated_attention(config.hidden_size, H, K, config.num_key_value_heads, dims, rope["rope_theta"],
                            config.rms_norm_eps)  # fmt: skip
    return layer, [
        Tensor(f"{theirs}.q_proj.weight", _under(f"{ours}/project", _by_head(H, q=K, z=K), "/weight"), DENSE),
        *(Tensor(f"{theirs}.{n}_proj.weight", {f"{ours}/project/{n}/weight": ALL}, DENSE) for n in "kv"),
        Tensor(f"{theirs}.o_proj.weight", {f"{ours}/out/weight": ALL}, DENSE),
        *(Tensor(f"{theirs}.{n}_norm.weight", {f"{ours}/{n}/norm/weight": ALL}, FROM_ONE) for n in "qk"),
    ]  # fmt: skip


FORMS: Mapping[str, Callable[[Any], tuple[Model, list[Tensor]]]] = {
    "Mamba2ForCausalLM": mamba2, "Qwen3NextForCausalLM": qwen3_next}  # fmt: skip
