"""What can be chosen: the experiments with their questions, and the option groups. Read from conf/ itself."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from experiments.lab.commands import COMMANDS
from experiments.lab.config import schema, typed
from experiments.lab.config.ablation_spec import AblationSpec, require_files
from experiments.lab.config.axes import NO_SCALE, nodes, read
from experiments.lab.config.explain import require_known
from experiments.lab.config.schema import SHORT
from experiments.lab.config.spec import PREDICTED
from experiments.lab.judge.knees import SEARCH
from experiments.lab.measure.kinds import Kind
from mini_infer.assets import shipped_path
from mini_infer.core.config import Device, LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.model_files import local_folder, safetensors_files

POINTS = "experiment.points."
LEFT_OUT = "~experiment.variants."
EXAMPLES = (
    ("python run.py experiment=quickstart", "one experiment, as it is"),
    ("python run.py experiment=quickstart measure.repeats=4", "with a setting changed"),
    ("python run.py experiment=quickstart engine/prefill=whole", "with a mechanism swapped"),
    ("python run.py experiment=prefix_cache scale=7b via=http hardware=h200", "of a larger model, over HTTP"),
    ("python run.py experiment=quickstart 'experiment.points.workload.concurrency=[4]'", "at other points"),
    ("python run.py experiment=quickstart model=/path/to/a/folder", "on a Hugging Face model"),
    ("python run.py -m experiment=quickstart measure.seed=0,1", "a sweep"),
    ("python run.py -m 'experiment=glob(*)'", "every experiment"),
    ("python run.py -m hydra/launcher=joblib ...", "a sweep with its jobs side by side: not for timings"),
    ("python run.py experiment=quickstart tracker=wandb", "with its curves, tables and figures in Weights & Biases"),
    ("python run.py experiment=quickstart --cfg job", "the composed config, without a run"),
)


def groups(conf: Path) -> dict[str, list[str]]:
    """Group -> its options, experiments aside."""
    found: dict[str, list[str]] = {}
    for path in sorted(conf.rglob("[!_]*.yaml")):
        group = path.parent.relative_to(conf).as_posix()
        if group not in (".", "experiment", "costs"):  # which is read, not chosen
            found.setdefault(group, []).append(path.stem)
    return found


def defaults(conf: Path) -> dict[str, str]:
    """Group -> the option that is taken where nothing is said; groups that take none then are left out."""
    named = [entry for entry in read(conf / "config.yaml")["defaults"] if isinstance(entry, dict)]
    chosen = {group: option for entry in named for group, option in entry.items() if option is not None}
    return {group: option for group, option in chosen.items() if group != "optional at"}


def experiment_names(conf: Path) -> list[str]:
    return sorted(path.stem for path in (conf / "experiment").glob("[!_]*.yaml"))


def chosen(arguments: Sequence[str]) -> str:
    """The experiment that a command line names: "" for none, `*` where it may be several."""
    named = [value for key, _, value in (argument.partition("=") for argument in arguments) if key == "experiment"]
    return named[0] if len(named) == 1 and named[0].isidentifier() else "*" * bool(named)


def experiment_list(conf: Path) -> str:
    rows = []
    for name in experiment_names(conf):
        node = read(conf / "experiment" / f"{name}.yaml")
        scales = [scale for scale in node.get("scales") or {} if scale != NO_SCALE]
        ways = [f"+{way}" for way in node.get("via") or {}]
        rows.append((name, " ".join([*scales, *ways]), (node.get("experiment") or {}).get("question", "")))
    wide = max((len(scales) for _, scales, _ in rows), default=0)
    return _table([(name, f"{scales:<{wide}}  {question}") for name, scales, question in rows])


def help_text(conf: Path) -> str:
    taken = defaults(conf).items()
    options = [(g, "  ".join(o + "*" * ((g, o) in taken) for o in known)) for g, known in groups(conf).items()]
    commands = [(f"python run.py {name} {command.usage}", command.help) for name, command in COMMANDS.items()]
    return f"""\
