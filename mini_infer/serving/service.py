"""What every endpoint shares: the engine, the tokenizer, the model's names, and the way into the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.prompt import Prompt, require_fit
from mini_infer.serving.async_engine import AsyncEngine
from mini_infer.serving.errors import ApiError
from mini_infer.serving.logprobs import TokenTexts
from mini_infer.serving.metrics import Metrics
from mini_infer.serving.sampling import deadline_s
from mini_infer.serving.schema import GenerationRequest
from mini_infer.serving.settings import ServerSettings
from mini_infer.serving.sse import Running
from mini_infer.serving.stream import Stream

# A longer text is encoded in a thread, so that the streams of the others go on meanwhile.
LONG_TEXT = 16_384  # characters


class Service:
    """One model, served."""

    def __init__(self, settings: ServerSettings, engine: AsyncEngine) -> None:
        self.settings = settings
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.texts = TokenTexts(engine.tokenizer)
        self.running = Running()
        self.started = int(time.time())
        self.stopping = False
        self.model_name = settings.model_name
        alone = settings.api_processes == 1
        self.metrics = Metrics(self.model_name, engine.info, latest=lambda: engine.stats, own_process=alone)

    @classmethod
    async def start(cls, settings: ServerSettings, engine_path: str | None = None) -> Service:
        """
        Args:
            engine_path: of an engine process that serves several API processes; without it, one is started.

        Raises:
            ConfigError, ModelError, EngineDead: the engine cannot start.
        """
        patience = settings.startup_timeout
        if engine_path is not None:
            return cls(settings, await AsyncEngine.connect(engine_path, startup_timeout=patience))
        return cls(
            settings,
            await AsyncEngine.start(settings.engine, max_queued=settings.max_queued, startup_timeout=patience),
        )

    async def close(self) -> None:
        self.stop()
        await self.engine.close()

    def stop(self) -> None:
        """From here on /readyz says no, and what still runs ends with an error when the time for it is over."""
        self.stopping = True

    def end_running(self) -> None:
        seconds = f"{self.settings.shutdown_timeout:g} s"
        message = f"the server shuts down, and the request did not finish within the {seconds} left to it"
        self.running.end_all(ApiError(503, message, type="server_error", code="shutting_down"))

    @property
    def max_requests(self) -> int:
        """As many as can run and wait together."""
        return self.settings.max_queued + self.settings.engine.scheduler.max_num_seqs

    # --- a request's way in ---------------------------------------------------------------------------------------

    def require_model(self, name: str | None) -> None:
        known = dict.fromkeys((self.model_name, self.settings.model))
        if name is not None and name not in known:
            names = " or ".join(repr(each) for each in known)
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist; this server has {names}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def encode(self, prompt: Prompt, param: str) -> list[int]:
        """A prompt's token ids, known to fit into the model.

        Raises:
            RequestError: it is none, or holds what cannot be encoded.
            ApiError: it is too long.
        """
        token_ids = await self.tokens(prompt, param)
        try:
            require_fit(len(token_ids), self.engine.info.max_model_len)
        except RequestError as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
        return token_ids

    async def tokens(self, prompt: Prompt, param: str) -> list[int]:
        """A prompt's token ids, however many. `param` is the field that it came in, for the message."""
        try:
            if _num_chars(prompt) > LONG_TEXT:
                return await asyncio.to_thread(self.engine.encode, prompt)
            return self.engine.encode(prompt)
        except RequestError as error:
            raise RequestError(str(error), param) from error

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, body: GenerationRequest) -> list[Stream]:
        """One stream for each prompt, or an error and none."""
        options: dict[str, Any] = {
            "priority": body.priority or 0,
            "cache_salt": body.cache_salt or "",
            "streaming": bool(body.stream),
            "deadline_s": deadline_s(body, self.settings.request_timeout),
        }
        streams: list[Stream] = []
        try:
            for token_ids in prompts:
                streams.append(self.engine.submit(token_ids, params, **options))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams


def _num_chars(prompt: Prompt) -> int:
    """Of a text, or of a conversation's texts."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(part.get("content"))) for part in prompt if isinstance(part, dict))
