"""What transformers' code of a model asks of attention, found out before any weight is loaded.

The model is made on the meta device, where tensors have shapes and no contents, and runs once on a few tokens. The
attention function that it is given there writes down every call, and the mask function gives masks that remember how
they were made. So the code itself tells the heads, the scale and the window of each layer; and code that waits for
results on the host fails there, for it finds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mini_infer.core.errors import ModelError
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, token_ids

PAGED = "mini_infer"  # the attention implementation's name in transformers; it has no masks, so none are made
_PROBE = "mini_infer_probe"  # the same function, with masks
_TOKENS = 3
_FARTHEST = 2**17  # windows are looked for among so many positions

# Of what may be handed to an attention function, what changes its result, and why we cannot.
_NOT_DONE = {
    "softcap": "soft-caps its attention scores, which no attention backend here does. Where config.json says "
    "attn_logit_softcapping: null it runs, without the cap, as transformers itself computes it under SDPA",
    "s_aux": "has attention sinks, which no attention backend here has",
    "position_bias": "adds a bias of positions to its attention scores, which no attention backend here does",
}
_ALIBI = ("bloom", "mpt")  # always; others say so in their config


class _CannotServeError(Exception):
    """Why; raised out of the midst of transformers' code."""


def transformers_spec(raw: dict[str, Any], names: list[str], source: str, ours: str) -> ModelSpec:
    """A config.json's content and its architectures' names -> ModelSpec. Raises ModelError where it cannot be served,
    with the reason. `ours` are the architectures that need no transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    model_type, config, architecture = raw.get("model_type"), None, None
    if model_type in CONFIG_MAPPING:
        config = AutoConfig.for_model(model_type, **{key: raw[key] for key in raw if key != "model_type"})
        architecture = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if config is None or architecture is None or architecture.__name__ not in names:
        raise ModelError(
            f"{source}: unsupported architecture {', '.join(names) or '(none given)'} ({model_type=}); supported are "
            f"{ours}, and what transformers knows as a causal language model by its model_type"
        )
    try:
        for refused, reason in _refusals(config, architecture):
            if refused:
                raise _CannotServeError(reason)
        calls, hidden_size, vocab_size = _probe(config)
    except _CannotServeError as error:
        name = architecture.__name__
        raise ModelError(f"{source}: {name} cannot run through transformers' code here: {error}") from error
    # Keys and values of different sizes are both kept at the larger one, filled up with zeros.
    head_dim, scale = max(call.head_dim for call in calls), calls[0].scale
    mlp = MLPSpec(getattr(config, "intermediate_size", None) or 4 * hidden_size)  # bounds memory, no more
    return ModelSpec(
        architecture=architecture.__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(replace(call, head_dim=head_dim, scale=scale), mlp) for call in calls),
        norm_eps=0.0,  # transformers' code has its own
        tie_word_embeddings=config.tie_word_embeddings,
        max_model_len=config.max_position_embeddings,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
        eos_token_ids=token_ids(config.eos_token_id),
        through_transformers=True,
        config=config,
    )


def register() -> None:
    """Makes both names known to transformers. Again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _call_the_modules_own)
    AttentionInterface.register(_PROBE, _call_the_modules_own)
    AttentionMaskInterface.register(_PROBE, _remembering_mask)


def attend_by(decoder: torch.nn.Module, attention: Callable[..., Tensor]) -> None:
    """The attention function of this model: not all of transformers' code hands arguments on to it, so it is found at
    the module that calls. attention(module, query, key, value, mask, **kwargs) takes [1, heads, T, dim] and returns
    [1, T, heads, dim]."""
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.paged_attention = attention  # type: ignore[assignment]
    # Some code looks for the padding token among the tokens of each step, to warn of it, and waits for the answer.
    vars(decoder.config)["pad_token_id"] = None


