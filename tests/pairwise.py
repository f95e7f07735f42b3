"""Fewer cases than every combination of settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations, one value of each axis, that hold every two values of two axes together: the same ones each time,
    each of them the one that holds most pairs which those before it do not."""

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, chosen = set[Any]().union(*map(pairs, every)), []
    while missing:
        chosen.append(max(every, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(chosen[-1])
    return [tuple(axis[index] for axis, index in zip(axes, case, strict=True)) for case in chosen]


def kernel_cases(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination on a GPU, and pairs of values in Triton's interpreter, which is slow."""
    return list(itertools.product(*axes)) if torch.cuda.is_available() else pairwise(*axes)
