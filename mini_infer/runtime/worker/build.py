"""From an EngineConfig to the parts of an engine: what the model allows, how much KV memory there is, who does what."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mini_infer.attention.backend import Requirements
from mini_infer.cache.kv_manager import KVManager
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.transfer import HostStore
from mini_infer.core.config import EngineConfig, LoadFormat, Preemption, When
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepPlan
from mini_infer.kernels.ops import TorchKernels, select_kernels
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.loader import load_model, load_spec, resolve_device, resolve_dtype
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.executor.dry_model import DryModel
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.decode_graphs import DecodeGraphs, NoGraphs, batch_ladder
from mini_infer.runtime.graphs.pieces import graph_bytes, token_ladder
from mini_infer.runtime.sampling.sampler import Sampler, make_sampler
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.runtime.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.worker.memory import (
    KVShape,
    Limits,
    allocate_kv,
    hold_small_memory,
    kv_memory,
    largest_step,
    largest_verification,
    require_room_for_weights,
    weight_bytes,
)
from mini_infer.runtime.worker.model_runner import Graphs, Runner
from mini_infer.runtime.worker.progress import progress_bar
from mini_infer.runtime.worker.request_states import RequestStates, StepInput
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport
from mini_infer.runtime.worker.torch_model import AttentionBackends, TorchModel
from mini_infer.speculative.costs import StepCosts
from mini_infer.speculative.draft_steps import DraftSteps
from mini_infer.speculative.loading import (
    DraftSpec,
    LoadedDraft,
    ProposerMaker,
    check_draft,
    describe_speculation,
    load_draft,
    make_draft_steps,
    make_proposer,
    require_room_for_drafts,
    row_logits_bytes,
)
from mini_infer.speculative.step_costs import measure_costs

_DRY_HAS_NO_GRAPHS = "the dry model runs on the CPU"
_NEEDS_GPU = "CUDA graphs need a GPU, not cpu"


@dataclass(frozen=True)
class EngineParts:
    tokenizer: Tokenizer
    runner: Runner
    reserve_memory: Callable[[], None]  # takes what the largest step needs; overwrites what runs
    make_scheduler: Callable[[], Scheduler]
    step_costs: Callable[[], StepCosts]  # measures them when it is first called; overwrites what runs
    overlap: bool  # a step is launched before the tokens of the step before it are read
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens of prompt and output
    limit_reason: str  # what sets max_model_len, for the message to who exceeds it
    startup: StartupReport


def build_parts(config: EngineConfig) -> EngineParts:
    """Raises ConfigError or ModelError where the settings cannot work; what needs no weights is found out first."""
    started = time.perf_counter()
    if config.model.load_format is LoadFormat.dry:
        return _build_dry(config, started)
    model_config = config.model
    if model_config.hf_config is None:  # a hub name is looked up once; from here on it is a folder
        folder = resolve_folder(model_config.path, weights=model_config.load_format is LoadFormat.auto)
        model_config = dataclasses.replace(model_config, path=str(folder))
    spec = load_spec(model_config)
    device = resolve_device(model_config)
    dtype = resolve_dtype(model_config, spec, device)
    kv_shape: KVShape = {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": config.cache.block_size,
        "dtype": dtype,
    }
    tokenizer = load_tokenizer(model_config)
    draft = check_draft(config, spec, dtype, tokenizer, device)
    block_bytes = KVStore.bytes_per_block(**kv_shape) + (draft.block_bytes if draft else 0)
    limits = settle_limits(config, spec.max_model_len, kv_memory(config.cache, device) // block_bytes)
    kernels = select_kernels(config.model.kernels, device)
    sampler = make_sampler(config.scheduler.max_num_seqs, spec.vocab_size, device, kernels)
    backends, no_graphs = _select_attention(config, spec, dtype, device, sampler)
    require_room_for_weights(weight_bytes(spec, dtype), model_config.path, dtype, device)
    lookahead = config.speculation.most
    model = load_model(model_config, spec, dtype, device, limits.max_model_len + lookahead, kernels)
    loaded_draft = None
    if draft:
        draft_model = load_draft(draft, limits.max_model_len, lookahead, device, kernels)
        loaded_draft = LoadedDraft(draft, draft_model, *_select_draft_attention(config, draft, device, sampler))
    captures_rows = no_graphs is None and (loaded_draft is None or loaded_draft.can_be_captured)
    if device.type == "cuda":  # the weights have taken their share, and steps will take theirs
        step_bytes = _try_largest_step(config, limits, model, loaded_draft, kv_shape, backends, sampler)
        step_bytes += _bytes_of_graphs(config, spec, dtype, draft, captures_rows)
        limits = settle_limits(config, spec.max_model_len, kv_memory(config.cache, device, step_bytes) // block_bytes)
    store = allocate_kv(kv_shape, limits.num_blocks, device)
    host = HostStore(store, limits.num_host_blocks) if limits.num_host_blocks else None
    torch_model = TorchModel(model, store, host, backends)
    req_indices = _make_states(config, limits, sampler, device)
    overlap = _overlaps(config, device)
    drafts = make_draft_steps(config, torch_model, loaded_draft, limits, req_indices, sampler, device, overlap)
    memory = GraphMemory(device) if device.type == "cuda" else None
    graphs, captured = _capture(config, torch_model, req_indices, sampler, memory, no_graphs)
    captured_pieces = _capture_pieces(config, torch_model, memory)
    captured_rows = CaptureReport()
    if memory is not None and captures_rows:
        captured_rows = drafts.capture(config, memory, _prefill_sizes(config))
    runner = Runner(torch_model, req_indices, sampler, graphs, drafts.steps)
    step_costs = cache(partial(measure_costs, runner, config, limits, overlap, drafts.steps.graphs.captured))
    if config.speculation.adapts:
        step_costs()
    reserve_memory = partial(_reserve_memory, config, limits, runner, device)
    reserve_memory()
    return EngineParts(
        tokenizer=tokenizer,
        runner=runner,
        reserve_memory=reserve_memory,
        step_costs=step_costs,
        make_scheduler=_scheduler_maker(config, limits, make_proposer(config, spec.vocab_size, step_costs), overlap),
        overlap=overlap,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids or tuple(tokenizer.eos_token_ids),
        max_model_len=limits.max_model_len,
        limit_reason=limits.reason,
        startup=StartupReport(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=str(dtype).removeprefix("torch."),
            attention_prefill=str(backends.prefill),
            attention_decode=str(backends.decode),
            kernels=f"{kernels.name} ({kernels.fallback})" if kernels.fallback else kernels.name,
            sampler=sampler.name,
            overlap=overlap,
            max_model_len=limits.max_model_len,
            num_kv_blocks=limits.num_blocks,
            kv_bytes=limits.num_blocks * KVStore.bytes_per_block(**kv_shape),
            weight_bytes=weight_bytes(spec, dtype),
            seconds=time.perf_counter() - started,
            graphs=captured,
            prefill_graphs=captured_pieces,
            draft_graphs=captured_rows,
            speculation=describe_speculation(config.speculation),
            draft_weight_bytes=draft.weight_bytes if draft else 0,
            draft_kv_bytes=limits.num_blocks * draft.block_bytes if draft else 0,
        ),
    )


def _build_dry(config: EngineConfig, started: float) -> EngineParts:
    dry, device = config.model.dry, torch.device("cpu")
    tokenizer = ByteTokenizer(dry.vocab_size)
    plenty = config.scheduler.max_num_seqs * -(-dry.max_model_len // config.cache.block_size)
    limits = settle_limits(config, dry.max_model_len, affordable_blocks=plenty)
    model = DryModel(dry, limits.num_blocks, config.cache.block_size, limits.num_host_blocks)
    sampler = make_sampler(config.scheduler.max_num_seqs, dry.vocab_size, device, TorchKernels())
    req_indices = _make_states(config, limits, sampler, device)
    overlap = _overlaps(config, device)
    drafts = DraftSteps(model, req_indices, sampler, rate=config.speculation.rate, always_rows=overlap)
    runner = Runner(model, req_indices, sampler, NoGraphs(), drafts)
    step_costs = cache(partial(measure_costs, runner, config, limits, overlap))
    return EngineParts(
        tokenizer=tokenizer,
        runner=runner,
        reserve_memory=lambda: None,
        step_costs=step_costs,
        make_scheduler=_scheduler_maker(config, limits, make_proposer(config, dry.vocab_size, step_costs), overlap),
        overlap=overlap,
        vocab_size=dry.vocab_size,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        max_model_len=limits.max_model_len,
        limit_reason=limits.reason,
        startup=StartupReport(
            device="cpu",
            dtype="dry",
            attention_prefill="none",
            attention_decode="none",
            kernels="none",
            sampler=sampler.name,
            overlap=overlap,
            max_model_len=limits.max_model_len,
            num_kv_blocks=limits.num_blocks,
            kv_bytes=0,
            weight_bytes=0,
            seconds=time.perf_counter() - started,
            graphs=CaptureReport(limits=(_DRY_HAS_NO_GRAPHS,)),
            prefill_graphs=CaptureReport(limits=(_DRY_HAS_NO_GRAPHS,)),
            speculation=describe_speculation(config.speculation),
        ),
    )


def _overlaps(config: EngineConfig, device: torch.device) -> bool:
    """On a CPU the model computes in the caller's thread: a step launched early would only make its tokens late."""
    overlap = config.scheduler.overlap
    return overlap is When.always or (overlap is When.auto and device.type == "cuda")


