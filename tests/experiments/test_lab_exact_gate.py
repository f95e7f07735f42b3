"""The gate of tokens finds planted faults of the engine, each of a kind that wrong tokens alone show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest
from compiled import replaces_methods
from model_shapes import LATENTS, SHAPES

from experiments.lab.judge import exact_gate
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import Gate
from experiments.lab.workloads import Inputs, Item
from mini_infer import EngineConfig, LLMEngine
from mini_infer.cache.block_pool import BlockPool
from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import AttentionChoice, KernelChoice, LoraConfig, MLAForm, Numerics
from mini_infer.kernels.sampling import draw
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.sampling import sampler
from mini_infer.runtime.scheduler.planned_step import PlannedStep
from mini_infer.runtime.worker import model_runner
from mini_infer.runtime.worker.request_states import RequestStates

SCHEDULER = {"max_num_batched_tokens": 1024, "max_num_seqs": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "swap, overlap, synthetic drafts": {
        "scheduler": {"preemption": "swap", "overlap": "always"},
        "speculation": {"method": "synthetic", "acceptance": 0.5, "adaptive": False},
    },
    "drafts": {"speculation": {"method": "draft", "draft": {"path": "tiny-draft"}, "adaptive": False}},
    "others' kernels": {
        "attention": {"prefill": "sdpa", "decode": "sdpa"},
        "model": {"kernels": "torch"},
    },
    "static, contiguous, whole prompts": {
        "cache": {"layout": "contiguous", "prefix_caching": False},
        "scheduler": {"batching": "static", "chunked_prefill": False},
    },
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def gate(request: pytest.FixtureRequest) -> Iterator[ExactGate]:
    """What requests get alone is computed once; on a CPU by the smaller model, whose drafts the larger one makes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            patch.setattr(exact_gate, "MODEL", exact_gate.DRAFT)
            patch.setattr(exact_gate, "DRAFT", "tiny-target")
        yield ExactGate(request.param)


