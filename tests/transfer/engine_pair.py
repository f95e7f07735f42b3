"""An engine that computes prompts and one that decodes, in one process, with a link whose every message and end the
test decides about."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from functools import partial
from typing import Any

from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.config import When, replace
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import RequestOutput
from mini_infer.runtime.handover import make_sender
from mini_infer.transfer.nixl import Agent
from mini_infer.transfer.protocol import Message
from mini_infer.transfer.receiver import Receiver
from mini_infer.transfer.sender import Sender

PREFILL = "prefill"  # where its engine is asked


class Wire:
    """Both directions of a link: what was said and has not been heard."""

    def __init__(self) -> None:
        self.there: deque[tuple[Message, bytearray]] = deque()
        self.back: deque[tuple[Message, bytearray]] = deque()
        self.near, self.far = _End(self.there), _End(self.back)
        self.told = False

    def cut(self) -> None:
        self.near.ended = self.far.ended = True
        self.there.clear()
        self.back.clear()


class _End:
    def __init__(self, unheard: deque[tuple[Message, bytearray]]) -> None:
        self._unheard = unheard
        self.ended = self.closed = False
        self.seconds = 0.0

    def start(self) -> None:
        pass

    def send(self, message: Message, payload: Any = b"", ready: Any = None) -> None:
        if not self.ended:
            self._unheard.append((message, bytearray(payload)))

    def close(self) -> None:
        self.closed = True


class _Receiver(Receiver):
    pair: Pair

    def _connect(self, path: str) -> Any:
        if self.pair.sender is None:
            raise ConnectionRefusedError("nobody listens")
        self.pair.wires.append(Wire())
        return self.attach(path, self.pair.wires[-1].near)


class LateRunner:
    """Computes a step when it is collected, as late as a device may be: after what was planned and said meanwhile."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        result: StepResult = self._runner.collect(self._runner.launch(plan))
        return result


