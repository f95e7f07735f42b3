"""The processes that a result is made of: each is started clean, one after the other, and has seeds of its own. What
they found is put together as that of one run."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from experiments.lab import interrupts
from experiments.lab.config import axes, schema
from experiments.lab.experiment import Findings, words
from experiments.lab.judge import formulas
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.show.progress import Steps
from experiments.lab.store.provenance import ProcessInfo
from experiments.lab.store.result import COMPLETE, OF_PROCESSES
from mini_infer.core.errors import ConfigError, MiniInferError

OF_SOME = re.compile(r"^Process ([\d, ]+): ")  # begins a note that not all processes say
# In how many processes peers are measured; and how notes of the run as a whole begin, which are made anew of all its
# processes.
PEER_PROCESSES = {
    "peers.processes": "Other systems than mini-infer are measured",
    "peers.hf.processes": "Transformers is measured",
}
BUSY = "Other GPUs of this machine"
OF_RUN = (*PEER_PROCESSES.values(), BUSY)
OF_ALL = ("rows", "requests", "gaps")  # tables to which every process adds
SEEDS = ("engine.seed", "engine.model.seed", "engine.speculation.draft.seed")  # of sampling, and of random weights


def measure(
    config: DictConfig,
    steps: Steps,
    said: Sequence[str] = (),
    earlier: Findings | None = None,
    keep: Callable[[Findings], None] = lambda so_far: None,
) -> Findings:
    """What all processes of `measure.processes` have found, put together; a single one is this process.

    An error in a process costs what that process had not finished, and the others are measured all the same; Ctrl-C or
    SIGTERM keeps what was finished. Raises what stopped the first process where it has finished nothing.

    Args:
        said: notes on the run as a whole.
        earlier: has processes that are not measured again.
        keep: gets what all processes have found so far, after each but the last.
    """
    settings = schema.build(schema.Measure, config.measure, "measure")
    notes = list(said)
    beside = settings.system is None and config.axes.via != axes.URL  # a system that is measured alone always is
    for key, what in PEER_PROCESSES.items():
        count = OmegaConf.select(config, key)
        if beside and count is not None and 0 < count < settings.processes:
            notes.append(f"{what} in {count} of {settings.processes} processes ({key}), because starting takes long.")
    found = [] if earlier is None else [earlier]
    left = [index for index in range(settings.processes) if index not in {p.index for f in found for p in f.processes}]
    several = settings.processes > 1
    for index in left:
        own = seeded(config, index)
        steps.begin_process(index, settings.processes)
        started, clock = datetime.now(timezone.utc), time.monotonic()
        try:
            findings = (_in_child if several else _here)(own, steps)
        except (Exception, KeyboardInterrupt) as error:
            if not found:
                raise
            findings = Findings([], status=f"incomplete: {words(error)}; nothing of it is kept", error=error)
        about = ProcessInfo(
            index=index,
            seed=seed_of(settings.seed, 0, index),
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            complete=findings.status == COMPLETE,
            **findings.gpu,
        )
        rows: dict[str, Any] = {n: [replace(row, process=index) for row in getattr(findings, n)] for n in OF_ALL}
        found.append(replace(findings, processes=[about], **rows))
        if index != left[-1]:
            keep(merged(found, settings.processes, notes))
        if isinstance(findings.error, KeyboardInterrupt):
            break
    if busy := max((about.busy_others or 0 for findings in found for about in findings.processes), default=0):
        notes.append(f"{BUSY}, {busy} at most, computed for somebody else when passes ended.")
    return merged(found, settings.processes, notes)


def seed_of(base: int, seed: int, process: int) -> int:
    """`base` itself in the first process of measure.seed=0, so that what a config states holds there."""
    if seed == process == 0:
        return base
    return int(np.random.SeedSequence([base, seed, process]).generate_state(1)[0])


def seeded(config: DictConfig, process: int) -> DictConfig:
    """The config of one process: prompts, lengths and arrivals (measure.seed), sampling and random weights."""
    seed, changed = config.measure.seed, dict[str, Any]()
    for key in SEEDS:
        if (base := OmegaConf.select(config, key)) is not None:
            changed[key] = seed_of(base, seed, process)
    for key in PEER_PROCESSES:
        if (count := OmegaConf.select(config, key)) is not None:
            changed[key] = max(0, count - process)
    profiled = OmegaConf.select(config, "experiment.profile")
    if profiled and process and not set(config.experiment.metrics) & set(formulas.OF_PROFILES):
        changed["experiment.profile"] = []  # the first process's are looked at
    if process and OmegaConf.select(config, "experiment.block_map"):
        changed["experiment.block_map"] = False  # the first process's is looked at, too
    gates = config.measure.gates and process == 0
    return schema.with_values(config, {**changed, "measure.seed": seed_of(seed, 0, process), "measure.gates": gates})


def _here(config: DictConfig, steps: Steps) -> Findings:
    if config.measure.threads is not None:
        torch.set_num_threads(config.measure.threads)
    return schema.experiment_class(config).from_config(config).measure(steps)


def _in_child(config: DictConfig, steps: Steps) -> Findings:
    """The child has a session of its own, so that Ctrl-C reaches it once, from here."""
    if get_start_method(allow_none=True) not in (None, *get_all_start_methods()):
        set_start_method("spawn", force=True)  # joblib's workers have one of its own, which a child would not know
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, config))
    child.start()
    theirs.close()
    try:
        return _follow(ours, steps)
    except KeyboardInterrupt as interrupt:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        try:
            return _follow(ours, steps)
        except EOFError:
            raise interrupt from None
    except EOFError:
        child.join()
        raise MiniInferError(f"the measuring process ended with code {child.exitcode}") from None
    finally:
        ours.close()
        child.join(timeout=60)
        child.kill()


def _follow(connection: Connection, steps: Steps) -> Findings:
    """Shows the child's progress until it hands its findings back. Raises its error, or EOFError where it is gone."""
    while True:
        what, values = connection.recv()
        if what == "findings":
            assert isinstance(values, Findings)
            return values
        if what == "error":
            raise values
        getattr(steps, what)(*values)


