"""The runner: StepPlan -> tensors -> tokens.

    launch    start transfers -> apply changes -> a step of rows alone, captured or not: drafts -> packed rows -> ...
                                               or a step of any rows: drafts -> build the input -> model -> sample
              -> the tokens set out for the host; of a stage before the last: hidden states for the next one
    collect   wait for the step

Everything in `launch` is queued on the device without waiting for it. The model (with its KV memory), the sampler and
who speculates are parts that it is given; the dry model is one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.errors import ModelError
from mini_infer.core.plan import NO_DRAFT, NONE, StepPlan, StepResult
from mini_infer.core.request import TokenLogprob
from mini_infer.parallel.expert_meter import traffic_of
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor, StepGraphs
from mini_infer.runtime.sampling.logprobs import Logprobs, prompt_logprobs
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.row_step import RowStep, real_tokens
from mini_infer.runtime.worker.stage import Stage
from mini_infer.runtime.worker.step_input import IntArray, Samples, small_growths
from mini_infer.speculative.draft_model import Drafter, Stopwatch

if TYPE_CHECKING:  # it is handed them
    from mini_infer.cache.transfer import KVTransfer
    from mini_infer.runtime.executor.dry import DryModel
    from mini_infer.runtime.worker.torch_model import TorchModel
    from mini_infer.transfer.pusher import Pusher

logger = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step in flight. Its tokens and log-probabilities are on their way to the host, and are there when `done` has
    happened."""

    plan: StepPlan
    done: torch.cuda.Event | None  # None on a CPU, where a step is done when its launch returns
    sampled: Samples | None = None  # None where no row samples
    tokens: Tensor | None = None  # [S], with drafts [2, S]: what the target picks, and what stands there
    real: IntArray | None = None  # [S]: those among `tokens`, where it has padding
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[int, list[Logprobs]] = NONE  # by row
    drafting: Stopwatch | None = None  # None where no model drafted
    pushed: Any = None  # an event behind the copies to other engines; None where there are none
    expert_counts: Tensor | None = None  # as StepResult.expert_tokens; None where nobody counts
    rank_counts: Tensor | None = None  # as StepResult.rank_tokens; None where nobody counts, or there is one rank
    expert_traffic: Tensor | None = None  # as Meter takes it; None where there is none