class Pair:
    """
    Args:
        ranks: what else the engines have of `parallel`: the one for prompts, and the one that decodes.
        prompts: of the engine for prompts, where that is another one.

    Attributes:
        decode: the engine that is asked for tokens; `prefill` computes prompts for it, as long as it lives.
        dead: earlier ones that decoded. Their memory stays: a copy may be on its way to it.
    """

    def __init__(self, config: EngineConfig, *ranks: dict[str, int], prompts: EngineConfig | None = None) -> None:
        self.wires: list[Wire] = []
        self._ending: dict[Wire, list[int]] = {}  # links of which the engine that decodes knows, with their transfers
        self._prompts, self._config = prompts or config, config
        self._ranks = ranks or ({}, {})
        self.prefill: LLMEngine | None = None
        self.sender: Sender | None = None
        self._late: list[tuple[int, int, int]] = []  # to, from, bytes
        self.dead: list[LLMEngine] = []
        self.start_prefill()
        self.start_decode()

    def start_decode(self) -> None:
        self.decode = LLMEngine(replace(self._config, parallel={"decode": 1, **self._ranks[1]}))
        if self._config.scheduler.overlap is When.always and not any(self._ranks):
            self.decode.executor.runner = LateRunner(self.decode.executor.runner)  # type: ignore[attr-defined]
        made = self.decode.receiver
        assert isinstance(made, Receiver)
        made.__class__ = _Receiver
        assert isinstance(made, _Receiver)
        made.pair, self.receiver = self, made
        made._late_s = 0.0

    def start_prefill(self) -> None:
        self.prefill = LLMEngine(replace(self._prompts, parallel={"prefill": 1, **self._ranks[0]}))
        self.sender = make_sender(self.prefill)

    def kill_prefill(self) -> None:
        """Nothing of it is left; whoever decodes hears of it later."""
        for wire in self.wires:
            wire.cut()
        if self.sender is not None:
            self.sender.close()
        self.prefill = self.sender = None

    def kill_decode(self) -> None:
        """Another one takes its place; the engine for prompts hears of it later."""
        for wire in self.wires:
            wire.cut()
        self.dead.append(self.decode)
        self.start_decode()

    def lose_a_write(self) -> None:
        """NIXL's next one is given up, and made when blocks of its link are about to be free."""
        agent = None if self.sender is None else self.sender._pusher._holding.agent
        if agent is not None:
            agent.write = partial(self._write_late, agent)  # type: ignore[method-assign]

    def _write_late(self, agent: Agent, name: Any, here: Any, there: Any, until: float) -> None:
        vars(agent).pop("write")
        self._late += zip(there[:, 0].tolist(), here[:, 0].tolist(), here[:, 1].tolist(), strict=True)
        raise OSError("a write is given up")

    def deliver_ends(self) -> None:
        """Whoever decodes hears of an end first, the other one, which may write meanwhile, in the next call. When that
        one has stopped, blocks are free: after less time than in earnest, where nobody knows when that is."""
        for wire, lost in list(self._ending.items()):
            if wire.told or self.sender is None:
                ends = [] if self.sender is None else [*self.sender._heard, *self.sender._asked.values()]
                if all(end[0] is not wire.far for end in ends):
                    del self._ending[wire]
                    while self._late:
                        ctypes.memmove(*self._late.pop())
                    for transfer_id in lost:
                        self.receiver._end(transfer_id, None)
            else:
                wire.told = True
                self.sender.hear_end(wire.far)  # type: ignore[arg-type]
        for wire in [wire for wire in self.wires if wire.near.ended or wire.near.closed or wire.far.closed]:
            wire.cut()
            self.wires.remove(wire)
            self._ending[wire] = self.receiver._lose(wire.near)  # type: ignore[arg-type]

    def deliver(self, wire: Wire, back: bool) -> None:
        """The next message of one direction."""
        unheard = wire.back if back else wire.there
        if not unheard:
            return
        message, payload = unheard.popleft()
        if back:
            self.receiver.hear(wire.near, message, payload)  # type: ignore[arg-type]
        elif self.sender is not None:
            self.sender.hear(wire.far, message, payload)  # type: ignore[arg-type]

    def step_prefill(self) -> None:
        if self.sender is None or self.prefill is None:
            return
        self.sender.turn()
        if self.prefill.has_unfinished_requests():
            for output in self.prefill.step():
                assert self.sender.take(output), "nobody else asks it"

    def step(self) -> list[RequestOutput]:
        return self.decode.step() if self.decode.has_unfinished_requests() else []

    def settle(self) -> None:
        """Hears and computes all that there is."""
        for _ in range(10_000):
            self.deliver_ends()
            for wire in list(self.wires):
                while wire.there or wire.back:
                    self.deliver(wire, back=False)
                    self.deliver(wire, back=True)
            self.step_prefill()
            self.decode.exchange()
            busy = self.prefill is not None and self.prefill.has_unfinished_requests()
            heard = self.sender is not None and bool(self.sender._heard)
            waits = bool(self._ending) or any(wire.there or wire.back or wire.near.ended for wire in self.wires)
            if not (busy or heard or waits or self.receiver._asked):
                return
        raise AssertionError("it does not settle")

    def check_empty(self) -> None:
        """No block, and nothing that remembers one, is left of what has ended."""
        for engine in filter(None, (self.decode, self.prefill)):
            if (copies := engine.executor.runner.transfers) is not None:
                copies.poll(wait=True)
            for transfer_id in engine.scheduler.kv.transfers.local:  # of who ended, or of a step that failed
                engine.scheduler.kv.end_transfer(transfer_id)
        assert not self.receiver._asked
        assert not self.decode.scheduler._elsewhere._asked
        assert not self.decode.scheduler.kv.transfers
        assert self.decode.scheduler.usage().used_blocks == 0
        if self.sender is not None and self.prefill is not None:
            assert not self.sender._asked
            assert not self.sender._pusher._open
            assert self.prefill.scheduler.usage().used_blocks == 0
            assert len(self.sender._links) <= len(self.wires)


def shuffled_turns(rng: random.Random, pair: Pair) -> None:
    """Some of what may happen next, in any order: nothing is lost by it."""
    for _ in range(rng.randint(1, 4)):
        choice = rng.random()
        if choice < 0.35:
            pair.step_prefill()
        elif pair.wires and choice < 0.95:
            wire = rng.choice(pair.wires)
            for _ in range(rng.randint(1, 3)):
                pair.deliver(wire, back=rng.random() < 0.5)
        else:
            pair.deliver_ends()


class Linked:
    """Both engines, with links as in earnest: they take turns where the test says.

    Args:
        where: the one for prompts listens, as of a Door.

    Attributes:
        address: at which that one is asked.
    """

    def __init__(self, config: EngineConfig, where: str) -> None:
        self.prefill = LLMEngine(replace(config, parallel={"prefill": 1}))
        self.decode = LLMEngine(replace(config, parallel={"decode": 1}))
        sender = make_sender(self.prefill)
        assert sender is not None
        self.sender, self.address = sender, sender.listen(where)
        assert isinstance(self.decode.receiver, Receiver)
        self.receiver = self.decode.receiver

    def run(self) -> dict[str, RequestOutput]:
        """The last outputs of all that are unfinished, when they are."""
        finished: dict[str, RequestOutput] = {}
        while self.decode.has_unfinished_requests():
            self.sender.turn()
            if self.prefill.has_unfinished_requests():
                for output in self.prefill.step():
                    assert self.sender.take(output), "nobody else asks it"
            finished |= {output.request_id: output for output in self.decode.step() if output.finished}
        return finished

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for engine in (self.prefill, self.decode):
            engine.close()
