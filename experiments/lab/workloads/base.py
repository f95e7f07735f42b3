"""What every workload is: prompts of token ids with exactly the stated length, fixed output lengths, a time at which
each request is due, and a warm-up on prompts that begin differently from every measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.lab.config.spec import Checked, Count, Positive
from mini_infer.core.config import LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from mini_infer.modeling.spec import ModelSpec
    from mini_infer.runtime.text.tokenizer import Tokenizer

START = 16  # tokens: prompts that are to share nothing differ within these (one KV block of the default size)
OPEN_LOOP_WARMUP = 16  # requests; how many will be in flight in an open loop depends on the engine


@dataclass(frozen=True)
class Item:
    """One request: it gets exactly `output_tokens` tokens, end-of-sequence or not."""

    prompt: tuple[int, ...]  # token ids; with `follows`, only what is new in this turn
    output_tokens: int
    # When it is due, from the start of the pass. None: as soon as there is a place for it, or behind what it follows.
    arrival_s: float | None = None
    priority: int = 0  # smaller goes first, with scheduler.policy=priority or patience
    # Index of the item whose whole prompt and actual output precede this prompt; it is due `think_s` after that
    # output's end.
    follows: int | None = None
    think_s: float = 0.0
    # Leading tokens of the whole prompt whose KV an earlier request of the pass (or a priming one) leaves behind. A
    # prefix cache can find that many, less what does not fill a block and the prompt's last token; fewer where the
    # earlier request has not got so far, or was evicted; never more.
    shared_tokens: int = 0
    name: str = ""  # class of request, such as "stream" and "prompt" of the workload `mixed`


@dataclass(frozen=True)
class Inputs:
    measured: tuple[Item, ...]
    warmup: tuple[Item, ...]
    # Served one by one after the warm-up and before the clock starts, so that what they leave in a prefix cache is
    # there from the first measured request on.
    prime: tuple[Item, ...] = ()
    # Facts about how the inputs were made, for `Workload.describe`.
    notes: Mapping[str, Any] = field(default_factory=dict)


class Vocabulary:
    """What a workload needs to know of a model, read without loading its weights."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._is_dry = model.load_format is LoadFormat.dry

    @property
    def size(self) -> int:
        """Ids that the model takes; its tokenizer may know fewer."""
        return self._model.dry.vocab_size if self._is_dry else self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together. The KV pool of an engine may be too small for as many."""
        limit = self._model.dry.max_model_len if self._is_dry else self._spec.max_model_len
        return min(self._model.max_model_len or limit, limit)

    @cached_property
    def _spec(self) -> ModelSpec:
        from mini_infer.modeling.loader import load_spec  # beside torch, which takes longer to import than all else

        return load_spec(self._model)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from mini_infer.runtime.text.tokenizer import load_tokenizer

        return load_tokenizer(self._model)


@dataclass(frozen=True)
class Workload(Checked, section="workload"):
    kind: ClassVar[str]  # its name in YAML

    def __init_subclass__(cls, kind: str = "", **more: str) -> None:
        super().__init_subclass__(**more)
        cls.kind = kind

    @property
    def num_requests(self) -> int:
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """The most requests that are in flight at once."""
        return self.num_requests

    @property
    def has_ramps(self) -> bool:
        """Whether requests arrive one after another: the first and the last of them meet less load than the others."""
        return False

    @property
    def shares(self) -> bool:
        """Whether prompts may begin as others do, so that a prefix cache has something to find."""
        return False

    def require_files(self) -> None:
        """Raises ConfigError where a file that `make` reads is not there."""

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        """The same inputs for the same settings, vocabulary and seed, on any machine.

        Raises ConfigError where a request is longer than the model takes, or prompts cannot all differ."""
        raise NotImplementedError

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        """What `make` made, in plain values for the result file. `hit_share` is the share of prompt tokens that a
        prefix cache can at most find, were it large enough and every earlier request computed in time."""
        prompts = prompt_lengths(inputs.measured)
        outputs = [item.output_tokens for item in inputs.measured]
        shared = sum(item.shared_tokens for item in inputs.measured)
        arrivals = [item.arrival_s for item in inputs.measured if item.arrival_s is not None]
        return {
            "kind": self.kind,
            "requests": len(inputs.measured),
            "warmup_requests": len(inputs.warmup),
            "priming_requests": len(inputs.prime),
            "in_flight": self.in_flight,
            "prompt_tokens": sum(prompts),
            "shortest_prompt": min(prompts),
            "longest_prompt": max(prompts),
            "output_tokens": sum(outputs),
            "shortest_output": min(outputs),
            "longest_output": max(outputs),
            "shared_tokens": shared,
            "hit_share": shared / sum(prompts),
            **({"last_arrival_s": max(arrivals)} if arrivals else {}),
            **inputs.notes,
        }

    def _require_room(self, vocabulary: Vocabulary, prompt: int, output: int, *lower: str, way_out: str = "") -> None:
        """`lower`: settings of which one is to be lowered where a request is too long."""
        limit, told = vocabulary.max_model_len, [f"workload.{name}={getattr(self, name)}" for name in lower]
        if prompt + output > limit:
            way_out = way_out or f"lower {', '.join(told[:-1])} or {told[-1]}"
            has = f"{prompt} prompt and {output} output tokens, {prompt + output} together; the model takes {limit}"
            way_out += ", or raise engine.model.max_model_len as far as the model allows"
            raise ConfigError(f"the longest request of workload={self.kind} has {has}: {way_out}")


class Arrivals(str, Enum):
    closed = "closed"  # the next request arrives when there is a place for it
    burst = "burst"  # all at once
    poisson = "poisson"  # at a mean rate, independently of each other
    gamma = "gamma"  # at a mean rate; gaps spread by cv: below 1 more regular than Poisson, above 1 burstier
    trace = "trace"  # as recorded in the trace


ONE_BY_ONE = (Arrivals.poisson, Arrivals.gamma, Arrivals.trace)


@dataclass(frozen=True)
class Arriving(Workload):
    """A workload with a choice of arrivals. Closed loop: `concurrency` requests are in flight at once (all of them,
    where it is not given). The others are open loops: nobody waits for a place."""

    arrivals: Arrivals = Arrivals.closed
    concurrency: Count | None = None
    rate_per_s: Positive | None = None  # mean arrivals a second, of poisson and gamma
    # Standard deviation of the gaps between arrivals over their mean, of gamma. 1 is a Poisson process.
    cv: Positive | None = None
    # Requests in the warm-up; default: as many as are in flight, or 16 where an open loop does not tell.
    warmup: Count | None = None

    recorded_arrivals: ClassVar[bool] = False  # whether arrivals=trace means something
    counted_by: ClassVar[str] = ""  # the setting that says how many arrive, where there can be more of them
    most: ClassVar[int | None] = None  # that can differ from each other; None: as many as are asked for

    def __post_init__(self) -> None:
        if self.arrivals is Arrivals.trace and not self.recorded_arrivals:
            way = f"has no recorded times: use {', '.join(a.value for a in Arrivals if a is not Arrivals.trace)}"
            raise ConfigError(f"workload.arrivals=trace needs workload=trace; workload={self.kind} {way}")
        random = self.arrivals in (Arrivals.poisson, Arrivals.gamma)
        self._only_with("concurrency", self.arrivals is Arrivals.closed, "arrivals=closed", needed=False)
        self._only_with("rate_per_s", random, "arrivals=poisson or gamma", needed=True)
        self._only_with("cv", self.arrivals is Arrivals.gamma, "arrivals=gamma", needed=True)
        super().__post_init__()

    def _only_with(self, name: str, applies: bool, condition: str, *, needed: bool) -> None:
        given, arrivals = getattr(self, name), self.arrivals.value
        if given is not None and not applies:
            raise ConfigError(f"workload.{name}={given} needs workload.{condition}; it is {arrivals}")
        if needed and applies and given is None:
            raise ConfigError(f"workload.arrivals={arrivals} needs workload.{name}")

    @property
    def num_arrivals(self) -> int:
        """What arrivals, rate_per_s, concurrency and warmup count."""
        return self.num_requests

    @property
    def in_flight(self) -> int:
        return min(self.concurrency or self.num_arrivals, self.num_arrivals)

    @property
    def has_ramps(self) -> bool:
        return self.arrivals in ONE_BY_ONE

    @property
    def num_warmup(self) -> int:
        if self.warmup is not None:
            return self.warmup
        known = self.arrivals in (Arrivals.closed, Arrivals.burst)
        return max(self.in_flight if known else min(self.num_arrivals, OPEN_LOOP_WARMUP), 2)

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        inputs = self._make(vocabulary, seed)
        if self.arrivals in (Arrivals.closed, Arrivals.trace):
            return inputs
        first = [index for index, item in enumerate(inputs.measured) if item.follows is None]
        times = [0.0] * len(first)
        if self.rate_per_s is not None:
            times = gamma_times(len(first), self.rate_per_s, self.cv or 1.0, generator(seed, "arrivals"))
        due: dict[int, float | None] = dict(zip(first, times, strict=True))
        scheduled = (replace(item, arrival_s=due.get(index)) for index, item in enumerate(inputs.measured))
        return replace(inputs, measured=tuple(scheduled))

    def describe(self, inputs: Inputs) -> dict[str, Any]:
        settings = {"arrivals": self.arrivals.value, "rate_per_s": self.rate_per_s, "cv": self.cv}
        return {**super().describe(inputs), **{key: value for key, value in settings.items() if value is not None}}

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        """The requests, without arrival times unless those are recorded."""
        raise NotImplementedError


@dataclass(frozen=True)
class Counted(Arriving):
    """One whose requests are counted by a setting."""

    counted_by: ClassVar[str] = "count"

    count: Count = 16

    @property
    def num_requests(self) -> int:
        return self.count

    def _parted(self, items: Sequence[Item]) -> Inputs:
        """What stands behind the measured ones is the warm-up."""
        return Inputs(tuple(items[: self.count]), tuple(items[self.count :]))


def prompt_lengths(items: Sequence[Item]) -> list[int]:
    """Tokens of each item's whole prompt, with the turns that it follows."""
    lengths: list[int] = []
    for item in items:
        before = 0 if item.follows is None else lengths[item.follows] + items[item.follows].output_tokens
        lengths.append(before + len(item.prompt))
    return lengths


def generator(seed: int, purpose: str) -> np.random.Generator:
    """One stream of random numbers a purpose, so that a setting of one (say the rate) leaves the others alone."""
    return np.random.default_rng([seed, *purpose.encode()])


def gamma_times(count: int, rate_per_s: float, cv: float, rng: np.random.Generator) -> list[float]:
    """`count` times in seconds, the first at 0, with independent gamma-distributed gaps of mean 1 / rate_per_s and
    coefficient of variation `cv`. With cv = 1 the gaps are exponential: a Poisson process."""
    gaps = rng.gamma(shape=cv**-2, scale=cv**2 / rate_per_s, size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
