"""flash-linear-attention's functions (FLA 0.6) for torch tensors: its names, order of arguments, defaults and states.

    from linattn_np.bridges.fla import chunk_gated_delta_rule
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

chunk_, fused_chunk_, fused_recurrent_ and parallel_ name one function: the call decides the form. Tensors are
(B, T, H, D), states (N, H, K, V) in float32 or wider. What only steers FLA's kernels (chunk_size, chunk_indices,
disable_recompute, ...) has no effect on results. Modules and the short convolution: linattn_np.bridges.modules.
"""

from __future__ import annotations

from typing import Any

import torch

from ..matrix_state.types import NormalisedState, PreconditionedState, SlotState
from ..runtime.values import shown
from .adapter import Given, Library, Translated, adapter
from .modules import l2norm

L2NORM_EPS = 1e-6  # FLA's, inside the root
NORMALISER_EPS = 1e-10  # linear_attn's, added to the sum of similarities
DEFAULTS: dict[str, Any] = {
    "scale": None, "initial_state": None, "output_final_state": False, "state_v_first": False, "cu_seqlens": None,
    "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None,
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "lower_bound": None, "safe_gate": False,
    "initial_A_state": None, "transpose_state_layout": False, "x": 1.5, "eps": 1e-6, "log_atk_scale": None,
    "overwrite_state": False,  # ours: the final state is written into initial_state; not differentiable
    # these have no effect
    "cu_seqlens_cpu": None, "chunk_indices": None, "chunk_size": None, "disable_recompute": False,
    "checkpoint_level": 2, "use_graph": False, "max_num_seqs": None, "solve_tril_precision": None,
    # and these are not supported
    "cp_context": None, "return_intermediate_states": False, "reverse": False, "output_attentions": False,
}  # fmt: skip
UNSUPPORTED = ("cp_context", "return_intermediate_states", "reverse", "output_attentions")


# FLA's arguments -> ours


# of arrays whose sizes a translation needs
AXES = {"q": "(B, T, H, D)", "r": "(B, T, H, D)", "k": "(B, T, H, D)", "v": "(B, T, H, D)", "kk": "(B, T, H, D)",
        "a": "(B, T, H, D)", "beta": "(B, T, H)", "g_atk": "(B, T, H)", "beta_atk": "(B, T, H)",
        "log_atk_scale": "(H,)", "initial_A_state": "(N, H, K)"}  # fmt: skip
TENSORS = (*AXES, "g", "g_gamma", "dt_bias")


def check(fn: str, given: Given) -> None:
    """Raise unless the arrays that a translation reads are tensors with their axes; our function checks the others."""
    for name in TENSORS:
        x, axes = given.get(name), AXES.get(name)
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{fn}: {name} is {shown(x)}, expected a tensor")
        if x is not None and axes is not None and x.ndim != len(axes.strip("(,)").split(",")):
            raise ValueError(f"{fn}: {name} has shape {tuple(x.shape)}, expected {axes}")
    state = given["initial_state"]
    may_be_pair = "initial_A_state" not in given
    each = state if may_be_pair and isinstance(state, tuple | list) and len(state) == 2 else (state,)
    if state is not None and not all(isinstance(S, torch.Tensor) for S in each):
        words = "a tensor or a pair of them" if may_be_pair else "a tensor"
        raise TypeError(f"{fn}: initial_state is {shown(state)}, expected {words}")
    if fn == "chunk_precond_kda" and not given["use_qk_l2norm_in_kernel"]:
        raise ValueError(f"{fn}: use_qk_l2norm_in_kernel is {shown(given['use_qk_l2norm_in_kernel'])}, expected True; "
                         "fused_recurrent_precond_kda has both")  # fmt: skip


def normalise_one_token(given: Given) -> None:
    """q and k of a decoding step on a device over their length, by torch: a step without a norm is replayed there."""
    if not given.get("use_qk_l2norm_in_kernel") or not given["q"].is_cuda:
        return
    q, k = given["q"], given["k"]
    if q.shape[1] != 1 or q.dtype != k.dtype:
        return
    rows = torch.cat([q, k], dim=2)
    rows = l2norm(rows, L2NORM_EPS, torch.promote_types(rows.dtype, torch.float32))
    given["q"], given["k"] = rows.split((q.shape[2], k.shape[2]), dim=2)
    given["use_qk_l2norm_in_kernel"] = False


