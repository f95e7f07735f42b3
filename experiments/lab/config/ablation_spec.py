"""What the YAML of an ablation may say; and its engines, of the config alone: what cannot run here is refused early."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig

from experiments.lab.config import axes, needs, points, schema
from experiments.lab.config.explain import require_known
from experiments.lab.config.spec import PREDICTED, ClaimSpec, ExperimentSpec, Natural, Positive, settings_of
from experiments.lab.judge import formulas
from experiments.lab.judge.knees import FOUND, KEPT
from experiments.lab.judge.metrics import SLO
from experiments.lab.measure import hardware
from experiments.lab.measure.kinds import SERVED, Kind
from experiments.lab.measure.rate_search import RateSearch
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.runtime import preflight

ABLATION = "experiments.ablation.Ablation"
READ = ("workload", "hardware", "peers.processes", *points.keys("measure", "aa points predict repeats seed system"))
NO_ADDRESS = "via=url needs the server's address: peers.http.url=http://localhost:8000, say"


@dataclass(frozen=True)
class AblationSpec(ExperimentSpec):
    # Name -> changes to the engine's config, and optionally `kind` (see kinds.Kind), `label` and `needs` (needs.Need).
    variants: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""  # the variant that ratios and the gate refer to
    # Dotted config key -> values, or a word -> names with their settings (see points.grid); every variant is measured
    # at every combination.
    points: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()  # see docs/metrics.md; `metric@name` looks at the requests of that name alone
    slo: SLO = field(default_factory=SLO)  # bounds that a request must keep to count in goodput_rps
    # The highest rate of arrivals at which requests keep `slo`; takes the metrics slo_share and slo_rate_rps.
    search: RateSearch = field(default_factory=RateSearch)
    # One engine a variant serves all its passes, which saves starting it again for each. Points may then change the
    # workload alone, and every variant's KV memory must be given, since all live side by side.
    keep_engines: bool = False
    # The points at which the baseline is measured a second time (A/A), such as [{load: short}]; left out: all of them.
    again_at: tuple[dict[str, Any], ...] = ()
    # Metric -> the share of what is measured that predictions may be off by: claims, where there are predictions.
    reach: dict[str, float] = field(default_factory=dict)
    # The points whose requests are asked by the gate of tokens (see exact_gate.py); left out: all of them.
    gate_at: tuple[dict[str, Any], ...] = ()
    # The most by which logits may differ from those of the reference in fp32 (see logit_gate.py).
    gate_logit_error: Positive | None = None
    samples: Natural = 0  # so many prompts of the workload are shown in the report with what was generated
    # The point whose first repeat is kept step by step, {} where there is only one; left out: none is.
    timeline: dict[str, Any] | None = None
    # Whether it is noted there whose KV blocks are which after each step, in a pass of their own: of the first two
    # variants that tell.
    block_map: bool = False
    # The points at which each engine's decode steps are profiled on a GPU after all else has been timed.
    profile: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError("experiment.variants is empty: name at least one variant and its changes")
        require_known("experiment.baseline: there is no variant", [self.baseline], self.variants)
        if not self.metrics:
            raise ConfigError("experiment.metrics is empty: name what to measure")
        formulas.require_known(self.metrics, self.slo)
        if unknown := [name for name, share in self.reach.items() if name not in self.metrics or not 0 < share < 1]:
            needed = f"a metric that is measured, with a share between 0 and 1. Measured: {', '.join(self.metrics)}"
            raise ConfigError(f"experiment.reach.{unknown[0]}={self.reach[unknown[0]]}: each is {needed}")
        super().__post_init__()
        if not self.profile and (profiled := [name for name in self.metrics if name in formulas.OF_PROFILES]):
            raise ConfigError(f"the metric {profiled[0]} is of profiled steps: name their points in experiment.profile")
        if self.search.rates and (missing := [name for name in (FOUND, KEPT) if name not in self.metrics]):
            raise ConfigError(f"experiment.search needs the metric {missing[0]}: add it to experiment.metrics")
        if FOUND in self.metrics and not self.search.rates:
            raise ConfigError(f"the metric {FOUND} is what a search finds: give experiment.search its range of rates")

    def without(self, dropped: Collection[str]) -> AblationSpec:
        """With the other variants alone, and the claims that name none of those."""
        variants = {name: changes for name, changes in self.variants.items() if name not in dropped}
        claims = tuple(claim for claim in self.claims if claim.variant not in dropped and claim.to not in dropped)
        return replace(self, variants=variants, claims=claims)

    def with_predictions(self) -> AblationSpec:
        """With a simulated engine behind each variant that is one of ours. One that is served has none where an engine
        alone has the same settings: HTTP is not simulated."""
        variants, claims = dict[str, Any](), list(self.claims)
        every = {name: (_named_kind(changes), changes or {}) for name, changes in self.variants.items()}
        of_engines = [settings_of(changes) for kind, changes in every.values() if kind == Kind.engine]
        for name, (kind, changes) in every.items():
            variants[name] = self.variants[name]
            if kind == Kind.engine or (kind == Kind.served and settings_of(changes) not in of_engines):
                label = f"{changes.get('label') or name.replace('_', ' ')}, predicted"
                variants[name + PREDICTED] = {**changes, "kind": Kind.simulated.value, "label": label}
                for metric, share in self.reach.items():
                    of = ClaimSpec(metric, name + PREDICTED, everywhere=True, to=name, source=f"reach: {share:.0%}")
                    claims.append(replace(of, ratio_at_least=1 - share, ratio_at_most=1 + share))
        return replace(self, variants=variants, claims=tuple(claims))

    def served_by(self, kind: Kind) -> AblationSpec:
        """The same workload, points and metrics with this system alone: by its own variants, or by a new one."""
        variants = {name: changes for name, changes in self.variants.items() if _named_kind(changes) == kind}
        if kind.can.virtual:
            for name, changes in self.variants.items():
                if _named_kind(changes) in (Kind.engine, Kind.served):
                    variants[name] = {**(changes or {}), "kind": kind.value}
        variants = variants or {kind.value: {"kind": kind.value, "label": kind.label}}
        baseline = self.baseline if self.baseline in variants else next(iter(variants))
        kept = tuple(name for name in self.metrics if name not in formulas.OF_PROFILES)
        claims = tuple(
            claim
            for claim in self.claims
            if claim.variant in variants
            and claim.metric in kept
            and not kind.can.virtual  # which proves nothing
            and (baseline == self.baseline or claim.against or claim.ratio_at_least is claim.ratio_at_most is None)
        )
        drawn = (replace(p, panels=tuple(x for x in p.panels if x.metric in kept)) for p in self.plots)
        plots = tuple(plot for plot in drawn if plot.panels)
        search = self.search if self.search.among(variants) else replace(self.search, variants=())
        changed = replace(self, variants=variants, baseline=baseline, search=search)
        return replace(changed, metrics=kept, claims=claims, plots=plots, timeline=None, profile=())

    def require_searchable(self, repeats: int) -> None:
        """Raises ConfigError where a search is of variants that there are not, is made more often than passes are
        repeated, so many times in each process, or where a claim is on the knee of a variant that is not searched."""
        search = self.search
        require_known("experiment.search.variants: there is no variant", search.variants, self.variants)
        if search.repeats is not None and search.repeats not in (1, repeats):
            raise ConfigError(f"experiment.search.repeats={search.repeats} must be 1, or measure.repeats={repeats}")
        for claim in (claim for claim in self.claims if claim.metric == FOUND):
            is_ratio = claim.ratio_at_least is not None or claim.ratio_at_most is not None
            who = {claim.variant, *([claim.to or self.baseline] if is_ratio and not claim.against else [])}
            if left := sorted(who - {*search.among(self.variants)}):
                raise ConfigError(f"a claim on {FOUND} is about {left[0]}, which experiment.search.variants leaves out")


def _named_kind(changes: dict[str, Any] | None) -> str:
    return str((changes or {}).get("kind", Kind.engine.value))


def kinds(config: DictConfig) -> set[Kind]:
    """Of the systems that are measured. Raises ConfigError."""
    if config.axes.via == axes.URL:
        return {Kind.http}
    alone, own = config.measure.system, schema.plain(config.experiment).get("variants") or {}
    asked = own if alone is None else {alone.value: {"kind": alone.value}}
    found = {_kind(config, name, changes or {}) for name, changes in asked.items()}
    return found | {Kind.simulated} if config.measure.predict else found


def made(config: DictConfig, name: str, changes: Mapping[str, Any]) -> tuple[Kind, EngineConfig]:
    """The variant of that name, with these changes to the config. Raises ConfigError."""
    kind = _kind(config, name, changes)
    where = f"experiment.variants.{name}"
    return kind, schema.engine_config(schema.merged(config.engine, settings_of(changes), where))


def _kind(config: DictConfig, name: str, changes: Mapping[str, Any]) -> Kind:
    where = f"experiment.variants.{name}"
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where} must map engine settings to values, got {changes!r}")
    try:
        kind = Kind(changes.get("kind", "engine"))
    except ValueError:
        allowed = ", ".join(k.value for k in Kind)
        raise ConfigError(f"{where}.kind must be one of {allowed}; got {changes['kind']!r}") from None
    if config.axes.via == axes.HTTP:
        kind = SERVED.get(kind, kind)
        if not (kind.can.over_http or kind.can.client_of or kind.can.virtual):
            raise ConfigError(f"{where}: {kind.label} is not served over HTTP by us: start its server, and ask it with "
                              "via=url peers.http.url=...")  # fmt: skip
    return kind


def at_points(config: DictConfig) -> Iterator[DictConfig]:
    """The parts that points may change, at each of them."""
    asked = schema.of_points(config)
    for point in points.grid(schema.plain(config.experiment).get("points") or {}):
        yield schema.with_values(asked, point.values)


def engines(config: DictConfig) -> Iterator[tuple[Kind, EngineConfig]]:
    """Every variant at every point, but for those that are left out. Raises ConfigError."""
    spec = schema.plain(config.experiment)
    variants = spec.get("variants") or {}
    left_out = lacking(config, variants, spec.get("baseline"))
    for at_point in at_points(config):
        for name, changes in variants.items():
            if name not in left_out:
                yield made(at_point, name, changes or {})


def lacking(config: DictConfig, variants: Mapping[str, Any], baseline: str | None) -> dict[str, str]:
    """Variants that need what is not here, and why they are left out. Raises ConfigError for the baseline."""
    asked = {name: own for name, changes in variants.items() if (own := needs.named(name, changes))}
    if not asked:
        return {}
    device = hardware.resolve(config.engine.model.device)
    loads = [schema.workload(at_point) for at_point in at_points(config)]
    model = lambda: EngineConfig.from_dict(schema.plain(config.engine)).model  # noqa: E731
    found = {name: why for name, own in asked.items() if (why := needs.lacking(own, device, loads, model))}
    if baseline in found:
        raise ConfigError(f"experiment.baseline={baseline} cannot be left out: {found[baseline]}")
    return found


def require_files(config: DictConfig) -> None:
    """Raises ConfigError where a file that requests of some point are made of is missing, or is not sound."""
    for at_point in at_points(config):
        schema.workload(at_point).require_files()


def require_possible(config: DictConfig) -> None:
    """Raises ConfigError or ModelError where what the experiment is to measure cannot start here."""
    if config.axes.via == axes.URL and config.peers.http.url is None:
        raise ConfigError(NO_ADDRESS)
    if config.axes.scale == axes.NO_SCALE:
        if config.hardware.device is None:  # else who measures nothing on it may go on
            preflight.require_device(schema.engine_config(config.engine))
        return
    require_files(config)
    system = Kind(config.measure.system or Kind.engine)
    if system.can.needs_gpu and not preflight.sees_gpu():
        raise ConfigError(f"system={system.value}: {system.label} is measured on a GPU, and none is visible here")
    if config.axes.via == axes.URL or not system.can.ours:
        return
    if config.experiment.get("_target_") != ABLATION:  # others make engines of their own, of this model
        preflight.check_model(schema.engine_config(config.engine).model)
        return
    checked = list[EngineConfig]()
    for kind, engine in engines(config):
        if kind.can.ours and engine not in checked:
            checked.append(engine)
            preflight.check(engine)
