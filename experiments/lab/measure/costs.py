"""Files of conf/costs/: what steps take, for one model, layout and machine each; and the roofline where there is none.

A file belongs to what was measured, to the last setting that changes a step's time (`Layout`), and is found by that,
not by its name. Written by `python run.py experiment=calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from experiments.lab.config.axes import CONF
from experiments.lab.config.points import flat, keys, within
from experiments.lab.config.spec import BOUND, ESTIMATE
from experiments.lab.judge import roofline
from experiments.lab.judge.roofline import StepWork
from experiments.lab.measure.fit import Residuals
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.store import result as store
from experiments.lab.store.rows import from_plain
from mini_infer.core.config import Connector, DryConfig, EngineConfig, When
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.loader import as_served, load_spec, resolve_dtype
from mini_infer.modeling.sharding import of_each_rank
from mini_infer.modeling.spec import ModelSpec, MoESpec
from mini_infer.simulation.costs import ATTENTION, OF_HEAT, Curve, FittedCosts, Heat, StepCosts, Work, require_simulated

FOLDER = CONF / "costs"
SUM_S = 3e-6  # of a sum over ranks, whatever its size: measured on two H200s (experiment=all_reduce)
_USUAL = flat(EngineConfig().to_dict())
HEADER = """\
# What an engine's steps take (docs/simulator.md). Written by `python run.py experiment=calibrate`; simulated engines of
# this layout on this machine find the file by what it says.
"""

# Settings that no step's time depends on, or that the other fields of a Layout say: any other is a part of it.
_ELSEWHERE = (
    *("seed", "numerics", "scheduler", "speculation", "attention.prefill", "attention.decode", "graphs.capture"),
    *keys("model", "path load_format hf_config tokenizer dtype device quantization quantization_group"),
    *keys("model", "quantization_symmetric max_model_len threads seed dry"),
    *keys("cache", "layout dtype num_blocks memory_gib gpu_memory_utilization gpu_shared prefix_caching watermark"),
    *keys("cache", "num_host_blocks host_memory_gib host_prefix_gib disk_prefix_path disk_prefix_gib"),
    *keys("parallel", "tensor pipeline timeout_s start_timeout_s replicas routing launcher prefill decode hand_over"),
    *keys("parallel", "connector prefill_tensor dispatch"),  # of ranks that share experts, which are not simulated
)
_OF_LATENTS = keys("attention", "mla mla_crossover")


@dataclass(frozen=True)
class Layout:
    """All that a step's time depends on, beside the step and the machine."""

    model: str
    dtype: str
    quantization: str
    kv: str
    tensor: int
    numerics: str
    overlap: bool
    graphs: str
    attention: str
    threads: int | None  # of torch, on a CPU
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, all others that are not the default

    @property
    def facts(self) -> dict[str, Any]:
        """By name, or by the setting's key."""
        return {**asdict(self), "settings": {}, **self.settings}

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str, threads: int) -> Layout:
        """Raises ConfigError where it is none that can be simulated."""
        require_simulated(config)
        overlap, attention = config.scheduler.overlap, config.attention
        routers = [layer.feed_forward.router for layer in spec.layers if isinstance(layer.feed_forward, MoESpec)]
        experts = f", {routers[0].top_k} of {routers[0].num_experts} experts a token" if routers else ""
        model = f"{spec.architecture}, {spec.num_layers} layers of {spec.hidden_size}, {spec.vocab_size} tokens"
        elsewhere = (*_ELSEWHERE, *(_OF_LATENTS if spec.attention.latent is None else ()))
        return cls(
            model=model + experts,
            dtype=str(dtype).removeprefix("torch."),
            quantization="none" if spec.quantization is None else spec.quantization.describe(),
            kv="fp8" if spec.fp8_kv else "model's",
            tensor=config.parallel.tensor,
            numerics=config.numerics.value,
            overlap=overlap is When.always or (overlap is When.auto and device == "cuda"),
            graphs=config.graphs.capture.value,
            attention="/".join(dict.fromkeys((attention.prefill.value, attention.decode.value))),
            threads=threads if device == "cpu" else None,
            settings={
                key: value
                for key, value in flat(config.to_dict()).items()
                if _USUAL.get(key) != value and not within(key, elsewhere)
            },
        )


@dataclass(frozen=True)
class CostFile:
    machine: str
    layout: Layout
    measured: str  # date
    how: str
    costs: FittedCosts
    far_off: int = 0  # steps of the fit that met something else than their work: they hardly count
    # By kind of step, of steps that the fit has not seen.
    residuals: dict[str, Residuals] = field(default_factory=dict)
    held: str = ""  # where held_block_s is from: an engine alone, which is calibrated, pushes nothing


