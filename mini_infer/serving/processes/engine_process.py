"""The process that owns the LLMEngine: commands in between two steps, one message out a step and connection.

    while requests are unfinished:   read what has come -> add, abort, deadlines -> step -> send
    else:                            wait in `select`, and say once a second that it lives

Nobody whom it serves can slow it: it never waits for a connection, adds newcomers for a bounded time a step, and has
grammars compiled by threads.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import selectors
import socket
import sys
import time
from array import array
from collections import deque

import torch

from mini_infer.core.clock import machine
from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.errors import MiniInferError, RankError, RequestError
from mini_infer.core.garbage import settle
from mini_infer.core.request import FinishReason, RequestOutput, SamplingParams, TokenLogprob
from mini_infer.runtime.handover import make_sender
from mini_infer.runtime.llm_engine import LLMEngine
from mini_infer.serving.link.connection import Connection
from mini_infer.serving.link.wire import (
    DEADLINE,
    Add,
    ChangeAdapter,
    Count,
    Delta,
    Done,
    Drain,
    Failed,
    FrameWriter,
    PromptLogprobs,
    Ready,
    Refused,
)
from mini_infer.serving.processes.engine_stats import EngineStats
from mini_infer.serving.processes.launch import MAX_QUEUED, prefill_socket
from mini_infer.serving.processes.newcomers import Newcomer, Newcomers, Owner, QueueBound, num_completions
from mini_infer.transfer.link import Bell
from mini_infer.transfer.receiver import Receiver

logger = logging.getLogger(__name__)

INTAKE_S = 0.002  # a step; a request takes about 50 microseconds
STATS_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0  # they come so often also where there is nothing to do
FAILURES_IN_A_ROW = 3  # steps; then it is not the requests' fault


CANNOT_START = 2  # exit code
CONNECT_S = 5.0  # until whoever started this process has connected, which is the next that it does
RESTART_S = 5.0  # about, for clients that nobody else can serve
YOUNG_OBJECTS = 10_000  # before the garbage collector looks at them
LOGPROBS_A_TURN = 2**13  # of prompts: a millisecond or two
_SPARE_DEADLINES = 64  # of requests that have ended, whose times may be years away
LAST_FLUSH_S = 1.0  # for what clients have not read when a drained engine ends


class Restarting(MiniInferError, RuntimeError):
    """What a request ends with that a drained engine could not finish."""


class EngineServer:
    """Serves an engine to every process that connects.

    Args:
        engine: with time.perf_counter as its clock.
        listener: a listening Unix socket.
        max_queued: completions that may wait, over all connections, beyond those that the engine runs at once.
        prompts_at: where it listens for who wants prompts of it, as of a Door; default: beside `listener`.
    """

    def __init__(
        self,
        engine: LLMEngine,
        listener: socket.socket,
        max_queued: int = MAX_QUEUED,
        prompts_at: str | None = None,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._stats = EngineStats(engine)
        self._stats_told = 0.0
        self._connections: list[Connection] = []
        self._num_connections = 0
        self._newcomers = Newcomers(engine.grammars)
        self._bound = QueueBound(max_queued, engine.config.scheduler.max_num_seqs)
        self._owners: dict[str, Owner] = {}  # of the engine's requests, but those whose connection has ended
        self._deadlines: list[tuple[float, str]] = []  # a heap
        self._expired: set[str] = set()
        self._late: list[RequestOutput] = []  # not handed out yet, since log-probabilities of prompts are written
        self._unwritten: dict[str, deque[TokenLogprob | None]] = {}  # by request
        self._failures = 0
        self._changes: deque[tuple[Owner, ChangeAdapter]] = deque()  # of adapters that have been read
        self._changes_bell = Bell()
        self._selector.register(self._changes_bell.sock, selectors.EVENT_READ, self._make_changes)
        self._drained_by: float | None = None  # no further requests; those that it has get until then
        self._sender = make_sender(engine)
        self._prompts_at: str | None = None
        if self._sender is not None:
            self._prompts_at = self._sender.listen(prompts_at or prefill_socket(listener.getsockname()))
            self._selector.register(self._sender.bell.sock, selectors.EVENT_READ, self._sender.turn)
        if isinstance(engine.receiver, Receiver):
            self._selector.register(engine.receiver.bell.sock, selectors.EVENT_READ, engine.exchange)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._newcomers.wakes, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns when it has been drained. Raises what a step raised that leaves no hope for the next one, and
        Restarting where it could not be drained in time."""
        try:
            while not self._is_drained():
                self.turn()
        except BaseException as error:
            _tell_all([c.sock for c in self._connections], error)
            raise

    def turn(self) -> None:
        """One step, or the wait for something to do."""
        computes = self._engine.has_unfinished_requests() and not self._engine.waits
        self._communicate(wait=not (self._newcomers or self._late or computes))
        self._take_in()
        self._enforce_deadlines()
        if self._engine.has_unfinished_requests():
            self._hand_out(self._step())
            self._bound.stepped(self._engine.scheduler)
            goes_on = self._engine.has_unfinished_requests() and not self._engine.waits
            self._tell_stats(STATS_INTERVAL_S if goes_on else 0.0)  # else it may be long before the next turn
        else:
            self._engine.executor.require_alive()
            self._hand_out([])
            self._tell_stats(HEARTBEAT_S)
        for connection in list(self._connections):
            self._flush(connection)

    def _tell_stats(self, interval: float) -> None:
        """Unless they were told less than `interval` seconds ago."""
        now = time.perf_counter()
        if now - self._stats_told >= interval:
            self._stats_told = now
            stats = self._stats.snapshot()
            for connection in self._connections:
                connection.stats = stats

    def _drain(self, drain: Drain) -> None:
        self._drained_by = time.perf_counter() + drain.seconds
        self._stats.draining = True
        self._tell_stats(0.0)

    def _is_drained(self) -> bool:
        if self._drained_by is None:
            return False
        left_s = self._drained_by - time.perf_counter()
        if self._newcomers.num_completions or self._late or self._engine.has_unfinished_requests():
            if left_s <= 0:
                raise Restarting("it was restarted, and the request did not finish within the time left to it")
            return False
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sock.settimeout(LAST_FLUSH_S)
                connection.flush()
        return True

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._selector.close()
        self._newcomers.close()
        self._changes_bell.close()
        if self._sender is not None:
            self._sender.close()

    # --- connections ----------------------------------------------------------------------------------------------

    def _communicate(self, wait: bool) -> None:
        seconds = HEARTBEAT_S if wait else 0.0
        if self._deadlines:
            seconds = min(seconds, max(self._deadlines[0][0] - time.perf_counter(), 0.0))
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._newcomers.wakes:
                self._newcomers.fetch_prepared()
            elif callable(key.data):
                key.data()
            elif events & selectors.EVENT_READ:
                self._receive(key.data)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        connection = Connection(sock, str(self._num_connections))
        self._num_connections += 1
        config = self._engine.config
        dry = config.model.load_format is LoadFormat.dry
        connection.notices.append(
            Ready(
                model="dry" if dry else config.model.path,
                max_model_len=self._engine.max_model_len,
                vocab_size=self._engine.vocab_size,
                settings=config.to_dict(),
                startup=self._engine.startup.to_dict(),
                pid=os.getpid(),
                machine=machine(),
                now=time.perf_counter(),
                prompts_at=self._prompts_at,
            )
        )
        connection.stats = self._stats.snapshot()
        self._connections.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> None:
        try:
            commands = connection.receive()
        except ConnectionError as error:
            self._disconnect(connection, error)
            return
        for command in commands:
            if isinstance(command, Count):
                self._stats.count(command.counts)
                continue
            if isinstance(command, Drain):
                self._drain(command)
                continue
            owner = Owner(connection, command.number)
            if isinstance(command, ChangeAdapter):
                self._begin_change(owner, command)
            elif isinstance(command, Add):
                self._receive_add(owner, command)
            elif self._newcomers.discard(owner):
                connection.notices.append(Refused(owner.number, "it was aborted"))
            else:
                self._unwritten.pop(_request_id(owner), None)
                self._engine.abort(_request_id(owner))

    def _begin_change(self, owner: Owner, change: ChangeAdapter) -> None:
        """Files are read while steps go on."""

        def done(_: object) -> None:
            self._changes.append((owner, change))
            self._changes_bell.ring()

        if change.path is None:
            self._change_adapter(owner, change)
            return
        try:
            self._engine.adapters.read(change.path).add_done_callback(done)
        except MiniInferError as error:
            owner.connection.notices.append(Refused(owner.number, str(error), "lora_path"))

    def _make_changes(self) -> None:
        self._changes_bell.quiet()
        while self._changes:
            self._change_adapter(*self._changes.popleft())

    def _change_adapter(self, owner: Owner, change: ChangeAdapter) -> None:
        """Between two steps."""
        notices, adapters = owner.connection.notices, self._engine.adapters
        had = adapters.paths.get(change.name)
        try:
            if change.path is not None:
                adapters.load(change.name, change.path)
            elif had is not None:
                adapters.unload(change.name)
        except (torch.AcceleratorError, RankError):
            raise
        except MiniInferError as error:
            notices.append(Refused(owner.number, str(error), "lora_path"))
        except Exception as error:  # too little memory, say: the others' requests go on
            logger.exception("the adapter %r could not be changed", change.name)
            message = f"the engine failed to change the adapter: {error!r}"
            notices.append(Refused(owner.number, message, None, internal=True))
        else:
            notices.append(Done(owner.number, had))
            self._tell_stats(0.0)

    def _receive_add(self, owner: Owner, add: Add) -> None:
        if self._drained_by is None:
            refusal = self._bound.refusal(
                add.number, num_completions(add), self._engine.scheduler, self._newcomers.num_completions
            )
        else:  # sent before it was known
            refusal = Refused(add.number, "the engine is being restarted", retry_after=RESTART_S)
        if refusal is None and not self._newcomers.put(owner, add):
            refusal = Refused(add.number, "too many new grammars wait to be compiled: try again later", retry_after=5.0)
        if refusal is not None:
            owner.connection.notices.append(refusal)

    def _flush(self, connection: Connection) -> None:
        try:
            done = connection.flush()
        except ConnectionError as error:
            self._disconnect(connection, error)
            return
        events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _disconnect(self, connection: Connection, reason: ConnectionError) -> None:
        logger.info("connection %s ends: %s", connection.name, reason)
        self._selector.unregister(connection.sock)
        connection.close()
        self._connections.remove(connection)
        self._newcomers.discard_all(connection)
        for request_id in [each for each, owner in self._owners.items() if owner.connection is connection]:
            del self._owners[request_id]
            self._engine.abort(request_id)

    # --- requests -------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        until = time.perf_counter() + INTAKE_S
        while self._newcomers:
            self._add(self._newcomers.pop())
            if time.perf_counter() > until:
                break

    def _add(self, newcomer: Newcomer) -> None:
        owner, add, failure, _ = newcomer
        request_id = _request_id(owner)
        try:
            if isinstance(failure, RequestError):  # which is kept: raised itself, it would hold this frame
                raise RequestError(str(failure), failure.param)
            if failure is not None:
                raise failure
            self._engine.add_request(
                array("I", add.prompt) if isinstance(add.prompt, bytes) else add.prompt,
                SamplingParams(**add.params),
                request_id=request_id,
                priority=add.priority,
                arrival_time=add.arrival_time,
                cache_salt=add.cache_salt,
                adapter=add.adapter,
                stream=add.streaming,
                prefill_at=add.prefill_at,
            )
        except RequestError as error:
            owner.connection.notices.append(Refused(owner.number, str(error), error.param))
            return
        except Exception as error:  # whatever it is, it is this request's alone
            logger.exception("request %s could not be added", request_id)
            message = f"the engine failed to take the request: {error!r}"
            owner.connection.notices.append(Refused(owner.number, message, None, internal=True))
            return
        self._owners[request_id] = owner
        if add.deadline_time is not None:
            heapq.heappush(self._deadlines, (add.deadline_time, request_id))
            if len(self._deadlines) > 2 * len(self._owners) + _SPARE_DEADLINES:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._owners]
                heapq.heapify(self._deadlines)

    def _enforce_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._owners:
                self._expired.add(request_id)
                if not any(late.finished for late in self._late if late.request_id == request_id):
                    self._unwritten.pop(request_id, None)
                self._engine.abort(request_id)

    def _expires(self, output: RequestOutput) -> bool:
        """A request whose time is over, and that was not complete by then."""
        aborted = any(new.finish_reason is FinishReason.abort for new in output.outputs)
        return aborted and output.request_id in self._expired

    # --- one step -------------------------------------------------------------------------------------------------

    def _step(self) -> list[RequestOutput]:
        computed = self._stats.computed_tokens
        try:
            outputs = self._engine.step()
        except (torch.AcceleratorError, RankError):  # the device's context is lost, or a process that has a part of it
            raise
        except Exception:
            self._failures += 1
            if self._failures == FAILURES_IN_A_ROW:
                raise
            logger.exception("a step failed; its requests end with an error")
            return []  # the next step hands over how they ended
        if self._stats.computed_tokens > computed:  # the step after a failure may only hand over what has ended
            self._failures = 0
        return outputs

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        """Log-probabilities of prompts take milliseconds to write, and to forget: LOGPROBS_A_TURN are. Who has more is
        told in a later turn, and all that comes behind it."""
        owners, late, room = self._owners, set[str](), LOGPROBS_A_TURN
        outputs, self._late = [*self._late, *outputs], []
        for output in outputs:
            if self._sender is not None and self._sender.take(output):
                continue
            request_id = output.request_id
            owner = owners.get(request_id)
            if output.prompt_logprobs is not None:
                if not self._expires(output):  # nobody waits for them
                    self._unwritten[request_id] = deque(output.prompt_logprobs)
                output.prompt_logprobs = None
            prompt_logprobs = None
            if request_id in self._unwritten and owner is not None:
                entries, prompt_logprobs = self._unwritten[request_id], PromptLogprobs()
                if request_id not in late:
                    room -= prompt_logprobs.take(entries, room)
                if entries:
                    if prompt_logprobs.parts:
                        prompt_logprobs.more = True
                        owner.connection.deltas.append(Delta(owner.number, 0, "", [], prompt_logprobs=prompt_logprobs))
                    self._late.append(output)
                    late.add(request_id)
                    continue
            self._unwritten.pop(request_id, None)
            for new in output.outputs:
                reason, cached, spans, left = None, 0, None, False
                if new.finish_reason is not None:
                    assert new.metrics is not None
                    expired = new.finish_reason is FinishReason.abort and request_id in self._expired
                    reason = DEADLINE if expired else new.finish_reason.value
                    left = reason == FinishReason.abort.value  # nobody reads it; its tokens are counted
                    cached, spans = new.metrics.num_cached_tokens, new.metrics.spans
                    now = time.perf_counter()
                    self._stats.finish(new, reason, len(output.prompt_token_ids), now)
                    self._bound.finished(now)
                if owner is not None:
                    owner.connection.deltas.append(
                        Delta(
                            owner.number,
                            new.index,
                            "" if left else new.text_delta,
                            new.token_ids_delta,
                            None if left else new.logprobs_delta,
                            reason,
                            new.stop_reason,
                            cached,
                            None if left else prompt_logprobs,
                            spans,
                        )
                    )
                prompt_logprobs = None
            if output.finished:
                owners.pop(request_id, None)
                self._expired.discard(request_id)


