"""An executor without weights: the dry model (dry_model.py) behind the same runner as any other."""

from __future__ import annotations

import time
from functools import cache

import torch

from mini_infer.core.config import EngineConfig, When
from mini_infer.kernels.ops import TorchKernels
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.executor.dry_model import DryModel
from mini_infer.runtime.sampling.sampler import make_sampler
from mini_infer.runtime.text.tokenizer import ByteTokenizer, Tokenizer
from mini_infer.runtime.worker.limits import settle_limits
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport
from mini_infer.speculative.step_costs import measure_costs

_NO_GRAPHS = CaptureReport(limits=("the dry model runs on the CPU",))


class DryExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        dry, cpu = config.model.dry, torch.device("cpu")
        scheduler, block_size = config.scheduler, config.cache.block_size
        plenty = scheduler.max_num_seqs * -(-dry.max_model_len // block_size)
        self.limits = limits = settle_limits(config, dry.max_model_len, plenty, block_bytes=0)
        self.tokenizer: Tokenizer = ByteTokenizer(dry.vocab_size)
        self.vocab_size, self.eos_token_ids = dry.vocab_size, tuple(self.tokenizer.eos_token_ids)
        self.overlap = scheduler.overlap is When.always
        model = DryModel(dry, limits.num_blocks, block_size, limits.num_host_blocks)
        sampler = make_sampler(scheduler.max_num_seqs, dry.vocab_size, cpu, TorchKernels())
        states = RequestStates.of(config, limits, sampler)
        self.runner = Runner(model, states, sampler, model, rate=config.speculation.rate, follows=self.overlap)
        self.step_costs = cache(lambda: measure_costs(self.runner, config, limits, self.overlap))
        self.startup = StartupReport(
            device="cpu",
            dtype="dry",
            implementation="dry",
            sampler=sampler.name,
            overlap=self.overlap,
            max_model_len=limits.max_model_len,
            num_kv_blocks=limits.num_blocks,
            seconds=time.perf_counter() - started,
            graphs=_NO_GRAPHS,
            prefill_graphs=_NO_GRAPHS,
            speculation=config.speculation.describe(),
        )
