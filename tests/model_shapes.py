"""Shapes of models that tests fill at random."""

from __future__ import annotations

from typing import Any

# For Triton's interpreter.
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SMALL_LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}

# For a GPU, small but for their widths: enough to run every kernel and graph.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 1808,
        "num_hidden_layers": 3,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 5003,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 5003,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "num_experts": 20,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [0],
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 5003,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 5003,
    "max_position_embeddings": 4096,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}
