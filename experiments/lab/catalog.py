"""What can be chosen: the experiments with their questions, and the option groups. Read from conf/ itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

EXAMPLES = (
    ("python run.py experiment=quickstart", "one experiment, as it is"),
    ("python run.py experiment=quickstart measure.repeats=3", "with a setting changed"),
    ("python run.py experiment=quickstart engine/prefill=whole", "with a mechanism swapped"),
    ("python run.py experiment=quickstart model=/path/to/a/folder", "on a Hugging Face model"),
    ("python run.py -m experiment=quickstart measure.seed=0,1", "a sweep"),
    ("python run.py -m 'experiment=glob(*)'", "every experiment"),
    ("python run.py report", "all reports again, from results/ alone"),
    ("python run.py experiment=quickstart --cfg job", "the composed config, without a run"),
)


def groups(conf: Path) -> dict[str, list[str]]:
    """Group -> its options, experiments aside."""
    found: dict[str, list[str]] = {}
    for path in sorted(conf.rglob("*.yaml")):
        group = path.parent.relative_to(conf).as_posix()
        if group not in (".", "experiment"):
            found.setdefault(group, []).append(path.stem)
    return found


def experiments(conf: Path) -> dict[str, str]:
    """Experiment -> the question it answers."""
    found = {}
    for path in sorted((conf / "experiment").glob("*.yaml")):
        node = OmegaConf.load(path)
        found[path.stem] = str(OmegaConf.select(node, "experiment.question") or "")
    return found


def experiment_list(conf: Path) -> str:
    return _table([(name, question) for name, question in experiments(conf).items()])


def help_text(conf: Path) -> str:
    rows = [(group, "  ".join(options)) for group, options in groups(conf).items()]
    return "\n".join(
        [
            "mini-infer: run an experiment; it writes results/ and a report with figures in reports/",
            "",
            "  python run.py experiment=<name> [group=option ...] [key=value ...]",
            "",
            "Experiments",
            experiment_list(conf),
            "",
            "Option groups (group=option)",
            _table(rows),
            "",
            "Keys (key=value): engine.model.*, engine.cache.*, engine.scheduler.*, engine.attention.*, workload.*,",
            "measure.repeats, measure.seed, measure.threads, paths.results, paths.reports; --cfg job shows all of them",
            "with their values.",
            "",
            "Examples",
            _table(EXAMPLES),
            "",
            "--hydra-help tells about Hydra's own flags.",
        ]
    )


def shorthand(arguments: Sequence[str], conf: Path) -> list[str]:
    """`model=<folder or hub name>` for a model that is no file in conf/model: the same as engine.model.path=..."""
    changed = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_path = "/" in value or Path(value).is_dir()
        if key == "model" and is_path and not (conf / "model" / f"{value}.yaml").exists():
            argument = f"engine.model.path={value}"
        changed.append(argument)
    return changed


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}".rstrip() for left, right in rows)
