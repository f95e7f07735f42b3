"""Virtual time against a hand-made example; plans against those of a dry engine; steps that are skipped."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from made_up_costs import CONFIG, CONFIGS, COSTS, LIMITS, copies, random_load, replica, watch

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import (
    EngineConfig,
    ParallelConfig,
    Preemption,
    SpeculationConfig,
)
from mini_infer.core.errors import ConfigError, RequestError
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepPlan
from mini_infer.core.request import Request
from mini_infer.simulation.costs import FittedCosts, Work
from mini_infer.simulation.executor import SimulatedExecutor, VirtualClock
from mini_infer.simulation.replica import Replica


def finished(engine: Replica) -> list[Request]:
    ended = []
    while engine.busy:
        ended += engine.run()
    return ended


def test_it_imports_no_torch() -> None:
    code = "import sys, mini_infer.simulation.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("skips", [False, True])
def test_time_without_overlap_is_the_sum_of_host_and_device(skips: bool) -> None:
    """A prompt of 10 tokens, and 5 tokens: one step with a prompt, 4 of one row. They end at 10 ms + 201 us of the host
    + the device's time, and so on."""
    engine = replica(overlap=False, skips=skips)
    request = engine.add("a", range(10), 5, now=0.010)
    assert finished(engine) == [request]
    host = 2e-4 + 1e-6
    prompt = 5e-3 + 9 / 1999 * 45e-3 + 10e-6 + 55e-10  # 55 pairs
    ends = [0.010 + host + prompt]
    for context in (11, 12, 13, 14):
        ends.append(ends[-1] + host + 4e-3 + context * 1e-8)
    assert request.token_times == pytest.approx(ends, rel=1e-12)
    assert (request.arrival_time, request.first_scheduled_time) == (0.010, 0.010)


@pytest.mark.parametrize("skips", [False, True])
def test_with_overlap_the_device_never_waits_for_the_host(skips: bool) -> None:
    engine = replica(overlap=True, skips=skips)
    request = engine.add("a", range(10), 5, now=0.0)
    finished(engine)
    prompt = 5e-3 + 9 / 1999 * 45e-3 + 10e-6 + 55e-10
    ends = [2e-4 + 1e-6 + prompt]
    for context in (11, 12, 13, 14):
        ends.append(ends[-1] + 4e-3 + context * 1e-8)
    assert request.token_times == pytest.approx(ends, rel=1e-12)


@pytest.mark.parametrize("skips", [False, True])
def test_the_end_of_a_step_is_not_told_before_the_next_one_is_launched(skips: bool) -> None:
    """A step of one row takes 4 ms, to launch the prompt behind it 6: its token comes 2 ms late, the next ones in time.
    What is longer than the graphs takes 9."""
    costs = replace(COSTS, pieces_s=6e-3, eager_s=9e-3, captured_tokens=30)
    for tokens, launch_s in ((20, 6e-3), (50, 9e-3)):
        times = []
        for own in (costs, COSTS):
            engine = replica(overlap=True, skips=skips, costs=own)
            first = engine.add("a", [1], 8, now=0.0)
            while engine.next_event < 0.018:
                engine.run()
            engine.add("b", range(100, 100 + tokens), 2, now=0.018)
            finished(engine)
            times.append(first.token_times)
        late, in_time = times
        (told,) = [i for i, pair in enumerate(zip(late, in_time, strict=True)) if pair[0] != pytest.approx(pair[1])]
        begin = in_time[told - 1] + 202e-6  # one more row is planned
        assert late[told] == pytest.approx(begin + launch_s, rel=1e-9)
        assert in_time[told] < late[told] < in_time[told + 1]


def test_nobody_waits_for_the_launch_of_a_step_that_nothing_is_under_way_beside() -> None:
    """What a prompt alone takes has its launch in it; nor where steps do not overlap is anything told late."""
    slow = replace(COSTS, pieces_s=1.0, eager_s=1.0)
    for overlap in (False, True):
        times = []
        for costs in (COSTS, slow):
            engine = replica(overlap=overlap, costs=costs)
            request = engine.add("a", range(20), 6, now=0.0)
            finished(engine)
            times.append(request.token_times)
        assert times[0] == times[1]


