"""LLMEngine: prompts in, text out, around the loop of engine_core.py."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import NoneType
from typing import Any, TypeAlias

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.request import Export, Request, RequestOutput, SamplingParams
from mini_infer.runtime.adapter_names import AdapterNames
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.executor.base import make_executor
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.runtime.text.conversation import checked_text
from mini_infer.runtime.text.detokenizer import Detokenizer
from mini_infer.runtime.text.grammar import CompiledGrammar, GrammarCompiler
from mini_infer.runtime.text.output import OutputProcessor
from mini_infer.runtime.text.prompt import (
    Params,
    Prompt,
    encode_prompt,
    pair_prompts,
    require_fit,
    require_known_tokens,
)
from mini_infer.speculative.speculator import make_speculator
from mini_infer.transfer.protocol import NoReceiver

RECORDS_KEPT = 100_000
# A request that can be served: its prompt's text, where it was given as text, and its token ids.
_Checked: TypeAlias = tuple[str | None, list[int], SamplingParams, CompiledGrammar | None]


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
        parallel = self.config.parallel
        parallel.require_one()
        self.executor = executor = make_executor(self.config)
        self.tokenizer = executor.tokenizer
        self.max_model_len = executor.limits.max_model_len
        self.startup = executor.startup
        self.vocab_size = executor.vocab_size
        self.clock = clock
        self.grammars = GrammarCompiler(executor.tokenizer, executor.vocab_size, executor.eos_token_ids)
        self._outputs = OutputProcessor(self.grammars)
        self.receiver = NoReceiver()
        if parallel.decode:
            from mini_infer.runtime.handover import make_receiver  # which needs torch

            self.receiver = make_receiver(self.config, executor)
        self.core = EngineCore(self._make_scheduler, executor, clock, self._outputs, records_kept, self.receiver)
        self.records = self.core.records  # the latest StepRecords, oldest first
        self.observers = self.core.observers  # each is called with every StepRecord
        self.adapters = AdapterNames(executor, self.config.lora, self._outputs.unfinished)
        self._num_requests = 0
        self._seed = secrets.randbits(62) if self.config.seed is None else self.config.seed

    def _make_scheduler(self) -> Scheduler:
        executor = self.executor
        config, overlap, stages = self.config, executor.overlap, executor.stages
        kv = KVManager.of(config.cache, executor.limits, executor.files)
        speculator = make_speculator(config.speculation, self.vocab_size, executor.step_costs)
        num_adapters = config.lora.max_adapters
        return Scheduler(
            config.scheduler, kv, config.cache.watermark, speculator, overlap, stages, self.receiver, num_adapters
        )

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    # --- whole requests -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        adapters: str | Sequence[str | None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, and returns their finished outputs in order.

        Args:
            params: for all prompts, or one for each.
            adapters: the name of one for all prompts, or one or None for each.
            on_output: called with each request's output as it finishes (for a progress bar, say).

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none of them is.
        """
        checked = [self._check(prompt, own) for prompt, own in pair_prompts(prompts, params)]
        names = [adapters] * len(checked) if adapters is None or isinstance(adapters, str) else adapters
        if len(names) != len(checked):
            raise RequestError(f"{len(checked)} prompts but {len(names)} adapters: give one, or one each", "adapter")
        keys = [self.adapters.key(name) for name in names]
        inbox: deque[RequestOutput] = deque()
        ids = [
            self._enqueue(request, stream=False, inbox=inbox, adapter=key)
            for request, key in zip(checked, keys, strict=True)
        ]
        done: dict[str, RequestOutput] = {}
        with contextlib.closing(self._follow(ids, inbox)) as outputs:
            for output in outputs:
                done[output.request_id] = output
                if on_output is not None:
                    on_output(output)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, with an output for every step that brings something new. It is queued when the first
        output is asked for; leaving the loop early aborts it. Several streams can be read in turns."""
        return self._stream(self._check(prompt, params))

    def _stream(self, request: _Checked) -> Iterator[RequestOutput]:
        inbox: deque[RequestOutput] = deque()
        yield from self._follow([self._enqueue(request, inbox=inbox)], inbox)

    def _follow(self, request_ids: Sequence[str], inbox: deque[RequestOutput]) -> Generator[RequestOutput, None, None]:
        """The outputs of these requests as they come, until all have finished. Leaving it early aborts them."""
        num_unfinished = len(request_ids)
        try:
            while num_unfinished:
                if not inbox:  # else somebody else stepped the engine while an output was being read
                    if not self.scheduler.num_unfinished:
                        raise RuntimeError(f"the engine has lost {num_unfinished} requests: this is a bug")
                    self.core.step()
                while inbox:
                    output = inbox.popleft()
                    num_unfinished -= output.finished
                    yield output
        finally:
            for request_id in request_ids:
                if request_id in self._outputs.inboxes:
                    self.abort(request_id)

    # --- step by step ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        stream: bool = True,
        prefill_at: str | None = None,
        export: Export | None = None,
    ) -> str:
        """Queues a request and returns its id; `step` computes it.

        Args:
            priority: smaller goes first, with scheduler.policy=priority or patience.
            arrival_time: on the engine's clock; now, if not given.
            cache_salt: requests share cached prefixes only with requests of the same salt, and of the same adapter.
            adapter: its name.
            stream: outputs in every step that brings something new; else one output at the end.
            prefill_at: the address of an engine that may compute the prompt.
            export: where another engine wants the prompt's KV.

        Raises:
            RequestError: it cannot be served. Nothing else is touched.
        """
        for name, value, kind, allowed in (
            ("priority", priority, int, "an integer"),
            ("arrival_time", arrival_time, (int, float, NoneType), "seconds on the engine's clock"),
            ("request_id", request_id, (str, NoneType), "a string"),
        ):
            if isinstance(value, bool) or not isinstance(value, kind):
                raise RequestError(f"{name} must be {allowed}, got {value!r}", name)
        if request_id is not None and request_id in self._outputs:
            raise RequestError(f"a request {request_id!r} is running already: choose another request_id", "request_id")
        checked_text(cache_salt, "cache_salt")
        key = self.adapters.key(adapter)
        checked = self._check(prompt, params)
        about: dict[str, Any] = {"priority": priority, "arrival_time": arrival_time, "cache_salt": cache_salt}
        about["adapter"] = key
        return self._enqueue(checked, request_id, stream, **about, prefill_at=prefill_at, export=export)

    def step(self) -> list[RequestOutput]:
        """Runs one step, and returns what it brought for requests of `add_request`."""
        self.core.step()
        outputs, self._outputs.outbox = self._outputs.outbox, []
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; its last output comes with the next step. Unknown ids are ignored: the
        request may just have finished."""
        requests = self._outputs.unfinished(request_id)
        self.core.abort(requests)
        self._outputs.finish_texts(requests)
        self.core.post_ended(requests)

    @property
    def waits(self) -> bool:
        """Whether all that is unfinished waits for other engines, so that `step` has nothing to do before one of them
        has something to tell (`exchange`), or a request comes or goes."""
        return self.core.waits and not self._outputs.outbox

    def exchange(self) -> None:
        """Takes in what other engines have to tell; a step does so, too."""
        self.scheduler.exchange()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute, or to hand over."""
        return self.scheduler.num_unfinished > 0 or bool(self._outputs.outbox)

    def close(self) -> None:
        """Aborts what is left, and ends the other ranks' processes, where there are any."""
        for request_id in dict.fromkeys(request.request_id for request in self._outputs.unfinished()):
            self.abort(request_id)
        self.core.drop_in_flight()
        self.receiver.close()
        self.executor.close()

    # --- a request's way in ---------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, given: Params | None) -> _Checked:
        """Whatever can be wrong with a request is found here, before it touches anything that others share."""
        params = SamplingParams.of(given)
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        require_fit(len(token_ids), self.max_model_len, self.executor.limits.reason)
        if params.stop_token_ids or params.logit_bias:
            require_known_tokens(params, self.vocab_size)
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        return text, token_ids, params, grammar

    def _enqueue(
        self,
        checked: _Checked,
        request_id: str | None = None,
        stream: bool = True,
        inbox: deque[RequestOutput] | None = None,
        arrival_time: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        **about: Any,
    ) -> str:
        text, token_ids, params, grammar = checked
        number = self._num_requests
        self._num_requests += 1
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in self._outputs:  # somebody else chose this name
                request_id += "'"
        seed = self._seed + number if params.seed is None else params.seed
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        # No adapter's key holds a zero: whatever a client calls his salt, it is that of no adapter.
        salt = f"{cache_salt}\0{adapter}" if adapter or "\0" in cache_salt else cache_salt
        leader: Request | None = None
        sequences = []
        for index in range(params.n):
            request = Request(
                request_id,
                token_ids,
                params,
                max_total_tokens=min(limit, self.max_model_len),
                eos_token_ids=self.executor.eos_token_ids,
                # The n completions differ, and none of them repeats the request with the next seed.
                seed=(seed + index * 0x9E3779B97F4A7C15) % 2**63,
                arrival_time=self.clock() if arrival_time is None else arrival_time,
                fork_of=leader,
                adapter=adapter,
                cache_salt=salt,
                constraint=None if grammar is None else grammar.start(),
                **about,
            )
            leader = leader or request
            sequences.append((request, Detokenizer(self.tokenizer, params, token_ids)))
        for request, _ in sequences:
            self.scheduler.add(request)
        self._outputs.add(request_id, text, sequences, stream)
        if inbox is not None:
            self._outputs.inboxes[request_id] = inbox
        return request_id
