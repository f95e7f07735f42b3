"""What a step takes: a function of what is in it. Costs of a machine are fitted to steps that were measured there
(experiments/lab/measure/fit.py).

The runner has two kinds of step, and each has a curve of its own over the tokens computed, in straight pieces that
never fall: steps of rows alone (one launch of a CUDA graph, and mostly the weights' way through memory) and steps with
prompts in them. Attention is added to either: so much for each KV slot that a decode row reads; and of prompts so much
for each (query, key) pair, for each slot of all rows, whose keys and values may have to be made first (of latents), and
for each of the row that looks furthest, since whoever computes that one goes from slot to slot, however many processors
have nothing to do. Each row beside prompts takes something more, since its attention is computed apart, and so does
each block that kernels push to another engine meanwhile: products wait for processors that these hold. What experts,
quantized products and collectives take grows with the tokens, too, however unevenly (each token chooses some experts,
until all are chosen), and lies in the curves, which therefore belong to one model, layout and machine. A GPU that goes
on computing prompts draws more power than it is allowed, and its clock falls: each token of such steps takes longer,
and so do steps of rows alone, until it has recovered.

    device_s = curve(tokens) + slot_s * decode context + reach_s * furthest + expand_s * prompts' context
             + pair_s * prompts' pairs + beside_s * rows beside prompts + held_block_s * blocks pushed meanwhile
             + throttled_s * tokens * heat   or, of rows alone, + recovering_s * heat
    host_s   = plan_s + row_s * rows          to plan and to book a step, beside the device where steps overlap
    launch_s = pieces_s or eager_s            to launch one with prompts as graphs or kernel by kernel: where steps
                                              overlap, the end of the one under way is not told before that
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepPlan
from mini_infer.speculative.policy.costs import interpolate


def require_simulated(config: EngineConfig) -> None:
    """Raises ConfigError where ranks share experts, or prefixes go to files: nobody knows what these take; and where it
    depends on a text, or on another model, what is drafted and accepted."""
    drafts = config.speculation
    if drafts.most and (drafts.rate is None or drafts.has_draft_model or drafts.adaptive):
        wrong = "speculation.adaptive=true" if drafts.adaptive else "speculation.draft"
        asked = f"speculation.method={drafts.method.value}" + (f" with {wrong}" if drafts.rate is not None else "")
        raise ConfigError(
            f"{asked}: a simulated engine has no text, no draft model and nothing to weigh drafts with. Set "
            "speculation.method=synthetic with speculation.acceptance (0.6, say), without a draft, and "
            "speculation.adaptive=false; or speculation.method=none"
        )
    if config.parallel.expert > 1:
        raise ConfigError(f"{config.parallel.asked}: ranks that share experts are not simulated. Set parallel.expert=1")
    if (path := config.cache.disk_prefix_path) is not None:
        raise ConfigError(
            f"cache.disk_prefix_path={path}: files of prefixes are not simulated, host memory is. Leave it and "
            "cache.disk_prefix_gib unset"
        )


class Work(NamedTuple):
    """What of a step decides how long the device takes."""

    decode_tokens: int  # of running requests: last ones, and drafts
    prompt_tokens: int
    decode_context: int  # as of a StepPlan, like the next three
    prompt_reach: int
    prompt_context: int
    prompt_pairs: int
    pushed_blocks: int = 0  # to other engines, beside it
    heat: float = 0.0  # of the device as it begins

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prompt_tokens

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        plan = plan.as_decode_rows() or plan  # as the runner takes it on a GPU
        rows = len(plan.req_indices)
        if plan.num_decode_rows == rows and not plan.has_drafts:
            return cls(rows, 0, sum(plan.starts) + rows, 0, 0, 0)
        tokens = plan.num_prefill_tokens
        attention = plan.decode_context, *plan.prompt_attention
        return cls(plan.num_tokens - tokens, tokens, *attention, plan.num_blocks_pushed)

    @classmethod
    def decode(cls, rows: int, context: int) -> Work:
        """A step of rows alone, which attend to so many slots."""
        return cls(rows, 0, context, 0, 0, 0)


HARDLY = 0.01  # of Heat


class Heat:
    """What share of its last moments a device has spent on computing prompts, from 0 to 1: a mean over time, to which
    what lies `settles_s` back counts by 1/e. Of a step that is the part beyond `reading_s`, in which it waits for
    weights.

    Args:
        settles_s: 0 where it makes no difference, and it is always 0.
    """

    def __init__(self, settles_s: float, reading_s: float) -> None:
        self._settles_s, self._reading_s = settles_s, reading_s
        self._share, self._told_at = 0.0, -math.inf

    def at(self, moment: float) -> float:
        """Where it has computed no prompt since the last one. What is hardly any is none."""
        if not self._share:
            return 0.0
        share = self._share * math.exp(min(0.0, self._told_at - moment) / self._settles_s)
        return share if share > HARDLY else 0.0

    def add(self, begin: float, seconds: float) -> None:
        """A step with prompts in it."""
        if self._settles_s and seconds > 0:
            kept = math.exp(-seconds / self._settles_s)
            computing = max(0.0, 1 - self._reading_s / seconds)
            self._share, self._told_at = self.at(begin) * kept + computing * (1 - kept), begin + seconds


class StepCosts(Protocol):
    """Seconds of a step."""

    def device_s(self, work: Work) -> float: ...

    def heat(self, stages: int) -> Heat:
        """Of a device that has done nothing so far, and computes one stage of each step."""
        ...

    def rows_s(self, rows: int, contexts: range, heat: Heat, begin: float, pause_s: float) -> list[float]:
        """`device_s` of steps of these rows alone, one that attends to each of so many slots: the first from `begin`
        on, on a device of that heat, and each of the others a pause behind the one before it."""
        ...

    def host_s(self, rows: int) -> float: ...

    def launch_s(self, work: Work) -> float:
        """What the host takes to launch it beside a step that is under way."""
        ...

    def copy_s(self, blocks: int) -> float:
        """KV blocks between the device and the host."""
        ...

    def push_s(self, blocks: int) -> float:
        """KV blocks from an engine that computes prompts to one that decodes."""
        ...


@dataclass(frozen=True)
class Curve:
    """Straight pieces between (tokens, seconds); the first one's seconds before it, the last piece goes on behind."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: int) -> float:
        if tokens not in self._known:
            self._known[tokens] = interpolate(self.tokens, self.seconds, tokens)
        return self._known[tokens]

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}


