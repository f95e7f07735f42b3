"""Rules by which a pass counts or not. Each looks at one thing that may have gone wrong and answers with the reason, or
with nothing. A row that a rule speaks against is kept and marked, and counts in no figure."""

from __future__ import annotations

from collections.abc import Callable

from experiments.lab.judge import timing
from experiments.lab.judge.timing import Evidence
from experiments.lab.measure.traces import Served

LAG_S = 0.005  # a request may be sent so much late,
LAG_SHARE = 0.1  # or so much of the mean gap between arrivals, if that is more;
LATE_SHARE = 0.01  # and this share of the requests may be later
STUCK_TOKENS = 16  # so many alike, of several requests, are no text of any model
MAX_BUSY = 0.8  # of the time, a process of the load client
FAR_BELOW = 0.5  # of the intended prefix hits


def failures(e: Evidence) -> str:
    failed = [r for r in e.requests if r.error]
    return f"{len(failed)} of {len(e.requests)} requests failed: {failed[0].error}" if failed else ""


def wrong_lengths(e: Evidence) -> str:
    wrong = [
        r
        for r in e.requests
        if not r.error
        and not (len(r.token_times) == r.asked_tokens and (len(r.token_ids) == r.asked_tokens or not r.tells_tokens))
    ]
    if not wrong:
        return ""
    return f"{len(wrong)} of {len(e.requests)} requests did not get the output length they asked for"


def outside_vocabulary(e: Evidence) -> str:
    wrong = [token for r in e.requests for token in r.token_ids if not 0 <= token < e.vocab_size]
    if not wrong:
        return ""
    return f"{len(wrong)} tokens are none of the vocabulary's {e.vocab_size}, the first is {wrong[0]}"


def stuck_sampler(e: Evidence) -> str:
    """Logits of NaN choose the same token everywhere, whatever the prompt."""
    seen = {token for r in e.requests for token in r.token_ids}
    count = sum(len(r.token_ids) for r in e.requests)
    if len(seen) != 1 or len(e.requests) < 2 or count < STUCK_TOKENS:
        return ""
    return f"every token of every request is {seen.pop()}: the sampler, or the logits it sees, must be broken"


def unsteady_tokens(e: Evidence) -> str:
    if e.first_tokens is None:
        return ""
    if not all(r.tells_tokens for r in e.requests):
        return ""
    pairs = zip(e.requests, e.first_tokens, strict=True)
    changed = sum(1 for r, first in pairs if not r.error and tuple(r.token_ids) != tuple(first))
    if not changed:
        return ""
    return f"{changed} of {len(e.requests)} requests got other greedy tokens than in the first repeat"


def unintended_hits(e: Evidence) -> str:
    """The sum counts: which of two requests computes what they share, and which finds it, is the scheduler's choice."""
    found, meant = sum(r.cached_tokens for r in e.requests), sum(r.shared_tokens for r in e.requests)
    if found <= meant:
        return ""
    if not meant:
        return f"{found} prompt tokens of unrelated prompts came from a prefix cache"
    return f"{found} prompt tokens came from a prefix cache, and the workload shares {meant}"


def drafts_of_nothing(e: Evidence) -> str:
    if not e.made_up_prompts or not any(record.drafted for record in e.served.records):
        return ""
    return (
        "drafts were verified on random tokens, and how many are accepted there says nothing of any text: take "
        "workload=text, or speculation.method=synthetic with a stated rate"
    )


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


RULES: tuple[Callable[[Evidence], str], ...] = (
    failures,
    wrong_lengths,
    outside_vocabulary,
    stuck_sampler,
    unsteady_tokens,
    unintended_hits,
    drafts_of_nothing,
    client_fell_behind,
    client_was_busy,
    clocks_drifted,
    memory_grew,
    timing.timed_from_outside,
    timing.edges,
    timing.tokens_between_steps,
    timing.latencies_of_nobody,
    timing.faster_than_possible,
    timing.no_warm_up,
    timing.warmed_up_on_itself,
)


def problem(evidence: Evidence) -> str:
    """Why a pass does not count; empty when it does."""
    return "; ".join(found for rule in RULES if (found := rule(evidence)))


def few_hits(served: Served, prefix_caching: bool) -> str:
    """A note, no fault: requests that came at once, or a pool too small, leave fewer prefixes to be found."""
    intended = sum(r.shared_tokens for r in served.requests)
    found = sum(r.cached_tokens for r in served.requests)
    if not prefix_caching or found >= FAR_BELOW * intended:
        return ""
    return f"{found} of {intended} shared prompt tokens were found in the prefix cache"
