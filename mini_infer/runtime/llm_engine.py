"""LLMEngine: prompts in, text out, around the loop of engine_core.py."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import StepRecord, StepResult
from mini_infer.core.request import Request, RequestOutput, SamplingParams
from mini_infer.runtime.engine_core import Ending, EngineCore
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.scheduler.scheduler import Scheduler, TokenUpdate
from mini_infer.runtime.text.detokenizer import Detokenizer
from mini_infer.runtime.text.grammar import CompiledGrammar, GrammarCompiler
from mini_infer.runtime.text.output import OutputProcessor
from mini_infer.runtime.text.prompt import Prompt, encode_prompt, is_single_prompt, require_fit
from mini_infer.runtime.text.tokenizer import checked_text
from mini_infer.speculative.speculator import make_speculator

RECORDS_KEPT = 100_000
Params = SamplingParams | Mapping[str, Any]  # a mapping holds arguments of SamplingParams


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
        self.executor = executor = _make_executor(self.config)
        self.tokenizer = executor.tokenizer
        self.max_model_len = executor.limits.max_model_len
        self.startup = executor.startup
        self.vocab_size = executor.vocab_size
        self.clock = clock
        self.core = EngineCore(self._make_scheduler, executor, clock, self, records_kept)
        self._outputs = OutputProcessor()
        self._grammars = GrammarCompiler(executor.tokenizer, executor.vocab_size, executor.eos_token_ids)
        self._claimed: set[str] = set()  # requests of `generate` and `stream`, which `step` does not hand out
        self._mailbox: dict[str, list[RequestOutput]] = {}  # their outputs that are not handed over yet, by request
        self._outbox: list[RequestOutput] = []  # for the next `step` to hand out
        self._num_requests = 0
        self._seed = secrets.randbits(62) if self.config.seed is None else self.config.seed

    def _make_scheduler(self) -> Scheduler:
        config, limits = self.config, self.executor.limits
        kv = KVManager(
            limits.num_blocks,
            config.cache.block_size,
            limits.max_model_len,
            layout=config.cache.layout,
            prefix_caching=config.cache.prefix_caching,
            num_host_blocks=limits.num_host_blocks,
        )
        proposer = make_speculator(config.speculation, self.vocab_size, self.executor.step_costs)
        return Scheduler(config.scheduler, kv, config.cache.watermark, proposer, self.executor.overlap)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def records(self) -> deque[StepRecord]:
        """The latest StepRecords, oldest first."""
        return self.core.records

    @property
    def observers(self) -> list[Callable[[StepRecord], None]]:
        """Each is called with every StepRecord."""
        return self.core.observers

    # --- whole requests -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
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
        if not isinstance(prompts, (str, Sequence)):
            raise RequestError(f"prompts are one prompt or a list of them, not {type(prompts).__name__}", "prompt")
        batch: list[Prompt] = [prompts] if is_single_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        each = [params] * len(batch) if params is None or isinstance(params, (SamplingParams, Mapping)) else params
        if not isinstance(each, Sequence) or isinstance(each, (str, bytes)):
            raise RequestError(f"sampling parameters are SamplingParams or a mapping, not {type(each).__name__}")
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters: give one, or one each")
        checked = [self._check(prompt, own) for prompt, own in zip(batch, each, strict=True)]
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

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, with an output for every step that brings something new. It is queued when the first
        output is asked for; leaving the loop early aborts it. Several streams can be read in turns."""
        return self._stream(self._check(prompt, params))

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
        params: Params | None = None,
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
        checked = self._check(prompt, params)
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
        self.core.step()
        outputs, self._outbox = self._outbox, []
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; its last output comes with the next step. Unknown ids are ignored: the
        request may just have finished."""
        requests = self._outputs.unfinished(request_id)
        self.core.abort(requests)
        self._outputs.finish_texts(requests)
        self.core.post_ended(requests)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute, or to hand over."""
        return self.scheduler.num_unfinished > 0 or bool(self._outbox)

    def close(self) -> None:
        """Aborts what is left."""
        for request_id in dict.fromkeys(request.request_id for request in self._outputs.unfinished()):
            self.abort(request_id)
        self.core.drop_in_flight()

    # --- a request's way in ---------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, given: Params | None) -> _Checked:
        """Whatever can be wrong with a request is found here, before it touches anything that others share."""
        params = SamplingParams.of(given)
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        require_fit(len(token_ids), self.max_model_len, self.executor.limits.reason)
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
        seed = self._seed + number if params.seed is None else params.seed
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        leader: Request | None = None
        sequences = []
        for index in range(params.n):
            request = Request(
                request_id,
                token_ids,
                params,
                max_total_tokens=min(limit, self.max_model_len),
                eos_token_ids=self.executor.eos_token_ids,
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

    # --- a request's way out (engine_core.Outputs) -------------------------------------------------------------------

    def process(self, updates: Sequence[TokenUpdate], result: StepResult) -> list[Ending]:
        self._grammars.update_masks()
        return self._outputs.process(updates, result)

    def post(self, requests: Sequence[Request]) -> None:
        outputs = self._outputs.collect(requests)
        if not self._claimed:
            self._outbox += outputs
            return
        for output in outputs:
            if output.request_id in self._claimed:
                self._mailbox.setdefault(output.request_id, []).append(output)
            else:
                self._outbox.append(output)

    def unfinished(self) -> list[Request]:
        return self._outputs.unfinished()

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
            self.core.step()

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
    grammar: CompiledGrammar | None


def sibling_seed(seed: int, index: int) -> int:
    """The n completions of one request differ, and none of them repeats the request with the next seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


def _make_executor(config: EngineConfig) -> Executor:
    # Imported where it is chosen: the dry model needs no model code, and a model no dry one.
    if config.model.load_format is LoadFormat.dry:
        from mini_infer.runtime.executor.dry import DryExecutor

        return DryExecutor(config)
    from mini_infer.runtime.executor.local import LocalExecutor

    return LocalExecutor(config)
