"""Rules by which a pass counts or not: docs/metrics.md says what each of them finds. Each answers with the reason, or
with nothing. Rules of time hold a pass against a second witness that knows nothing of how its times were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    """What is known of a pass when it is judged."""

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


def failures(e: Evidence) -> str:
    failed = [r for r in e.requests if r.error]
    return f"{len(failed)} of {len(e.requests)} requests failed: {failed[0].error}" if failed else ""


def wrong_lengths(e: Evidence) -> str:
    told = [(r, {len(r.token_times), len(r.token_ids) if r.tells_tokens else r.asked_tokens}) for r in e.requests]
    wrong = sum(lengths != {r.asked_tokens} for r, lengths in told if not r.error)
    return f"{wrong} of {len(e.requests)} requests did not get the output length they asked for" if wrong else ""


def outside_vocabulary(e: Evidence) -> str:
    wrong = [token for r in e.requests for token in r.token_ids if not 0 <= token < e.vocab_size]
    return f"{len(wrong)} tokens are none of the vocabulary's {e.vocab_size}, the first is {wrong[0]}" if wrong else ""


def stuck_sampler(e: Evidence) -> str:
    """Logits of NaN choose the same token everywhere, whatever the prompt."""
    tokens = [token for r in e.requests for token in r.token_ids]
    if len(set(tokens)) != 1 or len(e.requests) < 2 or len(tokens) < STUCK_TOKENS:
        return ""
    return f"every token of every request is {tokens[0]}: the sampler, or the logits it sees, must be broken"


def unsteady_tokens(e: Evidence) -> str:
    if e.first_tokens is None or not all(r.tells_tokens for r in e.requests):
        return ""
    pairs, count = zip(e.requests, e.first_tokens, strict=True), len(e.requests)
    changed = sum(1 for r, first in pairs if not r.error and tuple(r.token_ids) != tuple(first))
    return f"{changed} of {count} requests got other greedy tokens than in the first repeat" if changed else ""


def unintended_hits(e: Evidence) -> str:
    """The sum counts: which of two requests computes what they share, and which finds it, is the scheduler's choice."""
    found, meant = sum(r.cached_tokens for r in e.requests), sum(r.shared_tokens for r in e.requests)
    if found <= meant:
        return ""
    if not meant:
        return f"{found} prompt tokens of unrelated prompts came from a prefix cache"
    return f"{found} prompt tokens came from a prefix cache, and the workload shares {meant}"


def drafts_of_nothing(e: Evidence) -> str:
    """By the config alone: whether a pass on random tokens happens to draft anything says nothing either."""
    return OF_NOTHING if e.made_up_prompts else ""


def client_fell_behind(e: Evidence) -> str:
    """What the client adds between the moment it could have sent a request and the moment it did (RequestTrace.lag)."""
    scheduled = [r for r in e.requests if r.sent is not None]
    if not scheduled:
        return ""
    arrivals = [r.arrival for r in scheduled]
    mean_gap = (max(arrivals) - min(arrivals)) / max(len(scheduled) - 1, 1)
    allowed = max(LAG_S, LAG_SHARE * mean_gap)
    late = [r.lag for r in scheduled if r.lag > allowed]
    if len(late) <= LATE_SHARE * len(scheduled):
        return ""
    return (
        f"the client fell behind its schedule: {len(late)} of {len(scheduled)} requests were sent up to "
        f"{1e3 * max(late):.0f} ms late ({1e3 * allowed:.0f} ms are allowed)"
    )


def client_was_busy(e: Evidence) -> str:
    host = e.served.host
    if host is None or host.client_busy <= MAX_BUSY:
        return ""
    return (
        f"a process of the load client was busy {100 * host.client_busy:.0f} % of the time, so that the client may be "
        f"the limit ({100 * MAX_BUSY:.0f} % are allowed; peers.client.processes gives it more processes)"
    )


def clocks_drifted(e: Evidence) -> str:
    return e.drift.problem


def memory_grew(e: Evidence) -> str:
    grown = e.served.memory_growth
    return f"{grown / 2**20:.0f} MiB of GPU memory were taken inside the timed part" if grown else ""


def compiled_inside(e: Evidence) -> str:
    names = ", ".join(dict.fromkeys(e.served.compiled))
    return f"{len(e.served.compiled)} kernels were compiled inside the timed part: {names}" if names else ""