@pytest.mark.parametrize("stages", [1, 2])
def test_heat_is_that_of_the_moment_at_which_the_device_begins(stages: int) -> None:
    """Two prompts of 60 tokens, one launched behind the other: each of `stages` devices computes its share of both, and
    begins the second one as the first one ends there. A row of 9 slots beside the second is slowed down as well."""
    costs = replace(COSTS, throttled_s=1e-4, settles_s=0.05)
    executor = SimulatedExecutor(costs, LIMITS, VirtualClock(), overlap=True, stages=stages)
    first = executor.launch(StepPlan(1, [0], [0], [60], [True], num_decode_rows=0))
    second = executor.launch(StepPlan(2, [2, 1], [8, 0], [1, 60], [True, True], num_decode_rows=1))
    pairs = 60 * 61 / 2 * 1e-10 + 60e-6
    cold, begin = 5e-3 + 59 / 1999 * 45e-3 + pairs, 201e-6
    assert first.end == pytest.approx(begin + cold, rel=1e-12)
    heat = (1 - 4e-3 / cold) * (1 - math.exp(-cold / stages / 0.05))
    warm = 5e-3 + 60 / 1999 * 45e-3 + pairs + 9e-8 + 3e-5 + 61 * 1e-4 * heat
    assert second.end == pytest.approx(begin + cold / stages + warm, rel=1e-12)  # it is the longer one


def test_a_row_beside_a_prompt_takes_longer() -> None:
    """One of 11 slots, beside a prompt of 10 tokens."""
    engine = replica(overlap=False, skips=False)
    first = engine.add("a", range(10), 5, now=0.0)
    engine.run()
    engine.add("b", range(50, 60), 5, now=engine.clock.now)
    finished(engine)
    step = 2e-4 + 2e-6 + 5e-3 + 10 / 1999 * 45e-3 + 11e-8 + 10e-6 + 55e-10 + 3e-5
    assert first.token_times[1] - first.token_times[0] == pytest.approx(step, rel=1e-12)


@pytest.mark.parametrize("skips", [False, True])
def test_a_prompt_takes_longer_where_the_device_has_just_computed_another(skips: bool) -> None:
    """Chunks of 64 tokens, one after the other, 20 steps of one row, which take longer at first, and a prompt again."""
    costs = replace(COSTS, throttled_s=1e-4, recovering_s=1e-3, settles_s=0.05)
    engine = replica(overlap=False, skips=skips, costs=costs)
    first = engine.add("a", range(128), 21, now=0.0)
    finished(engine)
    chunk, host = 5e-3 + 63 / 1999 * 45e-3, 2e-4 + 1e-6
    cold = chunk + 64e-6 + 64 * 65 / 2 * 1e-10
    kept = math.exp(-cold / 0.05)
    heat = (1 - 4e-3 / cold) * (1 - kept) * math.exp(-host / 0.05)
    warm = chunk + 128e-6 + (64 * 64 + 64 * 65 / 2) * 1e-10 + 1e-4 * 64 * heat
    assert first.token_times[0] == pytest.approx(2 * host + cold + warm, rel=1e-12)
    last, begin = first.token_times[-1], engine.clock.now
    second = engine.add("b", range(200, 264), 1, now=begin)
    finished(engine)
    share = heat * math.exp(-warm / 0.05) + (1 - 4e-3 / warm) * (1 - math.exp(-warm / 0.05))
    cooled = share * math.exp(-(last + host - first.token_times[0]) / 0.05)
    assert second.token_times[0] - begin == pytest.approx(host + cold + 1e-4 * 64 * cooled, rel=1e-12)
    row = first.token_times[1] - first.token_times[0] - host
    assert row == pytest.approx(4e-3 + 129e-8 + 1e-3 * share * math.exp(-host / 0.05), rel=1e-12)


