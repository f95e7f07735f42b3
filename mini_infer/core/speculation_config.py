"""Settings of speculation: who proposes drafts, and how many."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mini_infer.core.config_checks import at_least, coerce
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import DType, LoadFormat, ModelConfig, Quantization, check_weights

MAX_DRAFT_TOKENS = 32


class SpeculationMethod(str, Enum):
    none = "none"
    draft = "draft"  # a smaller model with the same tokenizer proposes
    ngram = "ngram"  # what followed the last tokens where they came before, in the prompt or the output
    suffix = "suffix"  # the same by counts, over the outputs of finished requests as well
    synthetic = "synthetic"  # accepted at a stated rate, whatever the target says: for speed studies alone


@dataclass(frozen=True)
class DraftConfig:
    """The smaller model that proposes, for `method: draft`; with `synthetic` it runs for what it costs."""

    path: str | None = None  # a folder, a hub name, or tiny-draft
    load_format: LoadFormat = LoadFormat.auto
    hf_config: dict[str, Any] | None = None  # a config.json given inline, for dummy weights without a folder
    dtype: DType = DType.auto
    quantization: Quantization = Quantization.none  # of the draft's weights; groups and zeros as model says
    seed: int = 0  # of dummy weights

    def __post_init__(self) -> None:
        check_weights(self)
        if self.load_format is LoadFormat.dry:
            raise ConfigError(
                "speculation.draft.load_format=dry: a draft needs a model. Give weights, or set it to dummy, or take "
                "speculation.method=ngram, suffix or synthetic, which need none"
            )

    @property
    def given(self) -> bool:
        return self.path is not None or self.hf_config is not None

    def model(self, target: ModelConfig) -> ModelConfig:
        """As the loader takes it; it computes where the target does, and with the same kernels."""
        return ModelConfig(
            path=self.path or "the draft",
            load_format=self.load_format,
            hf_config=self.hf_config,
            dtype=target.dtype if self.dtype is DType.auto else self.dtype,
            device=target.device,
            quantization=self.quantization,
            quantization_group=target.quantization_group,
            quantization_symmetric=target.quantization_symmetric,
            kernels=target.kernels,
            seed=self.seed,
        )


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafts of up to `num_tokens` tokens, all of which the target verifies in one step."""

    method: SpeculationMethod = SpeculationMethod.none
    num_tokens: int = 4  # drafted for a request in a step, at most
    adaptive: bool = True  # fewer drafts, or none, where a cost model measured at start says that they do not pay
    acceptance: float | None = None  # of each synthetic proposal, the one before it being accepted
    ngram_min: int = 2  # tokens that must match, at least
    ngram_max: int = 4  # tokens that are tried first
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        coerce(self)
        method = self.method
        if not 1 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"speculation.num_tokens must be from 1 to {MAX_DRAFT_TOKENS}, got {self.num_tokens}. To draft "
                "nothing, set speculation.method=none"
            )
        at_least(self, 1, "ngram_min")
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"speculation.ngram_max={self.ngram_max} is less than speculation.ngram_min={self.ngram_min}: raise "
                "the first or lower the second"
            )
        if method is SpeculationMethod.draft and not self.draft.given:
            raise ConfigError(
                "speculation.method=draft needs speculation.draft.path: a model with the target's tokenizer, such as "
                "tiny-draft for tiny-target"
            )
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ConfigError(f"speculation.acceptance must be from 0 to 1, got {self.acceptance}")
        if method is SpeculationMethod.none:  # whatever else is set waits until there is a method again
            return
        if self.draft.given and method not in (SpeculationMethod.draft, SpeculationMethod.synthetic):
            raise ConfigError(
                f"speculation.draft goes with speculation.method=draft or synthetic, not {method.value}: no model "
                "proposes there"
            )
        if method is SpeculationMethod.synthetic and self.acceptance is None:
            raise ConfigError(
                "speculation.method=synthetic needs the rate at which its drafts are accepted, and none is given: set "
                "speculation.acceptance, to 0.6, say"
            )
        if method is not SpeculationMethod.synthetic and self.acceptance is not None:
            raise ConfigError(
                f"speculation.acceptance={self.acceptance:g} goes with speculation.method=synthetic, not "
                f"{method.value}, whose drafts the target judges: leave it unset"
            )

    @property
    def has_draft_model(self) -> bool:
        return self.most > 0 and self.draft.given

    @property
    def rate(self) -> float | None:
        """Of synthetic acceptance."""
        return self.acceptance if self.method is SpeculationMethod.synthetic else None

    @property
    def most(self) -> int:
        """Drafts of a request in a step, at most: 0 without speculation."""
        return 0 if self.method is SpeculationMethod.none else self.num_tokens

    def describe(self) -> str:
        """For a run's record: "draft, up to 4 tokens, as many as pay". What is synthetic says so."""
        if not self.most:
            return self.method.value
        many = "as many as pay" if self.adaptive else "always"
        rate = "" if self.rate is None else f" at a rate of {self.rate}"
        return f"{self.method.value}{rate}, up to {self.num_tokens} tokens, {many}"
