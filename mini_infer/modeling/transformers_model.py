"""A model that the registry does not know, through transformers' own code with our paged attention in it.

    token_ids, positions [T] --> decoder, as one sequence [1, T] --> hidden [T, H]
                                     |        ^
                        q, k, v of a layer    what its attention returns
                                     v        |
                                context.store, context.attend

Everything but attention treats tokens one by one, so the tokens of all sequences of a step pass as one; who sees whom
is attention's affair. Slower than our decoder: nothing is fused. What a model's code asks of attention, and which
models cannot be served, is found out in modeling/transformers_probe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext
from mini_infer.core.errors import ModelError
from mini_infer.modeling.linear_methods.base import Build
from mini_infer.modeling.model import CheckpointTensor, Model
from mini_infer.modeling.model_files import safetensors_files
from mini_infer.modeling.spec import AttentionSpec, MLASpec, ModelSpec
from mini_infer.modeling.transformers_probe import PAGED, attend_by, register


class TransformersModel(Model):
    """A causal language model of transformers."""

    def __init__(self, causal_lm: Any, spec: ModelSpec) -> None:
        embedding = causal_lm.get_input_embeddings().weight
        super().__init__(spec, embedding.dtype, embedding.device)
        causal_lm.requires_grad_(False)
        self._checkpoint = dict(causal_lm.named_parameters())
        self._decoder = causal_lm.get_decoder()
        self._attention = _PagedAttention(spec.attention)
        attend_by(self._decoder, self._attention)
        # What makes logits of hidden states (head, scale, cap, bias) is the rest of the model's own code.
        name = next(name for name, module in causal_lm.named_modules() if module is self._decoder)
        causal_lm.set_submodule(name, _Given())
        self._rest = causal_lm

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        self._attention.context = context
        # Drafts may stand behind the last position, where nobody reads what is computed.
        positions = positions.clamp(max=self.spec.max_model_len - 1)
        outputs = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._attention.context = None
        return outputs[0][0]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._rest(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(self.dtype) if out is None else out.copy_(logits)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """By transformers' names; its own loading also knows those of older files."""
        return {name: CheckpointTensor.copied_to(parameter.data) for name, parameter in self._checkpoint.items()}

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """Norms stay as their code sets them first: at one, or at zero where one is added to them."""
        norms = {id(p) for module in self.modules() if "Norm" in type(module).__name__ for p in module.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in norms:
                draw(torch.atleast_1d(parameter.data))


class _PagedAttention:
    """The attention function of all layers, of the step whose context it has."""

    def __init__(self, spec: AttentionSpec | MLASpec) -> None:
        self._head_dim, self._scale = spec.head_dim, spec.scale
        self.context: AttentionContext | None = None

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """query [1, num_heads, T, key_dim], key and value [1, num_kv_heads, T, ...] -> [1, T, num_heads, value_dim]."""
        context = self.context
        assert context is not None, "called outside of a step"
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if scale != self._scale:  # attention has one for all layers
            query = query * (scale / self._scale)
        context.store(module.layer_idx, self._tokens(key), self._tokens(value))
        attended = context.attend(module.layer_idx, self._tokens(query).contiguous())
        return attended[None, ..., : value.shape[3]]

    def _tokens(self, x: Tensor) -> Tensor:
        """[1, heads, T, dim] -> [T, heads, head_dim], filled up with zeros."""
        missing = self._head_dim - x.shape[3]
        return (F.pad(x, (0, missing)) if missing else x)[0].transpose(0, 1)


class _Given(nn.Module):
    """Stands where the decoder was: what it is given are the hidden states already."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Outputs:
        return _Outputs(inputs_embeds)


class _Outputs:
    """Of a decoder: hidden states, and nothing of all else that code may ask for."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def new_transformers_model(spec: ModelSpec, build: Build) -> TransformersModel:
    """Weights are as transformers initialises them, and without memory on the meta device."""
    from transformers import AutoModelForCausalLM

    register()
    with torch.device(build.device):
        causal_lm = AutoModelForCausalLM.from_config(spec.config, attn_implementation=PAGED, dtype=build.dtype)
    return TransformersModel(causal_lm.eval(), spec)


def load_transformers_model(folder: Path, spec: ModelSpec, build: Build) -> TransformersModel:
    """With the folder's safetensors, by transformers' own loading. Raises ModelError, naming tensor and folder."""
    from transformers import AutoModelForCausalLM

    register()
    safetensors_files(folder)
    try:
        causal_lm, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=spec.config,
            dtype=build.dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of safetensors, of torch, of transformers' own checks
        raise ModelError(f"cannot load {folder}: {type(error).__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}{more} is missing from {folder}")
    return TransformersModel(causal_lm.to(build.device), spec)