def test_a_slower_device_has_the_same_host() -> None:
    own = replace(COSTS, push_block_s=2e-5, expand_s=1e-6, held_block_s=1e-5, throttled_s=1e-5, settles_s=0.1)
    slower, rows, cold = own.slower(3.0), range(1000, 1100, 7), own.heat(1)
    for work in (Work.decode(7, 1000), Work(7, 300, 1000, 900, 1200, 20_000, 12, heat=0.7)):
        assert slower.device_s(work) == pytest.approx(3 * own.device_s(work), rel=1e-12)
    assert slower.rows_s(7, rows, cold, 0.0, 0.0) == pytest.approx(
        [3 * seconds for seconds in COSTS.rows_s(7, rows, cold, 0.0, 0.0)], rel=1e-12
    )
    assert (slower.host_s(5), slower.copy_s(5), slower.push_s(5)) == (COSTS.host_s(5), COSTS.copy_s(5), 1e-4)


SLOW_COPIES = replace(COSTS, block_s=0.1)
AFTER_COPIES = 201e-6 + 4e-3 + 9e-8  # a step of the ninth and last token of a prompt: a row like any


@pytest.mark.parametrize("skips", [False, True])
def test_a_swap_takes_what_its_blocks_take(skips: bool) -> None:
    """Of two requests with 2 of 5 blocks each, one needs a third, and the other goes to host memory: 2 blocks. When the
    first needs a fourth these are still on their way; when it ends they come back."""
    scheduler = replace(CONFIG.scheduler, preemption=Preemption.swap)
    config = replace(CONFIG, scheduler=scheduler, cache=replace(CONFIG.cache, prefix_caching=False, watermark=0.0))
    engine = replica(False, skips, config, Limits(200, "a test", 5, 10), SLOW_COPIES)
    one, two = (engine.add(name, range(8), 6, now=0.0) for name in "ab")
    finished(engine)
    both = 2e-4 + 2e-6 + 5e-3 + 15 / 1999 * 45e-3 + 8e-6 + 72e-10
    swapped = both + 201e-6 + 2 * 0.1
    ends = [both]
    for context in (9, 10, 11, 12):
        ends.append(ends[-1] + 201e-6 + 4e-3 + context * 1e-8)
    assert ends[-1] < swapped
    ends.append(swapped + 201e-6 + 4e-3 + 13e-8)
    assert one.token_times == pytest.approx(ends, rel=1e-12)
    assert (one.num_preemptions, two.num_preemptions) == (0, 1)
    assert two.token_times[:2] == pytest.approx([both, ends[-1] + 2e-4 + 2 * 0.1 + AFTER_COPIES], rel=1e-12)


def test_a_prefix_in_host_memory_takes_what_its_blocks_take() -> None:
    """Two blocks, which come back once the three of whoever has taken their place are saved."""
    config = replace(CONFIG, cache=replace(CONFIG.cache, host_prefix_gib=1.0, watermark=0.0))
    engine = replica(False, False, config, Limits(200, "a test", 4, 10), SLOW_COPIES)
    for moment, prompt in enumerate((range(9), range(20, 33), range(9))):
        again = engine.add("", prompt, 1, now=moment)
        finished(engine)
    assert again.num_cached_tokens == 8
    copies = 2e-4 + 3 * 0.1 + 2e-4 + 2 * 0.1
    assert again.token_times == pytest.approx([2.0 + copies + AFTER_COPIES], rel=1e-12)


HOT = replace(COSTS, throttled_s=1e-4, recovering_s=2e-3, settles_s=0.05, pieces_s=6e-3, captured_tokens=2000)


