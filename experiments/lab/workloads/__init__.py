"""Workloads: what is asked of every variant, and when. docs/workloads.md describes them."""

from experiments.lab.workloads.base import START, Arrivals, Inputs, Item, Workload, prompt_lengths  # noqa: F401
from experiments.lab.workloads.random import Fixed, Mixed, MultiTurn, SharedPrefix, Uniform
from experiments.lab.workloads.text import Text
from experiments.lab.workloads.trace import Trace

WORKLOADS: dict[str, type[Workload]] = {
    cls.kind: cls for cls in (Fixed, Uniform, SharedPrefix, Mixed, MultiTurn, Trace, Text)
}
