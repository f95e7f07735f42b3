"""Workloads: what is asked of every variant, and when. docs/workloads.md describes them."""

from experiments.lab.workloads.base import START, Arrivals, Arriving, Inputs, Item, Vocabulary, Workload, prompt_lengths
from experiments.lab.workloads.random import Fixed, Mixed, MultiTurn, SharedPrefix, Uniform
from experiments.lab.workloads.text import Text
from experiments.lab.workloads.trace import Trace

WORKLOADS: dict[str, type[Workload]] = {
    cls.kind: cls for cls in (Fixed, Uniform, SharedPrefix, Mixed, MultiTurn, Trace, Text)
}

__all__ = [
    "START",
    "WORKLOADS",
    "Arrivals",
    "Arriving",
    "Fixed",
    "Inputs",
    "Item",
    "Mixed",
    "MultiTurn",
    "SharedPrefix",
    "Text",
    "Trace",
    "Uniform",
    "Vocabulary",
    "Workload",
    "prompt_lengths",
]
