"""What transformers generates greedily, which engines are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from integrity import check_scheduler

from mini_infer import LLMEngine, SamplingParams

Tokens = list[list[int]]
# Of a model of random weights whose greedy token leads clearly, and that ends where it is told to.
CLEAR = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
# Of layers with multi-head latent attention and experts.
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}


def made_up_prompts(vocab_size: int) -> Tokens:
    """Four begin alike, four do not."""
    generator = torch.Generator().manual_seed(1)
    lengths = (40, 3, 10, 1, 7, 1, 17, 50, 33)
    shared, *rest = (torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths)
    return [*(shared + tail for tail in rest[:4]), *rest[4:]]


def saved(model: Any, folder: Path, prompts: Tokens, max_tokens: int) -> Tokens:
    """What the model generates, which is then in the folder."""
    model.save_pretrained(folder)
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def greedy(engine: LLMEngine, prompts: Tokens, max_tokens: int) -> Tokens:
    """What the engine generates, which is whole afterwards."""
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    check_scheduler(engine.scheduler)
    return [output.outputs[0].token_ids for output in outputs]