@dataclass(frozen=True)
class Target:
    """A model as an engine would serve it, and the machine that it is simulated on."""

    config: EngineConfig
    spec: ModelSpec
    dtype: torch.dtype
    device: str  # cpu or cuda; a simulated one need not be there
    machine: str  # its name, as hardware.name gives it
    threads: int
    memory_gib: float | None = None  # of one device, of a CPU its host's; None: not known
    ceilings: Ceilings | None = None  # None: not known

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.spec, self.dtype, self.device, self.threads)

    @property
    def block_bytes(self) -> int:
        return self.spec.kv_layout(self.dtype).bytes_per_block(self.config.cache.block_size)

    @property
    def rank_block_bytes(self) -> int:
        """That one of the ranks has which share each layer: its heads of it, or all of a latent."""
        own = of_each_rank(self.spec, self.config.parallel.tensor)
        return replace(self, spec=own).block_bytes


def served(config: EngineConfig, device: str) -> tuple[ModelSpec, torch.dtype]:
    """The spec and the dtype of a model on a device that need not be there."""
    spec = as_served(load_spec(config.model), config)
    return spec, resolve_dtype(config.model, spec, torch.device(device))


@dataclass(frozen=True)
class Found:
    costs: StepCosts
    source: str  # for the run's record
    measured: bool = True


def find(folder: Path, target: Target) -> Found:
    """The costs that were measured of this layout on this machine; else, of several ranks, an estimate from those of
    one; else the roofline's, which no step can beat.

    Raises ConfigError where neither is known."""
    layout, others, alone = target.layout, [], None
    push_s = push_block_s(target)  # one engine alone has pushed nothing
    for path in sorted(folder.glob("*.yaml")):
        known = read(path)
        measured = replace(known.costs, push_block_s=push_s)
        if target.config.parallel.connector is Connector.stream:  # no kernel copies
            measured = replace(measured, held_block_s=0.0)
        other = differences(layout, known.layout)
        other |= {"machine": known.machine} if known.machine != target.machine else {}
        if not other:
            return Found(Watched(measured), f"fitted: {path.name}, of {known.measured}")
        if other == {"tensor": 1}:
            alone = measured, path.name
        others.append((path.name, [f"{key}={value}" for key, value in other.items()]))
    nearest = min(others, default=None, key=lambda one: len(one[1]))
    hint = "" if nearest is None else f"; the nearest is {nearest[0]}, but for {', '.join(nearest[1])}"
    way_out = "measure them there with `python run.py experiment=calibrate --record` and the same settings"
    missing = f"no costs are known of {layout.model} on {target.machine or 'this machine'}{hint}: {way_out}"
    if target.ceilings is None:
        raise ConfigError(f"{missing}; and there are no ceilings for a roofline: choose hardware=...")
    if alone is not None and "to_peer" in target.ceilings.link_gb_s:
        estimate = Watched(over_ranks(alone[0], target))
        return Found(estimate, f"{ESTIMATE} ({alone[1]}): {missing}", measured=False)
    return Found(Roofline(target), f"{BOUND}: {missing}", measured=False)


def differences(layout: Layout, other: Layout) -> dict[str, Any]:
    """What the other has, where it is not the same."""
    mine, theirs = ({**_USUAL, **each.facts} for each in (layout, other))
    return {key: theirs.get(key) for key in {**layout.facts, **other.facts} if mine.get(key) != theirs.get(key)}


class Watched:
    """Fitted costs, and of how many of the steps that somebody asked for nobody has measured as many tokens."""

    def __init__(self, fitted: FittedCosts) -> None:
        self.fitted = fitted
        self.asked = self.beyond = 0  # steps, also those that somebody looked ahead at in vain; of these
        self.host_s, self.copy_s, self.push_s = fitted.host_s, fitted.copy_s, fitted.push_s
        self.launch_s = fitted.launch_s
        self._most_rows, self._most_tokens = fitted.decode.tokens[-1], fitted.prompts.tokens[-1]

    def device_s(self, work: Work) -> float:
        self.asked += 1
        self.beyond += work.tokens > (self._most_tokens if work.prompt_tokens else self._most_rows)
        return self.fitted.device_s(work)

    def heat(self, stages: int) -> Heat:
        return self.fitted.heat(stages)

    def rows_s(self, rows: int, contexts: range, heat: Heat, begin: float, pause_s: float) -> list[float]:
        self.asked += len(contexts)
        self.beyond += len(contexts) * (rows > self._most_rows)
        return self.fitted.rows_s(rows, contexts, heat, begin, pause_s)


