"""Tiny models of transformers with random weights, one of each kind of layer that calls linear attention."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FEW = {n: COMMON[n] for n in ("vocab_size", "num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id")}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "linear_conv_kernel_dim": 4}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
SSM = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> the prefix of its classes, its configuration
    "qwen3_next": ("Qwen3Next", COMMON | DELTA | EXPERTS | HYBRID | {"head_dim": 16}),
    "qwen3_5": ("Qwen3_5", COMMON | DELTA | HYBRID | {"head_dim": 16}),
    "qwen3_5_moe": ("Qwen3_5Moe", COMMON | DELTA | EXPERTS | HYBRID | {"head_dim": 16}),
    "qwen4_exp": ("Qwen4Exp", COMMON | DELTA | EXPERTS | INDEXED | {
        "head_dim": 16, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "eos_token_id": 60, "ple_embed_dim": 16,
        "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 2}),
    "olmo_hybrid": ("OlmoHybrid", COMMON | DELTA | HYBRID),
    "kimi_linear": ("KimiLinear", COMMON | HYBRID | LOCAL | LATENT | {
        "linear_num_heads": 2, "linear_head_dim": 16, "q_lora_rank": None}),
    "glm5_next": ("Glm5Next", COMMON | INDEXED | LATENT | {
        "linear_num_heads": 2, "linear_head_dim": 16, "q_lora_rank": 16, "hc_mult": 2, "qk_rope_head_dim": 0,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_topk": 64,
        "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4}),
    "bailing_hybrid": ("BailingHybrid", COMMON | HYBRID | LOCAL | LATENT | {
        "head_dim": 16, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "dense"]}),
    "mamba2": ("Mamba2", FEW | SSM | {"hidden_size": 32}),
    "mamba": ("Mamba", FEW | {"hidden_size": 32, "state_size": 8, "time_step_rank": 3}),
    "falcon_mamba": ("FalconMamba", FEW | {"hidden_size": 32, "state_size": 8, "time_step_rank": 3}),
    "jamba": ("Jamba", COMMON | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 3, "use_mamba_kernels": False}),
    "recurrent_gemma": ("RecurrentGemma", COMMON | {
        "lru_width": 32, "attention_window_size": 64, "head_dim": 16, "block_types": ["recurrent", "attention"]}),
    "bamba": ("Bamba", COMMON | MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", COMMON | MAMBA | {"mamba_d_ssm": 64}),
    "nemotron_h": ("NemotronH", COMMON | {
        "layer_types": ["mamba", "attention"], "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "conv_kernel": 4}),
    "zamba2": ("Zamba2", COMMON | {
        "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}),
    "granitemoehybrid": ("GraniteMoeHybrid", COMMON | MAMBA | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 16}),
    "minimax": ("MiniMax", COMMON | HYBRID | {
        "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16}),
    "xlstm": ("xLSTM", FEW | {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "num_heads": 2,
                              "chunk_size": 16}),
    "lfm2": ("Lfm2", COMMON | {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2Moe", COMMON | {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_dense_layers": 1}),
}  # fmt: skip
PURE = ("mamba", "mamba2", "falcon_mamba", "xlstm")
FULL = tuple(name for name in MODELS if name not in PURE)  # with layers of softmax attention


def build(name: str, **more: Any) -> Any:
    """A model in evaluation mode, float32, the same weights each time."""
    import torch
    import transformers

    prefix, options = MODELS[name]
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = config(**(options | more))
    of = "ForCausalLM"
    if not hasattr(transformers, prefix + of):  # around a vision model, here of one layer
        sizes = "hidden_size", "intermediate_size", "out_hidden_size", "projection_intermediate_size"
        of, vision = "ForConditionalGeneration", dict.fromkeys(sizes, 32) | {"depth": 1, "num_heads": 2}
        config = getattr(transformers, f"{prefix}Config")(text_config=config.to_dict(), vision_config=vision)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, prefix + of)(config).float().eval()
