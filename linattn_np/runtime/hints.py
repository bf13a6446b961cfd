"""Names of other libraries, and their names here: the "did you mean" of error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

OPTIONS = {  # of flash-linear-attention, mamba_ssm, torch and papers
    "initial_state": "state", "initial_states": "state", "past_state": "state", "prev_state": "state", "h0": "state",
    "recurrent_state": "state", "ssm_state": "state", "hx": "state",
    "output_final_state": "return_state", "return_final_state": "return_state", "return_final_states": "return_state",
    "return_last_state": "return_state", "output_state": "return_state",
    "use_qk_l2norm_in_kernel": "qk_l2norm", "use_qk_l2norm": "qk_l2norm", "qk_l2_norm": "qk_l2norm",
    "l2norm": "qk_l2norm", "qk_norm": "qk_l2norm",
    "head_first": "layout='heads_first'", "heads_first": "layout='heads_first'",
    "is_causal": "causal", "offsets": "cu_seqlens", "cu_seq_lens": "cu_seqlens", "cu_seqlens_q": "cu_seqlens",
    "seq_idx": "cu_seqlens", "seqlens": "cu_seqlens, their running sums from 0", "lengths": "cu_seqlens, their running "
    "sums from 0", "inplace": "overwrite_state", "inplace_final_state": "overwrite_state",
    "ssm_state_indices": "state_rows", "cache_indices": "state_rows", "state_indices": "state_rows",
    "has_initial_state": "fresh, its negation", "has_initial_states": "fresh, its negation",
    "delta_softplus": "dt_softplus", "sm_scale": "scale", "softmax_scale": "scale",
    "num_heads": "an axis of the arrays", "gk": "g of la.gla or la.kda, one log decay a key channel", "log_decay": "g",
    "decay": "g, its natural logarithm",
    "alpha": "g, the natural logarithm of alpha", "log_alpha": "g", "log_f": "g", "forget_gate": "g", "w": "g",
    "log_g": "g", "g_gamma": "g of la.retention", "r": "q", "gate": "g, its natural logarithm", "b": "beta",
    "lr": "beta", "attn_mask": "causal, or cu_seqlens for a batch of sequences", "query": "q", "key": "k",
    "value": "v", "queries": "q", "keys": "k", "values": "v", "dim": "an axis of the arrays",
    "use_beta_sigmoid_in_kernel": "beta_sigmoid", "use_gate_in_kernel": "A_log", "safe_gate": "lower_bound",
    "gate_lower_bound": "lower_bound", "qk_l2norm_eps": "l2norm_eps", "norm_eps": "l2norm_eps", "reversed": "reverse",
    "backwards": "reverse",
    "threads": "num_threads", "mode": "chunk_size", "form": "chunk_size", "dtype": "arrays of that dtype",
    "device": "arrays on that device",
}  # fmt: skip
FUNCTIONS = {
    "mamba": "mamba2", "ssd": "mamba2", "mamba_chunk_scan_combined": "mamba2", "mamba_2": "mamba2",
    "selective_state_update": "step(la.mamba2, ...)", "gated_deltanet": "gated_delta_rule", "deltanet": "delta_rule",
    "delta_net": "delta_rule", "gated_delta_net": "gated_delta_rule", "gdn": "gated_delta_rule", "retnet": "retention",
    "lightning_attn": "lightning_attention", "minimax": "lightning_attention", "linear_attn": "linear_attention",
    "kimi_delta_attention": "kda", "kimi_linear": "kda", "gated_linear_attention": "gla", "goose": "rwkv7",
    "finch": "rwkv6", "dplr_delta_rule": "dplr", "iplr_delta_rule": "iplr", "mesanet": "mesa_net",
    "attention": "linear_attention", "lightning": "lightning_attention",
    "gated_delta_product": "delta_product", "xlstm": "mlstm", "favor": "performer", "based_attention": "based",
    "scaled_dot_product_attention": "softmax_attention", "flash_attn_func": "softmax_attention",
    "deltaformer_attn": "deltaformer", "sb_attn": "stick_breaking_attention",
    "fox": "forgetting_attention", "forgetting_attn": "forgetting_attention",
    "path": "path_attention", "path_attn": "path_attention",
    "grad": "vjp", "backward": "vjp", "recurrent_step": "step", "decode": "step",
}  # fmt: skip
BACKENDS = {"numpy": "chunks", "array": "chunks", "cpu": "numba", "numba_cpu": "numba", "cupy": "cuda", "gpu": "cuda",
            "triton": "cuda", "naive": "reference", "recurrent": "reference"}  # fmt: skip
PREFIX = re.compile(r"^(chunk|fused_recurrent|fused_chunk|parallel|naive|naive_recurrent|recurrent|fused)_")
CHANNELS = {"simple_gla": "gla", "gated_delta_rule": "kda"}  # the function for a log decay a key channel
HEADS = {other: fn for fn, other in CHANNELS.items()}  # for one a head
CONVERSIONS = {  # how to make an array of it
    "list": "numpy.asarray({})", "tuple": "numpy.asarray({})", "DataFrame": "{}.to_numpy()", "Series": "{}.to_numpy()",
    "DataArray": "{}.data", "Variable": "{}.data", "Dataset": "{}[...]", "Quantity": "{}.value",
    "csr_matrix": "{}.toarray()", "csr_array": "{}.toarray()", "coo_array": "{}.toarray()",
    "csc_array": "{}.toarray()", "Table": "{}.to_pandas().to_numpy()",
}  # fmt: skip


def did_you_mean(word: str, known: Iterable[str], names: Mapping[str, str] = OPTIONS) -> str:
    """' (did you mean state?)' for a word that is not among `known`; '' without a guess."""
    known = list(known)
    guess = names.get(word)
    if guess is not None and guess in names.values() and guess.isidentifier() and guess not in known:
        guess = None  # an option that this function does not have
    if guess is None:
        guess = next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.75)), None)
    return "" if guess is None else f" (did you mean {guess}?)"


def function(name: str, known: Iterable[str]) -> str:
    """' (did you mean la.mamba2?)' for a name that this library does not have."""
    known, bare = list(known), PREFIX.sub("", name)
    guess = bare if bare in known else FUNCTIONS.get(bare)
    if guess is None:
        guess = next(iter(difflib.get_close_matches(bare, known, n=1, cutoff=0.75)), None)
    return "" if guess is None else f" (did you mean la.{guess}?)"


def conversion(name: str, x: Any) -> str:
    """': numpy.asarray(q) makes one' for an object that is no array."""
    if isinstance(x, int | float) and name in ("dout", "dstate", "dstates"):
        return f": the gradient of the loss with respect to {name[1:]}, in its shape"
    how = CONVERSIONS.get(type(x).__name__, "numpy.asarray({})" if hasattr(x, "__array__") else None)
    return "" if how is None else f": {how.format(name)} makes one"


def backend(given: Any) -> str:
    """' (did you mean 'chunks'?)' for an unknown backend."""
    guess = BACKENDS.get(given) if isinstance(given, str) else None
    return "" if guess is None else f" (did you mean {guess!r}?)"


def channels(fn: str, name: str, shape: tuple[int, ...], axes: str, batch: int) -> str:
    """': ...' for log decays of key channels in a function whose heads have one a token, and the other way round."""
    if name == "g" and axes == "T H" and len(shape) == batch + 3 and shape[-1] > 1 and fn in CHANNELS:
        return f": one log decay a key channel is for la.{CHANNELS[fn]}"
    if name == "g" and axes == "T H K" and len(shape) == batch + 2 and fn in HEADS:
        return f": one log decay a head is for la.{HEADS[fn]}"
    return ""
