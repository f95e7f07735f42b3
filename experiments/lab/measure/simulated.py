"""The simulated engine as a system of the lab: the same requests at the same times, on a clock nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.lab.config.points import keys
from experiments.lab.config.spec import STEPS
from experiments.lab.measure import ceilings, costs, hardware
from experiments.lab.measure.costs import Found, Target, Watched
from experiments.lab.measure.hardware import Hardware
from experiments.lab.measure.kinds import Subject
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.core.config import Device, EngineConfig, LoadFormat, When
from mini_infer.core.config import replace as changed
from mini_infer.core.errors import ConfigError
from mini_infer.core.limits import Limits, settle_limits
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import StepRecord
from mini_infer.core.request import Request
from mini_infer.modeling.loader import outline
from mini_infer.modeling.sharding import of_each_rank
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime import preflight
from mini_infer.runtime.worker.memory import CPU_KV_GIB, gib
from mini_infer.serving.router import Router
from mini_infer.simulation.cluster import Cluster
from mini_infer.simulation.replica import Replica

MOST_RANKS = 64  # that are looked at for a model that does not fit
GRAPHS_BYTES = 512 * 2**20  # that an engine on a GPU leaves for captured steps
OF_REPLICAS = (  # settings that replicas of given limits and costs read, and their router
    "engine.speculation",
    *keys("engine.cache", "block_size layout prefix_caching watermark"),
    *keys(
        "engine.scheduler", "ageing_tokens_per_s batching chunked_prefill max_num_batched_tokens max_num_seqs policy"
    ),
    *keys("engine.parallel", "pipeline routing"),
)
FREE_PUSHES = "how quick the link between engines is nobody has measured, and KV is taken to be there as it is computed"


@dataclass(frozen=True)
class Setup:
    config: EngineConfig
    found: Found  # what steps take
    limits: Limits
    overlap: bool
    prompts: Setup | None = None  # of the engines that compute prompts for the others; None where there are none

    def cluster(self, records: list[StepRecord] | None = None, skips: bool = True) -> Cluster:
        """As many engines as the settings say; `records` gets all StepRecords. `skips`: see simulation/replica.py."""
        config, observe = self.config, None if records is None else records.append
        engines = []
        for parallel in config.parallel.of_engines:
            own, of = replace(config, parallel=parallel), (self.prompts if parallel.prefill else None) or self
            engines.append(Replica(own, of.limits, of.found.costs, of.overlap, observe, skips))
        return Cluster(engines, Router(config.parallel.routing, len(engines), config.cache))


@dataclass(frozen=True)
class Simulator:
    """What is simulated on: the machine of `hardware=...`, or this one."""

    chosen: Hardware
    threads: int  # of torch, on a CPU
    folder: Path = costs.FOLDER  # with files of costs
    _watched: list[Watched] = field(default_factory=list, init=False, compare=False)  # that simulated steps have asked

    def setup(self, config: EngineConfig) -> Setup:
        """Raises ConfigError where the model, or one request, does not fit, or nothing is known of what steps take."""
        config.parallel.require_both_roles()
        if config.parallel.prefill:
            of_prompts, *_, of_others = config.parallel.of_engines
            prompts, others = (self._of_one(replace(config, parallel=one)) for one in (of_prompts, of_others))
            found = others.found
            if not prompts.found.costs.push_s(1):
                found = replace(found, source=f"{found.source}; {FREE_PUSHES}")
            return replace(others, config=config, found=found, prompts=prompts)
        return self._of_one(config)

    def _of_one(self, config: EngineConfig) -> Setup:
        """All engines of which are alike."""
        if config.model.load_format is LoadFormat.dry:
            dry, overlap = config.model.dry, config.scheduler.overlap is When.always
            plenty = config.scheduler.max_num_seqs * -(-dry.max_model_len // config.cache.block_size)
            block = config.cache.block_size * DRY_TOKEN_BYTES
            settled = settle_limits(config, dry.max_model_len, plenty, block, self.chosen.host_memory_gib)
            return Setup(config, Found(costs.of_dry(dry), "the dry model's own"), settled, overlap)
        target = self.target(config)
        settled = _limits(target, self.chosen.host_memory_gib)
        waits = config.parallel.pipeline > 1 and config.speculation.most > 0  # as in runtime/worker/worker.py
        found = costs.find(self.folder, target)
        if isinstance(found.costs, Watched):
            self._watched.append(found.costs)
        return Setup(config, found, settled, target.layout.overlap and not waits)

    def beyond(self) -> list[str]:
        """A remark where steps that were simulated have more in them than any that was measured."""
        asked, beyond = (sum(getattr(costs, name) for costs in self._watched) for name in ("asked", "beyond"))
        if not beyond:
            return []
        ends = {(known.fitted.decode.tokens[-1], known.fitted.prompts.tokens[-1]) for known in self._watched}
        most = " or ".join(f"{rows:,} rows alone and {tokens:,} tokens with prompts" for rows, tokens in sorted(ends))
        return [
            f"{beyond / asked:.1%} of the simulated steps lie beyond what was measured, which is up to {most}: their "
            "times go on as between the last two that were."
        ]

    def target(self, config: EngineConfig) -> Target:
        device = hardware.resolve(config.model.device)
        if self.chosen.device is not None and self.chosen.device.value != device:
            raise ConfigError(
                f"engine.model.device={device}, and the chosen hardware is {self.chosen.machine}, a "
                f"{self.chosen.device.value}: choose the one of the other"
            )
        self._require_machine(device)
        known, _ = ceilings.find(ceilings.FOLDER, self.chosen, device, self.threads)
        memory_gib = self.chosen.host_memory_gib if device == "cpu" else self.chosen.memory_gib
        if not self.chosen.machine:
            memory_gib = hardware.gpu_memory_gib() if device == "cuda" else hardware.host_memory_gib()
        machine = self.chosen.machine or hardware.name(device)
        spec, dtype = costs.served(config, device)
        return Target(config, spec, dtype, device, machine, self.threads, memory_gib, known)

    def key(self, config: EngineConfig) -> str:
        """Of the machine, as hardware.key."""
        if config.model.load_format is LoadFormat.dry or not self.chosen.machine:
            device = hardware.resolve(config.model.device)
            self._require_machine(device)
            return hardware.key(device)
        return "cpu" if self.chosen.device is Device.cpu else hardware.short_gpu_name(self.chosen.machine)

    def _require_machine(self, device: str) -> None:
        if device == "cuda" and not self.chosen.machine and not preflight.sees_gpu():
            raise ConfigError(
                "which GPU is to be simulated is not said, and none is here: choose hardware=... from conf/hardware"
            )


def _limits(target: Target, host_gib: float | None) -> Limits:
    """As an engine would find them. The error of what does not fit names the fewest ranks with which it does."""
    own, refused = target.config.parallel.tensor, None
    for tensor in range(own, MOST_RANKS + 1):
        try:
            config = changed(target.config, parallel={"tensor": tensor})
            found = _limits_of_rank(replace(target, config=config, spec=of_each_rank(target.spec, tensor)), host_gib)
        except ConfigError as error:
            refused = refused or error
            continue
        if refused is None:
            return found
        raise ConfigError(f"{refused}. With engine.parallel.tensor={tensor} it fits") from None
    assert refused is not None
    raise refused


def _limits_of_rank(target: Target, host_gib: float | None) -> Limits:
    """`target` has a rank's spec. Raises ConfigError where weights, the largest step and KV do not fit one device: of a
    GPU all of its memory, of a CPU's host the share of each rank. Of memory that is not known nothing is said."""
    config, spec, on_cpu = target.config, target.spec, target.device == "cpu"
    cache, parallel, scheduler, block = config.cache, config.parallel, config.scheduler, target.block_bytes
    whole = None if target.memory_gib is None else target.memory_gib * 2**30 / (parallel.ranks if on_cpu else 1)
    weights = outline(spec, target.dtype, ParallelContext(size=parallel.tensor)).weight_bytes() // parallel.pipeline
    activations = scheduler.max_num_batched_tokens * spec.activation_width * target.dtype.itemsize
    steps = activations + scheduler.max_num_seqs * spec.vocab_size * 4 + (0 if on_cpu else GRAPHS_BYTES)
    of_weights = f"{config.model.path} on {parallel.tensor} of {target.machine}: weights of {gib(weights)}"

    def require_left(room: float) -> float:
        if (left := room - weights - steps) <= 0:
            raise ConfigError(
                f"{of_weights} and steps of {gib(steps)} leave no room for KV in {gib(room)}. Raise "
                "engine.parallel.tensor, or quantize the weights"
            )
        return left

    asked_gib, for_kv = cache.memory_gib or CPU_KV_GIB, 0.0
    if cache.memory_gib is not None or on_cpu:
        for_kv = asked_gib * 2**30
    elif cache.num_blocks is None:
        if whole is None:
            raise ConfigError(
                "how much memory the simulated GPU has is not known: choose hardware=..., or set "
                "engine.cache.memory_gib"
            )
        for_kv = require_left(whole * cache.gpu_memory_utilization)
    # A stage has its share of the layers.
    affordable = int(for_kv) * parallel.pipeline // block
    found = settle_limits(config, spec.max_model_len, affordable, block * parallel.tensor, host_gib)
    of_stage = block / parallel.pipeline  # bytes
    if whole is not None and (kv := found.num_blocks * of_stage) > (left := require_left(whole)):
        key, asked, most = "memory_gib", f"{asked_gib:g}", f"{math.floor(10 * left / 2**30) / 10:g}"
        if cache.num_blocks is not None:
            key, asked, most = "num_blocks", f"{cache.num_blocks}", f"{int(left // of_stage)}"
        raise ConfigError(
            f"{of_weights}, steps of {gib(steps)} and KV of {gib(kv)} (engine.cache.{key}={asked}) take more than the "
            f"{gib(whole)} there are. Lower engine.cache.{key} to {most}, raise engine.parallel.tensor, or quantize "
            "the weights"
        )
    return found


