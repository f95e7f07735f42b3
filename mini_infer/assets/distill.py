"""Knowledge distillation (Hinton et al. 2015): the draft learns the target's whole distribution, not only its text.

Part of what it reads is written by the target itself (as in DistillSpec, Zhou et al. 2024), since that is what a draft
reads when it speculates.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

from mini_infer.assets.trainer import IGNORE, Objective, cross_entropy, token_logits

KL_WEIGHT = 0.9


def distillation(teacher: Qwen2ForCausalLM, kl_weight: float = KL_WEIGHT) -> Objective:
    """`kl_weight` * KL(teacher || student) + (1 - kl_weight) * cross-entropy, over the learned positions."""
    teacher.requires_grad_(False)

    def objective(logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            expected = F.log_softmax(token_logits(teacher, inputs).float(), dim=-1)
        predicted = F.log_softmax(logits.float(), dim=-1)
        divergence = (expected.exp() * (expected - predicted)).sum(dim=-1)
        learned = labels != IGNORE
        mean_divergence = (divergence * learned).sum() / learned.sum().clamp(min=1)
        return kl_weight * mean_divergence + (1 - kl_weight) * cross_entropy(logits, inputs, labels)

    return objective


@torch.no_grad()
def write_text(
    model: Qwen2ForCausalLM,
    stream: npt.NDArray[np.uint16],
    rows: int,
    temperatures: tuple[float, ...],
    prompt_len: int = 64,
    new_tokens: int = 448,
    seed: int = 0,
) -> npt.NDArray[np.uint16]:
    """Sample `rows` continuations of random windows of `stream` at each temperature, as one token stream.

    A document end does not stop a row: the model begins another document, as in the training streams.
    """
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    device = next(model.parameters()).device
    writer = copy.deepcopy(model)
    if device.type == "cuda":
        writer = writer.to(torch.bfloat16)
    writer.generation_config.eos_token_id = None
    texts = []
    for temperature in temperatures:
        starts = generator.integers(0, len(stream) - prompt_len, rows)
        prompts = torch.from_numpy(stream[starts[:, None] + np.arange(prompt_len)].astype(np.int64)).to(device)
        written = writer.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
        )
        texts.append(written.cpu().numpy().astype(np.uint16).ravel())
    return np.concatenate(texts)
