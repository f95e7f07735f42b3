"""LLMEngine: prompts in, tokens out. The one loop that ties scheduler, runner and outputs together, and the one place
where the engine is observed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import KVUsage, StepPlan, StepRecord
from mini_infer.core.request import FinishReason, Request, RequestOutput, SamplingParams
from mini_infer.runtime.build import build_parts
from mini_infer.runtime.detokenizer import Detokenizer
from mini_infer.runtime.output import OutputProcessor
from mini_infer.runtime.prompt import Prompt, encode_prompt, is_single_prompt

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
        self.scheduler = parts.scheduler
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self.clock = clock
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.observers: list[Callable[[StepRecord], None]] = []  # each is called with every StepRecord
        self._limit_reason = parts.limit_reason
        self._eos_token_ids = parts.eos_token_ids
        self._runner = parts.runner
        self._outputs = OutputProcessor()
        self._mailbox: dict[str, list[RequestOutput]] = {}  # outputs not handed over yet, by request
        self._claimed: set[str] = set()  # requests of `generate` and `stream`, which `step` does not hand out
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
            on_output: called with each request's output as it finishes (a progress bar, say).

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none of them is.
        """
        batch: list[Prompt] = [prompts] if is_single_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(params)} sampling parameters: give one, or one each")
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, own in zip(batch, params, strict=True):
                ids.append(self._add(prompt, own, claimed=True, stream=False))
            for request_id in ids:
                for output in self._follow(request_id):
                    done[request_id] = output
                    if on_output is not None:
                        on_output(output)
        finally:
            for request_id in ids:
                self._disown(request_id)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, with an output for every step that brings something new. Leaving the loop early
        aborts the request. Several streams can be read in turns."""
        request_id = self._add(prompt, params or SamplingParams(), claimed=True)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            yield from self._follow(request_id)
        finally:
            self._disown(request_id)

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
        return self._add(
            prompt,
            params or SamplingParams(),
            request_id=request_id,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            stream=stream,
        )

    def step(self) -> list[RequestOutput]:
        """Runs one step, and returns what it brought for requests of `add_request`."""
        self._advance()
        mine = [request_id for request_id in self._mailbox if request_id not in self._claimed]
        return [output for request_id in mine for output in self._mailbox.pop(request_id)]

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; its last output comes with the next step. Unknown ids are ignored: the
        request may just have finished."""
        unfinished = [request for request in self._outputs.sequences(request_id) if not request.finished]
        for request in unfinished:
            self.scheduler.finish(request, FinishReason.abort)
        self._post(unfinished)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.num_unfinished > 0

    def close(self) -> None:
        """Aborts what is left."""
        for request_id in self._outputs.request_ids():
            self.abort(request_id)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        claimed: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        stream: bool = True,
    ) -> str:
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        self._check_length(token_ids, params)
        if request_id is None:
            request_id = f"request-{self._num_requests}"
        if request_id in self._outputs:
            raise RequestError(f"a request {request_id!r} is running already: choose another request_id", "request_id")
        seed = self.config.seed + self._num_requests if params.seed is None else params.seed
        self._num_requests += 1
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        leader: Request | None = None
        sequences = []
        for index in range(params.n):
            request = Request(
                request_id if params.n == 1 else f"{request_id}#{index}",
                token_ids,
                params,
                max_total_tokens=min(limit, self.max_model_len),
                eos_token_ids=self._eos_token_ids,
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
        if claimed:
            self._claimed.add(request_id)
        return request_id

    def _check_length(self, token_ids: list[int], params: SamplingParams) -> None:
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; at most {self.max_model_len - 1} are allowed, so that one "
                f"can be generated ({self._limit_reason})",
                "prompt",
            )
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"stop token id {token} is out of range: 0 to {self.vocab_size - 1} are allowed", "stop_token_ids"
                )

    def _advance(self) -> None:
        """One step: schedule, execute, update, observe."""
        start = self.clock()
        evictions = self.scheduler.kv.num_evictions
        plan = self.scheduler.schedule(start)
        if plan.empty:
            return
        kv = self.scheduler.usage()
        planned = self.clock()
        try:
            result = self._runner.execute(plan)
        except BaseException:
            # Their KV is unknown now. Nobody else's is: blocks become shareable only once their step is booked.
            self._post(self.scheduler.fail(plan))
            raise
        executed = self.clock()
        updates = self.scheduler.update(plan, result, executed)
        for request, stop in self._outputs.process(updates, result):
            self.scheduler.finish(request, FinishReason.stop, stop)
        changed = [update.request for update in updates]
        self._post(changed)
        end = self.clock()
        self._observe(plan, kv, changed, evictions, (start, planned, executed, end))

    def _observe(
        self,
        plan: StepPlan,
        kv: KVUsage,
        changed: list[Request],
        evictions: int,
        times: tuple[float, float, float, float],
    ) -> None:
        start, planned, executed, end = times
        scheduler = self.scheduler
        record = StepRecord(
            step=plan.step,
            start_time=start,
            end_time=end,
            schedule_s=planned - start,
            execute_s=executed - planned,
            update_s=end - executed,
            prefill_tokens=plan.num_prefill_tokens,
            decode_tokens=plan.num_decode_rows,
            sampled_tokens=len(changed),
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
            finished=tuple(request.request_id for request in changed if request.finished),
        )
        self.records.append(record)
        for observer in self.observers:
            observer(record)

    def _post(self, requests: Sequence[Request]) -> None:
        for output in self._outputs.collect(requests):
            self._mailbox.setdefault(output.request_id, []).append(output)

    def _follow(self, request_id: str) -> Iterator[RequestOutput]:
        """The outputs of one claimed request, until it has finished."""
        while True:
            for output in self._mailbox.pop(request_id, ()):
                yield output
                if output.finished:
                    return
            self._advance()

    def _disown(self, request_id: str) -> None:
        self.abort(request_id)
        self._mailbox.pop(request_id, None)
        self._claimed.discard(request_id)


def sibling_seed(seed: int, index: int) -> int:
    """The n completions of one request differ, and none of them repeats the request with the next seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