@pytest.mark.parametrize("costs", [COSTS, HOT], ids=["cold", "hot"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_skipping_steps_changes_nothing(overlap: bool, config: EngineConfig, costs: FittedCosts) -> None:
    """Also where KV memory is short, so that requests wait and give way."""
    limits = Limits(200, "a test", 60 if config.scheduler.chunked_prefill else 130, 100 if copies(config) else 0)
    told, planned = [], []
    for skips in (False, True):
        engine = replica(overlap, skips, config, limits, costs)
        plans = watch(engine.core.executor)
        ended: list[Request] = []
        for now, prompt, output, priority in random_load(60, seed=1):
            while engine.busy and engine.next_event < now:
                ended += engine.run()
            engine.add(str(now), prompt, output, now, priority)
        ended += finished(engine)
        told.append({r.request_id: (r.num_cached_tokens, r.num_preemptions, r.token_times) for r in ended})
        planned.append(len(plans))
    assert told[0] == told[1], "to the last bit of every time"
    one_by_one = config.cache.host_prefix_gib is not None or config.speculation.most > 0
    assert (planned[1] == planned[0]) == one_by_one, "what steps fill is copied beside them, and drafts differ"


@pytest.mark.parametrize("overlap", [False, True])
def test_who_finds_room_by_what_a_prompt_leaves_comes_next(overlap: bool) -> None:
    """Two equal prompts of 10 blocks, in 14: the second shares those of the first, once that is computed."""
    told = []
    for skips in (False, True):
        engine = replica(overlap, skips, limits=replace(LIMITS, num_blocks=14))
        requests = [engine.add(name, range(40), 12, now=0.0) for name in "ab"]
        finished(engine)
        told.append([request.token_times for request in requests])
    assert told[0] == told[1]
    assert told[0][1][0] <= told[0][0][2]


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(RequestError, match=r"500 prompt and 20 output tokens do not fit in 512 tokens \(a test\)"):
        replica().add("a", [0] * 500, 20, now=0.0)
    with pytest.raises(ConfigError, match=r"parallel\.expert=2: ranks that share experts are not simulated"):
        replica(config=replace(CONFIG, parallel=ParallelConfig(expert=2)))
    files = replace(CONFIG, cache=replace(CONFIG.cache, host_prefix_gib=1.0, disk_prefix_path="a/folder"))
    with pytest.raises(ConfigError, match=r"disk_prefix_path=a/folder: files of prefixes are not simulated, host mem"):
        replica(config=files)
    drafts = replace(CONFIG, speculation=SpeculationConfig(method="ngram"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"speculation\.method=ngram: a simulated engine has no text"):
        replica(config=drafts)
    weighed = replace(CONFIG, speculation=SpeculationConfig(method="synthetic", acceptance=0.5))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"method=synthetic with speculation\.adaptive=true: a simulated engine has"):
        replica(config=weighed)


def test_stages_compute_other_requests_meanwhile() -> None:
    """Two requests in two stages: a step of one row takes 4 ms and some slots, half of it in each stage."""
    engine = replica(overlap=False, config=replace(CONFIG, parallel=ParallelConfig(pipeline=2)))
    for name in "ab":
        engine.add(name, range(10), 41, now=0.0)
    ended = finished(engine)
    plans = {len(request.token_times) for request in ended}
    took = max(request.token_times[-1] for request in ended)
    alone = replica(overlap=False)
    alone.add("a", range(10), 41, now=0.0)
    assert plans == {41}
    assert took == pytest.approx(finished(alone)[0].token_times[-1], rel=0.02), "each as if it had the device alone"


def test_a_skip_leaves_memory_as_the_steps_would() -> None:
    """What blocks are taken and which prefixes are there, in the middle of a decode."""
    states = []
    for skips in (False, True):
        engine = replica(overlap=True, skips=skips)
        engine.add("a", range(10), 100, now=0.0)
        engine.add("b", range(30, 50), 80, now=0.0)
        while engine.clock.now < 0.1:
            engine.run() if not skips or engine.next_event < 0.1 else engine.skip_until(0.1)
        kv: KVManager = engine.core.scheduler.kv
        running = engine.core.scheduler.batch.running
        states.append([(r.num_tokens, r.num_computed_tokens, r.block_hashes, r.block_table) for r in running])
        assert engine.core.scheduler.usage().used_slots == sum(r.num_computed_tokens for r in running)
        assert kv.num_free == LIMITS.num_blocks - sum(len(r.block_table) for r in running)
    assert [s[:3] for s in states[0]] == [s[:3] for s in states[1]]
    assert [len(s[3]) for s in states[0]] == [len(s[3]) for s in states[1]]
