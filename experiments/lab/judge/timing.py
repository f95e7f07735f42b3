"""Rules about time. Each holds the times of a pass against a second witness that knows nothing of how they were made:

the whole call of `serve`, timed from outside       must last as long as the pass says it did
the first arrival and the last token                must be its start and its end
ends of steps (StepRecords)                         must be when tokens appeared
requests in flight, integrated by the client        must be the sum of latencies (Little 1961)
what the hardware can do at most (the roofline)     must not be beaten by a step
what was served before the clock started            must be a warm-up, and on other prompts
"""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def requests(self) -> Sequence[RequestTrace]:
        return self.served.requests


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
    after the end of the last step but one. How late an end was read, which makes its step long and those behind it
    short, does not matter then."""
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


def late_readings(e: Evidence) -> str:
    """A note, no fault: steps that are too short alone, because the end of one before them was read late."""
    if not e.floors_s:
        return ""
    short = np.flatnonzero(_step_times(e) < FLOOR_SHARE * np.asarray(e.floors_s))
    count = len(set(short.tolist()) - set(_too_fast(e)))
    return f"{count} of {len(e.floors_s)} steps look too short, since an end before them was read late" if count else ""


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
    ends, found, done = [start, start, *_ends(e).tolist()], [], start
    for step, floor in enumerate(e.floors_s):
        done, end = max(done, ends[step]) + FLOOR_SHARE * floor, ends[step + 2]
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
