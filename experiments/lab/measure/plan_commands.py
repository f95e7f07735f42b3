"""Commands for what a planner has found: of a server, and of the run that measures plans beside their predictions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.lab import axes, schema
from experiments.lab.judge.metrics import SLO
from experiments.lab.load.subject import flags
from experiments.lab.measure.plans import Plan, Settings, counted
from experiments.lab.points import flat, within
from experiments.lab.spec import PREFILL_SHARE
from mini_infer.core.config import EngineConfig, LoadFormat, Routing
from mini_infer.core.speculation_config import SpeculationMethod

PROPOSER = SpeculationMethod.ngram  # of drafts, in commands: as those that are simulated, it costs the device nothing
METRICS = ["slo_share", "goodput_rps", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "output_tokens_per_s"]
# By the kind of the workload: the experiment that measures it, and the axis of its points, which is not to be typed.
MEASURED_BY = {"trace": ("simulator_trace", "rate_scale"), "shared_prefix": ("simulator", "count")}
KEPT = ("scale", "hardware", "model", "engine", "measure.costs", "measure.seed")  # of what was typed


def server(engine: EngineConfig) -> str:
    """With all that differs from its defaults."""
    engine = to_serve(engine)
    path = engine.model.path
    return shlex.join(["mini-infer-serve", "--model", path, *flags(engine, EngineConfig(path))])


def to_serve(engine: EngineConfig) -> EngineConfig:
    """What is simulated, as a server is told of it: seeds as they come, the model's own weights where its shape stood
    for it, and drafts that the target judges where a rate stood for them."""
    model, drafts = engine.model, engine.speculation
    if model.load_format is LoadFormat.dummy:
        model = replace(model, load_format=LoadFormat.auto, hf_config=None, routing=Routing.learned)
    method = drafts.method if drafts.rate is None else PROPOSER
    return replace(engine, model=model, speculation=replace(drafts, method=method, acceptance=None), seed=None)


def measuring(config: DictConfig, typed: Sequence[str], base: Settings, plans: Mapping[str, Plan], slo: SLO) -> str:
    """The run that serves the workload with these plans, by name, each beside what is predicted of it. Empty of a
    workload that no experiment does that with.

    Args:
        config: the planner's.
        typed: what stood on its command line.
        base: the engine's own values of all settings that others were tried of.
    """
    workload = schema.workload(config)
    if workload.kind not in MEASURED_BY:
        return ""
    experiment, axis = MEASURED_BY[workload.kind]
    scale = next((text.partition("=")[2] for text in typed if text.startswith("scale=")), "tiny")
    own, theirs = (_of_scale(name, scale) for name in ("capacity", experiment))
    changed = {key for plan in plans.values() for key in base if plan.settings[key] != base[key]} - {PREFILL_SHARE}
    variants = {
        name: {"kind": "served", "label": plan.point.name}
        | _of_engine({**{key: plan.settings[key] for key in changed}, **counted(plan.settings, plan.replicas)})
        for name, plan in plans.items()
    }
    given = [text for text in typed if within(_key(text), KEPT) and _key(text) not in changed]
    engine = flat(schema.plain(config.engine), "engine.")
    said = {key: engine.get(key) for key in {**own, **theirs} if key.startswith("engine.")}
    load = {f"workload.{f.name}": getattr(workload, f.name) for f in fields(workload) if f.name != axis}
    usual = {f"workload.{f.name}": f.default for f in fields(workload)}
    said |= {key: value for key, value in load.items() if key in theirs or value != usual[key]}
    known = {*map(_key, given), *changed}
    return shlex.join(
        [
            *("python", "run.py", f"experiment={experiment}", *given, f"workload={workload.kind}"),
            *(f"{key}={_typed(value)}" for key, value in said.items() if key not in known),
            *("~experiment.points", f"+experiment.points={{workload.{axis}: [{getattr(workload, axis)}]}}"),
            *("~experiment.variants", f"+experiment.variants={_typed(variants)}"),
            f"experiment.baseline={next(iter(plans))}",
            *( "experiment.keep_engines=false", f"+experiment.slo={_typed(asdict(slo))}"),
            f"experiment.metrics={_typed(METRICS)}",
        ]
    )  # fmt: skip


def _of_scale(experiment: str, scale: str) -> Mapping[str, Any]:
    """Dotted keys that the experiment sets of an engine and a workload at this scale."""
    scales = axes.plain(OmegaConf.load(axes.CONF / "experiment" / f"{experiment}.yaml"))["scales"]
    return flat({key: value for key, value in scales.get(scale, {}).items() if key != "experiment"})


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~").replace("/", ".").partition("@")[0]


def _of_engine(values: Mapping[str, Any]) -> dict[str, Any]:
    """Its sections, of dotted keys."""
    sections: dict[str, Any] = axes.plain(schema.with_values(OmegaConf.create(), values))["engine"]
    return sections


def _typed(value: Any) -> str:
    """As Hydra reads it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_typed(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    return f'"{value}"' if isinstance(value, str) and not re.fullmatch(r"[\w./~-]+", value) else str(value)
