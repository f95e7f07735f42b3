"""Which rank of one engine pushes what to which rank of another: each keeps some of the layers, and some of the heads.

computes, 2 ranks     decodes, 4 ranks of 8 heads         computes, 2 stages     decodes, 1 rank
heads 0-3  ---------> 0-1, 2-3                            layers 0-13  ------.
heads 4-7  ---------> 4-5, 6-7                            layers 14-27 ------'-> layers 0-27
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mini_infer.cache.kv_store import Allocate, KVStore
from mini_infer.cache.layout import KVLayout
from mini_infer.transfer.blocks import words_of

if TYPE_CHECKING:
    from mini_infer.transfer.memory import Shared
    from mini_infer.transfer.nixl import Agent, Reachable


class Share(NamedTuple):
    """What a rank keeps of a model's KV. Of a model without heads in its cache, such as latents, all ranks of a stage
    have heads [0, 1)."""

    first_layer: int
    end_layer: int
    first_head: int = 0
    end_head: int = 1

    def layout(self, like: KVLayout, own: Share) -> KVLayout:
        """Of this share of a model, of which `own` has the layout `like`. Layers of which ranks have unlike shares are
        all alike."""
        if self == own:
            return like
        planes, heads = like.layers[0], self.end_head - self.first_head
        if own.end_head - own.first_head != heads:
            planes = tuple(replace(plane, shape=(heads, *plane.shape[1:])) for plane in planes)
        return KVLayout.alike(self.end_layer - self.first_layer, *planes)


class Piece(NamedTuple):
    """What a rank keeps that one of another engine needs."""

    rank: int  # of the other engine
    layers: range  # as this rank counts them
    shift: int  # to what the other one calls them
    here: tuple[int, int] | None  # heads [first, end) of this rank's; None: all of both ranks'
    there: tuple[int, int] | None


def pieces(own: Sequence[Share], theirs: Sequence[Share], rank: int) -> list[Piece]:
    """What `rank` of an engine whose ranks have the shares `own` pushes to ranks that have `theirs`. All ranks together
    push everything once: of several that have the same share, one after the other has its turn."""
    mine, found = own[rank], []
    same = [other for other, share in enumerate(own) if share == mine]
    for other, share in enumerate(theirs):
        first, end = max(mine.first_layer, share.first_layer), min(mine.end_layer, share.end_layer)
        heads = max(mine.first_head, share.first_head), min(mine.end_head, share.end_head)
        if same[other % len(same)] != rank or first >= end or heads[0] >= heads[1]:
            continue
        here, there = (
            None if mine[2:] == share[2:] else (heads[0] - each.first_head, heads[1] - each.first_head)
            for each in (mine, share)
        )
        layers = range(first - mine.first_layer, end - mine.first_layer)
        found.append(Piece(other, layers, mine.first_layer - share.first_layer, here, there))
    return found


@dataclass(frozen=True)
class Holding:
    """An engine's KV as its ranks keep it.

    Attributes:
        store: of this rank.
        shares: of all ranks.
        memories: of all ranks, which other engines may write to; None where none may.
        agent: of NIXL, where that is the connector.
    """

    store: KVStore
    rank: int
    shares: Sequence[Share]
    memories: Sequence[Shared] | Sequence[Reachable] | None = None
    agent: Agent | None = None

    @property
    def whole(self) -> KVLayout:
        """Of all ranks together."""
        layers, heads = (max(share[end] for share in self.shares) for end in (1, 3))
        return Share(0, layers, 0, heads).layout(self.store.layout, self.shares[self.rank])

    def store_like(self, share: Share, num_blocks: int, allocate: Allocate) -> KVStore:
        """The KV of another rank, of this engine or of one like it."""
        like = self.store
        layout = share.layout(like.layout, self.shares[self.rank])
        return KVStore(layout, num_blocks=num_blocks, block_size=like.block_size, device=like.device, allocate=allocate)

    def parts(
        self, theirs: Sequence[Share], store_of: Callable[[int], KVStore]
    ) -> dict[int, list[tuple[int, Tensor, Tensor]]]:
        """What this rank pushes to ranks of another engine, by layer: the other rank, words here and words there (see
        `words_of`).

        Args:
            theirs: shares of the other engine's ranks.
            store_of: opens the store of one of them; asked once of each that this rank pushes to.
        """
        found: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        for piece in pieces(self.shares, theirs, self.rank):
            store = store_of(piece.rank)
            for layer in piece.layers:
                here = words_of(self.store, layer, piece.here)
                there = words_of(store, layer + piece.shift, piece.there)
                found.setdefault(layer, []).extend((piece.rank, *both) for both in zip(here, there, strict=True))
        return found
