"""The roofline (Williams, Waterman, Patterson 2009): the least time that a step's bytes and operations allow.

A floor must be below every true time, so each count here is the least that any implementation needs:

    bytes   each weight of the layers and of lm_head once, an embedding row a token, the KV of earlier tokens once
            (a prefix that requests share is read once), the new tokens' KV and the sampled rows' logits written once.
            Of experts those of one token, whom all others may share, or as many as uniform routing is sure to touch.
            Quantized weights count their codes, and all projections the fewest bits that any has; scales are free.
            Activations, masks and block tables count nothing: a kernel could keep them on the chip.
    flops   2 a weight and token in the layers, 2 a weight of lm_head and sampled row, and in attention 4 * head_dim a
            head and (query, key) pair: q k^T and p v, a multiplication and an addition each.
            Norms, rotary embedding, softmax and sampling count nothing.

    floor = max(bytes / bandwidth, flops / rate)        MBU = bytes / bandwidth / measured time
                                                        MFU = flops / rate / measured time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from experiments.lab.measure.hardware import Ceilings
from mini_infer.core.plan import StepRecord

if TYPE_CHECKING:  # a report is made without torch, which takes longer to import than all else
    import torch

    from mini_infer.modeling.spec import FeedForwardSpec, ModelSpec

MIB = 2**20
GB = 1e9
TFLOP = 1e12
RATES = {"fp8": "float8_e4m3", "int8": "int8"}  # activations' numbers, as ceilings name the products


@dataclass(frozen=True)
class StepWork:
    """What one step had to do, whatever the model."""

    tokens: int  # computed, prompt tokens and decode rows together
    sampled: int  # rows whose logits were needed
    rows: int  # sequences that the tokens belong to, at most
    context: int  # KV slots of these sequences, the new tokens' own included; shared ones once
    pairs: int  # (query, key) pairs of attention, at least


@dataclass(frozen=True)
class Cost:
    bytes: float  # moved through memory, at least
    flops: Mapping[str, float]  # at least, by the dtype in which the products run


@dataclass(frozen=True)
class Floor:
    """The least seconds of a step, by what limits it."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)


def work(record: StepRecord) -> StepWork:
    """What the record does not hold is counted low: a chunk of n prompt tokens is taken to look back at the chunks
    before it once, not n times, and several prompts in one step to be of equal length, which has the fewest pairs.
    `used_slots` is counted after scheduling, so the step's own tokens are in it."""
    rows, decode, prefill = record.decode_rows, record.verified_tokens, record.prefill_tokens
    prompts_done = max(record.sampled_tokens - record.decode_tokens - sum(record.accepted), 0)
    prefill_rows = prompts_done + record.num_prefilling
    context = max(record.kv.used_slots, decode + prefill)
    pairs = round((context - prefill) * decode / max(rows, 1)) if rows else context - prefill
    if prefill:
        pairs += round(prefill * (prefill / max(prefill_rows, 1) + 1) / 2)
    sampled = record.sampled_tokens + record.dropped_rows - sum(record.accepted) + sum(record.drafted)
    return StepWork(decode + prefill, sampled, rows + prefill_rows, context, pairs)


class StepCosts:
    """The least bytes and operations of steps of one model; `dtype` is that of activations, and of what is not
    quantized. What does not change from step to step is counted once: a run has hundreds of thousands of steps."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        attention, size = spec.attention, dtype.itemsize
        self._wide = str(dtype).removeprefix("torch.")
        schemes = spec.quantization.schemes if spec.quantization is not None else ()
        products = [scheme.activations.number.value for scheme in schemes if scheme.activations is not None]
        # Of several schemes the least bytes of a weight, and the fastest products.
        weight_bytes = min((scheme.weights.number.bits / 8 for scheme in schemes), default=size)
        self._product = RATES[products[0]] if products else self._wide
        self._layer_bytes = cache(lambda tokens: weight_bytes * layer_weights(spec, tokens))
        self._token_flops = 2.0 * layer_weights(spec, 1)
        self._kv_row = spec.kv_layout(dtype).bytes_per_token // spec.num_layers  # of one token in one layer
        self._token_bytes = spec.hidden_size * size + spec.num_layers * self._kv_row
        self._pair_flops = 2 * attention.num_heads * (attention.head_dim + attention.value_dim)
        self._head, self._logits_bytes = spec.vocab_size * spec.hidden_size, size * spec.vocab_size
        self._head_bytes = size * self._head
        self._windows = Counter(spec.windows)

    def of(self, done: StepWork) -> Cost:
        moved = self._layer_bytes(done.tokens) + done.tokens * self._token_bytes
        flops = 0.0
        if done.sampled:
            moved += self._head_bytes + done.sampled * self._logits_bytes
            flops += 2.0 * self._head * done.sampled
        for window, layers in self._windows.items():
            seen, pairs = done.context, done.pairs
            if window is not None:
                seen = min(seen, done.rows * window + done.tokens)
                pairs = min(pairs, done.tokens * window)
            moved += layers * max(seen - done.tokens, 0) * self._kv_row
            flops += layers * self._pair_flops * pairs
        by_dtype = {self._wide: flops}
        by_dtype[self._product] = by_dtype.get(self._product, 0.0) + self._token_flops * done.tokens
        return Cost(float(moved), by_dtype)


def layer_weights(spec: ModelSpec, tokens: int | None = None) -> float:
    """Parameters of all layers and of the last norm; with `tokens`, those that a step of so many needs at least."""
    hidden = spec.hidden_size
    layers = ((layer.attention.num_weights(hidden), layer.feed_forward) for layer in spec.layers)
    return hidden + sum(attention + 2 * hidden + _feed_forward(own, hidden, tokens) for attention, own in layers)


def _feed_forward(spec: FeedForwardSpec, hidden: int, tokens: int | None) -> float:
    from mini_infer.modeling.spec import MLPSpec  # beside torch, as whoever calls this

    if isinstance(spec, MLPSpec):
        return 3 * hidden * spec.intermediate_size + (2 * spec.intermediate_size + hidden) * spec.bias
    router = spec.router
    total = float(router.num_experts * (hidden + router.correction_bias) + hidden * spec.shared_gate)
    if spec.shared is not None:
        total += _feed_forward(spec.shared, hidden, tokens)
    touched: float = router.num_experts
    if tokens is not None:
        touched = router.top_k
        if router.routing == "uniform":
            touched = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** tokens)
    return total + touched * 3 * hidden * spec.intermediate_size


def bandwidth(ceilings: Ceilings, num_bytes: float) -> float:
    """The most bytes/s that a step of `num_bytes` could have: what fits a cache may come from there. Rates fall with
    size, so that of the largest measured size that is no larger is above its own; below all of them it is the fastest.
    """
    memory = max(ceilings.read_gb_s, ceilings.copy_gb_s)
    cached = ceilings.cached_read_gb_s
    smaller = [mib for mib in cached if mib * MIB <= num_bytes]
    rate = cached[max(smaller)] if smaller else max(cached.values(), default=memory)
    return max(memory, rate) * GB


def floor(cost: Cost, ceilings: Ceilings) -> Floor:
    seconds = sum(flops / (ceilings.tflop_s_of(dtype) * TFLOP) for dtype, flops in cost.flops.items())
    return Floor(cost.bytes / bandwidth(ceilings, cost.bytes), seconds)
