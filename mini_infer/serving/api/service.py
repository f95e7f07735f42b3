"""What every endpoint asks of a model: the engine, the tokenizer, and the way into the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.text.reasoning import CLOSE as THOUGHT
from mini_infer.runtime.text.tools.formats import FORMATS, ToolFormat, format_of
from mini_infer.serving.api.callers import Caller, GiveBack, current
from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.logprobs import TokenTexts
from mini_infer.serving.api.prompts import Prompts
from mini_infer.serving.api.sampling import bounded, deadline_s
from mini_infer.serving.api.schema import GenerationRequest
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.settings import ModelSettings, Reasoning, Tools
from mini_infer.serving.tracing import Tracer

if TYPE_CHECKING:
    from mini_infer.serving.api.gateway import Gateway

GRACE_S = 0.25  # from a deadline, which the engine keeps, until it is kept here


class Service:
    """One model, served."""

    def __init__(self, settings: ModelSettings, engine: AsyncEngine, gateway: Gateway) -> None:
        self.settings = settings
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.texts = TokenTexts(engine.tokenizer)
        self.prompts = Prompts(engine)
        self.running = gateway.running
        self._gateway = gateway
        self.model_name = settings.model_name
        endpoint = gateway.settings.otlp_traces_endpoint
        self._tracer = None if endpoint is None else Tracer(endpoint, settings.model_name)
        if settings.chat_template is not None:
            self.tokenizer.set_chat_template(settings.chat_template_text())
        self.tool_format = self._tool_format()
        reasons = settings.reasoning_format
        template = self.tokenizer.chat_template
        self.splits_reasoning = THOUGHT in template if reasons is Reasoning.auto else reasons is Reasoning.think

    async def close(self) -> None:
        self.prompts.close()
        await self.engine.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def max_requests(self) -> int:
        """As many as can run and wait together."""
        return self.settings.max_queued + len(self.engine.replicas) * self.settings.engine.scheduler.max_num_seqs

    def _tool_format(self) -> ToolFormat | None:
        wanted = self.settings.tool_format
        if wanted is not Tools.auto:
            found: ToolFormat | None = FORMATS[wanted.value]
        else:
            found = format_of(self.tokenizer.chat_template)
        if found is not None and found.special:
            return dataclasses.replace(found, token_id=self.tokenizer.encode_within(found.opening)[0])
        return found

    @property
    def hang(self) -> str | None:
        """Why the engine cannot be waited for; None where it lives."""
        silence = self.engine.silence_s
        return f"the engine has not said anything for {silence:.0f} s" if silence > self.settings.hang_timeout else None

    @property
    def trouble(self) -> dict[str, str]:
        """What a probe says of the engine; nothing where it lives."""
        for status, reason in (("dead", self.engine.failure), ("hung", self.hang)):
            if reason is not None:
                return {"status": status, "reason": reason}
        return {}

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name -> folder of those that engines have, or had when they were last asked."""
        return {name: path for each in self.engine.replicas for name, path in each.stats.adapters.items()}

    def adapter(self, name: str | None) -> str | None:
        """The one that a request's `model` names; None where it names the model. One that has been unloaded since the
        model was found by it is the engine's to refuse."""
        return None if name is None or self._gateway.names_model(name) else name

    def told_name(self, name: str | None) -> str:
        """What the answer to a request of that `model` calls it."""
        return self.adapter(name) or self.model_name

    # --- a request's way in ---------------------------------------------------------------------------------------

    def _count(self, name: str, by: int) -> None:
        self._gateway.count(name, self.model_name, by)

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, body: GenerationRequest) -> list[Stream]:
        """One stream for each prompt, or an error and none."""
        if len(prompts) > 1 and len(prompts) * params.n > self.max_requests:
            product = f"{len(prompts)} prompts x n = {params.n} are {len(prompts) * params.n} completions"
            raise RequestError(f"{product}; at most {self.max_requests} are taken at once", "n")
        lengths = [len(token_ids) for token_ids in prompts]
        echo = bool(getattr(body, "echo", False))
        limit = self.settings.max_answer_size
        params = bounded(params, lengths, self.engine.info.max_model_len, echo, limit)
        if self._gateway.over is not None:  # the time was over while a thread parsed or encoded it
            raise self._gateway.over
        callers, adapter = self._gateway.callers, self.adapter(body.model)
        options: dict[str, Any] = {
            "priority": body.priority or 0,
            "cache_salt": callers.salt(body.cache_salt or ""),
            "adapter": adapter,
            # A whole answer's log-probabilities come as they are made, too: at once they would hold up all others.
            "streaming": bool(body.stream) or params.logprobs is not None,
            "deadline_s": deadline_s(body, self.settings.request_timeout),
        }
        if self.hang is not None:
            raise ApiError(503, self.hang, type="server_error", code="engine_hung")
        give_back = callers.take(sum(lengths), len(prompts) * params.n, self._count)
        streams: list[Stream] = []
        try:
            for token_ids in prompts:
                arrival = time.perf_counter()
                stream = self.engine.submit(token_ids, params, **options)
                stream.on_end = partial(self._end, stream, give_back, params, arrival, current(), adapter)
                streams.append(stream)
                if options["deadline_s"] is not None:
                    stream.deadline = asyncio.get_running_loop().time() + options["deadline_s"] + GRACE_S
        except BaseException:
            for stream in streams:
                stream.abort()
            give_back(0, (len(prompts) - len(streams)) * params.n)
            raise
        return streams

    def _end(
        self,
        stream: Stream,
        give_back: GiveBack,
        params: SamplingParams,
        arrival: float,
        caller: Caller,
        adapter: str | None,
    ) -> None:
        give_back(stream.usage.completion_tokens, params.n)
        if adapter is not None:
            self._count(f"adapter_requests {adapter}", 1)
            self._count(f"adapter_generation_tokens {adapter}", stream.usage.completion_tokens)
        if self._tracer is not None:
            self._tracer.ended(stream, params, arrival, caller.name, caller.headers)
