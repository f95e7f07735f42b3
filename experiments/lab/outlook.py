"""What a run would measure, before it does: `python run.py show prefix_cache scale=7b`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments.lab import catalog, points, schema, typed
from experiments.lab.axes import nodes
from experiments.lab.explain import suggest
from experiments.lab.store import result as store
from mini_infer.core.errors import ConfigError


def outlook(experiment: str, overrides: Sequence[str], root: Path) -> str:
    """Raises ConfigError as a run would. Hydra's own errors come as they are."""
    conf = root / "conf"
    known = catalog.experiments(conf)
    if experiment not in known:
        raise ConfigError(f"unknown experiment {experiment!r}{suggest(experiment, known)}")
    schema.register(conf)
    given = [f"experiment={experiment}", *catalog.shorthand(overrides, conf)]
    with initialize_config_dir(str(conf), version_base="1.3"):
        settled = typed.settle(compose("config", overrides=given), experiment, given)
    spec = schema.plain(settled.config.experiment)
    axes, measure = settled.axes, settled.config.measure
    measured = {f"scale={scale} via={via}": None for scale, via, _ in nodes(settled.config)}
    lines = [
        f"{spec['title']}",
        f"  {spec['question']}",
        "",
        f"scale     {axes.scale}, via {axes.via}; there are: {', '.join(measured) or 'no others'}",
        f"model     {settled.config.engine.model.path}, {settled.config.engine.model.dtype.name} on "
        f"{settled.config.engine.model.device.name}",
    ]
    if "variants" in spec:
        lines.append(f"variants  {', '.join(spec['variants'])} (baseline {spec.get('baseline')})")
    grid = points.grid(spec.get("points") or {})
    lines.append(f"points    {len(grid)}" + (f": {'; '.join(point.name for point in grid)}" if grid[0].name else ""))
    lines += [
        f"metrics   {', '.join(spec.get('metrics') or [])}",
        f"repeats   {measure.repeats} in each of {measure.processes} processes",
    ]
    lines += [f"claims    {len(spec.get('claims') or [])}", f"code      {', '.join(spec.get('code') or [])}"]
    lines += [f"note      {note}" for note in settled.notes]
    for path in sorted((root / "results" / experiment / f"{axes.scale}.{axes.via}").glob("*/default.json")):
        info = store.read(path).info
        lines.append(
            f"last run  {info.provenance.seconds / 60:.0f} minutes on {info.hardware}, {info.provenance.started}"
        )
    return "\n".join(lines)