mini-infer: run an experiment; it writes tables and a report with figures

  python run.py experiment=<name> [scale=...] [via=...] [group=option ...] [key=value ...] [--record]

Experiments
{experiment_list(conf)}

Option groups (group=option; * is taken where nothing is said)
{_table(options)}

Without a choice scale is the one of that model, or the first that stands beside the experiment's name,
engine/prefix_cache what engine/cache can do, and hardware is looked up by its name.

Keys (key=value): engine.model.*, engine.cache.*, engine.scheduler.*, engine.attention.*,
engine.graphs.*, workload.*, experiment.points.*, experiment.claims.*, measure.repeats, measure.seed,
measure.threads, peers.vllm.*, peers.hf.*, peers.http.url, tracker.project, paths.run;
--cfg job shows all of them with their values.

A run is a trial, and writes to trial/; with --record to results/ and reports/, which are committed.
With --resume the processes that its stored run has, of the same settings and code, are not measured again.

Commands
{_table(commands)}

Examples
{_table(EXAMPLES)}

--hydra-help tells about Hydra's own flags."""


def settled(experiment: str, overrides: Sequence[str], root: Path) -> typed.Settled:
    """The config of a run. Raises ConfigError as a run would; Hydra's own errors come as they are."""
    conf = root / "conf"
    require_known("unknown experiment", [experiment], experiment_names(conf))
    schema.register(conf, experiment)
    given = shorthand([f"experiment={experiment}", *overrides], conf)
    with initialize_config_dir(str(conf), version_base="1.3"):
        return typed.settle(compose("config", overrides=given), experiment, given)


def outlook(experiment: str, overrides: Sequence[str], root: Path) -> str:
    """What a run would measure. Raises as `settled`."""
    from experiments.lab.store import result as store  # heavy, and `--help` reads no results

    run = settled(experiment, overrides, root)
    require_files(run.config)
    chosen = schema.experiment_class(run.config).from_config(run.config)  # refuses what a run refuses
    axes, measure, model, spec = run.axes, chosen.settings, chosen.engine.model, chosen.spec
    scales = dict.fromkeys(f"scale={scale} via={via}" for scale, via, _ in nodes(run.config))
    variants = [name for name in chosen.variants if name != chosen.aa and not name.endswith(PREDICTED)]
    ablation = spec if isinstance(spec, AblationSpec) else None  # others have settings of their own
    found = ablation.search.result if ablation else ()  # of passes that nobody knows yet
    points = [point for point in chosen.claimable if point not in found]
    lines = [
        spec.title,
        f"  {spec.question}",
        "",
        f"scale     {axes.scale}, via {axes.via}; there are: {', '.join(scales) or 'no others'}",
        f"model     {model.path}, {model.dtype.name} on {model.device.name}",
        f"variants  {', '.join(variants)}" + (f" (baseline {chosen.baseline})" if chosen.baseline else ""),
        *([f"points    {len(points)}: {'; '.join(point.name for point in points)}".rstrip(": ")] if points else []),
        f"metrics   {', '.join(chosen.metrics)}",
        f"repeats   {measure.repeats} in each of {measure.processes} processes",
    ]
    kinds = {name: Kind((ablation.variants[name] or {}).get("kind", "engine")) for name in variants} if ablation else {}
    for name, kind in kinds.items():
        if not kind.can.ours:
            own = chosen.peers.processes_of(kind)
            count = measure.processes if own is None else min(own, measure.processes)
            lines.append(f"peer      {name}, in {count} of {measure.processes} processes")
    lines += [f"claims    {len(spec.claims)}", f"code      {', '.join(spec.code)}"]
    lines += [f"note      {note}" for note in run.notes]
    lines.append(f"memory    {_memory(chosen.engine, len(variants) if ablation and ablation.keep_engines else 1)}")
    passes = max(1, len(variants)) * len(points) * measure.repeats * measure.processes
    for path in sorted((root / "results" / experiment / f"{axes.scale}.{axes.via}").glob("*/default.json")):
        if model.device is not Device.auto and (path.parent.name == "cpu") != (model.device is Device.cpu):
            continue  # what it took elsewhere says nothing
        info = store.read(path).info
        took, then = info.provenance.seconds, info.config["measure"]
        if not ablation:
            lines.append(f"time      {_time(took)} on {info.hardware}, on {info.measured}")
            continue
        arms = max(1, len(info.variants) - (info.aa is not None))
        planned = [name for name in info.points if not name.startswith(SEARCH)]
        before = arms * len(planned) * then["repeats"] * then.get("processes", 1)  # older ones: of one
        searches = " and their searches" * (len(planned) < len(info.points))
        passed = f"{_time(took)} for {before} passes{searches} on {info.measured}"
        lines.append(
            f"time      about {_time(took * passes / before)} on {info.hardware}: {passed}, and this has {passes}"
        )
    return "\n".join(lines)