def of_dry(config: DryConfig) -> FittedCosts:
    """The time model of the dry model, which sleeps for as long."""
    step_s, decode_s, prompt_s = 1e-3 * config.step_ms, 1e-6 * config.decode_token_us, 1e-6 * config.prefill_token_us
    decode, prompts = (Curve((0, 1), (step_s, step_s + token_s)) for token_s in (decode_s, prompt_s))
    return FittedCosts(decode, prompts, 0.0, 0.0, 0.0, 0.0, 0.0, beside_s=decode_s - prompt_s)


class Roofline(FittedCosts):
    """The least time that the hardware allows a step. Ranks share it, and talk in no time; stages take it together."""

    def __init__(self, target: Target) -> None:
        assert target.ceilings is not None
        self._costs = roofline.StepCosts(target.spec, target.dtype)
        self._ceilings = target.ceilings.of(target.config.parallel.tensor)
        rate, nothing = self._ceilings.link_gb_s.get("to_host"), Curve((0,), (0.0,))
        block_s = target.block_bytes / (rate * 1e9) if rate else 0.0
        super().__init__(nothing, nothing, *5 * (0.0,), block_s=block_s, push_block_s=push_block_s(target))

    def device_s(self, work: Work) -> float:
        rows = work.decode_tokens + bool(work.prompt_tokens)
        done = StepWork(
            tokens=work.tokens,
            sampled=rows,
            rows=rows,
            context=work.decode_context + work.prompt_reach,
            pairs=work.decode_context + work.prompt_pairs,
        )
        return roofline.floor(self._costs.of(done), self._ceilings).seconds

    def rows_s(self, rows: int, contexts: range, heat: Heat, begin: float, pause_s: float) -> list[float]:
        """Those between the first and the last lie on a line, but for what caches hold and windows hide."""
        first, last = (self.device_s(Work.decode(rows, context)) for context in (contexts[0], contexts[-1]))
        return np.linspace(first, last, len(contexts)).tolist()


def over_ranks(alone: FittedCosts, target: Target) -> FittedCosts:
    """An estimate for ranks that share each layer: a step of one device, as much shorter as the roofline says, and two
    sums a layer, that of embeddings, and the logits, one after the other. Attention is shared by heads, and what decode
    rows read as their cache is: every rank has all latents. The host is taken to need no longer than for one."""
    assert target.ceilings is not None
    parallel, spec = target.config.parallel, target.spec
    single = replace(target, config=replace(target.config, parallel=replace(parallel, tensor=1)))
    floor, floor_alone = Roofline(target).device_s, Roofline(single).device_s
    row_bytes = (parallel.tensor - 1) * spec.hidden_size * target.dtype.itemsize
    row_s = row_bytes / (1e9 * target.ceilings.link_gb_s["to_peer"])

    def shared(curve: Curve, work: Callable[[int], Work]) -> Curve:
        shorter = [floor(work(tokens)) / floor_alone(work(tokens)) for tokens in curve.tokens]
        sums = [(2 * spec.num_layers + 2) * (SUM_S + row_s * tokens) for tokens in curve.tokens]
        seconds = np.array(curve.seconds) * shorter + sums
        return Curve(curve.tokens, tuple(np.maximum.accumulate(seconds).tolist()))

    decode = shared(alone.decode, lambda tokens: Work.decode(tokens, 0))
    prompts = shared(alone.prompts, lambda tokens: Work(0, tokens, 0, 0, 0, 0))
    read = target.block_bytes / target.rank_block_bytes
    shares = {**dict.fromkeys((*ATTENTION, *OF_HEAT), parallel.tensor), "slot_s": read, "held_block_s": read}
    attention = {name: getattr(alone, name) / share for name, share in shares.items()}
    return replace(alone, decode=decode, prompts=prompts, **attention)


def push_block_s(target: Target) -> float:
    """Seconds of a KV block to another engine, at the rate that was measured of the link. Each rank has one, and pushes
    its part. 0 where the rate is not known."""
    parallel, known = target.config.parallel, target.ceilings
    if known is None:
        return 0.0
    if target.device == "cpu":
        rate = known.copy_gb_s / 2  # of bytes read and bytes written
    else:
        rate = known.link_gb_s.get("to_host" if parallel.connector is Connector.stream else "to_peer", 0.0)
    return target.rank_block_bytes / parallel.pipeline / (rate * 1e9) if rate else 0.0


def read(path: Path) -> CostFile:
    """Raises ConfigError where it is no file of costs."""
    try:
        return from_plain(CostFile, yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is no file of costs ({type(error).__name__}: {error}): calibrate again") from error


def save(path: Path, found: CostFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(store.plain(found), sort_keys=False, width=110, allow_unicode=True)
    store.write_atomic({path: HEADER + text})