def config(variant: str, device: str) -> EngineConfig:
    changes = VARIANTS[variant]
    model = {"path": "tiny-target", "device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}
    model |= changes.get("model", {})
    base = {**changes, "model": model, "scheduler": {**SCHEDULER, **changes.get("scheduler", {})}}
    return EngineConfig.from_dict(base)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_engine_without_faults_passes(gate: ExactGate, variant: str) -> None:
    found = gate.of_probes(variant, config(variant, gate.device))
    assert found.passed, found.first_difference
    assert found.total_tokens > 300
    assert found.covers(variant, "any point")
    assert not found.covers("another variant", "")


RANDOM: dict[str, Any] = {"path": "made up", "load_format": "dummy"}
MIXTURES: dict[str, tuple[dict[str, Any], str]] = {  # and the form of its latents
    "experts": ({**RANDOM, "hf_config": SHAPES["qwen2_moe"], "routing": "uniform"}, "auto"),
    "latents": ({**RANDOM, "hf_config": LATENTS | {"first_k_dense_replace": 3}}, "absorbed"),
    "both": ({"path": "tiny-moe"}, "naive"),
}


@pytest.mark.parametrize(("model", "form"), MIXTURES.values(), ids=MIXTURES)
def test_a_mixture_answers_for_experts_and_for_latents(model: dict[str, Any], form: str) -> None:
    asked = exact_gate._stressed(EngineConfig.from_dict({"model": model, "attention": {"mla": form}}))
    assert (asked.model.path, asked.attention.mla.value) == ("tiny-moe", form)


def test_a_dense_model_answers_for_others() -> None:
    dense = {**RANDOM, "hf_config": SHAPES["qwen2"]}
    assert exact_gate._stressed(EngineConfig.from_dict({"model": dense})).model.path == exact_gate.MODEL


@pytest.mark.parametrize("form", ["absorbed", *(pytest.param(f, marks=pytest.mark.gpu) for f in ("naive", "auto"))])
def test_a_mixture_without_faults_passes(gate: ExactGate, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    if gate.device == "cpu":  # which takes long
        monkeypatch.setattr(exact_gate, "probes", lambda whole: [(p, replace(q, max_tokens=4)) for p, q in SHORT[:2]])
    asked = config("as it is", gate.device)
    model, attention = replace(asked.model, path="tiny-moe"), replace(asked.attention, mla=MLAForm(form))
    found = gate.of_probes(form, replace(asked, model=model, attention=attention))
    assert found.passed, found.first_difference
    assert "trained weights of tiny-moe" in found.against


def test_what_is_cached_is_rounded_for_a_request_alone_too() -> None:
    """Else a cache in fewer bits would be held against a whole one."""
    for dtype in ("auto", "fp8"):
        config = EngineConfig.from_dict({"model": {"path": "tiny-moe"}, "cache": {"dtype": dtype, "block_size": 32}})
        alone = exact_gate.plain(config).cache
        assert (alone.dtype, alone.block_size) == (config.cache.dtype, 16)


def test_adapters_of_folders_have_random_ones_in_their_place() -> None:
    lora = LoraConfig(max_adapters=2, adapters={"mine": "of another model"}, dummy=1)
    asked = replace(config("as it is", "cpu"), lora=lora)
    for shrink in (exact_gate._stressed, exact_gate._shrunk):
        assert shrink(asked).lora == replace(lora, adapters={}, dummy=2)


def _orphaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's hash forgets its parent."""

    def extend(self: KVManager, request: Any, num_blocks: int) -> None:
        size = self.block_size
        for index in range(len(request.block_hashes), num_blocks):
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.block_hashes.append(repr(list(tokens)).encode())

    monkeypatch.setattr(KVManager, "_extend_hashes", extend)


def _freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who releases a shared block frees it, whoever else has it."""
    release = BlockPool.release

    def early(self: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            self._ref_counts[block] = min(self._ref_counts[block], 1)
        release(self, [block for block in blocks if self._ref_counts[block] > 0])

    monkeypatch.setattr(BlockPool, "release", early)


def _skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is computed in chunks loses the token behind each."""
    add = PlannedStep.add_prompt_row

    def skip(self: PlannedStep, request: Any, count: int) -> None:
        add(self, request, count)
        if request.num_computed_tokens < request.num_tokens - 1:
            request.num_computed_tokens += 1

    monkeypatch.setattr(PlannedStep, "add_prompt_row", skip)


def _untruncated(monkeypatch: pytest.MonkeyPatch) -> None:
    """top-p is ignored, by whoever asks."""
    monkeypatch.setattr(sampler, "encode", lambda params, *rest: draw.encode(replace(params, top_p=1.0), *rest))


def _beyond_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "encode", lambda params, *rest: draw.encode(replace(params, top_k=0), *rest))


def _stale_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a draft was rejected, the token after it is the target's for the draft."""
    monkeypatch.setattr(model_runner, "keep_accepted", _keep_all)


def _keep_all(tokens: list[list[int]], rows: Any, picked: Any, drafts: Any) -> None:
    for row, token in zip(rows, picked, strict=True):
        tokens[row].append(token)


def _turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions of prompts behind what the cache holds are one too far."""
    build = RequestStates.build

    def shifted(self: RequestStates, plan: Any, *rest: Any, **more: Any) -> Any:
        step = build(self, plan, *rest, **more)
        firsts = [0, *accumulate(plan.counts)]
        for row, (start, size) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            if size > 1 and start > 0:
                step.batch.positions[firsts[row] : firsts[row + 1]] += 1
        return step

    monkeypatch.setattr(RequestStates, "build", shifted)


def _wrong_in_a_crowd(monkeypatch: pytest.MonkeyPatch, rows: int = 16) -> None:
    """The last one of more than so many rows is one position too far."""
    build = RequestStates.build

    def shifted(self: RequestStates, plan: Any, *rest: Any, **more: Any) -> Any:
        step = build(self, plan, *rest, **more)
        if len(plan.counts) > rows:
            step.batch.positions[-1] += 1
        return step

    monkeypatch.setattr(RequestStates, "build", shifted)


def _drawn_by_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request draws depends on how many came before it."""
    before = count()

    def encode(params: Any, seed: int, *rest: Any) -> Any:
        return draw.encode(params, seed + next(before), *rest)

    monkeypatch.setattr(sampler, "encode", encode)


def _neighbours_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sampler.report
    monkeypatch.setattr(sampler, "report", lambda logits, *rest: report(logits.roll(1, 0), *rest))


def _blocks_come_back_in_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = KVManager.swap_in

    def turned(self: KVManager, request: Any) -> Any:
        transfer = swap_in(self, request)
        hosts, blocks = zip(*transfer.pairs, strict=True)
        return transfer._replace(pairs=list(zip(reversed(hosts), blocks, strict=True)))

    monkeypatch.setattr(KVManager, "swap_in", turned)


SHORT = exact_gate.probes()[exact_gate.CROWD :][2:10]
FAULTS: dict[Any, str] = {  # and the variant that has it
    _orphaned: "as it is",
    _freed_early: "as it is",
    _skipped: "as it is",
    _turned: "as it is",
    _untruncated: "as it is",
    _beyond_top_k: "as it is",
    _wrong_in_a_crowd: "as it is",
    _drawn_by_company: "as it is",
    _neighbours_logprobs: "as it is",
    _stale_token: "drafts",
    _blocks_come_back_in_other_places: "swap, overlap, synthetic drafts",
}
# Prompts in chunks, memory that gets short, or many rows.
NEEDS_ALL = {_freed_early, _skipped, _blocks_come_back_in_other_places, _wrong_in_a_crowd}


@replaces_methods
@pytest.mark.parametrize(("fault", "variant"), FAULTS.items())
def test_a_planted_fault_is_found(gate: ExactGate, monkeypatch: pytest.MonkeyPatch, fault: Any, variant: str) -> None:
    """By some of the probes, and so by all."""
    fault(monkeypatch)
    if fault not in NEEDS_ALL:
        monkeypatch.setattr(exact_gate, "probes", lambda whole: SHORT)
    try:
        found = gate.of_probes(variant, config(variant, gate.device))
    except AssertionError:
        return  # the engine's own bookkeeping noticed
    assert not found.passed


@pytest.mark.parametrize("fault", [_untruncated, _beyond_top_k])
def test_a_fault_that_a_request_alone_has_too_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    truncated = SHORT[2:5]  # by top-k and by top-p, with log-probabilities
    monkeypatch.setattr(exact_gate, "probes", lambda whole: truncated)
    fault(monkeypatch)
    assert not ExactGate("cpu").of_probes("as it is", config("as it is", "cpu")).passed


# --- an experiment's own requests ----------------------------------------------------------------------------------


def of_own(gate: ExactGate) -> list[Gate]:
    """What a GPU's runs ask at each point: some requests that share, a prompt of three chunks, one that went before."""
    rng = np.random.default_rng(0)
    shared, other, middle, *more = (
        tuple(rng.integers(4, 1000, count).tolist()) for count in (32, 32, 32, 3, 5, 150, 9)
    )
    prompts = [shared + middle + more[0], other + middle + more[1], more[2], shared + more[3], middle + more[3]]
    items = tuple(Item(prompt, 8) for prompt in prompts)
    base = config("as it is", gate.device)
    engine = replace(
        base,
        model=replace(base.model, path="tiny-draft", max_model_len=320),
        cache=replace(base.cache, num_blocks=24),
        scheduler=replace(base.scheduler, max_num_batched_tokens=64, max_num_seqs=4),
    )
    loads = {"another": Inputs(items[2:4], ()), "a point": Inputs(items, (), items[:1])}
    return gate.of_own("as it is", engine, loads)


def test_own_requests_are_answered_as_alone(gate: ExactGate) -> None:
    found = of_own(gate)
    assert all(each.passed for each in found), found
    assert [(each.point, each.total_tokens) for each in found] == [("another", 2 * 2 * 8), ("a point", 2 * 5 * 8)]


@replaces_methods
@pytest.mark.parametrize(
    "fault", [_orphaned, _skipped, _turned, _beyond_top_k, _drawn_by_company, _neighbours_logprobs]
)
def test_a_planted_fault_is_found_by_own_requests(gate: ExactGate, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    assert not all(each.passed for each in of_own(gate))


@replaces_methods
def test_as_many_own_requests_are_asked_at_once_as_a_point_has(
    gate: ExactGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By copies, whose answers are known: rows that few requests never have."""
    prompts = np.random.default_rng(1).integers(4, 1000, (200, 6)).tolist()
    load = Inputs(tuple(Item(tuple(prompt), 4) for prompt in prompts), ())
    base = config("as it is", gate.device)
    scheduler = replace(base.scheduler, max_num_seqs=160)
    asked = replace(base, model=replace(base.model, path="tiny-draft", max_model_len=320), scheduler=scheduler)
    (found,) = gate.of_own("as it is", asked, {"a point": load})
    assert found.passed, found.first_difference
    assert found.total_tokens == 2 * 160 * 4
    with monkeypatch.context() as patch:
        patch.setattr(exact_gate, "MOST_COPIED", 60)
        assert gate.of_own("as it is", asked, {"a point": load})[0].total_tokens == 2 * (23 + 10) * 4
    _wrong_in_a_crowd(monkeypatch, rows=150)
    assert not gate.of_own("as it is", asked, {"a point": load})[0].passed


@replaces_methods
def test_one_engine_answers_all_points_and_forgets_each(gate: ExactGate, monkeypatch: pytest.MonkeyPatch) -> None:
    made, forgot = [], []
    start, reset = LLMEngine.__init__, EngineCore.reset
    monkeypatch.setattr(LLMEngine, "__init__", lambda self, config: (made.append(config), start(self, config))[1])
    monkeypatch.setattr(EngineCore, "reset", lambda self: (forgot.append(self), reset(self))[1])
    assert len(of_own(gate)) == 2
    assert len(made) <= 2  # with one that answers alone, unless it is known what that says
    assert len(forgot) == 2
    assert len(set(map(id, forgot))) == 1


def test_what_its_engines_are_made_of() -> None:
    asked = config("others' kernels", "cpu")
    given = exact_gate.ExactGate("cuda")._comparable(asked)
    assert given.numerics is Numerics.batch_invariant
    assert (given.attention.prefill, given.attention.decode) == (AttentionChoice.auto, AttentionChoice.auto)
    assert given.model.kernels is KernelChoice.auto
    many, few = (replace(asked, scheduler=replace(asked.scheduler, max_num_seqs=n)) for n in (1024, 4))
    of_random_weights = [replace(each, model=replace(each.model, path="tiny-draft")) for each in (many, few)]
    found = [exact_gate._shrunk(each).scheduler.max_num_seqs for each in of_random_weights]
    assert found == [exact_gate.MOST_ROWS, 4]
    deep = {"hf_config": {"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24}, "load_format": "dummy"}
    drafts = EngineConfig.from_dict(
        {"model": {"path": "tiny-draft"}, "speculation": {"method": "draft", "draft": deep}}
    )
    small = exact_gate._shrunk(drafts).speculation.draft.hf_config
    assert small == {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_probes_memory_holds_their_longest_request_whatever_a_block_is(size: int) -> None:
    cache = exact_gate._stressed(EngineConfig.from_dict({"cache": {"block_size": size}})).cache
    assert cache.num_blocks is not None
    assert 640 < cache.num_blocks * size < 2 * 640, "and not two of them"
