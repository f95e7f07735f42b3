"""The dry model: no weights, a deterministic token function, and a time model; behind the same runner as any other.

It is also the sharpest test of the cache there is. Each KV slot holds one 64-bit state instead of K and V,

    state[p] = A * state[p - 1] + token[p] + 1   (mod 2^64)

read through the block table exactly where a real model would read K and V. The next token is a hash of the last
state, so a single wrong block, missing token, stale slot or lost swap changes every token that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from mini_infer.cache.block_files import BlockFiles, open_block_files
from mini_infer.cache.kv_store import Allocate, KVStore
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.core.config import DryConfig, EngineConfig, When
from mini_infer.core.limits import settle_limits
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import Transfer
from mini_infer.core.uniforms import splitmix64
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.peft_folder import PeftFolder
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.executor.fingerprints import kv_origin
from mini_infer.runtime.sampling.sampler import make_sampler
from mini_infer.runtime.text.tokenizer import ByteTokenizer, Tokenizer
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport
from mini_infer.runtime.worker.step_input import StepInput
from mini_infer.speculative.step_costs import measure_costs
from mini_infer.transfer.memory import hold, shared_memory
from mini_infer.transfer.pusher import Pusher
from mini_infer.transfer.shares import Share

_A = 6364136223846793005  # odd, so that it has an inverse modulo 2^64
_A_INVERSE = pow(_A, -1, 2**64)
_EOS_ONE_IN = 256
_PEAK = 8.0  # logit of the greedy token; all others are below 4
_LAYOUT = KVLayout.alike(1, Plane("state", (), torch.int64))


class DryModel:
    """Stands where a model and its KV store stand.

    Args:
        num_blocks, block_size, num_host_blocks, files: as in the KVManager.
    """

    expert_counts = None
    rank_counts = None
    expert_meter = None
    hot_experts = None
    adapters = None
    samples = True

    def __init__(
        self,
        config: DryConfig,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        files: BlockFiles | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self.config = config
        self._files = files
        self._eos = ByteTokenizer(config.vocab_size).eos_token_ids[0]
        cpu = torch.device("cpu")
        # The last block is for padding.
        self.store = KVStore(_LAYOUT, num_blocks=num_blocks + 1, block_size=block_size, device=cpu, allocate=allocate)
        self.on_layer: Callable[[int], None] | None = None  # as of a TorchModel
        self._states = self.store.plane(0, "state").numpy().view(np.uint64)
        self._host_states = np.zeros((num_host_blocks, block_size), dtype=np.uint64)
        self._transfers_done: list[int] = []
        self._failed: dict[int, list[int]] = {}

    def forward(self, step: StepInput) -> torch.Tensor:
        """Writes the step's states and returns them, [T] int64, on the CPU."""
        batch, states = step.batch, self._states.reshape(-1)
        seq_lens, ends = batch.seq_lens.numpy(), batch.query_starts.numpy()
        starts = seq_lens - np.diff(ends)
        tables, token_ids = batch.block_tables.numpy(), step.token_ids.numpy()
        block_size = self._states.shape[1]
        previous = np.zeros(len(starts), dtype=np.uint64)
        rows = np.flatnonzero(starts)
        block, offset = np.divmod(starts[rows] - 1, block_size)
        previous[rows] = states[tables[rows, block].astype(np.int64) * block_size + offset]

        new = np.empty(len(token_ids), dtype=np.uint64)
        tokens = token_ids.astype(np.uint64) + np.uint64(1)
        d = batch.num_decode_rows if batch.decode_query_len == 1 else 0
        new[:d] = previous[:d] * np.uint64(_A) + tokens[:d]
        for row in range(d, len(starts)):
            span = slice(ends[row], ends[row + 1])
            new[span] = _chain(previous[row], tokens[span])
        states[batch.slot_mapping.numpy()] = new
        if self.on_layer is not None:
            self.on_layer(0)

        config, prefill_tokens = self.config, batch.num_tokens - batch.num_decode_tokens
        micros = config.prefill_token_us * prefill_tokens + config.decode_token_us * batch.num_decode_rows
        if (seconds := config.step_ms * 1e-3 + micros * 1e-6) > 0:
            time.sleep(seconds)
        return torch.from_numpy(new.view(np.int64))

    def start(self, transfer: Transfer) -> None:
        """Reads or writes files, and copies, at once."""
        failed = []
        for block, block_hash in transfer.files:
            assert self._files is not None
            verb = self._files.write if transfer.to_host else self._files.read
            if not verb(block_hash, [memoryview(self._host_states[block]).cast("B")]):
                failed.append(block)
        if failed:
            self._failed[transfer.transfer_id] = failed
        transfer.copy(self._states, self._host_states)
        self._transfers_done.append(transfer.transfer_id)

    def poll(self, wait: bool = False) -> tuple[int, ...]:
        done, self._transfers_done = self._transfers_done, []
        return tuple(done)

    def close(self) -> None:
        """Nothing is under way."""

    def failed(self, ended: Sequence[int]) -> dict[int, list[int]]:
        return {transfer_id: self._failed.pop(transfer_id) for transfer_id in ended if transfer_id in self._failed}

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [N] -> float32 [N, vocab_size]: noise in [0, 4) over the vocabulary and a peak at the greedy token, a
        printable character, or now and then the end of the sequence."""
        states: NDArray[np.uint64] = hidden.numpy().view(np.uint64)
        draw = splitmix64(states)
        text = np.uint64(32) + draw % np.uint64(95)
        greedy = np.where((draw >> np.uint64(32)) % np.uint64(_EOS_ONE_IN) == 0, np.uint64(self._eos), text)
        vocab = np.arange(1, self.config.vocab_size + 1, dtype=np.uint64)
        noise = splitmix64(states[:, None] ^ (vocab * np.uint64(0x9E3779B97F4A7C15))) >> np.uint64(40)
        logits = noise.astype(np.float32) * np.float32(4 / 2**24)
        logits[np.arange(len(states)), greedy.astype(np.int64)] = _PEAK
        return torch.from_numpy(logits)


def _chain(previous: np.uint64, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """state[i] = A * state[i - 1] + tokens[i] for a whole chunk at once: divide by A^(i + 1), sum, multiply back."""
    n = len(tokens)
    powers = np.cumprod(np.full(n, _A, dtype=np.uint64))
    inverses = np.cumprod(np.full(n, _A_INVERSE, dtype=np.uint64))
    return powers * (previous + np.cumsum(tokens * inverses))


_NO_GRAPHS = CaptureReport(limits=("the dry model runs on the CPU",))


class DryExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        dry, cpu = config.model.dry, torch.device("cpu")
        scheduler, block_size = config.scheduler, config.cache.block_size
        plenty = scheduler.max_num_seqs * -(-dry.max_model_len // block_size)
        self.limits = limits = settle_limits(config, dry.max_model_len, plenty, block_size * DRY_TOKEN_BYTES)
        self.tokenizer: Tokenizer = ByteTokenizer(dry.vocab_size)
        self.vocab_size, self.eos_token_ids = dry.vocab_size, tuple(self.tokenizer.eos_token_ids)
        self.overlap = scheduler.overlap is When.always
        self.files = open_block_files(config.cache, lambda: repr((dry, block_size)), block_size * DRY_TOKEN_BYTES)
        shared = shared_memory(config.parallel, cpu)
        model = DryModel(dry, limits.num_blocks, block_size, limits.num_host_blocks, self.files, shared)
        sampler = make_sampler(scheduler.max_num_seqs, dry.vocab_size, cpu, TorchKernels())
        states = RequestStates.of(config, limits, sampler)
        self.runner = Runner(model, states, sampler, model, rate=config.speculation.rate, follows=self.overlap)
        self.holding = hold(model.store, Share(0, 1), connector=config.parallel.connector)
        self.kv_origin = partial(kv_origin, config, None)
        if config.parallel.prefill:
            self.runner.push_with(Pusher(self.holding))
        lora = config.lora
        self._max_rank = lora.max_rank if lora.max_adapters else None
        keys = {name: PeftFolder.read(path, lora.max_rank).key for name, path in lora.adapters.items()}
        self._reader, self._reading = ThreadPoolExecutor(1, "adapters"), dict[str, Future[PeftFolder]]()
        self.adapters = keys | {name: name for name in lora.dummy_names}
        self.step_costs = cache(lambda: measure_costs(self.runner, config, limits, dry.vocab_size, self.overlap))
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

    def read_adapter(self, path: str) -> Future[PeftFolder]:
        """It changes no token."""
        if self._max_rank is None:
            return super().read_adapter(path)
        self._reading[path] = self._reader.submit(PeftFolder.read, path, self._max_rank)
        return self._reading[path]

    def load_adapter(self, path: str) -> str:
        return self._reading.pop(path).result().key

    def forget_adapter(self, key: str) -> None:
        pass
