"""Prompts that another engine computes, as the scheduler sees them: what is asked of it, and what has come."""

from __future__ import annotations

from collections.abc import Iterable

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.request import Request
from mini_infer.transfer.protocol import Arrival, Ask, NoReceiver


class Elsewhere:
    def __init__(self, kv: KVManager, receiver: NoReceiver) -> None:
        self._kv, self._receiver = kv, receiver
        self._asked: dict[Request, Ask] = {}  # of those that are receiving
        self._asks: list[tuple[int, Ask]] = []  # not sent yet, each with the step that was planned meanwhile
        self._cancelled: list[int] = []  # transfers, of which nobody has been told yet

    def ask(self, request: Request, decoding: int, step: int) -> bool:
        """Whether another engine is to compute what a request of the batch lacks. That does not include its last token,
        whose logits are needed here. `decoding` requests would wait while it is computed here. Its blocks may be those
        that steps before `step` still write to, of requests that have ended: so it is sent when these are booked."""
        choice = self._receiver.choice
        if request.prefill_at is None or choice is None or request.prompt_logprobs is not None:
            return False
        if request.fork_of is not None:  # most of it is its leader's
            return False
        first, wanted = request.num_committed_blocks, request.num_tokens - 1
        missing = wanted - request.num_computed_tokens
        if missing <= 0 or not choice.pays(missing, decoding):
            return False
        blocks = request.block_table[first : -(-wanted // self._kv.block_size)]
        tokens, number = request.token_ids[:wanted], self._kv.start_receiving(request)
        ask = Ask(number, request.prefill_at, tokens, request.cache_salt, request.priority, first, blocks)
        self._asked[request] = ask
        self._asks.append((step, ask))
        return True

    def cancel(self, request: Request) -> None:
        """It needs nothing any more that another engine may be computing."""
        if (ask := self._asked.pop(request, None)) is None:
            return
        unsent = [other for other in self._asks if other[1] is not ask]
        if len(unsent) == len(self._asks):
            self._cancelled.append(ask.transfer_id)
        else:
            self._asks = unsent
            self._kv.end_transfer(ask.transfer_id)

    def tell(self, under_way: Iterable[int]) -> None:
        """Sends what has been asked for and what nobody needs any more. `under_way`: steps, the oldest first."""
        if self._asks or self._cancelled:
            oldest = next(iter(under_way), None)
            due = [ask for step, ask in self._asks if oldest is None or step <= oldest]
            self._asks = self._asks[len(due) :]
            self._receiver.start(due, self._cancelled)
            self._cancelled = []

    def arrivals(self) -> list[tuple[Request, bool]]:
        """Requests whose transfers have ended since the last call, each with whether it can use its blocks: others may
        still write to those of a lost link. What has not come is computed here."""
        taken = [(self._take(arrival), arrival.free) for arrival in self._receiver.poll()]
        return [(request, free) for request, free in taken if request is not None]

    def _take(self, arrival: Arrival) -> Request | None:
        if arrival.free:
            request = self._kv.end_transfer(arrival.transfer_id)
        else:
            parked = self._kv.transfers.get(arrival.transfer_id)
            request = None if parked is None else parked.request
        if request is None or (ask := self._asked.pop(request, None)) is None:
            return None
        if arrival.handover is None:
            request.prefill_at = None
        else:
            assert self._receiver.choice is not None
            self._receiver.choice.learn(len(ask.token_ids) - request.num_computed_tokens, arrival.handover)
            request.num_computed_tokens, request.handover = len(ask.token_ids), arrival.handover
            self._kv.commit(request, request.num_computed_tokens)
        return request