def options_of(given: Given) -> dict[str, Any]:
    """Options that every function has, and the norm of q and k."""
    options: dict[str, Any] = {"scale": given["scale"], "return_state": bool(given["output_final_state"])}
    if options["scale"] is None:
        options["scale"] = given["k"].shape[-1] ** -0.5
    if (state := given["initial_state"]) is not None:
        options["state"] = state.mT if given.get("state_v_first") else state
        options["overwrite_state"] = bool(given["overwrite_state"])
    if given["cu_seqlens"] is not None:
        packed = given.get("cu_seqlens_cpu")
        options["cu_seqlens"] = given["cu_seqlens"] if packed is None else packed
    if given.get("use_qk_l2norm_in_kernel"):
        options |= {"qk_l2norm": True, "l2norm_eps": L2NORM_EPS}
    return options


def gates_of(fn: str, given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options) of the formulas of the decay and of beta."""
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if given["use_gate_in_kernel"]:
        if given["A_log"] is None and given.get("lower_bound") is None:
            raise ValueError(f"{fn}: use_gate_in_kernel=True without A_log, expected A_log (H,)")
        arrays = {n: given[n] for n in ("A_log", "dt_bias") if given[n] is not None}
        if given.get("lower_bound") is not None:
            options["lower_bound"] = given["lower_bound"]
    if given.get("use_beta_sigmoid_in_kernel"):
        options |= {"beta_sigmoid": True, "allow_neg_eigval": bool(given["allow_neg_eigval"])}
    elif given.get("allow_neg_eigval"):
        raise ValueError(f"{fn}: allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True, expected both")
    return arrays, options


def some(given: Given, names: str, **renamed: str) -> dict[str, Any]:
    """Arrays by our names: `names` unchanged, and ours = theirs."""
    return {n: given[n] for n in names.split()} | {ours: given[theirs] for ours, theirs in renamed.items()}


def delta(fn: str, given: Given) -> Translated:
    if given["beta"] is None:
        given["beta"] = torch.ones_like(given["v"][..., 0])
    return Translated("delta_rule", some(given, "q k v beta"), options_of(given))


def check_decays(fn: str, given: Given) -> None:
    """Raise ValueError for decays of channels."""
    for name in ("gk", "gv"):
        if given.get(name) is not None:
            raise ValueError(f"{fn}: {name} is given, expected g (B, T, H) alone; kda has decays of key channels")


def gated_delta(fn: str, given: Given) -> Translated:
    check_decays(fn, given)
    if given["beta"] is None:
        given["beta"] = torch.ones_like(given["v"][..., 0])
    if given["g"] is None:
        return delta(fn, given)
    arrays, options = gates_of(fn, given)
    return Translated("gated_delta_rule", some(given, "q k v g beta") | arrays, options_of(given) | options)


def kda(fn: str, given: Given) -> Translated:
    arrays, options = gates_of(fn, given)
    if "dt_bias" in arrays:
        arrays["dt_bias"] = arrays["dt_bias"].reshape(given["g"].shape[-2:])
    return Translated("kda", some(given, "q k v g beta") | arrays, options_of(given) | options)


def preconditioned_gated_delta(fn: str, given: Given) -> Translated:
    check_decays(fn, given)
    if given["g"] is None:
        given["g"] = given["v"].new_zeros(given["v"].shape[:3])
    return preconditioned(fn, given, "preconditioned_gated_delta_rule")


def preconditioned_kda(fn: str, given: Given) -> Translated:
    arrays, options = gates_of(fn, given)
    if "dt_bias" in arrays:
        arrays["dt_bias"] = arrays["dt_bias"].reshape(given["g"].shape[-2:])
    found = preconditioned(fn, given, "preconditioned_kda")
    return found._replace(arrays=found.arrays | arrays, options=found.options | options)


def preconditioned(fn: str, given: Given, ours: str) -> Translated:
    """What preconditions a key is that of its head: g_atk, beta_atk (B, T, H), log_atk_scale (H,), A (N, H, K)."""
    for name in ("g_atk", "beta_atk"):
        if given[name] is None:
            raise ValueError(f"{fn}: {name} is None, expected (B, T, H)")
    if given["beta"] is None:
        given["beta"] = torch.ones_like(given["v"][..., 0])
    if given["use_qk_l2norm_in_kernel"]:
        given |= {n: l2norm(given[n], L2NORM_EPS) for n in ("q", "k")}
    S, A = given["initial_state"], given["initial_A_state"]
    options = options_of(given | {"use_qk_l2norm_in_kernel": False, "initial_state": None})
    if S is not None or A is not None:
        v, heads = given["v"], values_per_key(given)
        if S is None:
            S = A.new_zeros((A.shape[0], v.shape[2], A.shape[2], v.shape[3]))
        elif given["transpose_state_layout"]:
            S = S.mT
        A = S.new_zeros(S.shape[:-1]) if A is None else repeated(A, heads, 1)
        options |= {"state": PreconditionedState(S, A), "overwrite_state": bool(given["overwrite_state"])}
    arrays = some(given, "q k v g beta", g_square="g_atk", beta_square="beta_atk", center="log_atk_scale")
    for name, axis in (("g_square", 2), ("beta_square", 2), ("center", 0)):
        arrays[name] = None if arrays[name] is None else repeated(arrays[name], values_per_key(given), axis)
    return Translated(ours, arrays, options | {"span": given["x"], "eps": given["eps"]})


def values_per_key(given: Given) -> int:
    """How many heads of values share one of keys."""
    return max(given["v"].shape[2] // max(given["k"].shape[2], 1), 1)


def repeated(x: Any, count: int, axis: int) -> Any:
    return x if count == 1 else x.repeat_interleave(count, dim=axis)


def gdn2(fn: str, given: Given) -> Translated:
    arrays, options = gates_of(fn, given)
    if "dt_bias" in arrays:
        arrays["dt_bias"] = arrays["dt_bias"].reshape(given["g"].shape[-2:])
    return Translated("gdn2", some(given, "q k v g b w") | arrays, options_of(given) | options)


def comba(fn: str, given: Given) -> Translated:
    if given["beta"] is None:
        given["beta"] = torch.ones_like(given["v"][..., 0])
    return Translated("comba", some(given, "q k v p g beta"), options_of(given))


def product(fn: str, given: Given) -> Translated:
    """k, v and beta (B, T n, ...) with the n steps of a token one after the other."""
    n, arrays = given["num_householder"], some(given, "q k v beta g")
    for name in ("k", "v", "beta"):
        x = arrays[name]
        if x.shape[1] != n * given["q"].shape[1]:
            raise ValueError(f"{fn}: {name} has {x.shape[1]} tokens, expected num_householder * T = "
                             f"{n} * {given['q'].shape[1]}")  # fmt: skip
        arrays[name] = x.unflatten(1, (-1, n))
    return Translated("delta_product", arrays, options_of(given))


def gla(fn: str, given: Given) -> Translated:
    g = given["gk"] if "gk" in given else given["g"]
    if g is None:
        raise ValueError(f"{fn}: gk is None, expected the log decay of the key channels (B, T, H, K)")
    return Translated("gla", some(given, "q k v") | {"g": g, "gv": given.get("gv")}, options_of(given))


def simple_gla(fn: str, given: Given) -> Translated:
    """g (B, T, H), or g_gamma (H,), or both, or none."""
    g, gamma, arrays = given["g"], given.get("g_gamma"), some(given, "q k v")
    if g is not None:
        return Translated("simple_gla", arrays | {"g": g if gamma is None else g + gamma}, options_of(given))
    if gamma is not None:
        return Translated("retention", arrays | {"g": gamma}, options_of(given))
    return Translated("linear_attention", arrays, options_of(given))


def retention(fn: str, given: Given) -> Translated:
    return Translated("retention", some(given, "q k v"), options_of(given))


def lightning(fn: str, given: Given) -> Translated:
    rule = {"slopes": "fla"}
    layers = {"layer": given["layer_idx"], "num_layers": given["num_layers"]}
    return Translated("lightning_attention", some(given, "q k v") | rule, options_of(given) | layers)


def linear(fn: str, given: Given) -> Translated:
    """normalize=True: o / (scale q z + 1e-10); the state is a pair (S, z (N, 1, H, K))."""
    options, state = options_of(given), given["initial_state"]
    if given["normalize"]:
        options |= {"normalize": True, "eps": NORMALISER_EPS}
        if state is not None:
            S, z = state if isinstance(state, tuple | list) else (state, torch.zeros_like(state[..., 0]).unsqueeze(1))
            options["state"] = NormalisedState(S, z.squeeze(1))
    return Translated("linear_attention", some(given, "q k v"), options)


def rwkv6(fn: str, given: Given) -> Translated:
    return Translated("rwkv6", some(given, "k v u", q="r", g="w"), options_of(given))


def rwkv7(fn: str, given: Given) -> Translated:
    return Translated("rwkv7", some(given, "k v a b", q="r", g="w"), options_of(given))


def rwkv7_products(fn: str, given: Given) -> Translated:
    """a = -kk, b = kk * a."""
    kk, a = given["kk"], given["a"]
    return Translated("rwkv7", some(given, "k v", q="r", g="w") | {"a": -kk, "b": kk * a}, options_of(given))


def dplr(fn: str, given: Given) -> Translated:
    return Translated("dplr", some(given, "q k v a b", g="gk"), options_of(given))


def iplr(fn: str, given: Given) -> Translated:
    return Translated("iplr", some(given, "q k v a b"), options_of(given))


def gsa(fn: str, given: Given) -> Translated:
    """The state is a pair (W (N, H, K, M), S (N, H, M, V))."""
    options = options_of(given)
    if (state := given["initial_state"]) is not None:
        if not isinstance(state, tuple | list):
            raise TypeError(f"{fn}: initial_state is a {type(state).__name__}, expected a pair (W, S)")
        W, S = state
        options["state"] = SlotState(S, W)
    if given["g"] is None:
        raise ValueError(f"{fn}: g is None, expected the log decay of the slots (B, T, H, M)")
    return Translated("gsa", some(given, "q k v s g"), options)


def results(given: Given, out: Any, state: Any) -> tuple[Any, ...]:
    """(o, final state); of preconditioned rules (o, S, A), A of each head of keys."""
    if "initial_A_state" not in given:
        return out, state_of(given, state)
    if state is None:
        return out, None, None
    S, A, heads = state.S, state.A, values_per_key(given)
    S, A = (S.mT if given["transpose_state_layout"] else S), (A if heads == 1 else A[:, ::heads])
    if not given["overwrite_state"]:
        return out, S, A
    begin = given["initial_state"], given["initial_A_state"]
    return out, S if begin[0] is None else begin[0], A if begin[1] is None else begin[1].copy_(A)


def state_of(given: Given, state: Any) -> Any:
    """The final state as FLA stores it."""
    if given["overwrite_state"] and given["initial_state"] is not None:
        return given["initial_state"]
    if isinstance(state, NormalisedState):
        return state.S, state.z.unsqueeze(1)
    if isinstance(state, SlotState):
        return state.W, state.S
    return state.mT if state is not None and given.get("state_v_first") else state


# the table: FLA's name, its translation, FLA's parameters in order

CALL, PACKED = "scale initial_state output_final_state ", "cu_seqlens cu_seqlens_cpu "
L2NORM, V_FIRST, LAYERS = "use_qk_l2norm_in_kernel ", "state_v_first ", "layer_idx num_layers "
BETA, GATE, ANY = "use_beta_sigmoid_in_kernel allow_neg_eigval ", "use_gate_in_kernel ", " A_log dt_bias "
PRECOND, BOUNDS = "initial_state initial_A_state output_final_state ", "transpose_state_layout x eps log_atk_scale "
NORMED = "use_qk_l2norm_in_kernel=True "
KDA = "safe_gate lower_bound disable_recompute return_intermediate_states "
TABLE = {
    "chunk_gated_delta_rule": (gated_delta, "q k v g beta " + CALL + L2NORM + BETA + V_FIRST + PACKED
                               + "chunk_indices cp_context " + GATE + ANY),
    "fused_recurrent_gated_delta_rule": (gated_delta, "q k v g=None gk=None gv=None beta=None " + CALL + L2NORM + GATE
                                         + ANY + BETA + V_FIRST + "cu_seqlens"),
    "chunk_delta_rule": (delta, "q k v beta " + CALL + L2NORM + PACKED),
    "fused_recurrent_delta_rule": (delta, "q k v beta=None " + CALL + L2NORM + "cu_seqlens"),
    "chunk_kda": (kda, "q k v g beta " + CALL + L2NORM + GATE + BETA + KDA + V_FIRST + PACKED
                  + "cp_context use_graph max_num_seqs " + ANY),
    "fused_recurrent_kda": (kda, "q k v g beta " + ANY + CALL + L2NORM + GATE + BETA + "lower_bound " + V_FIRST
                            + "cu_seqlens"),
    "chunk_precond_gated_delta_rule": (preconditioned_gated_delta, "q k v g_atk g beta_atk beta scale " + PRECOND
                                       + NORMED + PACKED + "cp_context " + BOUNDS),
    "fused_recurrent_precond_gated_delta_rule": (preconditioned_gated_delta,
                                                 "q k v g=None gk=None gv=None beta=None g_atk=None beta_atk=None "
                                                 + "scale " + PRECOND + NORMED + "cu_seqlens " + BOUNDS),
    "chunk_precond_kda": (preconditioned_kda, "q k v g g_atk beta_atk beta scale " + PRECOND + GATE
                          + "safe_gate lower_bound " + PACKED + "chunk_indices cp_context " + BOUNDS
                          + "solve_tril_precision disable_recompute return_intermediate_states " + NORMED + ANY),
    "fused_recurrent_precond_kda": (preconditioned_kda, "q k v g g_atk beta_atk beta" + ANY + "scale " + PRECOND
                                    + NORMED + GATE + "lower_bound cu_seqlens " + BOUNDS),
    "chunk_gdn2": (gdn2, "q k v g b w " + CALL + L2NORM + GATE + PACKED + KDA + V_FIRST + "cp_context " + ANY),
    "fused_recurrent_gdn2": (gdn2, "q k v g b w " + ANY + CALL + L2NORM + GATE + "lower_bound " + V_FIRST
                             + "cu_seqlens"),
    "chunk_comba": (comba, "q k v p g beta=None " + CALL + L2NORM + PACKED),
    "fused_recurrent_comba": (comba, "q k p v g beta=None " + CALL + L2NORM + "cu_seqlens"),
    "chunk_gated_delta_product": (product, "q k v g beta num_householder " + CALL + L2NORM + PACKED + "cp_context"),
    "chunk_gla": (gla, "q k v g " + CALL + V_FIRST + PACKED),
    "fused_recurrent_gla": (gla, "q k v gk=None gv=None " + CALL + "reverse " + V_FIRST + "cu_seqlens"),
    "chunk_simple_gla": (simple_gla, "q k v g=None g_gamma=None " + CALL + V_FIRST + PACKED),
    "fused_recurrent_simple_gla": (simple_gla, "q k v g=None g_gamma=None " + CALL + "reverse " + V_FIRST
                                   + "cu_seqlens"),
    "chunk_retention": (retention, "q k v " + CALL + "cu_seqlens"),
    "fused_recurrent_retention": (retention, "q k v " + CALL + "reverse " + V_FIRST + "cu_seqlens"),
    "chunk_lightning_attn": (lightning, "q k v " + LAYERS + CALL + "cu_seqlens"),
    "fused_recurrent_lightning_attn": (lightning, "q k v " + LAYERS + CALL + "reverse cu_seqlens"),
    "chunk_linear_attn": (linear, "q k v " + CALL + "normalize=True cu_seqlens"),
    "fused_chunk_linear_attn": (linear, "q k v " + CALL + "normalize=True cu_seqlens"),
    "fused_recurrent_linear_attn": (linear, "q k v " + CALL + "reverse normalize=False cu_seqlens"),
    "chunk_rwkv6": (rwkv6, "r k v w u " + CALL + PACKED),
    "fused_recurrent_rwkv6": (rwkv6, "r k v w u " + CALL + "reverse cu_seqlens"),
    "chunk_rwkv7": (rwkv7, "r w k v a b scale=1.0 initial_state output_final_state " + PACKED
                    + "safe_gate chunk_size disable_recompute cp_context lower_bound"),
    "fused_recurrent_rwkv7": (rwkv7, "r w k v a b scale initial_state output_final_state=True cu_seqlens"),
    "fused_mul_recurrent_rwkv7": (rwkv7_products, "r w k v kk a scale=1.0 initial_state output_final_state reverse "
                                  + "cu_seqlens"),
    "chunk_dplr_delta_rule": (dplr, "q k v a b gk " + CALL + PACKED
                              + "safe_gate chunk_size disable_recompute cp_context lower_bound"),
    "fused_recurrent_dplr_delta_rule": (dplr, "q k v a b gk " + CALL + "reverse cu_seqlens"),
    "chunk_iplr_delta_rule": (iplr, "q k v a b " + CALL + PACKED),
    "fused_recurrent_iplr_delta_rule": (iplr, "q k v a b " + CALL + "cu_seqlens"),
    "chunk_gsa": (gsa, "q k v s g=None " + CALL + "checkpoint_level " + PACKED),
    "fused_recurrent_gsa": (gsa, "q k v s g=None " + CALL + "reverse cu_seqlens"),
}  # fmt: skip
ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule",
           "fused_recurrent_pgdn": "fused_recurrent_precond_gated_delta_rule"}  # fmt: skip
FLA = Library(DEFAULTS, ("chunk_size", "overwrite_state"), UNSUPPORTED, check, normalise_one_token, results)
FUNCTIONS = {name: adapter(name, translate, text, FLA)
             for name, (translate, text) in TABLE.items()}  # fmt: skip
globals().update(FUNCTIONS | {name: FUNCTIONS[of] for name, of in ALIASES.items()})
__all__ = [*FUNCTIONS, *ALIASES]
