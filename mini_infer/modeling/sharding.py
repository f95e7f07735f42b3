"""What of a model each rank has (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053).

    q, k, v, gate, up    columns: a rank has some heads of each, and some of the intermediate numbers
    o, down              rows: it has their inputs, and the ranks' products are added up
    embedding, head      vocabulary: a rank looks up and scores its own tokens; the last one's part is padded

Where there are fewer KV heads than ranks, neighbouring ranks have the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mini_infer.core.errors import ConfigError
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec
from mini_infer.parallel.context import ParallelContext

_MOST = 64  # ranks that a message names


def of_each_rank(spec: ModelSpec, size: int) -> ModelSpec:
    """The spec of what each of `size` ranks computes; vocabulary and hidden states are whole. Raises ConfigError,
    naming the numbers of ranks that work."""
    if size == 1:
        return spec
    asked = f"parallel.tensor={size}"
    if spec.through_transformers:
        raise ConfigError(
            f"{asked}: {spec.architecture} runs through transformers' code, whose layers ranks cannot share. Set "
            "parallel.tensor=1"
        )
    for layer in spec.layers:
        for part in (layer.attention, layer.feed_forward):
            if type(part) not in (AttentionSpec, MLPSpec):
                raise ConfigError(f"{asked}: ranks cannot share a {type(part).__name__} yet. Set parallel.tensor=1")
    attention = spec.attention
    assert isinstance(attention, AttentionSpec)
    if attention.qk_norm_of_all:
        raise ConfigError(
            f"{asked}: {spec.architecture} norms all heads of q and of k together, of which a rank has some. Set "
            "parallel.tensor=1"
        )
    if not _divides(spec, size):
        widths = sorted({layer.feed_forward.intermediate_size for layer in spec.layers})
        works = [str(n) for n in range(1, _MOST + 1) if _divides(spec, n)]
        raise ConfigError(
            f"{asked} does not divide {spec.architecture}'s {attention.num_heads} heads, {attention.num_kv_heads} KV "
            f"heads (which also may divide it) and {', '.join(map(str, widths))} intermediate numbers. These numbers "
            f"of ranks work: {', '.join(works)}"
        )
    return dataclasses.replace(spec, layers=tuple(_layer(layer, size) for layer in spec.layers))


def require_shared_experts(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError where `size` ranks cannot have as many of each layer's experts each, naming what works."""
    if size == 1:
        return
    asked = f"parallel.expert={size}"
    counts = {layer.feed_forward.router.num_experts for layer in spec.layers if isinstance(layer.feed_forward, MoESpec)}
    if not counts:
        raise ConfigError(f"{asked}: {spec.architecture} has no experts that our code computes. Set parallel.expert=1")
    if any(count % size for count in counts):
        works = [str(n) for n in range(1, _MOST + 1) if not any(count % n for count in counts)]
        raise ConfigError(
            f"{asked} does not divide {spec.architecture}'s {', '.join(map(str, sorted(counts)))} experts a layer. "
            f"These numbers of ranks work: {', '.join(works)}"
        )


def _divides(spec: ModelSpec, size: int) -> bool:
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    widths = [layer.feed_forward.intermediate_size for layer in spec.layers]
    return (kv_heads % size == 0 or size % kv_heads == 0) and not any(n % size for n in (heads, *widths))


def _layer(layer: LayerSpec, size: int) -> LayerSpec:
    attention, mlp = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    heads = attention.num_heads // size
    copies = max(1, size // attention.num_kv_heads)
    kv_heads = attention.num_kv_heads * copies // size
    return LayerSpec(
        dataclasses.replace(attention, num_heads=heads, num_kv_heads=kv_heads, kv_copies=copies),
        dataclasses.replace(mlp, intermediate_size=mlp.intermediate_size // size),
    )


def cut(
    tensors: Mapping[str, CheckpointTensor], whole: Mapping[str, CheckpointTensor], parallel: ParallelContext
) -> dict[str, CheckpointTensor]:
    """`tensors` of a rank's layer, read from a checkpoint of the whole one, which would take `whole` from it: wherever
    its shape is larger, the rank reads its own part."""
    return {name: _cut(tensor, whole[name], parallel) for name, tensor in tensors.items()}


def _cut(tensor: CheckpointTensor, whole: CheckpointTensor, parallel: ParallelContext) -> CheckpointTensor:
    if tensor.whole:
        return dataclasses.replace(tensor, shape=whole.shape)
    shapes = (whole.shape, *whole.other_shapes)
    owns = (tensor.shape, *tensor.other_shapes)
    reads = {
        shape: tuple(parallel.part(*sizes) for sizes in zip(shape, own, strict=True))
        for shape, own in zip(shapes, owns, strict=True)
        if shape != own
    }
    return dataclasses.replace(tensor, shape=shapes[0], other_shapes=shapes[1:], reads=reads)