class Runner:
    """
    Args:
        model: with its KV memory: `forward(StepInput)` gives a hidden state [T, ...] for each of the step's tokens, and
            `compute_logits` takes [N, ...] of them to [N, vocab_size].
        transfers: copies blocks to the host and back, as cache/transfer.py does; None: there is no host memory.
        drafter: makes drafts on the device.
        rate: at which drafts are accepted, whatever the target says (RowStep).
        follows: a step may be launched before the drafts of the one before it are read, whose rows must therefore go
            alone where they can.
        threads: what a step of so many tokens runs inside, on a CPU.
        stage: where the model has some of the layers. One before the last samples nothing.

    Attributes:
        logits: [S, vocab_size] of the step launched last; None where no row samples, or drafts do.
    """

    def __init__(
        self,
        model: TorchModel | DryModel,
        states: RequestStates,
        sampler: Sampler,
        transfers: KVTransfer | DryModel | None = None,
        drafter: Drafter | None = None,
        rate: float | None = None,
        follows: bool = False,
        threads: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        stage: Stage | None = None,
    ) -> None:
        self._model, self._states, self._sampler = model, states, sampler
        self.transfers = transfers
        self._drafter = drafter or Drafter()
        self._follows = follows
        self._threads = threads
        self._stage = stage or Stage()
        self.logits: Tensor | None = None
        self.pusher: Pusher | None = None
        self._rows = RowStep(model, states, sampler, rate)
        self.graphs = StepGraphs(states, self._drafter.chain, self._rows.run)

    @property
    def model(self) -> TorchModel | DryModel:
        return self._model

    def push_with(self, pusher: Pusher) -> None:
        """From now on it copies what plans say to other engines."""
        self.pusher, self._model.on_layer = pusher, pusher.layer

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan that is not empty."""
        with self._threads(plan.num_tokens):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self.logits = None  # so that their memory is this step's
        self._stage.settle(plan)
        if self.pusher is not None:
            self.pusher.begin(plan.pushes)
        for transfer in plan.transfers:
            assert self.transfers is not None, f"{transfer} without host memory"
            self.transfers.start(transfer)
        self._drafter.plan(plan)
        params = [self._sampler.admit(a.req_index, a.params, a.seed, a.prompt_len, a.stop_ids) for a in plan.admissions]
        if not plan.req_indices:
            return self._launched(plan)
        for counts in (self._model.expert_counts, self._model.rank_counts):
            if counts is not None:
                counts.zero_()
        if (meter := self._model.expert_meter) is not None:
            meter.clear()
        if self._model.hot_experts is not None:
            self._model.hot_experts.before_step()
        if self._model.adapters is not None:
            self._model.adapters.begin(plan)
        rows = plan.as_decode_rows()
        descriptor = None if rows is None else self._rows_alone(rows)
        if rows is None or descriptor is None:
            launch = self._launch_any(plan, params)
        else:
            launch = self._launch_rows(rows, params, descriptor)
        self._drafter.book(plan)
        return launch

    def _rows_alone(self, plan: StepPlan) -> BatchDescriptor | None:
        """How decode rows alone are computed by themselves; None where they go the way of any."""
        num_rows, query_len = plan.num_rows, plan.counts[-1]  # rows with more drafts come later
        descriptor = self.graphs.fit(num_rows, query_len, self._adapted)
        if descriptor is None and (plan.following or (plan.num_drafts and self._follows)):
            return BatchDescriptor(num_rows, query_len, self._adapted)
        return descriptor

    @property
    def _adapted(self) -> bool:
        """Whether rows of the step may have adapters."""
        return self._model.adapters is not None and self._model.adapters.active

    def _launch_rows(self, plan: StepPlan, params: Sequence[IntArray], descriptor: BatchDescriptor) -> LaunchedStep:
        inside = small_growths(plan)
        self._states.apply(plan, params, growths=() if inside else plan.growths)
        self._states.pack_rows(plan, descriptor.num_rows, growths=inside)
        drafted = self._drafter.launch(plan, lambda: self.graphs.draft(descriptor))
        real = real_tokens(plan.counts, descriptor.query_len) if descriptor.query_len > 1 else None
        self._stage.receive(plan, real)
        done = self.graphs.run(descriptor, drafted.logits)
        if self._stage.pass_on(plan, done.logits, real):
            return self._launched(plan, drafting=drafted.time)
        sampled = Samples.of(plan)
        logprobs = self._rows.resample(done, sampled, real, sampled.by_place(plan.masks), drafted.logits)
        tokens = done.tokens_and_drafts
        if tokens is None:
            tokens, self.logits = done.token_ids[: plan.num_rows], done.logits[: plan.num_rows]
        return self._launched(plan, tokens, real, sampled=sampled, logprobs=logprobs, drafting=drafted.time)

    def _launch_any(self, plan: StepPlan, params: Sequence[IntArray]) -> LaunchedStep:
        self._states.apply(plan, params)
        first, descriptor = self._rows_with_drafts(plan)

        def draft() -> Tensor | None:
            self._states.pack_rows(plan, descriptor.num_rows, first)
            return self.graphs.draft(descriptor)

        drafted = self._drafter.launch(plan, draft)
        sampled = Samples.of(plan)
        sources = self._sources(sampled, first, descriptor.num_rows) if plan.num_drafts else None
        step = self._states.build(plan, sampled, sources)
        self._stage.receive(plan)
        hidden = self._model.forward(step)
        if self._stage.pass_on(plan, hidden):
            return self._launched(plan, drafting=drafted.time)
        history, compute_logits = self._states.history, self._model.compute_logits
        of_prompts: Mapping[int, list[Logprobs]] = NONE
        if plan.prompt_logprobs:
            of_prompts = prompt_logprobs(plan, hidden, history, self._sampler.vocab_size, compute_logits)
        if not len(sampled.rows):
            return self._launched(plan, prompt_logprobs=of_prompts, drafting=drafted.time)
        logits = compute_logits(step.sampled(hidden))
        masks = sampled.by_place(plan.masks)
        token_ids, logprobs = self._sampler.sample(
            logits, step, sampled.req_indices, sampled.positions, history, masks, drafted.logits
        )
        tokens = token_ids
        if step.drafts is None:
            self._states.append(step, token_ids)  # where each row goes on the host knows
            self.logits = logits
        else:
            self._rows.settle(step, token_ids)
            tokens = torch.stack((token_ids, step.drafts.token_ids))
        return self._launched(
            plan,
            tokens,
            sampled=sampled,
            logprobs=logprobs,
            prompt_logprobs=of_prompts,
            drafting=drafted.time,
        )

    def _rows_with_drafts(self, plan: StepPlan) -> tuple[int, BatchDescriptor]:
        """The first of the decode rows that have drafts, and what takes all of them."""
        n = plan.num_decode_rows
        if not plan.num_drafts:
            return n, BatchDescriptor(0)
        first = next(row for row in range(n) if plan.counts[row] > 1)
        size = n - first, plan.counts[n - 1], self._adapted
        return first, self.graphs.fit(*size) or BatchDescriptor(*size)

    def _sources(self, sampled: Samples, first: int, num_rows: int) -> IntArray:
        """[S]: where each token's draft has its logits, NO_DRAFT where nothing random drew it. Drafts were made of
        `num_rows` packed rows from `first` on."""
        drawn = sampled.have_drafts() & self._sampler.draws_drafts(sampled.req_indices)
        return np.where(drawn, sampled.places() * num_rows + sampled.rows - first, NO_DRAFT)

    def _launched(
        self, plan: StepPlan, token_ids: Tensor | None = None, real: IntArray | None = None, **about: Any
    ) -> LaunchedStep:
        """Sets the tokens out for the host: a copy, since a graph writes to the same place each time. From a GPU it
        goes into page-locked memory, which needs no waiting. So do the counts of experts."""
        if token_ids is not None:
            self._stage.tell(token_ids, real)
        counts = (self._model.expert_counts, self._model.rank_counts) if plan.req_indices else (None, None)
        tokens, by_expert, by_rank = (
            None if tensor is None else tensor.to("cpu", non_blocking=True, copy=True)
            for tensor in (token_ids, *counts)
        )
        meter = self._model.expert_meter if plan.req_indices else None
        traffic = None if meter is None else meter.take()
        done = record_event(self._states.device)
        about |= {"real": real, "expert_counts": by_expert, "rank_counts": by_rank, "expert_traffic": traffic}
        about["pushed"] = None if self.pusher is None else self.pusher.end()
        return LaunchedStep(plan, done, tokens=tokens, **about)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a step, whether or not it samples: nobody runs ahead of the device. Row i of the result belongs to
        row i of the plan."""
        if launched.done is not None:
            launched.done.synchronize()
        if launched.pushed is not None:
            launched.pushed.synchronize()
        tokens: list[list[int]] = [[] for _ in launched.plan.req_indices]
        rows = [] if launched.sampled is None else launched.sampled.rows.tolist()
        if launched.tokens is not None and launched.tokens.dim() == 2:
            picked = launched.tokens if launched.real is None else launched.tokens[:, launched.real]
            keep_accepted(tokens, rows, *picked.tolist())
        elif launched.tokens is not None:
            for row, token in zip(rows, launched.tokens.tolist(), strict=True):
                tokens[row].append(token)
        logprobs: dict[int, list[TokenLogprob]] = {}
        for index, entry in ({} if launched.logprobs is None else launched.logprobs.finish()).items():
            own = logprobs.setdefault(rows[index], [])
            if len(own) < len(tokens[rows[index]]):
                own.append(entry)
        of_prompts = {
            row: [entry for part in slices for entry in part.finish().values()]
            for row, slices in launched.prompt_logprobs.items()
        }
        draft_s = 0.0 if launched.drafting is None else launched.drafting.read()
        ended = self.end_transfers(wait=not tokens)
        failed = NONE if self.transfers is None else self.transfers.failed(ended)
        by_expert, by_rank = _by_layer(launched.expert_counts), _by_layer(launched.rank_counts)
        traffic = None if launched.expert_traffic is None else traffic_of(launched.expert_traffic)
        return StepResult(tokens, logprobs, of_prompts, draft_s, ended, failed, by_expert, by_rank, traffic)

    def end_transfers(self, wait: bool) -> tuple[int, ...]:
        """Ids of transfers that have ended and were not named before; where it is to wait, of all."""
        return () if self.transfers is None else self.transfers.poll(wait)

    def close(self) -> None:
        """Ends what has to do with files beside the steps. There are no steps afterwards."""
        if self.transfers is not None:
            self.transfers.close()

    def read_adapter(self, path: str) -> None:
        """As Adapters.read."""
        assert self._model.adapters is not None, "the engine has asked"
        self._model.adapters.read(path)

    def load_adapter(self, path: str, key: str) -> bool:
        """As Adapters.load. Whether it can be served: if not, the log says why."""
        assert self._model.adapters is not None, "the engine has asked"
        try:
            self._model.adapters.load(path, key)
        except Exception as error:  # whatever a thread met that only reads: the step loop goes on
            logger.warning("%s", error, exc_info=not isinstance(error, ModelError))
            return False
        return True

    def forget_adapter(self, key: str) -> None:
        """As Adapters.forget."""
        assert self._model.adapters is not None, "it was loaded"
        self._model.adapters.forget(key)

    def settle(self) -> None:
        """Takes in whatever other stages have to tell of the steps so far."""
        self._stage.settle()

    def force_token(self, req_index: int, position: int, token_id: int) -> None:
        """Puts another token where the next step reads it."""
        self.settle()
        self._states.history[req_index, position] = token_id


def _by_layer(counts: Tensor | None) -> tuple[tuple[int, ...], ...]:
    return () if counts is None else tuple(map(tuple, counts.tolist()))


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind everything that the device has been given so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def keep_accepted(tokens: list[list[int]], rows: Sequence[int], picked: Sequence[int], drafts: Sequence[int]) -> None:
    """Puts into `tokens` what each row keeps of what the target picked: it goes on as long as that is the draft which
    stands there. `rows` are those of each token, neighbours in a row."""
    last, goes_on = -1, True
    for row, token, draft in zip(rows, picked, drafts, strict=True):
        if row != last or goes_on:
            tokens[row].append(token)
            goes_on = token == draft
        last = row