def _select_attention(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, sampler: Sampler
) -> tuple[AttentionBackends, str | None]:
    """The backends, and why decode steps will not be captured in CUDA graphs; None where they will."""
    needs = Requirements(
        head_size=spec.head_dim,
        block_size=config.cache.block_size,
        dtype=dtype,
        device=device,
        sliding_window=any(spec.sliding_windows),
    )
    capture = config.graphs.capture
    reason = None
    if capture is When.never:
        reason = "graphs.capture=never"
    elif device.type != "cuda":
        reason = _NEEDS_GPU
    elif not sampler.graph_safe:
        reason = f"the {sampler.name} sampler cannot be captured"
    else:
        try:
            return AttentionBackends.select(config.attention, dataclasses.replace(needs, graphs=True)), None
        except ConfigError as error:
            reason = str(error)
    if capture is When.always:
        raise ConfigError(f"graphs.capture=always: {reason}. Set graphs.capture=auto or never")
    return AttentionBackends.select(config.attention, needs), reason


def _select_draft_attention(
    config: EngineConfig, draft: DraftSpec, device: torch.device, sampler: Sampler
) -> tuple[AttentionBackends, bool]:
    """The draft's backends, and whether its steps can be captured."""
    backends, no_graphs = _select_attention(config, draft.spec, draft.dtype, device, sampler)
    return backends, no_graphs is None


