"""Worker: one device's part of an engine. It loads the model, finds out what steps and KV may take of the memory,
allocates, captures CUDA graphs, and hands over a Runner.

    Worker(config)         what can be wrong with the settings is found here, before any weights are read
    load(max_model_len)    weights
    affordable_blocks()    profiles the largest step there can be, which also compiles what steps run
    allocate(limits)       KV, the state of requests
    capture()              CUDA graphs; then `runner` serves

With several workers the limits are the least of all, which is why whoever drives them settles these in between.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property, partial

import torch

from mini_infer.cache.transfer import KVTransfer
from mini_infer.core.config import EngineConfig, When
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepPlan
from mini_infer.kernels.compile_ahead import compiled_in_parallel
from mini_infer.kernels.ops import select_kernels
from mini_infer.modeling.loader import resolve_device
from mini_infer.modeling.model import Model
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.pieces import graph_bytes, token_ladder
from mini_infer.runtime.graphs.step_graphs import batch_ladder, decode_grid
from mini_infer.runtime.sampling.sampler import make_sampler
from mini_infer.runtime.text.tokenizer import load_tokenizer
from mini_infer.runtime.worker.draft import capture_drafts, make_drafter, plan_draft, row_logits_bytes
from mini_infer.runtime.worker.limits import Limits
from mini_infer.runtime.worker.memory import (
    allocate_kv,
    decode_steps,
    hold_small_memory,
    kv_memory,
    largest_step,
    largest_verification,
)
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.phases import Phases
from mini_infer.runtime.worker.progress import progress_bar
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.served_model import NEEDS_GPU, ServedModel
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport
from mini_infer.runtime.worker.threads import StepThreads
from mini_infer.runtime.worker.torch_model import TorchModel
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.step_costs import measure_costs

logger = logging.getLogger(__name__)


class Worker:
    runner: Runner  # from `allocate` on

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError or ModelError where the settings cannot work."""
        self._config = config
        self.device = resolve_device(config.model)
        self._phase = Phases(partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else None)
        with self._phase("choose kernels"):
            self._kernels = select_kernels(config.model.kernels, self.device)
        uncapturable = None if self._kernels.name == "triton" else "torch"  # the sampler that goes with the kernels
        with self._phase("choose attention"):
            self.target = ServedModel.plan(config, config.model, self.device, uncapturable)
        with self._phase("tokenizer"):
            self.tokenizer = load_tokenizer(self.target.config)
        self.draft = plan_draft(config, self.target, self.tokenizer, uncapturable)
        spec = self.target.spec
        self.eos_token_ids = spec.eos_token_ids or tuple(self.tokenizer.eos_token_ids)
        self.block_bytes = self.target.block_bytes + (self.draft.block_bytes if self.draft else 0)
        self._sampler = make_sampler(config.scheduler.max_num_seqs, spec.vocab_size, self.device, self._kernels)
        parameters = self.target.weight_bytes // self.target.dtype.itemsize
        self._threads = StepThreads(config.model.threads, parameters if self.device.type == "cpu" else None)
        overlap = config.scheduler.overlap
        # On a CPU the model computes in the caller's thread: a step launched early would only make its tokens late.
        self.overlap = overlap is When.always or (overlap is When.auto and self.device.type == "cuda")

    # --- weights and memory ---------------------------------------------------------------------------------------

    def load(self, max_model_len: int) -> None:
        """For requests of so many tokens; rows of drafts may have tokens of padding behind the longest."""
        max_len = max_model_len + self._config.speculation.most
        with self._phase("load"):
            self._model = self.target.load(max_len, self._kernels)
        self._draft: tuple[ServedModel, Model] | None = None
        if self.draft is not None:
            if self.draft.spec.max_model_len < max_model_len:
                logger.warning(
                    "the draft's own limit is %d tokens: beyond, drafts for longer requests get worse",
                    self.draft.spec.max_model_len,
                )
            with self._phase("load draft"):
                self._draft = self.draft, self.draft.load(max_len, self._kernels)

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
        runner, model, draft = self._make_runner(small, follows=True)
        scheduler, device = self._config.scheduler, self.device
        largest = self._largest_steps(limits, block=0)
        try:
            with self._phase("compile"), compiled_in_parallel():
                self._sampler.warm_up(None if draft is None else draft.new_logits(1))
                for plan in [*largest, *decode_steps(largest[0], batch_ladder(scheduler.max_num_seqs))]:
                    runner.collect(runner.launch(plan))
                # Last come backends that compile by other means, for which the caller waits.
                for one in filter(None, (draft, model)):
                    one.warm_up(scheduler.max_num_seqs)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with self._phase("largest step"):
                for plan in largest:
                    runner.collect(runner.launch(plan))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens} tokens does not fit "
                "in the GPU's memory beside the weights: lower it, or choose a smaller model"
            ) from error
        taken = torch.cuda.max_memory_allocated(device) - before
        del runner, model, draft
        torch.cuda.empty_cache()
        return taken

    def _bytes_of_graphs(self) -> int:
        """What graphs of prompts will take of a GPU's memory, and those of rows with drafts where they are captured."""
        sizes = self._prefill_sizes()
        taken = graph_bytes(self.target.spec, self.target.dtype, sizes)
        if self._captures_rows:
            taken += row_logits_bytes(self._config, self.target, self.draft)
            if self.draft is not None:
                taken += graph_bytes(self.draft.spec, self.draft.dtype, sizes)
        return taken

    def allocate(self, limits: Limits) -> None:
        self.limits = limits
        with self._phase("allocate"):
            self.runner, self._torch_model, self._draft_model = self._make_runner(limits, self.overlap)

    def _make_runner(self, limits: Limits, follows: bool) -> tuple[Runner, TorchModel, TorchModel | None]:
        """What computes steps, with KV memory of its own; its model, and its draft model."""
        config = self._config
        store = allocate_kv(self.target.kv_layout, limits.num_blocks, config.cache.block_size, self.device)
        model = TorchModel(self._model, store, self.target.backends)
        states = RequestStates(
            config.scheduler.max_num_seqs,
            limits.max_model_len,
            config.cache.block_size,
            self._sampler.num_params,
            self.device,
            padding_block=limits.num_blocks,  # the one behind those that the scheduler knows
            lookahead=config.speculation.most,
        )
        drafter, draft = make_drafter(config, self._draft, limits, states, self._sampler)
        transfers = None
        if limits.num_host_blocks:  # one for both models: a block is there when it is there for both
            stores = [store] if draft is None else [store, draft.store]
            transfers = KVTransfer(stores, limits.num_host_blocks)
        rate = config.speculation.rate
        return Runner(model, states, self._sampler, transfers, drafter, rate, follows, self._threads), model, draft

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def capture(self) -> None:
        memory = GraphMemory(self.device) if self.device.type == "cuda" else None
        with self._phase("capture decode"):
            captured = self._capture_decode(memory)
        with self._phase("capture pieces"):
            captured_pieces = self._capture_pieces(memory)
        captured_rows = CaptureReport()
        if memory is not None and self._captures_rows:
            models = self._torch_model, self._draft_model
            with self._phase("capture rows"):
                sizes = self._prefill_sizes()
                captured_rows = capture_drafts(self._config, self.runner.graphs, *models, memory, sizes)
        self._captured = captured, captured_pieces, captured_rows
        with self._phase("reserve memory"):
            self.reserve_memory()

    @property
    def _captures_rows(self) -> bool:
        return self.target.no_graphs is None and (self.draft is None or self.draft.no_graphs is None)

    def _capture_decode(self, memory: GraphMemory | None) -> CaptureReport:
        if memory is None or self.target.no_graphs is not None:
            return CaptureReport(limits=(self.target.no_graphs or NEEDS_GPU,))
        max_num_seqs = self._config.scheduler.max_num_seqs
        grid = decode_grid(min(self._config.graphs.max_batch or max_num_seqs, max_num_seqs))
        logits = self._torch_model.new_logits(max(d.num_rows for d in grid))
        progress = progress_bar("capturing CUDA graphs")
        return self.runner.graphs.capture(grid, logits, None, memory, "rows", progress)

    def _capture_pieces(self, memory: GraphMemory | None) -> CaptureReport:
        """Attention is not in the graphs, and neither is the sampler: on a GPU nothing stands in their way."""
        if memory is None:
            return CaptureReport(limits=(NEEDS_GPU,))
        sizes = self._prefill_sizes()
        if not sizes:
            never = self._config.graphs.capture is When.never
            return CaptureReport(limits=("graphs.capture=never" if never else "graphs.max_prefill_tokens=0",))
        return self._torch_model.capture_pieces(sizes, memory, progress_bar("capturing CUDA graphs of prompts"))

    def _prefill_sizes(self) -> list[int]:
        """Numbers of tokens whose steps are to be captured in pieces, on a GPU."""
        if self._config.graphs.capture is When.never:
            return []
        return token_ladder(self._config.graphs.max_prefill_tokens, self._config.scheduler.max_num_batched_tokens)

    # --- serving --------------------------------------------------------------------------------------------------

    def reserve_memory(self) -> None:
        """Leaves in torch's allocator what the largest step takes, so that no step waits for the driver to find it."""
        if self.device.type == "cuda":
            hold_small_memory(self.device)
            for plan in self._largest_steps(self.limits, block=self.limits.num_blocks):  # the padding block
                self.runner.collect(self.runner.launch(plan))

    def _largest_steps(self, limits: Limits, block: int) -> list[StepPlan]:
        scheduler, drafts = self._config.scheduler, self._config.speculation.most
        rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        step = largest_step(rows, tokens, limits.max_model_len, self._config.cache.block_size, block)
        return [step, largest_verification(rows, tokens, drafts, step)] if drafts else [step]

    @cached_property
    def step_costs(self) -> StepCosts:
        captured = self.runner.graphs.with_drafts
        return measure_costs(self.runner, self._config, self.limits, self.overlap, captured)

    def report(self) -> StartupReport:
        kernels, target, draft = self._kernels, self.target, self.draft
        graphs, prefill_graphs, draft_graphs = self._captured
        return StartupReport(
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            dtype=str(target.dtype).removeprefix("torch."),
            implementation="transformers" if target.spec.through_transformers else "ours",
            attention_prefill=str(target.backends.prefill),
            attention_decode=str(target.backends.decode),
            kernels=f"{kernels.name} ({kernels.fallback})" if kernels.fallback else kernels.name,
            sampler=self._sampler.name,
            overlap=self.overlap,
            threads=str(self._threads),
            max_model_len=self.limits.max_model_len,
            num_kv_blocks=self.limits.num_blocks,
            kv_bytes=self.limits.num_blocks * target.block_bytes,
            weight_bytes=target.weight_bytes,
            seconds=self._phase.total,
            phases=self._phase.seconds,
            graphs=graphs,
            prefill_graphs=prefill_graphs,
            draft_graphs=draft_graphs,
            speculation=self._config.speculation.describe(),
            draft_weight_bytes=draft.weight_bytes if draft else 0,
            draft_kv_bytes=self.limits.num_blocks * draft.block_bytes if draft else 0,
        )
