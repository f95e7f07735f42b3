"""What can be chosen: the experiments with their questions, and the option groups. Read from conf/ itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from experiments.lab.commands import COMMANDS
from experiments.lab.schema import RECORDED

POINTS = "experiment.points."
EXAMPLES = (
    ("python run.py experiment=quickstart", "one experiment, as it is"),
    ("python run.py experiment=quickstart measure.repeats=3", "with a setting changed"),
    ("python run.py experiment=quickstart engine/prefill=whole", "with a mechanism swapped"),
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
        if group not in (".", "experiment"):
            found.setdefault(group, []).append(path.stem)
    return found


def defaults(conf: Path) -> dict[str, str]:
    """Group -> the option that is taken where nothing is said; groups that take none then are left out."""
    entries = OmegaConf.to_container(OmegaConf.load(conf / "config.yaml").defaults)
    assert isinstance(entries, list)
    named = [entry for entry in entries if isinstance(entry, dict)]
    return {str(group): option for entry in named for group, option in entry.items() if option is not None}


def experiments(conf: Path) -> dict[str, str]:
    """Experiment -> the question it answers."""
    found = {}
    for path in sorted((conf / "experiment").glob("[!_]*.yaml")):
        node = OmegaConf.load(path)
        found[path.stem] = str(OmegaConf.select(node, "experiment.question") or "")
    return found


def experiment_list(conf: Path) -> str:
    return _table([(name, question) for name, question in experiments(conf).items()])


def help_text(conf: Path) -> str:
    chosen = defaults(conf)
    rows = [
        (group, "  ".join(option + "*" * (option == chosen.get(group)) for option in options))
        for group, options in groups(conf).items()
    ]
    return "\n".join(
        [
            "mini-infer: run an experiment; it writes results/ and a report with figures in reports/",
            "",
            "  python run.py experiment=<name> [group=option ...] [key=value ...]",
            "",
            "Experiments",
            experiment_list(conf),
            "",
            "Option groups (group=option; * is taken where nothing is said)",
            _table(rows),
            "",
            "Without a choice engine/prefix_cache is what engine/cache can do, and hardware is looked up by its name.",
            "",
            "Keys (key=value): engine.model.*, engine.cache.*, engine.scheduler.*, engine.attention.*,",
            "engine.graphs.*, workload.*, measure.repeats, measure.seed, measure.threads, peers.vllm.*, peers.hf.*,",
            "tracker.project, paths.results, paths.reports; --cfg job shows all of them with their values.",
            "",
            "Commands",
            _table([(f"python run.py {name} {command.usage}", command.help) for name, command in COMMANDS.items()]),
            "",
            "Examples",
            _table(EXAMPLES),
            "",
            "--hydra-help tells about Hydra's own flags.",
        ]
    )


def shorthand(arguments: Sequence[str], conf: Path) -> list[str]:
    """What is shorter to type than what Hydra reads: `model=<folder or hub name>` for a model that is no file in
    conf/model, `experiment.points.<axis>=[...]` where the axis has dots in its name, and `--record`."""
    changed = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_path = "/" in value or Path(value).is_dir()
        if key == "model" and is_path and not (conf / "model" / f"{value}.yaml").exists():
            argument = f"engine.model.path={value}"
        if key.lstrip("+").startswith(POINTS):
            argument = f"+measure.points={{{key.lstrip('+').removeprefix(POINTS)}: {value}}}"
        changed += [f"{key}={value}" for key, value in RECORDED.items()] if argument == "--record" else [argument]
    return changed


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}".rstrip() for left, right in rows)
