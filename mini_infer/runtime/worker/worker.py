"""Worker: one device's part of an engine. It loads the model, finds out what steps and KV may take of the memory,
allocates, captures CUDA graphs, and hands over a Runner.

    Worker(config)         what can be wrong with the settings is found here, before any weights are read
    load(max_model_len)    weights
    affordable_blocks()    profiles the largest step there can be, which also compiles what steps run
    allocate(limits)       KV, the state of requests
    capture()              CUDA graphs; then `runner` serves

With several ranks the limits are the least of all, which is why whoever drives a worker settles these in between. A
draft model is whole on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial

import torch

from mini_infer.attention.mla import EXPANDED_BYTES
from mini_infer.cache.block_files import BlockFiles
from mini_infer.cache.kv_store import Allocate
from mini_infer.cache.transfer import KVTransfer
from mini_infer.core.config import AllReduce, EngineConfig, Numerics, When
from mini_infer.core.errors import ConfigError
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepPlan
from mini_infer.kernels.compile_ahead import compiled_in_parallel
from mini_infer.kernels.ops import select_kernels
from mini_infer.modeling.adapters import Adapters
from mini_infer.modeling.loader import resolve_device
from mini_infer.modeling.model import Model
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.pieces import graph_bytes, token_ladder
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor, batch_ladder, draft_grid
from mini_infer.runtime.sampling.sampler import make_sampler
from mini_infer.runtime.text.tokenizer import load_tokenizer
from mini_infer.runtime.worker.memory import (
    allocate_kv,
    hold_small_memory,
    kv_memory,
    largest_steps,
    steps_of_each_size,
)
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.served_model import HOST_COUNTS, NEEDS_GPU, ServedModel, make_drafter, plan_draft
from mini_infer.runtime.worker.stage import PipelineStage
from mini_infer.runtime.worker.startup import CaptureReport, Phases, StartupReport
from mini_infer.runtime.worker.threads import StepThreads
from mini_infer.runtime.worker.torch_model import TorchModel
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.step_costs import measure_costs
from mini_infer.transfer.memory import hold, shared_memory
from mini_infer.transfer.pusher import Pusher
from mini_infer.transfer.shares import Holding

logger = logging.getLogger(__name__)


class Worker:
    runner: Runner  # from `allocate` on
    holding: Holding | None = None  # likewise, of an engine that has a role beside others

    def __init__(self, config: EngineConfig, parallel: ParallelContext = ONE_RANK) -> None:
        """Raises ConfigError or ModelError where the settings cannot work."""
        self._config, self._parallel = config, parallel
        self.device = resolve_device(config.model, parallel)
        self._phase = Phases(partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else None)
        with self._phase("choose kernels"):
            self._kernels = select_kernels(config.model.kernels, self.device, config.numerics)
        with self._phase("choose attention"):
            self.target = ServedModel.plan(config, config.model, self.device, self._kernels, parallel)
        with self._phase("tokenizer"):
            self.tokenizer = load_tokenizer(self.target.config)
        self.draft = plan_draft(config, self.target, self.tokenizer, self._kernels)
        spec = self.target.spec
        self.eos_token_ids = spec.eos_token_ids or tuple(self.tokenizer.eos_token_ids)
        self.served = [self.target] if self.draft is None else [self.target, self.draft]
        self._expands = any(model.expands for model in self.served)
        self.block_bytes = sum(model.block_bytes for model in self.served)
        self.adapters: Adapters | None = None
        self._sampler = make_sampler(config.scheduler.max_num_seqs, spec.vocab_size, self.device, self._kernels)
        parameters = self.target.weight_bytes // self.target.dtype.itemsize
        counts = parameters if self.device.type == "cpu" else None
        self._threads = StepThreads(config.model.threads, counts, parallel.num_ranks)
        # On a GPU, what is to be captured: rows with drafts, and numbers of tokens of steps with prompts.
        scheduler, graphs = config.scheduler, config.graphs
        self._most_rows = min(graphs.max_batch or scheduler.max_num_seqs, scheduler.max_num_seqs)
        self._draft_grid = draft_grid(self._most_rows, config.speculation.most)
        self._no_pieces = self._why_no_pieces()
        most_tokens = 0 if self._no_pieces else graphs.max_prefill_tokens
        self._prefill_sizes = token_ladder(most_tokens, scheduler.max_num_batched_tokens)
        overlap = scheduler.overlap
        # On a CPU the model computes in the caller's thread: a step launched early would only make its tokens late.
        self.overlap = overlap is When.always or (overlap is When.auto and self.device.type == "cuda")
        if parallel.stages > 1 and config.speculation.most:
            self.overlap = False  # the stages are busy with other requests until drafts are read

    # --- weights and memory ---------------------------------------------------------------------------------------

    def load(self, max_model_len: int) -> None:
        """For requests of so many tokens; rows of drafts may have tokens of padding behind the longest."""
        max_len = max_model_len + self._config.speculation.most
        if self.draft is not None and self.draft.spec.max_model_len < max_model_len:
            own = self.draft.spec.max_model_len
            logger.warning("the draft's own limit is %d tokens: beyond, drafts for longer requests get worse", own)
        collectives = self.target.parallel.collectives  # ranks that share experts add nothing up
        if collectives is not None and self._config.parallel.all_reduce is AllReduce.auto:
            dtype = self.target.dtype
            ordered = self._config.numerics is Numerics.batch_invariant
            with self._phase("all-reduce"):
                dtypes = [torch.float32, dtype] if ordered else [dtype]
                tokens = 0 if ordered else self._most_tokens()
                collectives.open(self._kernels, self.target.spec.hidden_size, dtypes, tokens=tokens)
        if (lora := self._config.lora).max_adapters:
            most = self._config.scheduler.max_num_seqs, self._most_tokens()
            self.adapters = Adapters(lora, *most, self.device, self._kernels)
        self._weights: list[Model] = []
        for name, served in zip(("load", "load draft"), self.served, strict=False):
            with self._phase(name):
                adapters = self.adapters if served is self.target else None
                try:
                    self._weights.append(served.load(max_len, self._kernels, self._most_tokens(), adapters))
                except torch.OutOfMemoryError as error:
                    if adapters is None:
                        raise
                    raise ConfigError(
                        f"lora.max_adapters={lora.max_adapters} of lora.max_rank={lora.max_rank} do not fit in the "
                        "GPU's memory beside the weights: lower one of them"
                    ) from error
        if not self.target.spec.is_first:
            size = self._most_tokens(), self.target.spec.hidden_size
            self._weights[0].inbox = torch.zeros(size, dtype=self.target.dtype, device=self.device)

    def _most_tokens(self) -> int:
        """That are computed in a step, padding included."""
        scheduler, graphs = self._config.scheduler, [d.num_tokens for d in self._draft_grid] + self._prefill_sizes
        rows = scheduler.max_num_seqs * (1 + self._config.speculation.most)
        return max(scheduler.max_num_batched_tokens, rows, *graphs)

    def affordable_blocks(self, limits: Limits | None = None) -> int:
        """KV blocks that fit beside what is on the device already and what steps take there.

        Args:
            limits: with them, and once the weights are loaded, the largest step is tried on a GPU.
        """
        step_bytes = 0
        if limits is not None and self.device.type == "cuda":
            step_bytes = self._try_largest_step(limits) + self._bytes_of_graphs()
        return kv_memory(self._config.cache, self.device, step_bytes) // self.block_bytes

    def _try_largest_step(self, limits: Limits) -> int:
        """Runs the largest step there can be on a small KV store, which also compiles what steps run. Returns the bytes
        that it took beside weights and KV."""
        small = dataclasses.replace(limits, num_blocks=1, num_host_blocks=0)
        runner, models = self._make_runner(small, follows=True)
        scheduler, device = self._config.scheduler, self.device
        largest = self._largest_steps(limits, block=0)
        try:
            with self._phase("compile"), compiled_in_parallel():
                self._sampler.warm_up(*(draft.new_logits(1) for draft in models[1:]))
                sizes = batch_ladder(scheduler.max_num_seqs)
                drafts = 0 if self._captures_rows else self._config.speculation.most  # graphs compile when captured
                for plan in [*largest, *steps_of_each_size(largest[0], sizes, limits.max_model_len, drafts)]:
                    for _ in self._modes():
                        runner.collect(runner.launch(plan))
                # Last come backends that compile by other means, for which the caller waits.
                for model in reversed(models):
                    model.warm_up(scheduler.max_num_seqs)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with self._phase("largest step"):
                for plan in largest:
                    for _ in self._modes():
                        runner.collect(runner.launch(plan))
                runner.settle()  # what comes next is the other runner's
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens} tokens does not fit "
                "in the GPU's memory beside the weights: lower it, or choose a smaller model"
            ) from error
        taken = torch.cuda.max_memory_allocated(device) - before
        del runner, models, model
        torch.cuda.empty_cache()
        # One prompt may expand less than many do together.
        return taken + EXPANDED_BYTES * self._expands

    def _largest_steps(self, limits: Limits, block: int) -> list[StepPlan]:
        return largest_steps(self._config, limits.max_model_len, block, self._expands)

    def _bytes_of_graphs(self) -> int:
        """What graphs of prompts will take of a GPU's memory, and those of rows with drafts where they are captured."""
        models = self.served if self._captures_rows else self.served[:1]
        taken = sum(graph_bytes(model.spec, model.dtype, self._prefill_sizes) for model in models)
        taken *= sum(1 for _ in self._modes())
        if self._captures_rows:
            for model, tokens in zip(models, _logits_rows(self._draft_grid), strict=False):
                taken += tokens * model.spec.vocab_size * model.dtype.itemsize
        return taken

    def allocate(self, limits: Limits, files: BlockFiles | None = None) -> None:
        self.limits = limits
        with self._phase("allocate"):
            shared = shared_memory(self._config.parallel, self.device)
            self.runner, self._models = self._make_runner(limits, self.overlap, files, shared)
            roles = self._config.parallel
            if roles.prefill or roles.decode:
                self.holding = holding = hold(
                    self._models[0].store, self.target.kv_share, self._parallel, roles.connector
                )
                if roles.prefill:
                    self.runner.push_with(Pusher(holding))

    def _make_runner(
        self, limits: Limits, follows: bool, files: BlockFiles | None = None, allocate: Allocate | None = None
    ) -> tuple[Runner, list[TorchModel]]:
        """What computes steps, with KV memory of its own; the target, and the draft model where there is one."""
        config, sampler = self._config, self._sampler
        store = allocate_kv(self._weights[0], limits.num_blocks, config.cache.block_size, allocate)
        models = [TorchModel(self._weights[0], store, self.target.backends)]
        states = RequestStates.of(config, limits, sampler)
        drafter = None
        if self.draft is not None:
            drafter, draft = make_drafter(config, self.draft, self._weights[1], limits, states, sampler)
            models.append(draft)
        transfers = None
        if limits.num_host_blocks:  # one for both models: a block is there when it is there for both
            transfers = KVTransfer([model.store for model in models], limits.num_host_blocks, files=files)
        stage, rate = None, config.speculation.rate
        if self._parallel.pipe is not None:
            stage = PipelineStage(self._parallel.pipe, self._weights[0], states, self._parallel.stages)
        return Runner(models[0], states, sampler, transfers, drafter, rate, follows, self._threads, stage), models

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """On a GPU; elsewhere it only notes why there are no graphs."""
        on_gpu = self.device.type == "cuda"
        no_pieces = (self._no_pieces or "graphs.max_prefill_tokens=0") if on_gpu else NEEDS_GPU
        self._captured = {
            "graphs": CaptureReport(limits=(self.target.no_graphs or NEEDS_GPU,)),
            "prefill_graphs": CaptureReport(limits=(no_pieces,)),
        }
        if on_gpu:
            self._capture(GraphMemory(self.device, self._parallel), self._prefill_sizes)
        with self._phase("reserve memory"):
            self.reserve_memory()

    def _why_no_pieces(self) -> str | None:
        if self._config.graphs.capture is When.never:
            return "graphs.capture=never"
        if self._config.lora.max_adapters and self._kernels.name != "triton":
            return "adapters without Triton wait for the device"
        return HOST_COUNTS if self.target.experts.host_counts else None

    def _capture(self, memory: GraphMemory, sizes: list[int]) -> None:
        if self.target.no_graphs is None:
            with self._phase("capture decode"):
                grid = [BatchDescriptor(rows) for rows in batch_ladder(self._most_rows)]
                self._captured["graphs"] = self._capture_rows(grid, memory, "rows")
        wanted = sizes, memory, self._config.scheduler.max_num_seqs, self.limits.max_model_len
        if sizes:  # without sampler, and where need be without attention: nothing stands in their way
            with self._phase("capture pieces"):
                reports = [self._models[0].capture_pieces(*wanted) for _ in self._modes()]
                self._captured["prefill_graphs"] = CaptureReport.of_all(reports)
        if self._captures_rows:
            with self._phase("capture rows"):
                for draft in self._models[1:] if sizes else ():
                    draft.capture_pieces(*wanted)
                if self._draft_grid:
                    self._captured["draft_graphs"] = self._capture_rows(self._draft_grid, memory, "tokens of drafts")

    def _modes(self) -> Iterator[bool]:
        """Whether tokens have adapters, as far as there are any."""
        return iter([False]) if self.adapters is None else self.adapters.modes()

    def _capture_rows(self, grid: list[BatchDescriptor], memory: GraphMemory, unit: str) -> CaptureReport:
        logits = [model.new_logits(n) for model, n in zip(self._models, _logits_rows(grid), strict=False) if n]
        draft_logits = logits[1] if len(logits) > 1 else None
        reports = [
            self.runner.graphs.capture([d._replace(adapted=mode) for d in grid], logits[0], draft_logits, memory, unit)
            for mode in self._modes()
        ]
        return CaptureReport.of_all(reports)

    @property
    def _captures_rows(self) -> bool:
        return all(model.no_graphs is None for model in self.served)

    # --- serving --------------------------------------------------------------------------------------------------

    def reserve_memory(self) -> None:
        """Leaves in torch's allocator what the largest step takes, so that no step waits for the driver to find it."""
        if self.device.type == "cuda":
            hold_small_memory(self.device)
            padding_block = self.limits.num_blocks
            for plan in self._largest_steps(self.limits, padding_block):
                for _ in self._modes():
                    self.runner.collect(self.runner.launch(plan))

    def release_graphs(self) -> None:
        """Nothing is computed afterwards."""
        self.runner.graphs.release()
        for model in self._models:
            model.release_pieces()

    def measure_step_costs(self) -> StepCosts:
        captured = self.runner.graphs.with_drafts
        vocab_size = self.target.spec.vocab_size
        return measure_costs(self.runner, self._config, self.limits, vocab_size, self.overlap, captured)

    def report(self) -> StartupReport:
        kernels, target, draft = self._kernels, self.target, self.draft
        experts = target.experts
        return StartupReport(
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            dtype=str(target.dtype).removeprefix("torch."),
            implementation="transformers" if target.spec.through_transformers else "ours",
            attention_prefill=str(target.backends.prefill),
            attention_decode=str(target.backends.decode),
            numerics=self._config.numerics.value,
            kernels=f"{kernels.name} ({kernels.fallback})" if kernels.fallback else kernels.name,
            tensor_parallel=self.target.parallel.size,
            expert_parallel=experts.context.size,
            dispatch=experts.dispatch.value if experts.context.size > 1 else "none",
            pipeline_parallel=self._parallel.stages,
            all_reduce=self.target.parallel.about,
            quantization=target.quantization,
            draft_quantization=draft.quantization if draft else "none",
            kv_dtype=target.kv_dtype,
            sampler=self._sampler.name,
            overlap=self.overlap,
            threads=str(self._threads),
            max_model_len=self.limits.max_model_len,
            num_kv_blocks=self.limits.num_blocks,
            kv_bytes=self.limits.num_blocks * target.block_bytes,
            kv_token_bytes=target.kv_layout.bytes_per_token,
            kv_token_bytes_of_heads=target.spec.heads_layout(target.dtype).bytes_per_token,
            weight_bytes=target.weight_bytes,
            adapter_bytes=self.adapters.num_bytes if self.adapters else 0,
            seconds=self._phase.total,
            phases=self._phase.seconds,
            **self._captured,
            speculation=self._config.speculation.describe(),
            draft_weight_bytes=draft.weight_bytes if draft else 0,
            draft_kv_bytes=self.limits.num_blocks * draft.block_bytes if draft else 0,
        )


def _logits_rows(grid: list[BatchDescriptor]) -> tuple[int, int]:
    """Rows of logits that graphs keep: the target's, one a token, and a draft model's, one a draft."""
    target = max((d.num_tokens for d in grid), default=0)
    return target, max((d.num_tokens - d.num_rows for d in grid), default=0)