def _make_states(config: EngineConfig, limits: Limits, sampler: Sampler, device: torch.device) -> RequestStates:
    return RequestStates(
        config.scheduler.max_num_seqs,
        limits.max_model_len,
        config.cache.block_size,
        sampler.num_params,
        device,
        padding_block=limits.num_blocks,  # the one behind those that the scheduler knows
        lookahead=config.speculation.most,
    )


def _scheduler_maker(
    config: EngineConfig, limits: Limits, make_proposer: ProposerMaker, overlap: bool
) -> Callable[[], Scheduler]:
    def make_scheduler() -> Scheduler:
        kv = KVManager(
            limits.num_blocks,
            config.cache.block_size,
            limits.max_model_len,
            layout=config.cache.layout,
            prefix_caching=config.cache.prefix_caching,
            num_host_blocks=limits.num_host_blocks,
        )
        return Scheduler(config.scheduler, kv, config.cache.watermark, make_proposer(), overlap)

    return make_scheduler


def _try_largest_step(
    config: EngineConfig,
    limits: Limits,
    model: Decoder,
    draft: LoadedDraft | None,
    kv_shape: KVShape,
    backends: AttentionBackends,
    sampler: Sampler,
) -> int:
    """Runs the largest step there can be on a small KV store, which also compiles what steps run. Returns the bytes
    that it took beside weights and KV."""
    device = model.embed_tokens.device
    small = dataclasses.replace(limits, num_blocks=1, num_host_blocks=0)
    torch_model = TorchModel(model, allocate_kv(kv_shape, small.num_blocks, device), None, backends)
    req_indices = _make_states(config, small, sampler, device)
    drafts = make_draft_steps(config, torch_model, draft, small, req_indices, sampler, device, overlap=True)
    runner = Runner(torch_model, req_indices, sampler, NoGraphs(), drafts.steps)
    torch_model.warm_up(config.scheduler.max_num_seqs)
    if drafts.draft_model is not None:
        drafts.draft_model.warm_up(config.scheduler.max_num_seqs)
    sampler.warm_up(None if drafts.draft_model is None else drafts.draft_model.new_logits(1))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        for plan in _largest_steps(config, limits, block=0):
            runner.collect(runner.launch(plan))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of scheduler.max_num_batched_tokens={config.scheduler.max_num_batched_tokens} tokens does not fit "
            "in the GPU's memory beside the weights: lower it, or choose a smaller model"
        ) from error
    taken = torch.cuda.max_memory_allocated(device) - before
    del runner, torch_model, drafts
    torch.cuda.empty_cache()
    return taken


def _reserve_memory(config: EngineConfig, limits: Limits, runner: Runner, device: torch.device) -> None:
    """Leaves in torch's allocator what the largest step takes, so that no step waits for the driver to find it."""
    if device.type == "cuda":
        hold_small_memory(device)
        for plan in _largest_steps(config, limits, block=limits.num_blocks):  # the spare block
            runner.collect(runner.launch(plan))


