"""A stored run's predictions, made anew of what steps are known to take today, or made at all where it was measured
without; of a calibration's steps the costs, fitted anew. What was measured stays as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from experiments.lab.config import catalog, schema
from experiments.lab.config.ablation_spec import ABLATION, require_files
from experiments.lab.config.points import flat, keys, within
from experiments.lab.config.spec import NONE_OF, PREDICTED, STEPS, TAKE
from experiments.lab.judge import prediction
from experiments.lab.measure import costs, hardware, processes
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.kinds import Kind
from experiments.lab.show import grids
from experiments.lab.show.progress import Steps
from experiments.lab.store import provenance, runs
from experiments.lab.store import result as store
from experiments.lab.store.rows import Row, from_plain
from mini_infer.core.errors import ConfigError

TRACE = "workload.path"  # a file that may lie elsewhere by now: the hash of what was in it is stored
ASKED = (*keys("experiment", "variants points mixes metrics slo search baseline"),
         *keys("measure", "processes repeats seed"))  # fmt: skip
TURN = ("process", "repeat")  # of a row; what is told of one pass alone has neither
CALIBRATE = "experiments.calibrate.Calibrate"
PREDICTS = (ABLATION, "experiments.disaggregation.Disaggregation")
FITTED_ANEW = "Fitted anew on"
OLD_PAGE = "Its page is still as before: run `python run.py report`"
SUMMARY = re.compile(r"\bOf \d+ predictions ")
OF_PREDICTIONS = re.compile(  # notes, behind the process that they are of
    rf"Predicted (anew )?on |{TAKE}|Of \d+ predictions |Predictions that missed by |"
    r"\d+ more could not be compared|[\d.]+% of the simulated steps lie beyond "
)


def again(path: Path, overrides: Sequence[str], root: Path) -> str:
    """Replaces the files of the run of that JSON, and says what has become of its errors. `root`: run.py's folder.

    Where it has no predictions, it gets those that it would have with measure.predict=true; of one that was stopped
    whole processes are predicted, of which it has a part. Raises ConfigError or StoreError where nothing of it can be
    predicted, it asks something else today, or its trace is not there; its files are as they were then."""
    before = store.read(path)
    info, remarks = before.info, path.with_name(path.name.removesuffix(".json") + store.REMARKS)
    place, names = store.run_path(info), [name for name in info.variants if name.endswith(PREDICTED)]
    if path.resolve().with_suffix("").parts[-len(place.parts) :] != place.parts:
        raise ConfigError(f"{path} is not where its run is stored: move its files to {place.parent} in a folder")
    results = path.resolve().parents[len(place.parts) - 1]
    of = info.config["experiment"]["_target_"]
    if of not in (*PREDICTS, CALIBRATE):
        raise ConfigError(f"{place}: nothing of {info.experiment} is predicted")
    config = _composed(info, overrides, root)
    experiment = schema.experiment_class(config).from_config(config)
    if of == CALIBRATE:
        return _fitted_anew(experiment, before, path, results, root)
    if first := not names:
        info = _with_predictions(info, experiment.variants, experiment.notes)
        names = [name for name in info.variants if name.endswith(PREDICTED)]
    if gone := [name.removesuffix(PREDICTED) for name in names if name not in experiment.variants]:
        raise ConfigError(f"{place}: nothing is predicted of {', '.join(gone)} today: measure it again")
    mark = "" if of == ABLATION else PREDICTED
    with open_dict(config):
        if mark:  # its variants are its own, and it simulates them by their names
            config.measure.system = Kind.simulated
        else:
            alone = {name: {**experiment.spec.variants[name], "label": info.variants[name]} for name in names}
            config.experiment.update({"variants": alone, "baseline": names[0]})
        config.experiment.claims = []
        config.measure.update({"predict": False, "gates": False, "aa": schema.Again.never})
    with Steps(info.experiment) as steps:
        found = processes.measure(config, steps)
    if found.error is not None:
        raise found.error
    _require_same(info, "workload.", info.workload, {**info.workload, **found.workload}, info.workload)
    visited = {*info.points, *(point.name for point in found.points or ())}
    points = {point.name: dict(point.values) for point in experiment.points if point.name in visited}
    info = replace(info, points=points, peers={**info.peers, **found.peers})
    before_and_now = names if first else grids.predictions_of(before.info)
    lost = [name for name in before_and_now if name not in grids.predictions_of(info)]
    if lost and (not first or lost == names):
        source = info.peers[lost[0]][0][STEPS]  # which says how to measure them
        raise ConfigError(f"{place}: today steps of {lost[0].removesuffix(PREDICTED)} would take {source}")
    of_lost = tuple([part for name in lost for part in (info.variants[name], f"{TAKE}{info.peers[name][0][STEPS]}")])
    said = [note for note in found.notes if not note.startswith(of_lost)]
    info, names = _without(info, lost), [name for name in names if name not in lost]
    every = [name for name, _ in store.TABLES.values() if getattr(before, name)]  # older results have fewer tables
    stored = {None, *(row.process for row in before.rows)}  # processes: one that was stopped early has left nothing
    tables: dict[str, Any] = {}
    for name in every:
        own = [row for row in getattr(found, name) if row.__dict__.get(TURN[0]) in stored and row.variant not in lost]
        own = [replace(row, variant=row.variant + mark) for row in own] if mark else own
        tables[name] = _replaced(getattr(before, name), own, names)
    info = replace(info, notes=_notes(info, said, tables["rows"], "on" if first else "anew on", root))
    lines = [f"removed  {remarks}, which was about the predictions before"] if remarks.exists() and not first else []
    with runs.exclusive(results):
        _require_unchanged(before, path)
        store.write(results, replace(before, info=info, **tables))
        if first and before.remarks:  # about what was measured
            store.write_atomic({remarks: f"{before.remarks}\n"})
    return _lines(_told(before), _told(store.read(path)), f"results  {path}", *lines)


def _fitted_anew(experiment: Any, before: store.Result, path: Path, results: Path, root: Path) -> str:
    """Writes the file of costs of a calibration's steps, and how far off they are."""
    info, machine = before.info, before.info.provenance.device
    folder = costs.FOLDER if results == root / "results" else results / "costs"
    name = machine["gpu"] if info.on_gpu else machine["cpu"]
    key = hardware.short_gpu_name(name) if info.on_gpu else "cpu"
    when, version = _when(root), info.provenance.versions["torch"]
    started = info.provenance.started[: len("2026-11-29")]
    anew = replace(before, rows=tuple(experiment.told(before.steps)))
    kept = [note for note in info.notes if not note.startswith(FITTED_ANEW)]
    info = replace(info, notes=(*kept, f"{FITTED_ANEW} {when}; measured as before."))
    with runs.exclusive(results):
        _require_unchanged(before, path)
        found = experiment.save(before.steps, folder, name, key, version, started, anew=when)
        store.write(results, replace(anew, info=info))
    return _lines(_errors(before), _errors(anew), f"costs    {found}", f"results  {path}")


