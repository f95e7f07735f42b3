"""The gate of tokens: what a variant answers under load, with memory short, is what each request gets alone, of a plain
engine with every mechanism off. docs/metrics.md says which requests are asked, and of which model. On a CPU engines
compute in fp32, whose sums come out alike often enough for every token to be equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import cycle, islice, zip_longest
from typing import Any

import numpy as np

from experiments.lab.judge import logit_gate
from experiments.lab.judge.gate import ALONE, Gate, Tokens, compare
from experiments.lab.workloads import Inputs, Item
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import Batching, EngineConfig, Layout, LoadFormat, LoraConfig, ModelConfig, Numerics
from mini_infer.core.config import replace as changed
from mini_infer.core.request import TokenLogprob
from mini_infer.core.speculation_config import DraftConfig, SpeculationMethod
from mini_infer.modeling.loader import load_spec
from mini_infer.modeling.spec import MLASpec, MoESpec

MOST_REQUESTS = 24  # of a point's own that differ
MOST_ROWS = 256  # of a step: so many are asked at once, by copies, where the point has as many
MOST_COPIED = 2**17  # tokens of the copies' prompts, which take time
CROWD = 32  # short probes, of which as many decode side by side as memory holds
MOST_TOKENS = 32  # of an answer
SMALL_TIER_GIB = 2**-6  # of host memory for prefixes
CHUNK = 256  # tokens of a step, where probes are computed in chunks
# That answer probes, of those that ship with the package. MIXTURE has experts and latents: for models with either.
MODEL, MIXTURE, DRAFT = "tiny-target", "tiny-moe", "tiny-draft"
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.5, "logprobs": 20},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 3, "logprobs": 0},
)

# What stands for a token in the comparison:
OTHER_LOGPROBS = -1  # it is right, and its log-probabilities are not
EXCLUDED = -2  # it is one that the request's parameters exclude

Question = tuple[list[int], SamplingParams]
Asked = tuple[Sequence[Item], list[Question]]  # what primes the prefix cache, and the questions behind it
Answer = list[tuple[int, TokenLogprob | None]]  # tokens, with their log-probabilities where they are asked for
Answers = list[Answer]
Draft = Callable[[DraftConfig], DraftConfig]  # what stands for a draft model
Ask = Callable[[Sequence[Question]], Tokens]  # all questions at once


class ExactGate:
    def __init__(self, device: str) -> None:
        """`device`, that the variants are measured on, is "cuda" or "cpu"."""
        self.device, self._on_gpu = device, device == "cuda"
        self._how = "; batch-invariant numerics, to the bit" if self._on_gpu else ""
        self._alone: dict[str, Answer] = {}  # of a plain engine, by its config and the question

    def of_own(self, variant: str, config: EngineConfig, loads: Mapping[str, Inputs]) -> list[Gate]:
        """Of a variant's requests at each point of `loads`, those of a closed loop and of an open one alike all at
        once, and copies of them, until as many are asked as the point has, or an engine has places. One engine answers
        the points after each other, and forgets each: starting takes longer than asking."""
        asked = {}
        for point, load in loads.items():
            items = load.measured[:: max(1, -(-len(load.measured) // MOST_REQUESTS))]
            questions = _questions([list(item.prompt) for item in items], [item.output_tokens for item in items])
            # Copies cost nothing more to ask alone, and are rows of their own in company.
            copied = MOST_COPIED // max(len(prompt) for prompt, _ in questions)
            rows = min(config.scheduler.max_num_seqs, len(load.measured), MOST_ROWS, len(questions) + copied)
            asked[point] = load.prime, list(islice(cycle(questions), max(rows, len(questions))))
        return self._gates(variant, _shrunk(config), asked, f"{logit_gate.LAYERS} layers, random weights")

    def of_prompts(self, variant: str, config: EngineConfig, prompts: Sequence[list[int]], length: int) -> Gate:
        """Of a config as it is, with its own weights, all of these at once; `length` tokens of each answer."""
        asked = {"": ((), _questions(prompts, [length] * len(prompts)))}
        return self._gates(variant, config, asked, "its own weights")[0]

    def of_probes(self, variant: str, config: EngineConfig) -> Gate:
        """With a shipped model, in place of the variant's."""
        questions, stressed = probes(whole=not config.scheduler.chunked_prefill), _stressed(config)
        return self._gates(variant, stressed, {"": ((), questions)}, _trained(stressed))[0]

    def of_served(
        self,
        variant: str,
        config: EngineConfig,
        serve: Callable[[EngineConfig], AbstractContextManager[Ask]],
        way: str = "over HTTP",
    ) -> Gate:
        """As of_probes, of the base model's tokens that `serve` brings this way from engines with these settings."""
        questions = probes(whole=not config.scheduler.chunked_prefill)
        stressed = self._comparable(_stressed(replace(config, lora=LoraConfig())))
        with serve(stressed) as ask:
            found = [ask(questions) for _ in range(2)]
        right = [[token for token, _ in answer] for answer in self._asked_alone(plain(stressed), questions)]
        against = f"{ALONE} ({_trained(stressed)}; {way}{self._how})"
        first, again = (compare(variant, "", right, tokens, against) for tokens in found)
        return first.joined(again)

    def _gates(self, variant: str, config: EngineConfig, asked: Mapping[str, Asked], weights: str) -> list[Gate]:
        config, found = self._comparable(config), []
        with closing(LLMEngine(config)) as engine:
            for prime, questions in asked.values():
                engine.core.reset()
                for item in prime:
                    engine.generate([list(item.prompt)], SamplingParams(temperature=0, max_tokens=1))
                # The second time prefixes are there, and what drafts are proposed from.
                found.append([_answers(engine, questions) for _ in range(2)])
        every = [question for _, questions in asked.values() for question in questions]
        alone = iter(self._asked_alone(plain(config), every))
        against, gates = f"{ALONE} ({weights}{self._how})", []
        for (point, (_, questions)), twice in zip(asked.items(), found, strict=True):
            expected = list(islice(alone, len(questions)))
            right = [[token for token, _ in answer] for answer in expected]
            told = (self._told(questions, answers, expected) for answers in twice)
            first, again = (compare(variant, point, right, tokens, against) for tokens in told)
            gates.append(first.joined(again))
        return gates

    def _told(self, questions: list[Question], answers: Answers, expected: Answers) -> Tokens:
        """Tokens, or what stands for them. On a CPU log-probabilities' last bits depend on the company: none count."""
        found = []
        for (_, params), answer, own in zip(questions, answers, expected, strict=True):
            alone = dict(enumerate(own))
            found.append([token for token, _ in answer])
            for at, (token, logprobs) in enumerate(answer):
                if _excluded(params, logprobs):
                    found[-1][at] = EXCLUDED
                elif self._on_gpu and alone.get(at, answer[at]) != (token, logprobs) and alone[at][0] == token:
                    found[-1][at] = OTHER_LOGPROBS
        return found

    def _comparable(self, config: EngineConfig) -> EngineConfig:
        if not self._on_gpu:
            return replace(config, numerics=Numerics.fast)
        # Batch-invariant numerics have kernels and attention of their own: a choice of others gives way.
        own = changed(config, model={"kernels": "auto"}, attention={"prefill": "auto", "decode": "auto"})
        return replace(own, numerics=Numerics.batch_invariant)

    def _asked_alone(self, config: EngineConfig, questions: list[Question]) -> Answers:
        """Each question is asked once of the same engine."""
        asked = {repr((config, question)): question for question in questions}
        if new := {key: question for key, question in asked.items() if key not in self._alone}:
            with closing(LLMEngine(config)) as engine:
                self._alone |= {key: _answers(engine, [question])[0] for key, question in new.items()}
        return [self._alone[repr((config, question))] for question in questions]


