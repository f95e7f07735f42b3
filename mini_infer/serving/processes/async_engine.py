"""AsyncEngine: the engine processes as seen by an asyncio program."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from mini_infer.core.config import EngineConfig, ParallelConfig
from mini_infer.core.errors import MiniInferError
from mini_infer.core.request import SamplingParams
from mini_infer.core.token_ids import pack
from mini_infer.runtime.text.prompt import Prompt, encode_prompt, require_fit
from mini_infer.runtime.text.tokenizer import Tokenizer, load_tokenizer
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.link.replica import QueueFull, Replica, Request, why_none
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.link.wire import Add, ChangeAdapter, non_default_params
from mini_infer.serving.processes.launch import MAX_QUEUED, EngineProcess
from mini_infer.serving.router import Homes, Router
from mini_infer.serving.stats import Stats

STARTUP_TIMEOUT_S = 1800.0
GATHER_S = 0.5  # an engine that serves says so at once
MOST_RERUNS = 2  # of a request whose engine died: it may be what the engine died of


class AsyncEngine:
    """A connection to an engine process. `start` makes the process too; `connect` uses others', of which there can be
    several: a router deals the requests, and what one loses before it has begun is asked of another.

    Args:
        kept: whoever supervises the engines starts another one for each that ends.

    Attributes:
        replicas: the engines.
        info: what the first of them turned out to be, and the least of their max_model_len.
        tokenizer: the model's, for prompts that are text.
        on_death: called with the failure if the only engine process dies; not at `close`.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        tokenizer: Tokenizer,
        patience: float,
        num_prefill: int = 0,
        kept: bool = False,
    ) -> None:
        infos = [replica.info for replica in replicas if replica.info is not None]
        self.replicas = replicas
        self.info = msgspec.structs.replace(infos[0], max_model_len=min(info.max_model_len for info in infos))
        self.tokenizer = tokenizer
        self._router = router
        self._patience = patience
        self._num_prefill = num_prefill
        self._kept = kept
        self._num_submitted = 0
        self._closing = False
        self.on_death: Callable[[str], None] = lambda reason: None
        for replica in replicas:
            replica.attach(self)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, max_queued: int = MAX_QUEUED, startup_timeout: float = STARTUP_TIMEOUT_S
    ) -> AsyncEngine:
        """Starts an engine process, which ends with this one.

        Args:
            max_queued: completions that may wait beyond those that the engine runs at once, whoever has sent them.
            startup_timeout: seconds.

        Raises:
            ConfigError, ModelError: as LLMEngine raises them.
            EngineDead: the process ended, or took too long.
        """
        process = EngineProcess(config, max_queued)
        replica = Replica(0, process.socket_path, process)
        # Beside the engine's own start: importing and reading a tokenizer takes seconds.
        tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, config.model))
        try:
            await replica.open(startup_timeout)
            return cls([replica], Router(config.parallel.routing, 1, config.cache), await tokenizer, startup_timeout)
        except BaseException:
            tokenizer.cancel()
            process.stop()
            raise

    @classmethod
    async def connect(
        cls,
        *socket_paths: str,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  it is frozen
        startup_timeout: float = STARTUP_TIMEOUT_S,
    ) -> AsyncEngine:
        """Uses engine processes that another process has started. Of several, one that ends is waited for, since
        whoever started it starts another; it begins as soon as one serves. Other arguments and errors: as with `start`.

        Args:
            parallel: how requests are dealt, and how many of the first ones compute prompts for the others.
        """
        replicas = [Replica(number, path) for number, path in enumerate(socket_paths)]
        return await cls.over(replicas, parallel, None, startup_timeout, kept=len(replicas) > 1)

    @classmethod
    async def over(
        cls,
        replicas: Sequence[Replica],
        parallel: ParallelConfig,
        homes: Homes | None,
        startup_timeout: float,
        kept: bool,
    ) -> AsyncEngine:
        """As `connect`, of replicas that nobody has opened. `homes` is shared with the other processes that send
        requests to them; None: there are none."""
        try:
            if kept:
                await _first(replicas, startup_timeout)
            else:
                await replicas[0].open(startup_timeout)
            info = next(replica.info for replica in replicas if replica.info is not None)
            config = EngineConfig.from_dict(info.settings)
            tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        except BaseException:
            for replica in replicas:
                replica.close()
            raise
        router = Router(parallel.routing, len(replicas), config.cache, alone=homes is None, homes=homes)
        return cls(replicas, router, tokenizer, startup_timeout, parallel.prefill, kept)

    @property
    def stats(self) -> Stats:
        """The first replica's."""
        return self.replicas[0].stats

    @property
    def failure(self) -> str | None:
        """Why there is no engine to ask; None while there is one."""
        return None if any(replica.failure is None for replica in self.replicas) else why_none(self.replicas)

    @property
    def socket_path(self) -> str:
        """For `connect` in other processes."""
        return self.replicas[0].socket_path

    @property
    def silence_s(self) -> float:
        """Seconds since an engine last said something; one that lives does so every second."""
        return min((r.silence_s for r in self.replicas if r.failure is None), default=0.0)

    def count(self, counts: dict[str, int]) -> bool:
        """Adds to `Stats.counted`, of one of the engines; False where none can be told."""
        for replica in self.replicas:
            if replica.failure is None:
                replica.count(counts)
                return True
        return False

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids. Raises RequestError."""
        return encode_prompt(prompt, self.tokenizer, self.info.vocab_size)[1]

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        streaming: bool = True,
        deadline_s: float | None = None,
    ) -> Stream:
        """Sends a request to the engine.

        Args:
            priority, cache_salt, adapter: as with LLMEngine.add_request.
            streaming: deltas as they come; else one a completion, at the end, which costs less.
            deadline_s: seconds from now; a request that takes longer ends with the finish reason "deadline".

        Raises:
            EngineDead: never.
            RequestError: the prompt is too long, or holds what cannot be sent. Whatever else the engine refuses, and
                QueueFull, is raised by the stream.
        """
        if self._closing:
            raise EngineDead("the engine has been closed")
        token_ids = list(token_ids)
        require_fit(len(token_ids), self.info.max_model_len)
        now, packed = time.perf_counter(), pack(token_ids)
        add = Add(
            number=self._num_submitted,
            prompt=token_ids if packed is None else packed.tobytes(),
            params=non_default_params(params),
            priority=priority,
            cache_salt=cache_salt,
            streaming=streaming,
            arrival_time=now,
            deadline_time=None if deadline_s is None else now + deadline_s,
            adapter=adapter,
        )
        self._num_submitted += 1
        # What computes every token of the prompt anyway finds nothing in a cache.
        salt = cache_salt if adapter is None else f"{cache_salt}\0{adapter}"
        chain = self._router.chain(token_ids, salt) if params.prompt_logprobs is None else ()
        stream = Stream(params.n, len(token_ids), lambda: self._abort(request))
        request = Request(add, stream, params.n, chain)
        if not self._place(request):
            raise EngineDead(why_none(self.replicas))
        return stream

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Has an adapter loaded by all engines that can be asked, or unloaded where there is no path. An engine that is
        started again has those of its settings.

        Raises:
            RequestError, EngineError: one of them refuses it. Those that had done it have gone back to what they had.
            EngineDead: there is none left.
        """
        before: dict[Replica, str | None] = {}  # of those that have done it
        for replica in self.replicas:
            if replica.failure is not None:
                continue
            try:
                before[replica] = await self._change_adapter(replica, name, path)
            except EngineDead:  # it comes back as one that is started again, if at all
                continue
            except MiniInferError:
                for other, its_own in before.items():
                    with contextlib.suppress(MiniInferError):  # it has died, or its old folder has gone
                        await self._change_adapter(other, name, its_own)
                raise
        if self.failure is not None:
            raise EngineDead(self.failure)

    async def _change_adapter(self, replica: Replica, name: str, path: str | None) -> str | None:
        self._num_submitted += 1
        return await replica.change_adapter(ChangeAdapter(self._num_submitted - 1, name, path))

    async def close(self) -> None:
        """Aborts what runs, and ends the process that `start` started."""
        if self._closing:
            return
        self._closing = True
        for replica in self.replicas:
            for request in replica.requests.values():
                request.stream.abort()
                request.stream.fail(EngineDead("the engine has been closed"))
            replica.close()
            if replica.process is not None:
                await asyncio.to_thread(replica.process.stop)

    # --- a request's way ------------------------------------------------------------------------------------------

    def _place(self, request: Request) -> bool:
        """Sends it to a replica; not where there is none that may take it."""
        serving = [replica.number for replica in self.replicas if replica.takes_requests]
        prompts = [number for number in serving if number < self._num_prefill]
        # Every engine can do all of a request: where nobody is left to decode, those for prompts do.
        decode = [number for number in serving if number >= self._num_prefill]
        able = decode or prompts
        # One that was started again may lack an adapter that others were told to load. Where all do, one says so.
        if (adapter := request.add.adapter) is not None:
            able = [number for number in able if adapter in self.replicas[number].stats.adapters] or able
        among = [number for number in able if number not in request.refused_by]
        if not among:
            return False
        request.add.prefill_at = self._choose_prefill(request, prompts) if decode else None
        route = self._router.route(request.chain, request.num_completions, among)
        try:
            self.replicas[route.replica].send(request)
        except BaseException:
            self._router.end(route)
            raise
        request.route = route
        return True

    def _choose_prefill(self, request: Request, among: Sequence[int]) -> str | None:
        """Who may compute its prompt: the engine that decodes it asks, where that pays."""
        if not among:
            return None
        route = self._router.route(request.chain, 1, among, role=1)
        self._router.end(route)  # what it has to do it tells
        engine = self.replicas[route.replica].info
        return None if engine is None else engine.prompts_at

    def _place_again(self, request: Request, error: Exception) -> None:
        """It ends with the error where nobody else may take it."""
        if not self._place(request):
            request.stream.fail(error)

    def _leave(self, request: Request, cached_tokens: int | None = None) -> None:
        """Its replica has nothing to do with it any more."""
        assert request.route is not None
        self._router.end(request.route, cached_tokens)

    def _abort(self, request: Request) -> None:
        assert request.route is not None
        self.replicas[request.route.replica].abort(request)

    # --- what the engines say -------------------------------------------------------------------------------------

    def take_end(self, request: Request) -> None:
        self._leave(request, None if request.stream.aborted else request.stream.usage.cached_tokens)

    def take_refusal_of(self, request: Request, error: Exception) -> None:
        self._leave(request)
        if isinstance(error, QueueFull) and not request.stream.aborted:
            assert request.route is not None
            request.refused_by.add(request.route.replica)
            self._place_again(request, error)
        else:
            request.stream.fail(error)

    def take_news(self, replica: Replica) -> None:
        stats = replica.stats
        self._router.told(replica.number, stats.unfinished, stats.kv_total_blocks)

    def take_loss(self, replica: Replica, lost: Sequence[Request]) -> None:
        if self._closing:
            return
        reason = replica.failure or ""
        if len(self.replicas) > 1:
            reason = f"replica {replica.number}: {reason}"
        if self._kept:
            self._router.restarted(replica.number)
            replica.keep_open(self._patience)
        for request in lost:
            self._leave(request)
            request.num_lost += 1
            if request.stream.aborted or request.stream.has_begun or request.num_lost > MOST_RERUNS:
                request.stream.fail(EngineDead(reason))
            else:
                self._place_again(request, EngineDead(reason))
        if not self._kept:
            self.on_death(reason)


async def _first(replicas: Sequence[Replica], timeout: float) -> None:
    """Waits until one serves, and a moment for those that do already."""
    opening = [replica.keep_open(timeout) for replica in replicas]
    done, others = await asyncio.wait(opening, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise EngineDead(why_none(replicas))
    if others:
        await asyncio.wait(others, timeout=GATHER_S)
