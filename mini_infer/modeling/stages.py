"""Which layers each stage of a pipeline has: neighbours, of which a step reads about as many bytes as of any other
stage's. The head counts with the last ones; of the embedding a step reads a few rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from mini_infer.core.errors import ConfigError
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.loader import outline
from mini_infer.modeling.spec import ModelSpec
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.expert import ALL_EXPERTS, ExpertRanks


def of_stage(
    spec: ModelSpec, dtype: torch.dtype, parallel: ParallelContext, experts: ExpertRanks = ALL_EXPERTS
) -> ModelSpec:
    """The spec of this rank's stage, of a rank's spec of the whole model. Raises ConfigError, naming what works."""
    stages = parallel.stages
    if stages == 1:
        return spec
    asked = f"parallel.pipeline={stages}"
    if spec.through_transformers:
        raise ConfigError(
            f"{asked}: {spec.architecture} runs through transformers' code, which computes all layers in one go. Set "
            "parallel.pipeline=1"
        )
    if stages > spec.num_layers:
        raise ConfigError(
            f"{asked}: each stage needs a layer, and {spec.architecture} has {spec.num_layers} of them here. Set "
            f"parallel.pipeline to {spec.num_layers} or less"
        )
    whole = outline(spec, dtype, parallel, experts)
    assert isinstance(whole, Decoder)
    sizes = [_bytes(layer) for layer in whole.layers]
    sizes[-1] += _bytes(whole.lm_head)
    first, end = split(sizes, stages)[parallel.stage]
    return dataclasses.replace(spec, layers=spec.layers[first:end], first_layer=first, stage_of=spec)


def _bytes(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.nbytes for parameter in module.parameters())


def split(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """(first, end) of so many parts, none of them empty, whose largest sum is as small as it can be, and of the others
    the largest likewise."""

    @cache
    def best(first: int, left: int) -> tuple[list[int], tuple[int, ...]]:
        """The sums of `left` parts from `first` on, largest first, and where the parts end."""
        if left == 1:
            return [sum(sizes[first:])], (len(sizes),)
        choices = []
        for end in range(first + 1, len(sizes) - left + 2):
            sums, ends = best(end, left - 1)
            choices.append((sorted([*sums, sum(sizes[first:end])], reverse=True), (end, *ends)))
        return min(choices)

    ends = best(0, parts)[1]
    return list(zip((0, *ends), ends, strict=False))
