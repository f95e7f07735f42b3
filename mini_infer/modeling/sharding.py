"""What of a model each rank has (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053).

    q, k, v, gate, up    columns: a rank has some heads of each, and some of the intermediate numbers
    o, down              rows: it has their inputs, and the ranks' products are added up
    experts              as gate, up and down, every one of them; the router is whole
    latents              every rank makes them, and has its heads of what queries, keys and values are made with
    embedding, head      vocabulary: a rank looks up and scores its own tokens; the last one's part is padded

Where there are fewer KV heads than ranks, neighbouring ranks have the same one. Ranks that share experts (GShard:
Lepikhin et al. 2020, arXiv:2006.16668) have some of them, whole; if they share heads as well, dense layers are theirs
as above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from mini_infer.core.config import ParallelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec
from mini_infer.parallel.context import ParallelContext

_MOST = 64  # ranks that a message names


def of_each_rank(spec: ModelSpec, size: int, whole_experts: bool = False) -> ModelSpec:
    """The spec of what each of `size` ranks computes; vocabulary and hidden states are whole, and so are experts where
    that is said. Raises ConfigError, naming the numbers of ranks that work."""
    if size == 1:
        return spec
    asked = f"parallel.tensor={size}"
    if spec.through_transformers:
        raise ConfigError(
            f"{asked}: {spec.architecture} runs through transformers' code, whose layers ranks cannot share. Set "
            "parallel.tensor=1"
        )
    sizes = _shared_sizes(spec, whole_experts)
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    works = [n for n in range(1, _MOST + 1) if _divides(n, kv_heads, sizes)]
    if size not in works:
        raise ConfigError(
            f"{asked} does not divide {spec.architecture}'s {heads} heads, {kv_heads} KV heads (which also may divide "
            f"it) and {', '.join(map(str, sorted(sizes - {heads})))} intermediate numbers. These numbers of ranks "
            f"work: {', '.join(map(str, works))}"
        )
    return dataclasses.replace(spec, layers=tuple(_layer(layer, size, whole_experts) for layer in spec.layers))


def require_ranks(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raises ConfigError where ranks of one of the engines cannot share its layers, naming what works."""
    for engine in parallel.of_engines:
        own = of_each_rank(spec, engine.tensor, whole_experts=engine.expert > 1)
        require_shared_experts(own, engine.expert, engine.redundant_experts)


def require_shared_experts(spec: ModelSpec, size: int, redundant: int = 0) -> None:
    """Raises ConfigError where `size` ranks cannot have as many of each layer's experts each, and room for so many
    copies together, naming what works."""
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
    most = min(counts) * (size - 1)
    if redundant > most:
        raise ConfigError(
            f"parallel.redundant_experts={redundant}: {size} ranks that share {min(counts)} experts of a layer can "
            f"have {most} of each other's. Set it to {most} or less"
        )


def _shared_sizes(spec: ModelSpec, whole_experts: bool) -> set[int]:
    """Numbers that ranks have equal parts of."""
    sizes = {spec.attention.num_heads}
    for layer in spec.layers:
        part = layer.feed_forward
        if isinstance(part, MLPSpec):
            sizes.add(part.intermediate_size)
        elif not whole_experts:
            sizes.add(part.intermediate_size)
            sizes |= set() if part.shared is None else {part.shared.intermediate_size}
    return sizes


def _divides(ranks: int, kv_heads: int, sizes: Collection[int]) -> bool:
    return (kv_heads % ranks == 0 or ranks % kv_heads == 0) and not any(size % ranks for size in sizes)


def _layer(layer: LayerSpec, size: int, whole_experts: bool) -> LayerSpec:
    attention, part = layer.attention, layer.feed_forward
    heads = attention.num_heads // size
    if isinstance(attention, AttentionSpec):
        copies = max(1, size // attention.num_kv_heads)
        kv_heads = attention.num_kv_heads * copies // size
        attention = dataclasses.replace(attention, num_heads=heads, num_kv_heads=kv_heads, kv_copies=copies)
    else:
        attention = dataclasses.replace(attention, num_heads=heads)
    if isinstance(part, MLPSpec):
        part = _narrower(part, size)
    elif not whole_experts:
        shared = None if part.shared is None else _narrower(part.shared, size)
        part = dataclasses.replace(part, intermediate_size=part.intermediate_size // size, shared=shared)
    return LayerSpec(attention, part)


def _narrower(mlp: MLPSpec, size: int) -> MLPSpec:
    return dataclasses.replace(mlp, intermediate_size=mlp.intermediate_size // size)


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