class _Relay(Steps):
    """Progress that is shown in the parent."""

    def __init__(self, connection: Connection) -> None:
        self._send: Callable[[tuple[str, tuple[Any, ...]]], None] = connection.send

    def plan(self, total: int) -> None:
        self._send(("plan", (total,)))

    def next(self, what: str) -> None:
        interrupts.keep()
        self._told = time.monotonic()
        self._send(("next", (what,)))

    def note(self, what: str) -> None:
        self._send(("note", (what,)))

    def tell(self, done: int, total: int) -> None:
        self._send(("tell", (done, total)))


def _child(connection: Connection, config: DictConfig) -> None:
    os.setsid()
    interrupts.listen(*interrupts.STOPS)
    _answer(connection, config)


def _answer(connection: Connection, config: DictConfig) -> None:
    try:
        found = _here(config, _Relay(connection))
        if not isinstance(found.error, ConfigError | None):  # which says what is wrong by itself
            traceback.print_exception(found.error)
        answer: tuple[str, Any] = ("findings", replace(found, error=found.error and _portable(found.error)))
    except BaseException as error:
        if not isinstance(error, ConfigError):
            traceback.print_exception(error)
        answer = ("error", _portable(error))
    with suppress(BrokenPipeError):  # nobody is left to hear it
        connection.send(answer)


def _portable(error: BaseException) -> BaseException:
    """The error itself, where it survives the way to another process; of an interrupt what was cut off stays here."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return MiniInferError(words(error))
    return error


def merged(found: Sequence[Findings], planned: int, notes: Sequence[str]) -> Findings:
    """Numbers, gates and requests of all, in the order of the processes; what stands for one (steps, profiles, samples)
    is the first one's that has it. `planned`: so many there should be. `notes` are of the run as a whole."""
    status, error = _status(found, planned)
    names = ("samples", "steps", "profiles", "kernels", "blocks", "experts")
    of_one: dict[str, Any] = {name: next((part for f in found if (part := getattr(f, name))), ()) for name in names}
    of_all: dict[str, Any] = {
        name: sorted((row for f in found for row in getattr(f, name)), key=lambda row: row.process) for name in OF_ALL
    }
    gates, worst = dict[Any, Gate](), dict[Any, ErrorGate]()
    # Of a process that was cut off none that passed: it is measured again, and what is joined cannot be taken apart.
    for gate in (g for f in found for g in f.gates if f is found[0] or f.status == COMPLETE or not g.passed):
        key = gate.variant, gate.point, gate.against
        gates[key] = gates[key].joined(gate) if key in gates else gate
    for one in (one for f in found for one in f.error_gates):  # an error that is no number is worse than any
        at = one.variant, one.point
        worst[at] = max(worst.get(at, one), one, key=lambda gate: (math.isnan(gate.error), gate.error))
    visited = {point.name: point for f in found for point in f.points or ()}  # a search visits others in each
    told = {n: of for f in found for n, of in apart(f.notes, [p.index for p in f.processes]).items()}
    return replace(
        found[0],
        **of_all,
        gates=list(gates.values()),
        error_gates=list(worst.values()),
        **of_one,
        status=status,
        error=error,
        notes=[*notes, *together({n: [note for note in told[n] if note not in notes] for n in sorted(told)})],
        peers={name: about for f in reversed(found) for name, about in f.peers.items()},
        points=list(visited.values()) or None,
        processes=sorted((about for f in found if f.rows for about in f.processes), key=lambda about: about.index),
    )


def _status(found: Sequence[Findings], planned: int) -> tuple[str, BaseException | None]:
    """Of one process as it says it; of several which ones are incomplete, and why."""
    whole = sum(bool(about.complete) for f in found for about in f.processes)
    wrong = [(f.processes[0].index, f) for f in found if f.status != COMPLETE]
    if planned == 1 or whole >= planned:
        return found[0].status, found[0].error
    told = [f"process {n + 1} of {planned}: {f.status.removeprefix('incomplete: ')}" for n, f in wrong]
    status = f"incomplete: {'; '.join([*told, f'{whole} of {planned} {OF_PROCESSES}'])}"
    return status, wrong[0][1].error if wrong else None


def together(notes: Mapping[int, Sequence[str]]) -> list[str]:
    """Notes by process. What all say is said once; else it stands with its process."""
    by: dict[str, list[str]] = {}
    for process, own in notes.items():
        for note in dict.fromkeys(own):
            by.setdefault(note, []).append(str(process + 1))
    return [note if len(who) == len(notes) else f"Process {', '.join(who)}: {note}" for note, who in by.items()]


def apart(notes: Sequence[str], processes: Sequence[int]) -> dict[int, list[str]]:
    """The notes of each of `processes`, of what `together` has made of them."""
    by: dict[int, list[str]] = {process: [] for process in processes}
    for note in notes:
        named = OF_SOME.match(note)
        for process in [int(n) - 1 for n in named[1].split(", ")] if named else processes:
            by.setdefault(process, []).append(note[named.end() if named else 0 :])
    return by
