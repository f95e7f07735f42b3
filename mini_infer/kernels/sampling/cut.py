"""Where top-k and top-p cut a row of logits, without sorting it: three kernels of sample.py.

The cut is the largest key that is kept (see shared.py) and, since tokens may tie there, the first token id with
that key that is. Both rules are sums over the likelier tokens: top-k keeps tokens until there are k, top-p until they
have enough mass.

    guess      row           two keys between which the cut must be, or probably is
    gather     row x tiles   sets the tokens between them apart, and sums up the mass on either side
    find_cut   row           finds the cut: compares a few tokens with each other, bisects many

A wrong guess costs time, not correctness: `find_cut` sees it by the masses, and bisects the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.sampling.shared import (
    COUNTER,
    GROUP,
    INFINITE,
    load_highest,
    load_logits,
    load_maxima,
    locate,
    read,
    shares,
    token_keys,
    weights,
)

_NEAR = tl.constexpr(192)  # group maxima that the guess for top-p takes in at least
_RUN, _EVERY = tl.constexpr(16), tl.constexpr(256)  # its sample of a row: so many tokens out of so many
_TILE = tl.constexpr(2048)  # tokens that `gather` reads at a time
_FEW = tl.constexpr(256)  # tokens that are compared with each other
_BLOCK, _WAYS = tl.constexpr(1024), tl.constexpr(8)  # tokens that a bisection reads at a time, parts that it makes
_COUNT, _MASS, _TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what it sums up


# ----------------------------------------------------------------------------------------------------------- the guess


class Apart(NamedTuple):
    """What kernels leave for each other of S rows.

    Attributes:
        bounds: [S, 2] int32: the least and the largest key to set apart.
        counts: [S, COUNTER] int32, at first zeros: how many tokens are set apart.
        sums: [S, 3] int64, at first zeros: for top-p without top-k the mass of the row, of the tokens with smaller
            keys, and of these and those set apart.
        keys, ids: [S, CAPACITY] int32: the tokens set apart, in any order, as far as they fit.
    """

    bounds: Tensor
    counts: Tensor
    sums: Tensor
    keys: Tensor
    ids: Tensor


@triton.jit
def guess(rows, bounds, VOCAB: tl.constexpr):
    """The bounds of what is set apart. For top-k they are certain: up to any key there
    are as many tokens as groups with such a maximum, or more. For top-p they are an estimate from the groups' maxima,
    among which are the tokens that matter where few carry the mass, and from a sample of the other tokens."""
    row, logits, own_params, maxima = locate(rows, VOCAB)
    temperature, tail, top_k, _min_p = read(own_params)
    if (temperature == 0) | ((top_k >= VOCAB) & (tail == 0)):
        return
    groups: tl.constexpr = triton.cdiv(VOCAB, GROUP)
    group, highest = load_maxima(maxima, VOCAB)
    top = tl.max(highest)
    rank = tl.where(top_k < VOCAB, top_k, tl.minimum(_NEAR, groups // 2)).to(tl.float32)
    _low, near = _enclose(token_keys(highest, top, temperature), (group < groups).to(tl.float32), rank)
    first, last = tl.cast(0, tl.int32), near
    if top_k >= VOCAB:
        item = tl.arange(0, triton.next_power_of_2(groups + triton.cdiv(VOCAB, _EVERY) * _RUN))
        token = (item - groups) // _RUN * _EVERY + (item - groups) % _RUN
        is_group = item < groups
        is_token = (item >= groups) & (token < VOCAB)
        own = tl.load(maxima + tl.where(is_group, item, token // GROUP), mask=is_group | is_token, other=-float("inf"))
        x = tl.load(logits + token, mask=is_token, other=-float("inf")).to(tl.float32)
        key = token_keys(tl.where(is_group, own, x), top, temperature)
        stands_for = tl.where(is_group, 1.0, tl.where(is_token & (x < own), 1.0 * _EVERY / _RUN, 0.0))
        mass = shares(key) * stands_for
        kept = (1 - tail) * tl.sum(mass)
        _low, cut = _enclose(key, mass, kept)
        noise = tl.where(is_token, mass * mass, 0.0)
        behind = tl.sum(tl.where(key > cut, noise, 0.0))
        deviation = tl.sqrt((1 - tail) * (1 - tail) * behind + tail * tail * (tl.sum(noise) - behind))
        doubt = tl.minimum(4.5 * deviation, 0.5 * tail * kept)
        low, _high = _enclose(key, mass, kept - doubt)
        _low, high = _enclose(key, mass, kept + doubt)
        first, last = tl.where(low > near, low, 0), tl.maximum(high, near)
    tl.store(bounds + row * 2, first)
    tl.store(bounds + row * 2 + 1, last)


@triton.jit
def _enclose(keys, amounts, goal):
    """A short range of keys: amounts below it sum up to less than the goal, those up to its end to the goal or more."""
    least: tl.constexpr = 0x3C800000  # of gaps from 1/64 ...
    most: tl.constexpr = 0x42800000  # ... to 64
    low, high = tl.cast(least, tl.int32), tl.cast(most, tl.int32)
    while high - low > 1 << 15:
        quarter = (high - low) >> 2
        a, b, c = low + quarter, low + 2 * quarter, low + 3 * quarter
        at_a = tl.sum(tl.where(keys <= a, amounts, 0.0))
        at_b = tl.sum(tl.where(keys <= b, amounts, 0.0))
        at_c = tl.sum(tl.where(keys <= c, amounts, 0.0))
        low = tl.where(at_a >= goal, low, tl.where(at_b >= goal, a, tl.where(at_c >= goal, b, c)))
        high = tl.where(at_a >= goal, a, tl.where(at_b >= goal, b, tl.where(at_c >= goal, c, high)))
    return tl.where(low == least, 0, low), tl.where(high == most, INFINITE, high)


@triton.jit
def gather(rows, apart, scale, VOCAB: tl.constexpr, CAPACITY: tl.constexpr):
    """Sets tokens apart, and adds up masses."""
    row, logits, own_params, maxima = locate(rows, VOCAB)
    temperature, tail, top_k, _min_p = read(own_params)
    if (temperature == 0) | ((top_k >= VOCAB) & (tail == 0)):
        return
    top = load_highest(maxima, VOCAB)
    first, last = _load_bounds(apart.bounds + row * 2, VOCAB, CAPACITY)
    per_tile: tl.constexpr = _TILE // GROUP
    nothing = tl.zeros((per_tile,), tl.int64)
    mass, smaller, up_to = nothing, nothing, nothing
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, _TILE), tl.num_programs(1)):
        group = tile * per_tile + tl.arange(0, per_tile)
        index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        wanted = index < VOCAB
        if top_k < VOCAB:  # groups whose highest is too unlikely need not be read
            wanted = wanted & (token_keys(tl.load(maxima + group), top, temperature) <= last)[:, None]
        x = tl.load(logits + index, mask=wanted, other=-float("inf")).to(tl.float32)
        key = token_keys(x, top, temperature)
        if top_k >= VOCAB:
            weight = tl.where(wanted, weights(key, scale), 0)
            mass += tl.sum(weight, axis=1)
            smaller += tl.sum(tl.where(key < first, weight, 0), axis=1)
            up_to += tl.sum(tl.where(key <= last, weight, 0), axis=1)
        mask = wanted & (key >= first) & (key <= last)
        place = tl.atomic_add(apart.counts + row * COUNTER + tl.zeros_like(index), 1, mask=mask, sem="relaxed")
        tl.store(apart.keys + row * CAPACITY + place, key, mask=mask & (place < CAPACITY))
        tl.store(apart.ids + row * CAPACITY + place, index, mask=mask & (place < CAPACITY))
    if top_k >= VOCAB:
        tl.atomic_add(apart.sums + row * 3, tl.sum(mass), sem="relaxed")
        tl.atomic_add(apart.sums + row * 3 + 1, tl.sum(smaller), sem="relaxed")
        tl.atomic_add(apart.sums + row * 3 + 2, tl.sum(up_to), sem="relaxed")


@triton.jit
def _load_bounds(bounds, VOCAB: tl.constexpr, CAPACITY: tl.constexpr):
    first, last = tl.cast(0, tl.int32), tl.cast(INFINITE, tl.int32)
    if CAPACITY < VOCAB:
        first, last = tl.load(bounds), tl.load(bounds + 1)
    return first, last


# ------------------------------------------------------------------------------------------------------------- the cut


@triton.jit
def find_cut(rows, apart, cuts, scale, VOCAB: tl.constexpr, CAPACITY: tl.constexpr):
    """cuts [S, 2] int32: of rows with top-k or top-p the largest key that is kept, and the first token with it."""
    row, logits, own_params, maxima = locate(rows, VOCAB)
    temperature, tail, top_k, _min_p = read(own_params)
    if (temperature == 0) | ((top_k >= VOCAB) & (tail == 0)):
        return
    keys = apart.keys + row * CAPACITY
    ids = apart.ids + row * CAPACITY
    sums = apart.sums + row * 3
    count = tl.load(apart.counts + row * COUNTER)
    mass, smaller, up_to = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2)
    goal = _kept(mass, tail)
    whole = (count > CAPACITY) | ((top_k >= VOCAB) & ((smaller >= goal) | (up_to < goal)))
    if (count <= _FEW) & (whole == 0):
        cut, first_tie = _cut_few(keys, ids, count, top_k, tail, mass, smaller, scale, VOCAB)
    else:
        first, last = _load_bounds(apart.bounds + row * 2, VOCAB, CAPACITY)
        smaller = tl.where(whole, 0, smaller)
        low, cut = tl.where(whole, 0, first), tl.where(whole, INFINITE, last)
        count = tl.where(whole, VOCAB, count)
        first_tie = tl.cast(0, tl.int32)
        given = (whole, count, logits, keys, ids, load_highest(maxima, VOCAB), temperature, scale)
        if top_k < VOCAB:
            cut = _bisect(low, cut, top_k, 0, given, VOCAB, _COUNT)
            mass = _mass(cut, given, VOCAB)
        if tail > 0:
            goal = _kept(mass, tail) - smaller
            cut = _bisect(low, cut, goal, 0, given, VOCAB, _MASS)
            gone = (_mass(cut, given, VOCAB) - goal) // weights(cut, scale)
            if gone > 0:  # the first of the tokens that tie at the cut
                first_tie = 1 + _bisect(0, VOCAB - 1, gone, cut, given, VOCAB, _TIES)
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, first_tie)


@triton.jit
def _kept(mass, tail):
    """The least that top-p leaves of a mass."""
    return tl.maximum(mass - (tail.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _cut_few(keys, ids, count, top_k, tail, mass, smaller, scale, VOCAB: tl.constexpr):
    """The cut among at most _FEW tokens, from what each of them has before it: the likelier ones and, of those that tie
    with it, the ones with higher ids."""
    index = tl.arange(0, _FEW)
    key = tl.load(keys + index, mask=index < count, other=INFINITE)
    token = tl.load(ids + index, mask=index < count, other=0)
    rank, before = tl.zeros((_FEW,), tl.int32), tl.zeros((_FEW,), tl.int64) + smaller
    for start in range(0, count, 32):
        other = start + tl.arange(0, 32)
        other_key = tl.load(keys + other, mask=other < count, other=INFINITE)
        other_token = tl.load(ids + other, mask=other < count, other=0)
        likelier = (other_key[None, :] < key[:, None]) & (other < count)[None, :]
        first = likelier | ((other_key[None, :] == key[:, None]) & (other_token[None, :] > token[:, None]))
        weight = tl.where(other < count, weights(other_key, scale), 0)
        rank += tl.sum(likelier.to(tl.int32), axis=1)
        before += tl.sum(tl.where(first, weight[None, :], 0), axis=1)
    kept = (index < count) & (rank < top_k)
    if top_k < VOCAB:
        mass = tl.sum(tl.where(kept, weights(key, scale), 0))
    kept = kept & (before < _kept(mass, tail))
    cut = tl.max(tl.where(kept, key, 0))
    return cut, tl.min(tl.where(kept & (key == cut), token, VOCAB))


@triton.jit
def _bisect(low, high, goal, cut, given, VOCAB: tl.constexpr, BY: tl.constexpr):
    """The smallest number in [low, high] up to which the sum reaches the goal."""
    low, high = tl.cast(low, tl.int32), tl.cast(high, tl.int32)
    while low < high:
        step = (high - low) // _WAYS + 1
        ends = tl.minimum(low + (tl.arange(0, _WAYS) + 1) * step - 1, high)
        low += tl.sum((_sums(ends, cut, given, VOCAB, BY) < goal).to(tl.int32)) * step
        high = tl.minimum(low + step - 1, high)
    return high


@triton.jit
def _mass(key, given, VOCAB: tl.constexpr):
    """Of the tokens up to a key."""
    return tl.max(_sums(tl.zeros((_WAYS,), tl.int32) + key, 0, given, VOCAB, _MASS))


@triton.jit
def _sums(ends, cut, given, VOCAB: tl.constexpr, BY: tl.constexpr):
    """Sums up to each of the ends, over the whole row or the tokens set apart: their number or their mass, by key, or
    the number of those that tie at the cut, by token id."""
    whole, count, logits, keys, ids, top, temperature, scale = given
    sums = tl.zeros((_BLOCK, _WAYS), tl.int64)
    for start in range(0, count, _BLOCK):
        index = start + tl.arange(0, _BLOCK)
        if whole:
            token = index
            key = token_keys(load_logits(logits, index, VOCAB), top, temperature)
        else:
            token = tl.load(ids + index, mask=index < count, other=0)
            key = tl.load(keys + index, mask=index < count, other=0)
        amount = (index < count).to(tl.int64)
        if BY == _MASS:
            amount *= weights(key, scale)
        if BY == _TIES:
            amount *= (key == cut).to(tl.int64)
        place = token if BY == _TIES else key
        sums += tl.where(place[:, None] <= ends[None, :], amount[:, None], 0)
    return tl.sum(sums, axis=0)
