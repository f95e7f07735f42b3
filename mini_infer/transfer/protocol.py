"""How a prompt's KV gets from the engine that computes it to the one that decodes.

    decodes                                               computes prompts
    reserves blocks: the request is `receiving`
      Ask (tokens, blocks)         ------------------->   a request of these tokens
                                   <-------------------   blocks, layers and chunks at a time: a connector
      End (whether all is there)   <-------------------   when nothing of it will be written any more
    computes the prompt's last token, and samples

    Cancel                         ------------------->   at any time; the End comes all the same

Nothing is sent without a place, and a place is nobody else's until the End has come, or the link has ended some time
ago, in which others may still write. Whatever goes wrong is one of the two: then the request is computed where it is,
from its tokens. The engine that decodes samples every token, so seeds, penalties, grammars and log-probabilities are
what they are in one engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from mini_infer.core.request import Handover
from mini_infer.core.trials import Trials


class Hello(NamedTuple):
    """The first word of whoever connects.

    about: what has to be equal on both sides, by its name.
    memories: of all ranks, where blocks are written to, a Shared each; None: they are sent by the link.
    """

    about: dict[str, str]
    memories: Sequence[Sequence[Any]] | None
    machine: str = ""  # of whoever says it (core/clock.py)
    now: float = 0.0  # on their clock


class Clock(NamedTuple):
    """The answer to a Hello from another machine, at once: what the clock is there."""

    asked: float  # Hello.now
    now: float


class Unlike(NamedTuple):
    """The answer to a Hello from which nothing will be computed; the last word."""

    reason: str


class Ask(NamedTuple):
    """A prompt to compute for whoever says this.

    at: the address of whoever is asked.
    token_ids: as they are said to another process, their bytes (core/token_ids.py).
    first, blocks: where its KV goes: the asker's blocks of table indices from `first` on.
    """

    transfer_id: int
    at: str
    token_ids: Sequence[int] | bytes
    cache_salt: str
    priority: int
    first: int
    blocks: list[int]


class Cancel(NamedTuple):
    """Nobody needs it any more."""

    transfer_id: int


class Blocks(NamedTuple):
    """What is in blocks of a layer, of the bytes that follow."""

    transfer_id: int
    layer: int
    blocks: list[int]


class End(NamedTuple):
    """Nothing of this transfer will be written any more.

    reason: why not all of it was; "" where it was.
    begun, computed, copying, num_bytes: as of a Handover.
    """

    transfer_id: int
    reason: str
    begun: float = 0.0
    computed: float = 0.0
    copying: float = 0.0
    num_bytes: int = 0


Message: TypeAlias = Hello | Clock | Unlike | Ask | Cancel | Blocks | End


class Arrival(NamedTuple):
    """What became of an Ask.

    handover: None: its blocks hold nothing that was asked for.
    free: nothing is written to them any more; else another Arrival says when that is so.
    """

    transfer_id: int
    handover: Handover | None
    free: bool = True


class NoReceiver:
    """Of an engine that computes all of its prompts."""

    choice: Choice | None = None
    num_received = num_failed = num_bytes = 0

    @property
    def num_computed_here(self) -> int:
        """Prompts that were not asked for, since that was dearer."""
        return 0 if self.choice is None else self.choice.num_kept

    def start(self, asks: Sequence[Ask], cancelled: Sequence[int]) -> None:
        """Sends what the scheduler has decided. Waits for nothing."""

    def poll(self) -> list[Arrival]:
        """What has ended since the last call."""
        return []

    def abandon(self) -> None:
        """Waits until nobody writes to any block."""

    def close(self) -> None:
        """Ends all links."""


class Choice:
    """Whether a prompt is computed elsewhere. Here it holds up everybody who decodes; elsewhere it costs its own
    request the way there and back. Both times are learned from the transfers so far, as a constant and a time a
    token; the first ones are made to learn from, and those of which a line through shorter ones would say anything.
    Whoever sends nothing does not learn that a queue elsewhere is gone: so some are sent all the same (core/trials.py),
    in the long run one behind `Trials.RARELY` that stay."""

    LEARNED = 4  # transfers
    BEYOND = 2  # as long as the longest prompt that was learned from
    MEMORY = 0.98  # share of the older ones' weight that each new one leaves

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._num_learned = self._longest = 0
        self.num_kept = 0  # prompts that were to be computed here
        self._computing, self._apart = _Line(self.MEMORY), _Line(self.MEMORY)
        self._trials = Trials()

    def pays(self, tokens: int, decoding: int) -> bool:
        """
        Args:
            tokens: to compute.
            decoding: requests that would wait meanwhile.
        """
        if self._always or self._num_learned < self.LEARNED or tokens > self.BEYOND * self._longest:
            return True
        pays = self._trials.pays(tokens, self._apart.at(tokens), (1 + decoding) * self._computing.at(tokens))
        self.num_kept += not pays
        return pays

    def learn(self, tokens: int, handover: Handover) -> None:
        self._num_learned += 1
        self._longest = max(self._longest, tokens)
        self._computing.learn(tokens, handover.computed - handover.begun)
        self._apart.learn(tokens, handover.arrived - handover.asked)
        self._trials.took(tokens, handover.arrived - handover.asked)


class _Line:
    """y = a + b x by least squares, with a and b not below 0; older points count less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        old = self._memory
        self._n, self._x, self._y = old * self._n + 1, old * self._x + x, old * self._y + y
        self._xx, self._xy = old * self._xx + x * x, old * self._xy + x * y

    def at(self, x: float) -> float:
        spread = self._n * self._xx - self._x**2
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        slope = min(max(slope, 0.0), self._y / self._x if self._x else 0.0)
        return (self._y - slope * self._x) / self._n + slope * x
