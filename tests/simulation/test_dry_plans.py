"""Plans of simulated engines, step by step, beside those of dry ones: engines that compute, with a model that has no
weights. No dry engine has ranks, as the stages of a pipeline are; here one that runs as many steps ahead stands for it.
What engines with roles say to each other is the simulated protocol in both cases: the real one is sockets and threads,
and no moment of it comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from cells import cells
from made_up_costs import CONFIG, CONFIGS, COSTS, copies, random_load, watch
from pairwise import pairwise

from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import (
    DryConfig,
    EngineConfig,
    HandOver,
    LoadFormat,
    ModelConfig,
    ParallelConfig,
    Policy,
    When,
)
from mini_infer.core.plan import StepPlan
from mini_infer.core.request import Request
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.serving.router import Router
from mini_infer.simulation.apart import SimulatedReceiver
from mini_infer.simulation.cluster import Cluster
from mini_infer.simulation.costs import Curve, FittedCosts
from mini_infer.simulation.replica import Replica


def dry(config: EngineConfig, overlap: bool, blocks: int) -> EngineConfig:
    return replace(
        config,
        model=ModelConfig(load_format=LoadFormat.dry, dry=DryConfig(max_model_len=200)),
        cache=replace(config.cache, num_blocks=blocks),
        scheduler=replace(config.scheduler, overlap=When.always if overlap else When.never),
        seed=0,
    )


def params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


FREE = FittedCosts(Curve((1,), (0.0,)), Curve((1,), (0.0,)), slot_s=0, reach_s=0, pair_s=0, plan_s=0, row_s=0)


MACHINES = product(CONFIGS, (60, 400), (False, True))


@pytest.mark.parametrize(("name", "blocks", "overlap"), cells(MACHINES, pairwise([*CONFIGS], (60, 400), (False, True))))
def test_its_plans_are_those_of_a_dry_engine(name: str, blocks: int, overlap: bool) -> None:
    """Step by step, with requests that come between steps, share beginnings, give way where memory is short, and whose
    drafts are accepted by the same hashes. Nothing takes any time, which loads and the order of requests depend on."""
    config = dry(CONFIGS[name], overlap, blocks)
    engine = LLMEngine(config, clock=lambda: 0.0)
    simulated = Replica(config, engine.executor.limits, FREE, overlap, skips=False)
    plans, own = watch(engine.executor), watch(simulated.core.executor)
    for _, prompt, output, priority in random_load(40, seed=2):
        engine.add_request(prompt, params(output), priority=priority, stream=False)
        simulated.add("", prompt, output, simulated.clock.now, priority)
        for _ in range(3):
            if engine.has_unfinished_requests():
                engine.step()
                simulated.run()
    while engine.has_unfinished_requests():
        engine.step()
        simulated.run()
    assert len(plans) > 80
    assert [shape(plan) for plan in own] == [shape(plan) for plan in plans]
    assert any(plan.preempted for plan in plans) == (blocks < 100 or config.scheduler.policy is Policy.priority)
    assert any(plan.num_drafts for plan in plans) == (config.speculation.most > 0)
    comes_back = any(not moved.to_host for plan in plans for moved in plan.transfers)
    assert comes_back == (copies(config) and blocks < 100)


def shape(plan: StepPlan) -> Any:
    """A plan without names and tokens."""
    admissions = [(a.req_index, len(a.token_ids), a.prompt_len, a.block_table) for a in plan.admissions]
    rows = plan.req_indices, plan.starts, plan.counts, plan.samples, plan.num_decode_rows, plan.following
    moves = [(moved.to_host, moved.pairs) for moved in plan.transfers]
    return *rows, admissions, plan.growths, len(plan.preempted), plan.prefix_hit_tokens, moves


class Twin:
    """A dry engine to which everything happens that happens to a simulated one.

    Attributes:
        plans: of both.
        requests: simulated -> dry.
    """

    def __init__(self, replica: Replica, config: EngineConfig, stages: int = 1) -> None:
        engine = LLMEngine(config, clock=lambda: replica.clock.now)
        engine.executor.stages = stages
        if replica.receiver is not None:
            engine.receiver = SimulatedReceiver(replica.clock, always=True)
        make, outputs = engine._make_scheduler, engine._outputs
        core = engine.core = EngineCore(make, engine.executor, engine.clock, outputs, 0, engine.receiver)
        launch: Callable[[StepPlan], Any] = engine.executor.launch

        def launch_alone(plan: StepPlan) -> Any:
            return launch(plan._replace(pushes=()))  # there is no memory to push to

        engine.executor.launch = launch_alone  # type: ignore[method-assign]
        self.plans = watch(replica.core.executor), watch(engine.executor)
        self.requests: dict[Request, Request] = {}
        added: list[Request] = []
        queue, add, hear, step = core.scheduler.add, replica.add, replica.hear, replica.core.step

        def queued(request: Request) -> None:
            added.append(request)
            queue(request)

        def both_add(name: str, prompt: list[int], output: int, now: float, *more: Any, **options: Any) -> Request:
            request = add(name, prompt, output, now, *more, **options)
            core.waits = False
            about = {"priority": request.priority, "arrival_time": request.arrival_time, "export": request.export}
            engine.add_request(prompt, params(output), stream=False, prefill_at=request.prefill_at, **about)
            self.requests[request] = added[-1]
            return request

        def both_hear(transfer_id: int, computed: Request | None, copying: float, now: float) -> None:
            hear(transfer_id, computed, copying, now)
            core.waits = False
            assert isinstance(engine.receiver, SimulatedReceiver)
            engine.receiver.end(transfer_id, computed, copying)

        def both_step() -> None:
            engine.step()
            step()

        core.scheduler.add = queued  # type: ignore[method-assign]
        replica.add, replica.hear = both_add, both_hear  # type: ignore[method-assign, assignment]
        replica.core.step = both_step  # type: ignore[method-assign]

    def check(self) -> None:
        own, plans = self.plans
        assert len(plans) > 40
        assert [shape(plan) for plan in own] == [shape(plan) for plan in plans]
        for request, twin in self.requests.items():
            assert (twin.num_cached_tokens, twin.finished) == (request.num_cached_tokens, request.finished)


def twins(config: EngineConfig, overlap: bool, blocks: int, parallel: ParallelConfig) -> tuple[Cluster, list[Twin]]:
    """Engines behind the router, and a dry one beside each."""
    config = dry(config, overlap, blocks)
    limits = LLMEngine(config).executor.limits
    configs = [replace(config, parallel=of_one) for of_one in parallel.of_engines]
    replicas = [Replica(of_one, limits, COSTS, overlap, skips=False) for of_one in configs]
    pairs = [Twin(replica, config) for replica in replicas]
    return Cluster(replicas, Router(parallel.routing, len(replicas), config.cache)), pairs


def serve(cluster: Cluster, sent: Callable[[Request], None], ended: Callable[[Request], None]) -> None:
    """60 requests, of which each ends."""
    count = 0
    for now, prompt, output, priority in random_load(60, seed=3):
        while (request := cluster.advance(now)) is not None:
            ended(request)
            count += 1
        sent(cluster.send(str(now), prompt, output, now, priority))
    while (request := cluster.advance()) is not None:
        ended(request)
        count += 1
    assert count == 60


def nothing(request: Request) -> None:
    """Of no interest."""


@pytest.mark.parametrize(("overlap", "blocks"), [(False, 60), (True, 60), (True, 400)])
def test_two_replicas_behind_the_router_make_the_plans_of_two_dry_engines(overlap: bool, blocks: int) -> None:
    """A second router that hears of dry engines alone sends each request where the cluster's does."""
    cluster, pairs = twins(CONFIG, overlap, blocks, ParallelConfig(replicas=2))
    router, routes = Router(ParallelConfig().routing, 2, CONFIG.cache), {}

    def sent(request: Request) -> None:
        routes[request] = router.route(router.chain(request.token_ids[: request.prompt_len]), 1, [0, 1])
        assert request in pairs[routes[request].replica].requests

    def ended(request: Request) -> None:
        route = routes[request]
        router.end(route, pairs[route.replica].requests[request].num_cached_tokens)

    serve(cluster, sent, ended)
    for pair in pairs:
        pair.check()
    assert any(plan.preempted for plan in pairs[0].plans[0]) == (blocks < 100)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_computed_apart_make_the_plans_of_dry_engines_with_roles(overlap: bool) -> None:
    apart = ParallelConfig(prefill=1, decode=1, hand_over=HandOver.always)
    cluster, pairs = twins(CONFIG, overlap, 400, apart)
    serve(cluster, nothing, nothing)
    for pair in pairs:
        pair.check()
    of_prompts, _ = (pair.plans[1] for pair in pairs)
    assert any(plan.pushes for plan in of_prompts)
    assert max(plan.num_prefill_tokens for plan in of_prompts) > 30


@pytest.mark.parametrize(("overlap", "blocks"), [(False, 60), (True, 60), (True, 400)])
def test_a_pipelines_plans_are_those_of_an_engine_that_runs_as_far_ahead(overlap: bool, blocks: int) -> None:
    config = dry(CONFIG, overlap, blocks)
    limits = LLMEngine(config).executor.limits
    staged = replace(config, model=ModelConfig(), parallel=ParallelConfig(pipeline=2))
    replica = Replica(staged, limits, COSTS, overlap)
    twin = Twin(replica, config, stages=2)
    serve(Cluster([replica], Router(ParallelConfig().routing, 1, CONFIG.cache)), nothing, nothing)
    twin.check()
    assert any(plan.preempted for plan in twin.plans[0]) == (blocks < 100)
