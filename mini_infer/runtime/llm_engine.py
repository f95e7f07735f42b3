"""LLMEngine: prompts in, tokens out. The one loop that ties scheduler, runner and outputs together, and the one place
where the engine is observed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import KVUsage, StepPlan, StepRecord, StepResult, count_drafts
from mini_infer.core.request import FinishReason, Request, RequestOutput, RequestStatus, SamplingParams
from mini_infer.runtime.probe import blocks_of, probe
from mini_infer.runtime.scheduler.scheduler import TokenUpdate
from mini_infer.runtime.text.detokenizer import Detokenizer
from mini_infer.runtime.text.grammar import CompiledGrammar, GrammarCompiler
from mini_infer.runtime.text.output import OutputProcessor
from mini_infer.runtime.text.prompt import Prompt, encode_prompt, is_single_prompt, require_fit
from mini_infer.runtime.text.tokenizer import checked_text
from mini_infer.runtime.worker.build import build_parts
from mini_infer.runtime.worker.launched import LaunchedStep
from mini_infer.speculative.costs import StepCosts

RECORDS_KEPT = 100_000


class LLMEngine:
    """A model, its KV cache and a scheduler.

        engine = LLMEngine(EngineConfig(model="tiny-target"))
        print(engine.generate("def fibonacci(n):")[0].outputs[0].text)

    A prompt is a string, a list of token ids, or a list of chat messages ({"role": ..., "content": ...}).

    Args:
        config: every setting; a string is taken as the model's name or path.
        clock: seconds, monotonic; all timestamps are read from it.
        records_kept: how many of the latest StepRecords `records` holds; observers are told all of them.

    Raises:
        ConfigError: settings that cannot work together, or with this model or machine.
        ModelError: a model that cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig | str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        records_kept: int = RECORDS_KEPT,
    ) -> None:
        self.config = EngineConfig(model=config) if isinstance(config, str) else config
        parts = build_parts(self.config)
        self.tokenizer = parts.tokenizer
        self.scheduler = parts.make_scheduler()
        self.max_model_len = parts.max_model_len
        self.startup = parts.startup
        self.vocab_size = parts.vocab_size
        self.clock = clock
        self.records: deque[StepRecord] = deque(maxlen=records_kept)
        self.observers: list[Callable[[StepRecord], None]] = []  # each is called with every StepRecord
        self._parts = parts
        self._outputs = OutputProcessor()
        self._grammars = GrammarCompiler(parts.tokenizer, parts.vocab_size, parts.eos_token_ids)
        self._claimed: set[str] = set()  # requests of `generate` and `stream`, which `step` does not hand out
        self._mailbox: dict[str, list[RequestOutput]] = {}  # their outputs that are not handed over yet, by request
        self._outbox: list[RequestOutput] = []  # for the next `step` to hand out
        self._ended: list[Request] = []  # aborted or failed since the last StepRecord
        self._num_requests = 0
        self._flights: deque[_Flight] = deque()  # oldest first; with overlap one stays between two calls of `step`
        self._laps = _Laps()
        self._step_costs = parts.step_costs() if self.config.speculation.adapts else None

    # --- whole requests -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, and returns their finished outputs in order.

        Args:
            params: for all prompts, or one for each.
            on_output: called with each request's output as it finishes (for a progress bar, say).

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none of them is.
        """
        batch: list[Prompt] = [prompts] if is_single_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(params)} sampling parameters: give one, or one each")
        checked = [self._check(prompt, own) for prompt, own in zip(batch, params, strict=True)]
        ids = [self._enqueue(request, claim=True, stream=False) for request in checked]
        done: dict[str, RequestOutput] = {}
        try:
            for output in self._follow(ids):
                done[output.request_id] = output
                if on_output is not None:
                    on_output(output)
        finally:
            self._disown(ids)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, with an output for every step that brings something new. It is queued when the first
        output is asked for; leaving the loop early aborts it. Several streams can be read in turns."""
        return self._stream(self._check(prompt, params or SamplingParams()))

    def _stream(self, request: _Checked) -> Iterator[RequestOutput]:
        ids = [self._enqueue(request, claim=True)]
        try:
            yield from self._follow(ids)
        finally:
            self._disown(ids)

    # --- step by step ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        stream: bool = True,
    ) -> str:
        """Queues a request and returns its id; `step` computes it.

        Args:
            priority: smaller goes first, with scheduler.policy=priority.
            arrival_time: on the engine's clock; now, if not given.
            cache_salt: requests share cached prefixes only with requests of the same salt.
            stream: outputs in every step that brings something new; else one output at the end.

        Raises:
            RequestError: it cannot be served. Nothing else is touched.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}", "priority")
        if arrival_time is not None and not isinstance(arrival_time, (int, float)):
            raise RequestError(
                f"arrival_time must be seconds on the engine's clock, got {arrival_time!r}", "arrival_time"
            )
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}", "request_id")
        if request_id is not None and request_id in self._outputs:
            raise RequestError(f"a request {request_id!r} is running already: choose another request_id", "request_id")
        checked_text(cache_salt, "cache_salt")
        checked = self._check(prompt, params or SamplingParams())
        return self._enqueue(checked, request_id, priority, arrival_time, cache_salt, stream)

    def prepare(self, params: SamplingParams) -> None:
        """Does beforehand what takes long when a request is added: a new grammar is compiled, and for the first one the
        vocabulary is read. May be called in any thread, while the engine works in its own.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        if params.grammar is not None:
            self._grammars.compile(params.grammar)

    def step(self) -> list[RequestOutput]:
        """Runs one step, and returns what it brought for requests of `add_request`."""
        self._advance()
        outputs, self._outbox = self._outbox, []
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; its last output comes with the next step. Unknown ids are ignored: the
        request may just have finished."""
        requests = self._outputs.unfinished(request_id)
        for request in requests:
            self.scheduler.finish(request, FinishReason.abort)
        self._outputs.finish_texts(requests)
        self._post_ended(requests)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute, or to hand over."""
        return self.scheduler.num_unfinished > 0 or bool(self._outbox)

    def close(self) -> None:
        """Aborts what is left."""
        for request_id in dict.fromkeys(request.request_id for request in self._outputs.unfinished()):
            self.abort(request_id)
        self._drop_flights()

    # --- for measurements and comparisons -----------------------------------------------------------------------------

    def reserve_memory(self) -> None:
        """Takes from the GPU again what the largest step needs, where something else in this process may have given it
        back since the engine was made. Raises RuntimeError where requests are unfinished."""
        self._require_idle("memory can be reserved")
        self._parts.reserve_memory()

    def step_costs(self) -> StepCosts | None:
        """What steps cost by rows and drafts, as measured when the engine started, or, where the number of drafts is
        fixed, when this is first called. None without speculation. Raises RuntimeError if requests are unfinished."""
        if not self.config.speculation.most:
            return None
        if self._step_costs is None:
            self._require_idle("costs of steps can be measured")
            self._step_costs = self._parts.step_costs()
            self.scheduler = self._parts.make_scheduler()  # it overwrote blocks that the prefix cache may hold
        return self._step_costs

    def probe_logits(self, token_ids: Sequence[int], split: int) -> Tensor:
        """`probe_batch` of one row."""
        return self.probe_batch([(token_ids, split)])[0]

    def probe_batch(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """The logits that this engine's own steps give, through whatever kernels, attention and CUDA graphs it runs:
        of each (token_ids, split) the prompt token_ids[:split], alone; and then each further token in a decode step
        together with those of the other rows.

        Returns:
            Of each row [len(token_ids) - split + 1, vocab_size] float32 on the CPU: of the token behind
            token_ids[:split], behind token_ids[: split + 1], and so on.

        Raises:
            RuntimeError: requests are unfinished; a probe uses their slots and blocks.
            RequestError: there are too many rows, or too many tokens.
        """
        self._require_idle("logits can be probed")
        most = self.config.scheduler.max_num_seqs
        if not 0 < len(rows) <= most:
            raise RequestError(f"a probe takes from 1 to {most} rows (scheduler.max_num_seqs), not {len(rows)}")
        for token_ids, split in rows:
            if not 0 < split <= len(token_ids) < self.max_model_len:
                raise RequestError(
                    f"a probe takes from 1 to {self.max_model_len - 1} tokens, of which {split} come first"
                )
        needed, there = sum(blocks_of(ids, self.config) for ids, _ in rows), self.startup.num_kv_blocks
        if needed > there:
            raise RequestError(f"the rows of a probe take {needed} KV blocks, and there are {there}")
        try:
            return probe(self._parts.runner, rows, self.config)
        finally:
            self.scheduler = self._parts.make_scheduler()  # it overwrote blocks that the prefix cache may hold

    def _require_idle(self, what: str) -> None:
        if self.scheduler.num_unfinished:
            raise RuntimeError(f"{what} only while the engine has no unfinished requests")
        self._drop_flights()

    # --- a request's way in ---------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, params: SamplingParams) -> _Checked:
        """Whatever can be wrong with a request is found here, before it touches anything that others share."""
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        require_fit(len(token_ids), self.max_model_len, self._parts.limit_reason)
        self._check_ids("stop token", params.stop_token_ids, "stop_token_ids")
        self._check_ids("biased token", [token for token, _ in params.biases], "logit_bias")
        grammar = None if params.grammar is None else self._grammars.compile(params.grammar)
        return _Checked(text, token_ids, params, grammar)

    def _check_ids(self, name: str, token_ids: Iterable[int], param: str) -> None:
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name} id {token} is out of range: 0 to {self.vocab_size - 1} are allowed", param)

    def _enqueue(
        self,
        checked: _Checked,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        stream: bool = True,
        claim: bool = False,
    ) -> str:
        text, token_ids, params, grammar = checked
        number = self._num_requests
        self._num_requests += 1
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in self._outputs:  # somebody else chose this name
                request_id += "'"
        seed = self.config.seed + number if params.seed is None else params.seed
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        leader: Request | None = None
        sequences = []
        for index in range(params.n):
            request = Request(
                request_id,
                token_ids,
                params,
                max_total_tokens=min(limit, self.max_model_len),
                eos_token_ids=self._parts.eos_token_ids,
                seed=sibling_seed(seed, index),
                priority=priority,
                arrival_time=self.clock() if arrival_time is None else arrival_time,
                cache_salt=cache_salt,
                fork_of=leader,
                constraint=None if grammar is None else grammar.start(),
            )
            leader = leader or request
            sequences.append((request, Detokenizer(self.tokenizer, params, token_ids)))
        for request, _ in sequences:
            self.scheduler.add(request)
        self._outputs.add(request_id, text, sequences, stream)
        if claim:
            self._claimed.add(request_id)
        return request_id

    # --- one step -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Schedule, launch, read, update, observe. With overlap, what is read is not the step just launched but the one
        before it: the device computes a step while the host books the last one and plans the next one."""
        start = self.clock()
        plan, kv, evictions = self._schedule(start)
        planned = self.clock()
        if not plan.empty:
            self._flights.append(_Flight(plan, self._launch(plan), kv, evictions))
        waits = self._parts.overlap and not plan.empty  # for the step after it, unless there is none
        flight = self._flights.popleft() if len(self._flights) > waits else None
        result = self._collect(flight) if flight else StepResult([])
        executed = self.clock()
        try:
            updates = self.scheduler.update(flight.plan, result, executed) if flight else []
            self._grammars.update_masks()
            endings = self._outputs.process(updates, result)
            for request, reason, stop, _ in endings:
                self.scheduler.finish(request, reason, stop)
            self._post([request for request, _, _ in updates])
        except BaseException:
            self._start_over()
            raise
        if not self.scheduler.num_unfinished:
            self._drop_flights()
        end = self.clock()
        self._laps.add(start, planned - start, executed - planned, end - executed)
        if flight or self._ended:
            num_dropped = sum(ending.num_dropped for ending in endings)
            # Where nothing was read, what was just launched is told of when it is.
            self._observe(flight or _Flight(_nothing(plan.step), None, kv, 0), result, updates, num_dropped, end)

    def _drop_flights(self) -> None:
        """What is still under way computes tokens for requests that have ended meanwhile. Nobody waits for them."""
        while self._flights:
            self.scheduler.fail(self._flights.popleft().plan)

    def _schedule(self, now: float) -> tuple[StepPlan, KVUsage, int]:
        """The next plan, the KV memory as it will be then, and the evictions that it caused."""
        evictions = self.scheduler.kv.num_evictions
        try:
            plan = self.scheduler.schedule(now)
            return plan, self.scheduler.usage(), self.scheduler.kv.num_evictions - evictions
        except BaseException:
            self._start_over()
            raise

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        try:
            return self._parts.runner.launch(plan)
        except BaseException:
            self._give_up(plan)
            raise

    def _collect(self, flight: _Flight) -> StepResult:
        assert flight.step is not None
        try:
            return self._parts.runner.collect(flight.step)
        except BaseException:
            self._give_up(flight.plan)
            raise

    def _give_up(self, plan: StepPlan) -> None:
        """The KV of the plan's requests is unknown now. Nobody else's is: blocks become shareable only once their step
        is booked."""
        self._post_ended(self.scheduler.fail(plan))

    def _start_over(self) -> None:
        """After an error or an interrupt in the bookkeeping itself nothing in it can be trusted."""
        lost = self._outputs.unfinished()
        for request in lost:
            request.status, request.finish_reason = RequestStatus.finished, FinishReason.error
        self.scheduler = self._parts.make_scheduler()
        self._flights.clear()
        self._post_ended(lost)

    def _observe(
        self, flight: _Flight, result: StepResult, updates: Sequence[TokenUpdate], num_dropped: int, end: float
    ) -> None:
        plan, scheduler = flight.plan, self.scheduler
        drafted, accepted = ((), ()) if flight.step is None else count_drafts(plan, result)
        decode_tokens = bisect_left(updates, plan.num_decode_rows, key=_row_of)  # updates are in the order of rows
        laps, self._laps = self._laps, _Laps()
        in_step = [request for request, _, _ in updates if request.finish_reason is not None]
        by_text = [r for r in in_step if r.finish_reason is FinishReason.error]
        ended, self._ended = self._ended, []
        record = StepRecord(
            step=plan.step,
            start_time=laps.start,
            end_time=end,
            schedule_s=laps.schedule_s,
            execute_s=laps.execute_s,
            update_s=laps.update_s,
            prefill_tokens=plan.num_prefill_tokens,
            decode_tokens=decode_tokens,
            sampled_tokens=sum([len(token_ids) for _, token_ids, _ in updates]) - num_dropped,
            num_running=scheduler.num_running,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            kv=flight.kv,
            prefix_queried_tokens=plan.prefix_queried_tokens,
            prefix_hit_tokens=plan.prefix_hit_tokens,
            evictions=flight.evictions,
            preempted=tuple(plan.preempted),
            swapped_out_blocks=len(plan.swap_out),
            swapped_in_blocks=len(plan.swap_in),
            finished=_names(r for r in in_step if r.finish_reason is not FinishReason.error),
            aborted=_names(r for r in ended if r.finish_reason is FinishReason.abort),
            failed=_names(r for r in [*ended, *by_text] if r.finish_reason is FinishReason.error),
            drafted=drafted,
            accepted=accepted,
            draft_s=result.draft_s,
            dropped_rows=plan.num_decode_rows - decode_tokens,
        )
        self.records.append(record)
        for observer in self.observers:
            observer(record)

    # --- a request's way out --------------------------------------------------------------------------------------

    def _post(self, requests: Sequence[Request]) -> None:
        outputs = self._outputs.collect(requests)
        if not self._claimed:
            self._outbox += outputs
            return
        for output in outputs:
            if output.request_id in self._claimed:
                self._mailbox.setdefault(output.request_id, []).append(output)
            else:
                self._outbox.append(output)

    def _post_ended(self, requests: Sequence[Request]) -> None:
        self._ended += requests
        self._post(requests)

    def _follow(self, request_ids: Sequence[str]) -> Iterator[RequestOutput]:
        """The outputs of claimed requests as they come, until all have finished."""
        missing = dict.fromkeys(request_ids)
        while True:
            for request_id in [i for i in self._mailbox if i in missing]:
                for output in self._mailbox.pop(request_id):
                    if output.finished:
                        del missing[request_id]
                    yield output
            if not missing:
                return
            if any(request_id in self._mailbox for request_id in missing):
                continue  # somebody else stepped the engine while this output was being read
            if not any(request_id in self._outputs for request_id in missing):
                raise RuntimeError(f"the engine has lost {', '.join(missing)}: this is a bug")
            self._advance()

    def _disown(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.abort(request_id)
            self._mailbox.pop(request_id, None)
            self._claimed.discard(request_id)


class _Flight(NamedTuple):
    """A step that was launched and is not booked yet."""

    plan: StepPlan
    step: LaunchedStep | None  # None: it has no rows
    kv: KVUsage
    evictions: int


@dataclass
class _Laps:
    """Where the host's time went since the last StepRecord."""

    start: float = 0.0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0

    def add(self, start: float, schedule_s: float, execute_s: float, update_s: float) -> None:
        if not (self.schedule_s or self.execute_s or self.update_s):
            self.start = start
        self.schedule_s += schedule_s
        self.execute_s += execute_s
        self.update_s += update_s


_row_of = itemgetter(2)  # of a TokenUpdate


def _nothing(step: int) -> StepPlan:
    return StepPlan(step, req_indices=[], starts=[], counts=[], samples=[], num_decode_rows=0)


class _Checked(NamedTuple):
    """A request that can be served."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    grammar: CompiledGrammar | None


def _names(requests: Iterable[Request]) -> tuple[str, ...]:
    return tuple(request.request_id for request in requests)


def sibling_seed(seed: int, index: int) -> int:
    """The n completions of one request differ, and none of them repeats the request with the next seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