def _largest_steps(config: EngineConfig, limits: Limits, block: int) -> list[StepPlan]:
    rows, tokens, most = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.speculation.most
    step = largest_step(rows, tokens, limits.max_model_len, config.cache.block_size, block)
    return [step, largest_verification(rows, tokens, most, step)] if most else [step]


def _capture(
    config: EngineConfig,
    model: TorchModel,
    req_indices: RequestStates,
    sampler: Sampler,
    memory: GraphMemory | None,
    no_graphs: str | None,
) -> tuple[Graphs, CaptureReport]:
    if memory is None or no_graphs is not None:
        return NoGraphs(), CaptureReport(limits=(no_graphs or _NEEDS_GPU,))

    def decode(step: StepInput, logits: Tensor) -> Tensor:
        model.compute_logits(step.sampled(model.forward_eagerly(step)), out=logits)
        return sampler.main(logits, step.param_rows, step.sampled_positions)

    max_num_seqs = config.scheduler.max_num_seqs
    sizes = batch_ladder(min(config.graphs.max_batch or max_num_seqs, max_num_seqs))
    graphs = DecodeGraphs(req_indices, decode, sizes, model.new_logits(max(sizes)))
    return graphs, graphs.capture(memory, progress_bar("capturing CUDA graphs"))


def _prefill_sizes(config: EngineConfig) -> list[int]:
    """Numbers of tokens whose steps are to be captured in pieces, on a GPU."""
    if config.graphs.capture is When.never:
        return []
    return token_ladder(config.graphs.max_prefill_tokens, config.scheduler.max_num_batched_tokens)


def _bytes_of_graphs(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, draft: DraftSpec | None, captures_rows: bool
) -> int:
    """What graphs of prompts will take of a GPU's memory, and those of rows with drafts where they are captured."""
    sizes = _prefill_sizes(config)
    taken = graph_bytes(spec, dtype, sizes)
    if captures_rows:
        taken += row_logits_bytes(config, spec, dtype, draft)
        if draft is not None:
            taken += graph_bytes(draft.spec, draft.dtype, sizes)
    return taken


def _capture_pieces(config: EngineConfig, model: TorchModel, memory: GraphMemory | None) -> CaptureReport:
    """Attention is not in the graphs, and neither is the sampler: on a GPU nothing stands in their way."""
    if memory is None:
        return CaptureReport(limits=(_NEEDS_GPU,))
    sizes = _prefill_sizes(config)
    if not sizes:
        never = config.graphs.capture is When.never
        return CaptureReport(limits=("graphs.capture=never" if never else "graphs.max_prefill_tokens=0",))
    return model.capture_pieces(sizes, memory, progress_bar("capturing CUDA graphs of prompts"))


def settle_limits(config: EngineConfig, model_limit: int, affordable_blocks: int) -> Limits:
    """Brings the model's length, the wishes of the config and the memory at hand together.

    Args:
        model_limit: tokens that the model's positions reach.
        affordable_blocks: KV blocks that fit in memory; used where cache.num_blocks is not given.

    Raises:
        ConfigError: the wishes contradict each other.
    """
    cache, scheduler, asked = config.cache, config.scheduler, config.model.max_model_len
    if asked is not None and asked > model_limit:
        raise ConfigError(
            f"model.max_model_len={asked} is beyond the model's own limit of {model_limit} tokens. Lower it, or "
            "stretch the model with rope scaling (linear or yarn) in its config.json"
        )
    length = asked or model_limit
    reason = f"model.max_model_len={asked}" if asked else f"the model's limit is {model_limit} tokens"
    longest = -(-length // cache.block_size)
    num_blocks = cache.num_blocks or min(affordable_blocks, scheduler.max_num_seqs * longest)
    if num_blocks < longest:
        capacity = num_blocks * cache.block_size
        pool = f"the KV pool holds {capacity} tokens ({num_blocks} blocks of {cache.block_size})"
        way_out = "raise cache.num_blocks" if cache.num_blocks else "give the cache more memory (cache.memory_gib)"
        if asked is not None or capacity < 2:
            raise ConfigError(
                f"{pool}, too few for one request of {length} tokens: {way_out}, or lower model.max_model_len"
            )
        length, reason = capacity, f"{pool}: {way_out}"
    if not scheduler.chunked_prefill and scheduler.max_num_batched_tokens < length:
        raise ConfigError(
            f"scheduler.chunked_prefill=false computes a prompt in one step, but "
            f"scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than the longest prompt "
            f"({length} tokens, {reason}): raise it to {length}, or lower model.max_model_len"
        )
    require_room_for_drafts(config.speculation, length)
    swaps = scheduler.preemption is Preemption.swap
    num_host_blocks = (cache.num_host_blocks or num_blocks) if swaps else 0
    return Limits(length, reason, num_blocks, num_host_blocks)
