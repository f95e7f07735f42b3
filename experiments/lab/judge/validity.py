"""Rules by which a pass counts or not, as docs/metrics.md has them: the names of those that are broken, and why.
Rules of time hold a pass against a second witness that knows nothing of how its times were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from experiments.lab.measure.clocks import Drift
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item

OUTSIDE_SHARE, OUTSIDE_S = 0.05, 0.1  # of the call, and seconds: what `serve` may do beside the pass
EDGE_S = 0.1  # from the start to the first arrival, and from the last token to the end;
EDGE_SHARE = 0.02  # or so much of the pass, if that is more
GRAIN_S = 2e-6  # two readings of one clock
LITTLE_SHARE, LITTLE_S = 0.05, 0.01  # of the integral, and seconds a request: an answer is read after its last token
FLOOR_SHARE = 0.9  # ceilings are measured, too
LAG_S = 0.005  # a request may be sent so much late,
LAG_SHARE = 0.1  # or so much of the mean gap between arrivals, if that is more;
LATE_SHARE = 0.01  # and this share of the requests may be later
STUCK_TOKENS = 16  # so many alike, of several requests, are no text of any model
MAX_BUSY = 0.8  # of the time, a process of the load client
FAR_BELOW = 0.5  # of the intended prefix hits
OF_NOTHING = (
    "drafts would be verified on random tokens, and how many are accepted there says nothing of any text: take "
    "workload=text, or speculation.method=synthetic with a stated rate"
)


@dataclass(frozen=True)
class Evidence:
    served: Served
    vocab_size: int  # ids from 0 to it are tokens
    drift: Drift = field(default_factory=Drift)  # of the clocks, during the pass
    # Of the same variant in its first repeat, where greedy tokens must be the same in all of them.
    first_tokens: Sequence[Sequence[int]] | None = None
    made_up_prompts: bool = False  # random tokens, for which there are real drafts: their acceptance is no setting
    items: Sequence[Item] = ()  # what was asked for in the pass
    # What the subject had served, and not forgotten, when the pass began; None where nobody knows.
    before: Sequence[Item] | None = None
    # The least seconds that the hardware allows each step; empty where that is not known.
    floors_s: Sequence[float] = ()
    stages: int = 1  # of a pipeline, each of which has a step under way

    @property
    def requests(self) -> Sequence[RequestTrace]:
        return self.served.requests


Broken = Iterator[tuple[str, str]]  # name of a rule, and the reason


def problem(evidence: Evidence) -> str:
    """Why a pass does not count; empty when it does."""
    return "; ".join(reason for _, reason in broken(evidence))


def broken(evidence: Evidence) -> Broken:
    return chain.from_iterable(of(evidence) for of in RULES)


def _of_answers(e: Evidence) -> Broken:
    count, tokens = len(e.requests), [token for r in e.requests for token in r.token_ids]
    if failed := [r.error for r in e.requests if r.error]:
        yield "failures", f"{len(failed)} of {count} requests failed: {failed[0]}"
    told = [(r, {len(r.token_times), len(r.token_ids) if r.tells_tokens else r.asked_tokens}) for r in e.requests]
    if wrong := sum(lengths != {r.asked_tokens} for r, lengths in told if not r.error):
        yield "wrong_lengths", f"{wrong} of {count} requests did not get the output length they asked for"
    if outside := [token for token in tokens if not 0 <= token < e.vocab_size]:
        where = f"none of the vocabulary's {e.vocab_size}, the first is {outside[0]}"
        yield "outside_vocabulary", f"{len(outside)} tokens are {where}"
    # Logits of NaN choose the same token everywhere, whatever the prompt.
    if len(set(tokens)) == 1 and count > 1 and len(tokens) >= STUCK_TOKENS:
        cause = "the sampler, or the logits it sees, must be broken"
        yield "stuck_sampler", f"every token of every request is {tokens[0]}: {cause}"
    if e.first_tokens is not None and all(r.tells_tokens for r in e.requests):
        pairs = zip(e.requests, e.first_tokens, strict=True)
        if changed := sum(tuple(r.token_ids) != tuple(first) for r, first in pairs if not r.error):
            yield "unsteady_tokens", f"{changed} of {count} requests got other greedy tokens than in the first repeat"


def _of_hits_and_drafts(e: Evidence) -> Broken:
    # Sums count: which of two requests computes what they share, and which finds it, is the scheduler's choice.
    found, meant = sum(r.cached_tokens for r in e.requests), sum(r.shared_tokens for r in e.requests)
    if found > meant == 0:
        yield "unintended_hits", f"{found} prompt tokens of unrelated prompts came from a prefix cache"
    elif found > meant:
        shares = f"the workload shares {meant}"
        yield "unintended_hits", f"{found} prompt tokens came from a prefix cache, and {shares}"
    if e.made_up_prompts:  # by the config alone: whether a pass on random tokens happens to draft says nothing either
        yield "drafts_of_nothing", OF_NOTHING


def _of_client_and_machine(e: Evidence) -> Broken:
    # What the client adds between the moment it could have sent a request and the moment it did (RequestTrace.lag).
    scheduled = [r for r in e.requests if r.sent is not None]
    arrivals = [r.arrival for r in scheduled] or [0.0]
    allowed = max(LAG_S, LAG_SHARE * (max(arrivals) - min(arrivals)) / max(len(scheduled) - 1, 1))
    late = [r.lag for r in scheduled if r.lag > allowed]
    if len(late) > LATE_SHARE * len(scheduled):
        by = f"up to {1e3 * max(late):.0f} ms late ({1e3 * allowed:.0f} ms are allowed)"
        sent = f"{len(late)} of {len(scheduled)} requests were sent {by}"
        yield "client_fell_behind", f"the client fell behind its schedule: {sent}"
    if e.served.host is not None and (busy := e.served.host.client_busy) > MAX_BUSY:
        limit = f"{100 * MAX_BUSY:.0f} % are allowed; peers.client.processes gives it more processes"
        client = f"a process of the load client was busy {100 * busy:.0f} % of the time"
        yield "client_was_busy", f"{client}, so that the client may be the limit ({limit})"
    if e.drift.problem:
        yield "clocks_drifted", e.drift.problem
    if grown := e.served.memory_growth:
        yield "memory_grew", f"{grown / 2**20:.0f} MiB of GPU memory were taken inside the timed part"
    if compiled := e.served.compiled:
        names = ", ".join(dict.fromkeys(compiled))
        yield "compiled_inside", f"{len(compiled)} kernels were compiled inside the timed part: {names}"


def of_times(e: Evidence) -> Broken:
    outside, inside = e.served.outside_s, e.served.took
    if outside is not None and not -GRAIN_S <= outside - inside <= OUTSIDE_SHARE * outside + OUTSIDE_S:
        told = f"the pass says that it took {inside:.4g} s"
        yield "timed_from_outside", f"{told}, and from outside it took {outside:.4g} s"
    if any(r.error for r in e.requests):
        return
    if answered := [r for r in e.requests if r.token_times]:
        allowed = max(EDGE_S, EDGE_SHARE * inside)
        early = min(r.arrival for r in e.requests) - e.served.start
        left = e.served.end - max(r.token_times[-1] for r in answered)
        if not -GRAIN_S <= early <= allowed:
            when = f"{1e3 * abs(early):.3g} ms {'after' if early < 0 else 'before'}"
            yield "edges", f"the pass starts {when} its first arrival"
        elif not -GRAIN_S <= left <= allowed:
            yield "edges", f"the pass ends {1e3 * abs(left):.3g} ms {'before' if left < 0 else 'after'} its last token"
    counted, waited = e.served.in_flight_s, sum(r.e2e or 0.0 for r in e.requests)
    if counted is not None and abs(waited - counted) > LITTLE_SHARE * counted + LITTLE_S * len(e.requests):
        flight = f"requests were in flight for {counted:.4g} s"
        yield "latencies_of_nobody", f"latencies add up to {waited:.4g} s, and {flight}"


def _of_steps(e: Evidence) -> Broken:
    records, times = e.served.records, np.unique([time for r in e.requests for time in r.token_times])
    if records and len(times):  # a step's tokens are known between what it executed and the end of its bookkeeping
        ends = np.array([record.end_time for record in records]) + GRAIN_S
        known = ends - [record.update_s + 2 * GRAIN_S for record in records]
        step = np.searchsorted(ends, times)
        inside = (step < len(ends)) & (times >= known[np.minimum(step, len(ends) - 1)])
        if wrong := int((~inside).sum()):
            moments = f"{wrong} of {len(times)} moments at which tokens appeared"
            yield "tokens_between_steps", f"{moments} are the end of no step"
    if wrong_steps := _too_fast(e):
        took = _step_times(e)
        worst = min(wrong_steps, key=lambda step: took[step] / e.floors_s[step])
        work = f"{records[worst].prefill_tokens} prompt tokens and {records[worst].decode_tokens} running requests"
        many = f"{len(wrong_steps)} of {len(e.floors_s)} steps took less than the hardware needs"
        own = f"step {worst} took {1e3 * took[worst]:.3g} ms for {work}"
        yield "faster_than_possible", f"{many}: {own}, which take {1e3 * e.floors_s[worst]:.4g} ms"


def _of_warm_up(e: Evidence) -> Broken:
    if e.before is not None and not e.before:
        pays = "so the pass pays for what is compiled and allocated once"
        yield "no_warm_up", f"nothing was served before the clock started, {pays}"
    known = {item.prompt for item in e.before or ()}  # drafts from finished outputs, and caches, would know the answers
    if count := sum(item.follows is None and item.prompt in known for item in e.items):
        prompts = f"{count} of {len(e.items)} measured prompts"
        yield "warmed_up_on_itself", f"{prompts} had been served before the clock started"


RULES = (_of_answers, _of_hits_and_drafts, _of_client_and_machine, of_times, _of_steps, _of_warm_up)


def few_hits(served: Served, prefix_caching: bool) -> str:
    """A note, no fault: requests that came at once, or a pool too small, leave fewer prefixes to be found."""
    intended = sum(r.shared_tokens for r in served.requests)
    found = sum(r.cached_tokens for r in served.requests)
    if not prefix_caching or found >= FAR_BELOW * intended:
        return ""
    return f"{found} of {intended} shared prompt tokens were found in the prefix cache"


def late_readings(e: Evidence) -> float:
    """No fault: the share of steps that are too short alone, because the end of one before them was read late."""
    if not e.floors_s:
        return 0.0
    short = np.flatnonzero(_step_times(e) < FLOOR_SHARE * np.asarray(e.floors_s))
    return len(set(short.tolist()) - set(_too_fast(e))) / len(e.floors_s)


def _ends(e: Evidence) -> np.ndarray:
    return np.array([record.end_time - record.update_s for record in e.served.records])


def _step_times(e: Evidence) -> np.ndarray:
    """From the end of the step before it: with overlap the device works on it from there."""
    return np.diff(_ends(e), prepend=e.served.records[0].start_time)


def _too_fast(e: Evidence) -> list[int]:
    """Steps whose end came before the device could have done them. It begins a step when it has done the one before,
    and not before it was launched: with overlap that is after the end of the last step but one, and in a pipeline of
    the last but as many as there are stages. How late an end was read, which makes its step long and those behind it
    short, does not matter then."""
    if not e.floors_s:
        return []
    start = e.served.records[0].start_time
    under_way = e.stages + 1
    ends, found, done = [start] * under_way + _ends(e).tolist(), [], start
    for step, floor in enumerate(e.floors_s):
        done, end = max(done, ends[step]) + FLOOR_SHARE * floor, ends[step + under_way]
        if end < done:
            found.append(step)
            done = end
    return found