def _request_id(owner: Owner) -> str:
    return f"{owner.connection.name}-{owner.number}"


def _tell_all(sockets: list[socket.socket], error: BaseException) -> None:
    frame = FrameWriter().frame(Failed(type(error).__name__, str(error)))
    for sock in sockets:
        with contextlib.suppress(OSError):  # the end of the connection says enough
            sock.send(frame)


def run(config: EngineConfig, listener: socket.socket, max_queued: int, prompts_at: str | None = None) -> None:
    """Makes the engine and serves it. Who is connected already learns why that failed."""
    try:
        engine = LLMEngine(config, records_kept=0)  # nobody reads them; EngineStats counts them as they come
    except BaseException as error:
        listeners = _waiting_at(listener)
        _tell_all(listeners, error)
        if isinstance(error, MiniInferError):  # says all there is to say, and whoever listens prints it
            sys.exit(CANNOT_START if listeners else f"the engine cannot start: {error}")
        raise
    settle(YOUNG_OBJECTS)
    try:
        with contextlib.suppress(Restarting):  # whom it concerns has been told
            EngineServer(engine, listener, max_queued, prompts_at).serve()
    finally:
        engine.executor.close()  # or the process would not end before all that its threads have to write is written


def _waiting_at(listener: socket.socket) -> list[socket.socket]:
    """Who has connected; where nobody has, the first who does within CONNECT_S."""
    listener.settimeout(CONNECT_S)
    sockets = []
    with contextlib.suppress(OSError):
        while True:
            sockets.append(listener.accept()[0])
            listener.setblocking(False)
    return sockets