def _call_the_modules_own(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    return module.paged_attention(module, query, key, value, attention_mask, **kwargs), None


def _remembering_mask(mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device=kwargs["device"])
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


def _refusals(config: Any, architecture: Any) -> Iterator[tuple[object, str]]:
    """(whether it holds, reason) of all that a config can say."""
    yield config.is_encoder_decoder, "it is the decoder of an encoder-decoder, which attends to an encoder's states"
    yield config.get_text_config() is not config, "it takes more than text, and only decoders of text are served"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    others = ", ".join(kinds)
    yield (
        getattr(architecture, "_is_stateful", False) or any("attention" not in kind for kind in kinds),
        f"its layers keep a state{f' ({others})' if kinds else ''} that is not each token's keys and values, which is "
        "all the cache holds",
    )
    yield kinds, f"layers of kind {others} are not supported; only full and sliding attention are"
    yield (
        getattr(config, "alibi", config.model_type in _ALIBI),
        "it uses ALiBi, a bias of positions on attention scores, which no attention backend here does",
    )
    yield (
        not architecture._can_set_attn_implementation(),
        "its code attends by itself, not through an attention function that could be replaced",
    )
    yield (
        not getattr(config, "max_position_embeddings", None),
        "its config does not say how many positions there are (max_position_embeddings)",
    )
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = values.get("rope_type")
        yield (
            kind in ("dynamic", "longrope"),
            f"rope type {kind} changes the keys already cached as a sequence grows",
        )


def _probe(config: Any) -> tuple[list[AttentionSpec], int, int]:
    """The calls of all layers in order, hidden size and vocabulary. Raises _CannotServeError."""
    from transformers import AutoModelForCausalLM

    register()
    recorder = _Recorder(config.max_position_embeddings)
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=_PROBE, dtype=torch.bfloat16).eval()
            hidden, logits = recorder.run(model, model.get_decoder())
    except _CannotServeError:
        raise
    except Exception as error:  # whatever its code does, with such a config or where there are no values
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        waits = isinstance(error, RuntimeError) and "meta" in str(error)  # a NotImplementedError is one
        reason = f"it waits for results on the host ({said})" if waits else f"its code fails with {said}"
        raise _CannotServeError(reason) from error
    calls, layers = recorder.calls, recorder.layers
    if not layers or layers != list(range(len(layers))):
        raise _CannotServeError(
            "its layers must attend once each through transformers' attention function; the layers that did are "
            f"{layers}"
        )
    for what in ("num_heads", "num_kv_heads"):
        differing = sorted({getattr(call, what) for call in calls})
        if len(differing) > 1:
            numbers = ", ".join(map(str, differing))
            raise _CannotServeError(f"{what} differs between its layers ({numbers}); the cache has one for all")
    return calls, hidden.shape[-1], logits.shape[-1]


def _nothing(query: Tensor, value: Tensor) -> Tensor:
    """Of the shape of what attention gives."""
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


class _Recorder:
    """The attention function of the run on the meta device."""

    def __init__(self, num_positions: int) -> None:
        self.layers: list[int] = []  # in the order in which they attended
        self.calls: list[AttentionSpec] = []  # what each asked for; head_dim is the larger one where values differ
        self._keys = torch.arange(max(_TOKENS, min(num_positions, _FARTHEST)), device="cpu")

    def run(self, model: Any, decoder: Any) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of a few tokens, without values."""
        if decoder is model:
            raise _CannotServeError("its code has no decoder apart from the head that makes logits")
        if "position_ids" not in inspect.signature(decoder.forward).parameters:
            raise _CannotServeError("its code takes no position_ids, so its tokens cannot be of several sequences")
        tokens = torch.zeros((1, _TOKENS), dtype=torch.int64)
        attend_by(decoder, self)
        # With a mask of padding, the code does not look whether positions start anew, as of packed sequences.
        mask = torch.ones((1, _TOKENS), dtype=torch.int64)
        decoder(input_ids=tokens, position_ids=tokens, attention_mask=mask, use_cache=False)
        # And once as a step will call it: without masks.
        model.set_attn_implementation(PAGED)
        attend_by(decoder, lambda module, query, key, value, mask, **kwargs: _nothing(query, value))
        hidden = decoder(input_ids=tokens, position_ids=tokens, use_cache=False)[0]
        return hidden, model.get_output_embeddings()(hidden)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        layer = module.layer_idx
        if not getattr(module, "is_causal", True):
            raise _CannotServeError(f"layer {layer} sees later tokens: it is no decoder")
        for name, reason in _NOT_DONE.items():
            if kwargs.get(name) is not None:
                raise _CannotServeError(f"it {reason}")
        scale = kwargs.get("scaling")
        self.layers.append(layer)
        self.calls.append(
            AttentionSpec(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=max(key.shape[3], value.shape[3]),
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=kwargs.get("sliding_window") if mask is None else self._window(layer, mask),
            )
        )
        return _nothing(query, value)

    def _window(self, layer: int, mask: Tensor) -> int | None:
        """The window within which this mask is causal."""
        sees = getattr(mask, "mask_function", None)
        if sees is None:
            raise _CannotServeError(f"layer {layer} changes its mask in a way of its own")
        keys, zero = self._keys, torch.zeros((), dtype=torch.int64, device="cpu")
        last = len(keys) - 1
        with torch.device("cpu"):
            window = int(sees(zero, zero, keys[-1], keys).sum())
            for query in {0, 1, last // 2, last // 2 + 1, last}:
                causal = (keys <= query) & (keys > query - window)
                if not torch.equal(sees(zero, zero, keys[query], keys).expand_as(keys), causal):
                    raise _CannotServeError(
                        f"layer {layer} has a mask that is neither causal nor a sliding window of the last tokens"
                    )
        return None if window > last else window