def plain(config: EngineConfig) -> EngineConfig:
    """The same model and numbers with every mechanism off, in one process."""
    longest = config.model.max_model_len or logit_gate.LENGTH
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": longest, "chunked_prefill": False, "overlap": "never"}
    own = config.to_dict()
    numbers = {"dtype": own["cache"]["dtype"], "block_size": 16, "num_blocks": -(-longest // 16) + 1}
    off = {"graphs": {"capture": "never"}, "speculation": {}, "parallel": {}}
    return EngineConfig.from_dict({**own, "scheduler": alone, "cache": {**numbers, "prefix_caching": False}, **off})


def _trained(config: EngineConfig) -> str:
    return f"trained weights of {config.model.path}, small chunks, little memory"


def probes(whole: bool = False) -> list[Question]:
    """`whole` prompts fit into a step, since they are not cut into chunks."""
    rng = np.random.default_rng(15)
    size = 1000  # tokens of the shipped vocabulary that are drawn from

    def draw(count: int) -> list[int]:
        return rng.integers(4, size, count).tolist()

    one, other, middle = draw(32), draw(32), draw(32)
    ends = [CHUNK - 1, CHUNK] if whole else [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1]
    prompts = [draw(end) for end in ends[:2]]  # which leave so little memory that those behind them must give way
    prompts += [one + middle + draw(5), other + middle + draw(5), middle + draw(9)]  # equal blocks, other beginnings
    prompts += [one + middle, one + middle + draw(1), one, one + draw(15), one * 3]
    prompts += [draw(end) for end in ends[2:]]
    short = _questions([draw(length) for length in range(4, 12)], [12] * 8)
    crowd = list(islice(cycle(short), CROWD))
    # The crowd first: behind the longest, which fill the memory, few would be side by side.
    return [*crowd, *_questions(prompts, [18 + 4 * (index % 4) for index in range(len(prompts))])]


def _questions(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Question]:
    return [
        (prompt, SamplingParams(max_tokens=min(length, MOST_TOKENS), ignore_eos=True, seed=index, **kind))
        for index, (prompt, length, kind) in enumerate(zip(prompts, lengths, cycle(KINDS), strict=False))
    ]


def _shrunk(config: EngineConfig) -> EngineConfig:
    """Few layers of the shape, and of a draft's, and memory for KV that shrinks with them, so that it is as short as it
    was; places for as many requests as are asked at once, since of larger batches no graph need be captured."""
    cache, scheduler = config.cache, config.scheduler
    if cache.num_blocks is None:
        share = logit_gate.LAYERS / int(logit_gate.shape_of(config.model)["num_hidden_layers"])
        cache = replace(cache, memory_gib=(cache.memory_gib or 16) * share)
    scheduler = replace(scheduler, max_num_seqs=min(scheduler.max_num_seqs, MOST_ROWS))
    return _around(config, logit_gate.few_layers(config.model), logit_gate.few_layers, cache=cache, scheduler=scheduler)


def _stressed(config: EngineConfig) -> EngineConfig:
    """The variant's mechanisms around a shipped model, in small chunks; memory for two or three of the longest."""
    spec = load_spec(replace(config.model, load_format=LoadFormat.dummy))  # which asks for no weights
    mixture = isinstance(spec.attention, MLASpec) or any(isinstance(x.feed_forward, MoESpec) for x in spec.layers)
    shipped = MIXTURE if mixture else MODEL
    model = ModelConfig(path=shipped, dtype=config.model.dtype, device=config.model.device, max_model_len=640)
    scheduler, cache = config.scheduler, config.cache
    tier = None if cache.host_prefix_gib is None else SMALL_TIER_GIB
    blocks = 3 * (-(-640 // cache.block_size))
    if cache.layout is Layout.paged and scheduler.batching is Batching.continuous:
        blocks = -(-768 // cache.block_size)  # for 640 tokens of the longest: who grows makes others give way
    # Without files: those of earlier gates would answer.
    cache = replace(logit_gate.bare(cache, blocks), host_prefix_gib=tier, watermark=0.0)
    most = CHUNK if scheduler.chunked_prefill else 640
    scheduler = replace(scheduler, max_num_seqs=min(scheduler.max_num_seqs, CROWD), max_num_batched_tokens=most)
    return _around(config, model, lambda _: DraftConfig(path=DRAFT), cache=cache, scheduler=scheduler)


def _around(config: EngineConfig, model: ModelConfig, draft: Draft, **others: Any) -> EngineConfig:
    """The config's mechanisms around another model, with `others` of its sections. Adapters in folders are of the true
    model: as many random ones stand for them. Synthetic acceptance makes up tokens: its drafts are verified here."""
    speculation, lora = config.speculation, config.lora
    if speculation.method is SpeculationMethod.synthetic:
        method = SpeculationMethod.draft if speculation.draft.given else SpeculationMethod.suffix
        speculation = replace(speculation, method=method, acceptance=None)
    if speculation.has_draft_model:
        speculation = replace(speculation, draft=draft(speculation.draft))
    lora = replace(lora, adapters={}, dummy=lora.dummy + len(lora.adapters))
    return replace(config, model=model, speculation=speculation, lora=lora, **others)


def _answers(engine: LLMEngine, questions: Sequence[Question]) -> Answers:
    names = list(engine.adapters)  # whoever asks has the same one alone and in company
    adapters = [names[(params.seed or 0) % len(names)] for _, params in questions] if names else None
    prompts, params = [prompt for prompt, _ in questions], [params for _, params in questions]
    done = [output.outputs[0] for output in engine.generate(prompts, params, adapters=adapters)]
    return [list(zip_longest(each.token_ids, each.logprobs or ())) for each in done]


def _excluded(params: SamplingParams, entry: TokenLogprob | None) -> bool:
    """Whether the token that `entry` is about may not be drawn at temperature 1."""
    if entry is None:
        return False
    if params.temperature == 0:
        return entry.rank > 1
    likelier = sum(math.exp(logprob) for _, logprob in entry.top[: entry.rank - 1])
    return 0 < params.top_k < entry.rank or (params.top_p < 1 and likelier > params.top_p + 1e-3)
