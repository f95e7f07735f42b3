"""Where top-k and top-p cut a row of logits, without sorting it: two kernels of sample.py.

The cut is the largest key that is kept (see sample_shared.py) and, since tokens may tie there, the first token id with
that key that is. Both rules are sums up to a key: top-k wants the first key up to which there are k tokens, top-p the
first up to which they have enough mass. Such a key is found by bisection, four parts at a time.

`gather` spares `find_cut` most of the row: it guesses from what lies at hand between which keys the cut must be, and
sets only those tokens apart. A wrong guess costs time, not correctness: `find_cut` then bisects the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mini_infer.kernels.sample_shared import (
    GROUP,
    INFINITE,
    TILE,
    load_highest,
    load_logits,
    load_maxima,
    locate,
    read,
    shares,
    token_keys,
    weights,
)

_NEAR = tl.constexpr(1024)  # group maxima that the guess for top-p takes in at least
_RUN, _EVERY = tl.constexpr(16), tl.constexpr(512)  # its sample of a row: so many tokens out of so many
_BLOCK = tl.constexpr(1024)  # tokens that a bisection reads at a time
_COUNT, _MASS, _TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what it sums up


@triton.jit
def gather(
    logits,
    stride,
    own_params,
    own_stride,
    maxima,
    sums,
    keys,
    ids,
    scale,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """sums [S, 4]: zeros -> tokens set apart, all mass, mass below the keys set apart (both for top-p without top-k).
    keys, ids [S, CAPACITY]: the tokens set apart, in any order."""
    row, logits, own_params, maxima = locate(logits, stride, own_params, own_stride, maxima, VOCAB)
    temperature, tail, top_k, _min_p = read(own_params)
    if (temperature == 0) | ((top_k >= VOCAB) & (tail == 0)):
        return
    top = load_highest(maxima, VOCAB)
    first, last = 0, INFINITE
    if CAPACITY < VOCAB:
        first, last = _guess(logits, maxima, top, temperature, tail, top_k, VOCAB)
    mass, smaller = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, TILE), tl.num_programs(1)):
        index = tile * TILE + tl.arange(0, TILE)
        key = token_keys(load_logits(logits, index, VOCAB), top, temperature)
        if top_k >= VOCAB:
            weight = tl.where(index < VOCAB, weights(key, scale), 0)
            mass += tl.sum(weight)
            smaller += tl.sum(tl.where(key < first, weight, 0))
        apart = (index < VOCAB) & (key >= first) & (key <= last)
        count = tl.sum(apart.to(tl.int32))
        if count > 0:
            place = tl.atomic_add(sums + row * 4, count.to(tl.int64)) + tl.cumsum(apart.to(tl.int32)) - 1
            tl.store(keys + row * CAPACITY + place, key, mask=apart & (place < CAPACITY))
            tl.store(ids + row * CAPACITY + place, index, mask=apart & (place < CAPACITY))
    if top_k >= VOCAB:
        tl.atomic_add(sums + row * 4 + 1, mass)
        tl.atomic_add(sums + row * 4 + 2, smaller)


@triton.jit
def _guess(logits, maxima, top, temperature, tail, top_k, VOCAB: tl.constexpr):
    """Keys between which the cut lies. For top-k this is certain: up to any key there are as many tokens as groups with
    such a maximum, or more. For top-p it is an estimate from the groups' maxima, among which are the tokens that matter
    where few carry the mass, and from a sample of the other tokens."""
    groups: tl.constexpr = triton.cdiv(VOCAB, GROUP)
    group, highest = load_maxima(maxima, VOCAB)
    rank = tl.where(top_k < VOCAB, top_k, tl.minimum(_NEAR, groups // 2)).to(tl.float32)
    _below, near = _enclose(token_keys(highest, top, temperature), (group < groups).to(tl.float32), rank)
    first, last = tl.cast(0, tl.int32), near
    if top_k >= VOCAB:
        item = tl.arange(0, triton.next_power_of_2(groups + triton.cdiv(VOCAB, _EVERY) * _RUN))
        token = (item - groups) // _RUN * _EVERY + (item - groups) % _RUN
        is_group = item < groups
        is_token = (item >= groups) & (token < VOCAB)
        own = tl.load(maxima + tl.where(is_group, item, token // GROUP), mask=is_group | is_token, other=-float("inf"))
        x = tl.load(logits + token, mask=is_token, other=-float("inf")).to(tl.float32)
        stands_for = tl.where(is_group, 1.0, tl.where(is_token & (x < own), 1.0 * _EVERY / _RUN, 0.0))
        key = token_keys(tl.where(is_group, own, x), top, temperature)
        mass = shares(key) * stands_for
        kept = (1 - tail) * tl.sum(mass)
        doubt = 0.22 * tail * kept  # three to four standard deviations at the vocabularies there are
        low, _end = _enclose(key, mass, kept - doubt)
        _start, high = _enclose(key, mass, kept + doubt)
        first, last = tl.where(low > near, low, 0), tl.maximum(high, near)
    return first, last


@triton.jit
def _enclose(keys, amounts, goal):
    """A short range of keys: amounts below it sum up to less than the goal, those up to its end to the goal or more."""
    low, high = tl.cast(0, tl.int32), tl.cast(INFINITE, tl.int32)
    while high - low > 1 << 15:
        span = high - low
        a, b, c = low + (span >> 2), low + (span >> 1), high - 1 - (span >> 2)
        at_a = tl.sum(tl.where(keys <= a, amounts, 0.0))
        at_b = tl.sum(tl.where(keys <= b, amounts, 0.0))
        at_c = tl.sum(tl.where(keys <= c, amounts, 0.0))
        low, high = _narrow(low, high, a, b, c, at_a, at_b, at_c, goal)
    return low, high


@triton.jit
def _narrow(low, high, a, b, c, at_a, at_b, at_c, goal):
    """The quarter of [low, high] in which the sum reaches the goal, given the sums up to a, b and c."""
    new_low = tl.where(at_a >= goal, low, tl.where(at_b >= goal, a + 1, tl.where(at_c >= goal, b + 1, c + 1)))
    return new_low, tl.where(at_a >= goal, a, tl.where(at_b >= goal, b, tl.where(at_c >= goal, c, high)))


@triton.jit
def find_cut(
    logits,
    stride,
    own_params,
    own_stride,
    maxima,
    sums,
    keys,
    ids,
    cuts,
    scale,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """cuts [S, 2]: of rows with top-k or top-p the largest key that is kept, and the first token with it that is."""
    row, logits, own_params, maxima = locate(logits, stride, own_params, own_stride, maxima, VOCAB)
    temperature, tail, top_k, _min_p = read(own_params)
    if (temperature == 0) | ((top_k >= VOCAB) & (tail == 0)):
        return
    top = load_highest(maxima, VOCAB)
    count = tl.load(sums + row * 4).to(tl.int32)
    mass, smaller = tl.load(sums + row * 4 + 1), tl.load(sums + row * 4 + 2)
    given = (logits, keys + row * CAPACITY, ids + row * CAPACITY, top, temperature, scale)

    whole = count > CAPACITY
    if (top_k >= VOCAB) & (count <= CAPACITY):
        goal = _kept(mass, tail)
        whole = (smaller >= goal) | (smaller + _sum(INFINITE, 0, whole, count, given, VOCAB, _MASS) < goal)
    count = tl.where(whole, VOCAB, count)
    smaller = tl.where(whole, 0, smaller)

    cut, first_tie = tl.cast(INFINITE, tl.int32), tl.cast(0, tl.int32)
    if top_k < VOCAB:
        cut = _bisect(cut, top_k, 0, whole, count, given, VOCAB, _COUNT)
        mass = _sum(cut, 0, whole, count, given, VOCAB, _MASS)
    if tail > 0:
        goal = _kept(mass, tail) - smaller
        cut = _bisect(cut, goal, 0, whole, count, given, VOCAB, _MASS)
        gone = (_sum(cut, 0, whole, count, given, VOCAB, _MASS) - goal) // weights(cut, scale)
        if gone > 0:  # the first of the tokens that tie at the cut
            first_tie = 1 + _bisect(VOCAB - 1, gone, cut, whole, count, given, VOCAB, _TIES)
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, first_tie)


@triton.jit
def _kept(mass, tail):
    """The least that top-p leaves of a mass."""
    return tl.maximum(mass - (tail.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _bisect(high, goal, cut, whole, count, given, VOCAB: tl.constexpr, BY: tl.constexpr):
    """The smallest number in [0, high] up to which the sum reaches the goal."""
    low, high = tl.cast(0, tl.int32), tl.cast(high, tl.int32)
    while low < high:
        span = high - low
        a, b, c = low + (span >> 2), low + (span >> 1), high - 1 - (span >> 2)
        at_a, at_b, at_c = _sums(a, b, c, cut, whole, count, given, VOCAB, BY)
        low, high = _narrow(low, high, a, b, c, at_a, at_b, at_c, goal)
    return high


@triton.jit
def _sum(a, cut, whole, count, given, VOCAB: tl.constexpr, BY: tl.constexpr):
    return _sums(a, a, a, cut, whole, count, given, VOCAB, BY)[0]


@triton.jit
def _sums(a, b, c, cut, whole, count, given, VOCAB: tl.constexpr, BY: tl.constexpr):
    """Sums up to a, b and c, over the whole row or the tokens set apart: their number or their mass, by key, or the
    number of those that tie at the cut, by token id."""
    logits, keys, ids, top, temperature, scale = given
    sum_a, sum_b, sum_c = tl.zeros((_BLOCK,), tl.int64), tl.zeros((_BLOCK,), tl.int64), tl.zeros((_BLOCK,), tl.int64)
    for start in range(0, count, _BLOCK):
        index = start + tl.arange(0, _BLOCK)
        real = index < count
        if whole:
            token = index
            key = token_keys(load_logits(logits, index, VOCAB), top, temperature)
        else:
            token = tl.load(ids + index, mask=real, other=0)
            key = tl.load(keys + index, mask=real, other=0)
        amount = real.to(tl.int64)
        if BY == _MASS:
            amount = tl.where(real, weights(key, scale), 0)
        if BY == _TIES:
            amount = (real & (key == cut)).to(tl.int64)
        place = token if BY == _TIES else key
        sum_a += tl.where(place <= a, amount, 0)
        sum_b += tl.where(place <= b, amount, 0)
        sum_c += tl.where(place <= c, amount, 0)
    return tl.sum(sum_a), tl.sum(sum_b), tl.sum(sum_c)