def _memory(engine: Any, engines: int) -> str:
    """Of so many engines, which live at a time."""
    cache, model = engine.cache, engine.model
    if cache.memory_gib is not None:
        parts = [f"{cache.memory_gib:g} GiB for KV"]
    elif cache.num_blocks is not None:
        parts = [f"KV of {cache.num_blocks * cache.block_size:,} tokens"]
    else:
        parts = [f"for KV 0.5 GiB of a CPU's, or what {cache.gpu_memory_utilization:.0%} of a GPU's leaves"]
    if model.load_format is LoadFormat.auto and (folder := local_folder(model.path)) is not None:
        size = sum(file.stat().st_size for file in safetensors_files(folder))
        parts.append(f"weights of {size / 2**20:,.0f} MiB in their files")
    each = f", each of {engines} variants, side by side" if engines > 1 else ""
    return " and ".join(parts) + each


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"


def require_setting(word: str, conf: Path) -> None:
    """Raises ConfigError where the first word is no setting and no flag: it was to be a command, or an experiment."""
    if not word or "=" in word or word.startswith(("-", "~")):
        return
    known = {name: name for name in COMMANDS} | {name: f"experiment={name}" for name in experiment_names(conf)}
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {known[close[0]]!r}?" if close else f"commands are {', '.join(COMMANDS)}."
    raise ConfigError(f"{word!r} is no command, and no setting, which is typed as key=value; {hint}")


def shorthand(arguments: Sequence[str], conf: Path) -> list[str]:
    """What is shorter to type than what Hydra reads: `model=<folder or hub name>` for a model that is no file in
    conf/model, `experiment.points.<axis>=[...]`, `~experiment.variants.<name>`, `slo.<bound>=...` of an experiment,
    `--record` and `--resume`; and a `scale` where only its model is typed: dtype, device and memory are the model's."""
    without = [argument for argument in arguments if argument.startswith(LEFT_OUT)]
    names = ",".join(argument.removeprefix(LEFT_OUT) for argument in without)
    changed, said = list[str](), dict(argument.partition("=")[::2] for argument in arguments)
    path = conf / "experiment" / f"{said.get('experiment')}.yaml"
    if "model" in said and "scale" not in said and path.is_file():
        wanted, scales = {"override /model": said["model"]}, read(path).get("scales") or {}
        fitting = [name for name in scales if wanted in (read(conf / f"scale/{name}.yaml").get("defaults") or [])]
        changed += [f"scale={name}" for name in fitting[:1]]  # before any flag, where Hydra takes no more settings
    changed += [f"measure.without=[{names}]"] if without else []  # it knows no key with a + in it
    for argument in arguments:
        if argument in without:
            continue
        key, _, value = argument.partition("=")
        other = key == "model" and not (conf / "model" / f"{value}.yaml").exists()
        if other and ("/" in value or Path(value).is_dir() or shipped_path(value) is not None):
            argument = f"engine.model.path={value}"
        if key.startswith("slo."):
            argument = f"experiment.{argument}"
        if key.lstrip("+").startswith(POINTS):
            argument = f"+measure.points={{{key.lstrip('+').removeprefix(POINTS)}: {value}}}"
        changed += [f"{key}={value}" for key, value in SHORT[argument].items()] if argument in SHORT else [argument]
    return changed


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}".rstrip() for left, right in rows)