def few_hits(served: Served, prefix_caching: bool) -> str:
    """A note, no fault: requests that came at once, or a pool too small, leave fewer prefixes to be found."""
    intended = sum(r.shared_tokens for r in served.requests)
    found = sum(r.cached_tokens for r in served.requests)
    if not prefix_caching or found >= FAR_BELOW * intended:
        return ""
    return f"{found} of {intended} shared prompt tokens were found in the prefix cache"


def timed_from_outside(e: Evidence) -> str:
    outside, inside = e.served.outside_s, e.served.took
    if outside is None or -GRAIN_S <= outside - inside <= OUTSIDE_SHARE * outside + OUTSIDE_S:
        return ""
    return f"the pass says that it took {inside:.4g} s, and from outside it took {outside:.4g} s"


def edges(e: Evidence) -> str:
    answered = [r for r in e.requests if r.token_times]
    if not answered or any(r.error for r in e.requests):
        return ""
    allowed = max(EDGE_S, EDGE_SHARE * e.served.took)
    late = min(r.arrival for r in e.requests) - e.served.start
    if not -GRAIN_S <= late <= allowed:
        return f"the pass starts {1e3 * abs(late):.3g} ms {'after' if late < 0 else 'before'} its first arrival"
    left = e.served.end - max(r.token_times[-1] for r in answered)
    if not -GRAIN_S <= left <= allowed:
        return f"the pass ends {1e3 * abs(left):.3g} ms {'before' if left < 0 else 'after'} its last token"
    return ""


def tokens_between_steps(e: Evidence) -> str:
    """A step's tokens are known between what it executed and the end of its bookkeeping."""
    records = e.served.records
    times = np.unique([time for r in e.requests for time in r.token_times])
    if not records or not len(times):
        return ""
    ends = np.array([record.end_time for record in records]) + GRAIN_S
    known = ends - [record.update_s + 2 * GRAIN_S for record in records]
    step = np.searchsorted(ends, times)
    inside = (step < len(ends)) & (times >= known[np.minimum(step, len(ends) - 1)])
    wrong = int((~inside).sum())
    return f"{wrong} of {len(times)} moments at which tokens appeared are the end of no step" if wrong else ""


def latencies_of_nobody(e: Evidence) -> str:
    counted = e.served.in_flight_s
    if counted is None or any(r.error for r in e.requests):
        return ""
    told = sum(r.e2e or 0.0 for r in e.requests)
    if abs(told - counted) <= LITTLE_SHARE * counted + LITTLE_S * len(e.requests):
        return ""
    return f"latencies add up to {told:.4g} s, and requests were in flight for {counted:.4g} s"


def faster_than_possible(e: Evidence) -> str:
    """The device begins a step when it has done the one before, and not before it was launched: with overlap that is
    after the end of the last step but one, and in a pipeline of the last but as many as there are stages. How late an
    end was read, which makes its step long and those behind it short, does not matter then."""
    wrong = _too_fast(e)
    if not wrong:
        return ""
    worst = min(wrong, key=lambda step: _step_times(e)[step] / e.floors_s[step])
    record = e.served.records[worst]
    return (
        f"{len(wrong)} of {len(e.floors_s)} steps took less than the hardware needs: step {worst} took "
        f"{1e3 * _step_times(e)[worst]:.3g} ms for {record.prefill_tokens} prompt tokens and {record.decode_tokens} "
        f"running requests, which take {1e3 * e.floors_s[worst]:.4g} ms"
    )


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
    """Steps whose end came before the device could have done them."""
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


def no_warm_up(e: Evidence) -> str:
    if e.before is None or e.before:
        return ""
    return "nothing was served before the clock started, so the pass pays for what is compiled and allocated once"


def warmed_up_on_itself(e: Evidence) -> str:
    """Drafts from finished outputs, and caches of any kind, would know the answers."""
    known = {item.prompt for item in e.before or ()}
    count = sum(1 for item in e.items if item.follows is None and item.prompt in known)
    return f"{count} of {len(e.items)} measured prompts had been served before the clock started" if count else ""


RULES: tuple[Callable[[Evidence], str], ...] = (
    # Of answers; of the client and the machine; of times.
    *(failures, wrong_lengths, outside_vocabulary, stuck_sampler, unsteady_tokens, unintended_hits, drafts_of_nothing),
    *(client_fell_behind, client_was_busy, clocks_drifted, memory_grew, compiled_inside),
    *(timed_from_outside, edges, tokens_between_steps, latencies_of_nobody, faster_than_possible),
    *(no_warm_up, warmed_up_on_itself),
)


def problem(evidence: Evidence) -> str:
    """Why a pass does not count; empty when it does."""
    return "; ".join(found for rule in RULES if (found := rule(evidence)))
