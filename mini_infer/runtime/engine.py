"""LLMEngine: prompts in, tokens out. The one loop that ties scheduler, runner and outputs together, and the one place
where the engine is observed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import KVUsage, StepPlan, StepRecord, StepResult
from mini_infer.core.request import FinishReason, Request, RequestOutput, RequestStatus, SamplingParams
from mini_infer.runtime.build import build_parts
from mini_infer.runtime.detokenizer import Detokenizer
from mini_infer.runtime.output import OutputProcessor
from mini_infer.runtime.prompt import Prompt, encode_prompt, is_single_prompt
from mini_infer.runtime.tokenizer import checked_text

RECORDS_KEPT = 100_000


class LLMEngine:
    """A model, its KV cache and a scheduler.

        engine = LLMEngine(EngineConfig(model="tiny-target"))
        print(engine.generate("def fibonacci(n):")[0].outputs[0].text)

    A prompt is a string, a list of token ids, or a list of chat messages ({"role": ..., "content": ...}).

    Args:
        config: every setting; a string is taken as the model's name or path.
        clock: seconds, monotonic; all timestamps are read from it.

    Raises:
        ConfigError: settings that cannot work together, or with this model or machine.
        ModelError: a model that cannot be loaded.
    """

    def __init__(self, config: EngineConfig | str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.config = EngineConfig(model=config) if isinstance(config, str) else config
        parts = build_parts(self.config)
        self.tokenizer = parts.tokenizer
        self.scheduler = parts.make_scheduler()
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self.clock = clock
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.observers: list[Callable[[StepRecord], None]] = []  # each is called with every StepRecord
        self._parts = parts
        self._outputs = OutputProcessor()
        self._mailbox: dict[str, list[RequestOutput]] = {}  # outputs not handed over yet, by request
        self._claimed: set[str] = set()  # requests of `generate` and `stream`, which `step` does not hand out
        self._ended: list[Request] = []  # aborted or failed since the last StepRecord
        self._num_requests = 0

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

    def step(self) -> list[RequestOutput]:
        """Runs one step, and returns what it brought for requests of `add_request`."""
        self._advance()
        return [output for request_id in self._unclaimed() for output in self._mailbox.pop(request_id)]

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
        return self.scheduler.num_unfinished > 0 or bool(self._unclaimed())

    def close(self) -> None:
        """Aborts what is left."""
        for request_id in dict.fromkeys(request.request_id for request in self._outputs.unfinished()):
            self.abort(request_id)

    # --- a request's way in ---------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, params: SamplingParams) -> _Checked:
        """Whatever can be wrong with a request is found here, before it touches anything that others share."""
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; at most {self.max_model_len - 1} are allowed, so that one "
                f"can be generated ({self._parts.limit_reason})",
                "prompt",
            )
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"stop token id {token} is out of range: 0 to {self.vocab_size - 1} are allowed", "stop_token_ids"
                )
        return _Checked(text, token_ids, params)

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
        text, token_ids, params = checked
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
        """Schedule, execute, update, observe."""
        start = self.clock()
        evictions = self.scheduler.kv.num_evictions
        try:
            plan = self.scheduler.schedule(start)
            kv = self.scheduler.usage()
        except BaseException:
            self._start_over()
            raise
        planned = self.clock()
        result = self._execute(plan)
        executed = self.clock()
        try:
            updates = self.scheduler.update(plan, result, executed) if plan.slots else []
            for request, reason, stop in self._outputs.process(updates, result):
                self.scheduler.finish(request, reason, stop)
            changed = [update.request for update in updates]
            self._post(changed)
        except BaseException:
            self._start_over()
            raise
        end = self.clock()
        if plan.slots or self._ended:
            num_sampled = sum(len(update.token_ids) for update in updates)
            self._observe(plan, kv, changed, num_sampled, evictions, (start, planned, executed, end))

    def _execute(self, plan: StepPlan) -> StepResult:
        if not plan.slots:
            return StepResult([])
        try:
            return self._parts.runner.execute(plan)
        except BaseException:
            # Their KV is unknown now. Nobody else's is: blocks become shareable only once their step is booked.
            self._post_ended(self.scheduler.fail(plan))
            raise

    def _start_over(self) -> None:
        """After an error or an interrupt in the bookkeeping itself nothing in it can be trusted."""
        lost = self._outputs.unfinished()
        for request in lost:
            request.status, request.finish_reason = RequestStatus.finished, FinishReason.error
        self.scheduler = self._parts.make_scheduler()
        self._post_ended(lost)

    def _observe(
        self,
        plan: StepPlan,
        kv: KVUsage,
        changed: list[Request],
        num_sampled: int,
        evictions: int,
        times: tuple[float, float, float, float],
    ) -> None:
        start, planned, executed, end = times
        scheduler = self.scheduler
        ended, self._ended = self._ended, []
        by_text = [r for r in changed if r.finish_reason is FinishReason.error]
        record = StepRecord(
            step=plan.step,
            start_time=start,
            end_time=end,
            schedule_s=planned - start,
            execute_s=executed - planned,
            update_s=end - executed,
            prefill_tokens=plan.num_prefill_tokens,
            decode_tokens=plan.num_decode_rows,
            sampled_tokens=num_sampled,
            num_running=scheduler.num_running,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            kv=kv,
            prefix_queried_tokens=plan.prefix_queried_tokens,
            prefix_hit_tokens=plan.prefix_hit_tokens,
            evictions=scheduler.kv.num_evictions - evictions,
            preempted=tuple(plan.preempted),
            swapped_out_blocks=len(plan.swap_out),
            swapped_in_blocks=len(plan.swap_in),
            finished=_names(r for r in changed if r.finished and r.finish_reason is not FinishReason.error),
            aborted=_names(r for r in ended if r.finish_reason is FinishReason.abort),
            failed=_names(r for r in [*ended, *by_text] if r.finish_reason is FinishReason.error),
        )
        self.records.append(record)
        for observer in self.observers:
            observer(record)

    # --- a request's way out --------------------------------------------------------------------------------------

    def _post(self, requests: Sequence[Request]) -> None:
        for output in self._outputs.collect(requests):
            self._mailbox.setdefault(output.request_id, []).append(output)

    def _post_ended(self, requests: Sequence[Request]) -> None:
        self._ended += requests
        self._post(requests)

    def _unclaimed(self) -> list[str]:
        return [request_id for request_id in self._mailbox if request_id not in self._claimed]

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


class _Checked(NamedTuple):
    """A request that can be served."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams


def _names(requests: Iterable[Request]) -> tuple[str, ...]:
    return tuple(request.request_id for request in requests)


def sibling_seed(seed: int, index: int) -> int:
    """The n completions of one request differ, and none of them repeats the request with the next seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