def _lines(before: str, after: str, *files: str) -> str:
    return "\n".join([f"before   {before}", f"after    {after}", *files, OLD_PAGE])


def _errors(result: store.Result) -> str:
    return ", ".join(f"{row.point}: {row.metric} {row.value:.3g}" for row in result.rows)


def _require_unchanged(before: store.Result, path: Path) -> None:
    if store.read(path).info != before.info:
        raise ConfigError(f"{path} was written meanwhile: predict it again")


def _when(root: Path) -> str:
    changed = "" if provenance.is_clean(root) else ", with changes"
    return f"{datetime.now(timezone.utc):%Y-%m-%d} at commit {(provenance.commit(root) or 'not known')[:12]}{changed}"


def _with_predictions(info: store.RunInfo, today: Mapping[str, str], notes: Sequence[str]) -> store.RunInfo:
    """With those of `today`, name -> label, each behind what was measured, and with what `notes` say has none."""
    labels = {**today, **info.variants}
    variants = {key: labels[key] for name in info.variants for key in (name, name + PREDICTED) if key in labels}
    without = [note for note in notes if note.startswith(NONE_OF)]
    if variants == info.variants:
        raise ConfigError(". ".join([f"{store.run_path(info)}: nothing that it measured can be predicted", *without]))
    return replace(info, variants=variants, notes=(*info.notes, *without))


def _without(info: store.RunInfo, names: Collection[str]) -> store.RunInfo:
    """Where the first predictions of a run would be bounds or estimates: no column beside what was measured."""
    labels = [(info.variants[name].removesuffix(", predicted"), info.peers[name][0][STEPS]) for name in names]
    notes = [f"{NONE_OF}{label}: its steps would take {source}." for label, source in labels]
    variants = {key: label for key, label in info.variants.items() if key not in names}
    peers = {key: peer for key, peer in info.peers.items() if key not in names}
    return replace(info, variants=variants, peers=peers, notes=(*info.notes, *notes))


