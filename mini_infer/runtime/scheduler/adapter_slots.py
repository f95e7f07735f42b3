"""Which adapters are on the device: a slot each, the least recently used one given away for the next.

    slot      0       1       2       3
    holds   [ 9f3a  | 07c1  | e55d  |  --  ]
    users   [ 5     | 0     | 1     |      ]     requests in the batch: a slot with any stays as it is

No tensors: a request's slot travels with its admission, and the device copies what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_infer.core.request import NO_ADAPTER, Request


class AdapterSlots:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))  # that have never held anything
        self._slots: dict[str, int] = {}  # adapter -> slot, the least recently used one first
        self._users: dict[str, int] = {}  # adapter -> requests of the batch; none with 0

    def room_for(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether its adapter is there or can be, if the requests of `without` had left the batch."""
        if not request.adapter or request.adapter in self._slots or self._free:
            return True
        leaving: dict[str, int] = {}
        for other in without:
            leaving[other.adapter] = leaving.get(other.adapter, 0) + 1
        return any(self._users.get(held, 0) == leaving.get(held, 0) for held in self._slots)

    def take(self, request: Request) -> None:
        """As the request joins the batch. There is room for it."""
        key = request.adapter
        if not key:
            return
        slot = self._slots.pop(key, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._give_up()
        self._slots[key] = request.adapter_slot = slot  # as the last one
        self._users[key] = self._users.get(key, 0) + 1

    def _give_up(self) -> int:
        return self._slots.pop(next(held for held in self._slots if held not in self._users))

    def release(self, request: Request) -> None:
        """As it leaves the batch."""
        key = request.adapter
        if key:
            request.adapter_slot = NO_ADAPTER
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