class SimulatedSubject(Subject):
    """One pass is as the next: nothing is compiled, and no machine is busy with others."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.about = {STEPS: setup.found.source}
        self._records: list[StepRecord] = []
        self.forget()

    def forget(self) -> None:
        alone = self._setup.config.parallel.engines == 1  # else their steps are not one engine's
        self._cluster = self._setup.cluster(self._records if alone else None, skips=False)

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        self._records.clear()
        return replace(drive(self._cluster, items, concurrency), records=tuple(self._records))


def drive(cluster: Cluster, items: Sequence[Item], concurrency: int) -> Served:
    outcomes, index_of = Outcomes(items, cluster.clock), dict[Request, int]()

    def send(index: int) -> None:
        item, prompt, arrival = items[index], outcomes.prompts[index], outcomes.sent[index].arrival
        name = outcomes.names[index]
        index_of[cluster.send(name, prompt, item.output_tokens, arrival, item.priority)] = index

    def advance(due: float | None) -> bool:
        request = cluster.advance(due)
        outcomes.answered()
        if request is not None:
            outcomes.end(
                index_of.pop(request),
                "",
                request.token_times,
                request.output_token_ids,
                cached_tokens=request.num_cached_tokens or 0,
                first_scheduled=request.first_scheduled_time,
                preemptions=request.num_preemptions,
            )
        return request is not None or due is not None

    served = outcomes.run(concurrency, send, advance)
    # Tokens that nobody has computed are not told of, and there is no clock outside.
    requests = tuple(replace(trace, token_ids=(), tells_tokens=False) for trace in served.requests)
    return replace(served, requests=requests, outside_s=served.took)