def _told(result: store.Result) -> str:
    """How far off the predictions are: by the claims on them, or else as the notes say."""
    notes = " ".join(note for note in result.info.notes if SUMMARY.search(note))
    return grids.misses_in_words(result) or notes or "no prediction can be compared"


def _composed(info: store.RunInfo, overrides: Sequence[str], root: Path) -> DictConfig:
    """The config of its command as it is made today, on the machine that measured, whichever this is; with
    predictions."""
    if other := [one for one in overrides if not one.startswith(f"{TRACE}=")]:
        raise ConfigError(f"{other[0]}: all is as it was measured; {TRACE}=FILE alone may say where its trace lies now")
    typed = [one for one in shlex.split(info.provenance.command)[2:] if one not in schema.SHORT]
    known = ("experiment", "measure.predict", *([TRACE] if overrides else []))
    predict = ["measure.predict=true"] if info.config["experiment"]["_target_"] in PREDICTS else []
    typed = [*(one for one in typed if one.partition("=")[0] not in known), *predict, *overrides]
    config = catalog.settled(info.experiment, typed, root).config
    then, now = (flat(store.plain(of)) for of in (info.config, schema.plain(config)))
    # A new setting is as it was without; and defaults of the engine may be others today.
    of_load = [key for key in then if key.startswith("workload.") and key != TRACE]
    asked = [key for key in {**then, **now} if within(key, ASKED) and not key.endswith(".label")]
    _require_same(info, "", then, now, [*of_load, *asked])
    try:
        require_files(config)
    except ConfigError as why:
        raise ConfigError(f"{why}. Say where it lies now: python run.py predict RUN {TRACE}=FILE") from None
    values = {key: value for key, value in then.items() if key.startswith("engine.") and now.get(key) != value}
    machine = info.provenance.device
    if not info.on_gpu and config.measure.threads is None:
        values["measure.threads"] = machine["torch_threads"]
    if not config.hardware.machine:
        ceilings = [asdict(from_plain(Ceilings, info.ceilings))] if info.ceilings else []
        sizes = {"memory_gib": machine.get("gpu_memory_gib"), "host_memory_gib": machine["ram_gib"]}
        values["hardware"] = {"machine": machine["gpu" if info.on_gpu else "cpu"], "ceilings": ceilings, **sizes}
    return schema.with_values(config, values)


def _require_same(
    info: store.RunInfo, section: str, then: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str]
) -> None:
    pairs = {name: (store.plain(then.get(name)), store.plain(now.get(name))) for name in names}
    if changed := [f"{section}{name}={new} (then {old})" for name, (old, new) in pairs.items() if old != new]:
        asks = f"{store.run_path(info)} asks something else today than when it was measured"
        raise ConfigError(f"{asks}, {', '.join(changed)}: measure it again")


def _replaced(before: Sequence[Any], found: Sequence[Any], names: Collection[str]) -> tuple[Any, ...]:
    """Rows with those of `names` found anew, which stand where those of the same pass stood."""
    anew, turn = dict[Any, list[Any]](), lambda row: (row.variant, row.point, *map(row.__dict__.get, TURN))
    for row in found:
        anew.setdefault(turn(row), []).append(row)
    kept = [row for old in before for row in (anew.pop(turn(old), ()) if old.variant in names else [old])]
    return (*kept, *chain(*anew.values()))


def _notes(info: store.RunInfo, found: Sequence[str], rows: Sequence[Row], on: str, root: Path) -> tuple[str, ...]:
    labels = tuple(label for name, label in info.variants.items() if name.endswith(PREDICTED))
    bare = {note: processes.OF_SOME.sub("", note) for note in info.notes}
    kept = [note for note, text in bare.items() if not (OF_PREDICTIONS.match(text) or text.startswith(labels))]
    by_process = {number: [row for row in rows if row.process == number] for number in {row.process for row in rows}}
    told = {n: prediction.remarks(own, grids.predictions_of(info), info.variants) for n, own in by_process.items()}
    anew = f"Predicted {on} {_when(root)}; measured as before."
    return (*kept, *(note for note in found if note not in kept), *processes.together(told), anew)
