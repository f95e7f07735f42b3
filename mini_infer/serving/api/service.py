"""What every endpoint shares: the engine, the tokenizer, the model's names, and the way into the engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.text.reasoning import CLOSE as THOUGHT
from mini_infer.runtime.text.tools.formats import FORMATS, ToolFormat, format_of
from mini_infer.serving.api.callers import Caller, Callers, GiveBack, current
from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.logprobs import TokenTexts
from mini_infer.serving.api.prompts import Prompts
from mini_infer.serving.api.sampling import bounded, deadline_s
from mini_infer.serving.api.schema import GenerationRequest
from mini_infer.serving.api.sse import Answer
from mini_infer.serving.http.bodies import UnfinishedBodies
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.metrics import Metrics
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.settings import Reasoning, ServerSettings, Tools
from mini_infer.serving.tracing import Tracer

ALIAS = "mini-infer"  # always names the served model
GRACE_S = 0.25  # from a deadline, which the engine keeps, until it is kept here
COUNT_S = 0.1  # between two reports to the engine of what was counted here
UNFINISHED_BODIES = 16  # of the largest size, together


class Service:
    """One model, served."""

    def __init__(self, settings: ServerSettings, engine: AsyncEngine, accounts: int | None = None) -> None:
        self.settings = settings
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.texts = TokenTexts(engine.tokenizer)
        self.running: set[Answer] = set()
        self.unfinished = UnfinishedBodies(UNFINISHED_BODIES * settings.max_body_bytes)
        self.prompts = Prompts(engine)
        self._counts: Counter[str] = Counter()
        self.callers = Callers(settings, accounts, self._count)
        endpoint = settings.otlp_traces_endpoint
        self._tracer = None if endpoint is None else Tracer(endpoint, settings.model_name)
        self.started = int(time.time())
        self.stopping = False
        self._over: ApiError | None = None  # what ends all that is not ready when the server stops
        self._arriving: set[asyncio.Task[Any]] = set()
        self.model_name = settings.model_name
        if settings.chat_template is not None:
            self.tokenizer.set_chat_template(settings.chat_template_text())
        self.tool_format = self._tool_format()
        reasons = settings.reasoning_format
        template = self.tokenizer.chat_template
        self.splits_reasoning = THOUGHT in template if reasons is Reasoning.auto else reasons is Reasoning.think
        alone = settings.api_processes == 1
        self.metrics = Metrics(self.model_name, engine.info, engine.replicas, own_process=alone)

    @classmethod
    async def start(
        cls, settings: ServerSettings, engine_paths: Sequence[str] = (), accounts: int | None = None
    ) -> Service:
        """
        Args:
            engine_paths: of engine processes that a Supervisor keeps; without any, one is started.
            accounts: as with `Accounts`.

        Raises:
            ConfigError, ModelError, EngineDead: the engine cannot start.
        """
        patience = settings.startup_timeout
        if engine_paths:
            engine = await AsyncEngine.connect(
                *engine_paths,
                parallel=settings.engine.parallel,
                alone=settings.api_processes == 1,
                startup_timeout=patience,
            )
        else:
            engine = await AsyncEngine.start(settings.engine, max_queued=settings.max_queued, startup_timeout=patience)
        try:
            return cls(settings, engine, accounts)
        except BaseException:
            await engine.close()
            raise

    async def close(self) -> None:
        self.stop()
        self.prompts.close()
        await self.engine.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def stop(self) -> None:
        """From here on /readyz says no, and what still runs ends with an error when the time for it is over."""
        self.stopping = True

    def end_running(self) -> None:
        seconds = f"{self.settings.shutdown_timeout:g} s"
        message = f"the server shuts down, and the request did not finish within the {seconds} left to it"
        self._over = ApiError(503, message, type="server_error", code="shutting_down")
        for answer in list(self.running):
            answer.end(self._over)
        for task in self._arriving:
            task.cancel()

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Around the wait for the rest of a request, which ends with an error, too, when the time is over."""
        task = asyncio.current_task()
        assert task is not None
        self._arriving.add(task)
        try:
            yield
        except asyncio.CancelledError:
            raise self._over or asyncio.CancelledError from None
        finally:
            self._arriving.discard(task)

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

    # --- counts ---------------------------------------------------------------------------------------------------

    def count_response(self, path: str, status: int) -> None:
        self._count(f"responses {path} {status}")

    def count_refusal(self, reason: str) -> None:
        self._count(f"refused {reason}")

    def _count(self, name: str, by: int = 1) -> None:
        if not self._counts:
            asyncio.get_running_loop().call_later(COUNT_S, self._report_counts)
        self._counts[name] += by

    def _report_counts(self) -> None:
        self.engine.count(dict(self._counts))
        self._counts.clear()

    # --- a request's way in ---------------------------------------------------------------------------------------

    def require_model(self, name: str | None) -> None:
        known = dict.fromkeys((self.model_name, self.settings.model, ALIAS))
        if name is not None and name not in known:
            names = " or ".join(repr(each) for each in known)
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist; this server has {names}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, body: GenerationRequest) -> list[Stream]:
        """One stream for each prompt, or an error and none."""
        if len(prompts) > 1 and len(prompts) * params.n > self.max_requests:
            product = f"{len(prompts)} prompts x n = {params.n} are {len(prompts) * params.n} completions"
            raise RequestError(f"{product}; at most {self.max_requests} are taken at once", "n")
        lengths = [len(token_ids) for token_ids in prompts]
        echo = bool(getattr(body, "echo", False))
        limit = self.settings.max_answer_size
        params = bounded(params, lengths, self.engine.info.max_model_len, echo, limit)
        if self._over is not None:  # the time was over while a thread parsed or encoded it
            raise self._over
        options: dict[str, Any] = {
            "priority": body.priority or 0,
            "cache_salt": self.callers.salt(body.cache_salt or ""),
            "streaming": bool(body.stream),
            "deadline_s": deadline_s(body, self.settings.request_timeout),
        }
        if self.hang is not None:
            raise ApiError(503, self.hang, type="server_error", code="engine_hung")
        give_back = self.callers.take(sum(lengths), len(prompts) * params.n)
        streams: list[Stream] = []
        try:
            for token_ids in prompts:
                arrival = time.perf_counter()
                stream = self.engine.submit(token_ids, params, **options)
                stream.on_end = partial(self._end, stream, give_back, params, arrival, current())
                streams.append(stream)
                if options["deadline_s"] is not None:
                    stream.deadline = asyncio.get_running_loop().time() + options["deadline_s"] + GRACE_S
        except BaseException:
            for stream in streams:
                stream.abort()
            give_back(0, (len(prompts) - len(streams)) * params.n)
            raise
        return streams

    def _end(self, stream: Stream, give_back: GiveBack, params: SamplingParams, arrival: float, caller: Caller) -> None:
        give_back(stream.usage.completion_tokens, params.n)
        if self._tracer is not None:
            self._tracer.ended(stream, params, arrival, caller.name, caller.headers)