OF_HEAT = ("throttled_s", "recovering_s")
ATTENTION = ("slot_s", "reach_s", "expand_s", "pair_s", "beside_s")  # what the device takes beside a curve


@dataclass(frozen=True)
class FittedCosts:
    decode: Curve  # steps of rows alone
    prompts: Curve  # steps with prompts
    slot_s: float
    reach_s: float
    pair_s: float
    plan_s: float
    row_s: float
    block_s: float = 0.0
    beside_s: float = 0.0
    push_block_s: float = 0.0
    expand_s: float = 0.0
    held_block_s: float = 0.0
    throttled_s: float = 0.0
    recovering_s: float = 0.0
    settles_s: float = 0.0  # of Heat
    pieces_s: float = 0.0  # of steps with prompts of up to `captured_tokens` tokens
    eager_s: float = 0.0  # of those with more
    captured_tokens: int = 0

    def device_s(self, work: Work) -> float:
        curve = self.prompts if work.prompt_tokens else self.decode
        attention = self.slot_s * work.decode_context
        if work.prompt_tokens:
            attention += self.reach_s * work.prompt_reach + self.pair_s * work.prompt_pairs
            attention += self.expand_s * work.prompt_context + self.beside_s * work.decode_tokens
            attention += self.held_block_s * work.pushed_blocks
            throttled = self.throttled_s * work.tokens
        else:
            throttled = self.recovering_s
        return curve(work.tokens) + attention + throttled * work.heat

    def heat(self, stages: int) -> Heat:
        return Heat(self.settles_s, self.decode.seconds[0] / stages)

    def rows_s(self, rows: int, contexts: range, heat: Heat, begin: float, pause_s: float) -> list[float]:
        alone, slot_s, recovering, done = self.decode(rows), self.slot_s, list[float](), 0
        while done < len(contexts) and (share := heat.at(begin)):
            recovering.append(alone + slot_s * contexts[done] + self.recovering_s * share)
            begin, done = begin + recovering[-1] + pause_s, done + 1
        return recovering + [alone + slot_s * context for context in contexts[done:]]

    def host_s(self, rows: int) -> float:
        return self.plan_s + self.row_s * rows

    def launch_s(self, work: Work) -> float:
        if not work.prompt_tokens:
            return 0.0
        return self.pieces_s if work.tokens <= self.captured_tokens else self.eager_s

    def copy_s(self, blocks: int) -> float:
        return self.block_s * blocks

    def push_s(self, blocks: int) -> float:
        return self.push_block_s * blocks

    def slower(self, times: float) -> FittedCosts:
        """Of a device that takes so many times as long; the host and its links are the same."""
        decode, prompts = (Curve(c.tokens, tuple(times * s for s in c.seconds)) for c in (self.decode, self.prompts))
        of_device = {name: times * getattr(self, name) for name in (*ATTENTION, *OF_HEAT, "held_block_s")}
        return replace(self, decode=decode, prompts=prompts, **of_device)
