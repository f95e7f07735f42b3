"""Profiles the decode steps of a live engine, in a pass of its own that nothing is timed in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from experiments.lab.measure import profile
from experiments.lab.measure.profile import CALM, STEPS, KernelRow, NoProfile, StepProfile
from experiments.lab.workloads import Item
from mini_infer import LLMEngine, SamplingParams

_numbers = count()  # passes share no request names and no cached prefixes


def profile_decode(engine: LLMEngine, items: Sequence[Item], variant: str, point: str) -> tuple[
    StepProfile, list[KernelRow]
]:  # fmt: skip
    """Decodes all `items` together, some steps without the profiler and some under it, and aborts them.

    Raises NoProfile where the engine runs on no GPU, cannot hold the items together, or they leave no room to decode.
    """
    if not torch.cuda.is_available():
        raise NoProfile("it takes a GPU")
    names = _admit(engine, items)
    try:
        _until_all_decode(engine, len(items))
        plain_us = _plain_us(engine)
        trace = _trace(engine)
        if engine.records[-1].decode_tokens != len(items):  # else the mean would be of fewer rows than it says
            raise NoProfile("some of them ended while its steps were profiled")
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_unfinished_requests():
            engine.step()
    return profile.analyse(trace, variant, point, len(items), plain_us)


def _admit(engine: LLMEngine, items: Sequence[Item]) -> list[str]:
    room = engine.max_model_len - max(len(item.prompt) for item in items)
    if room < 4 * (STEPS + CALM):
        raise NoProfile(f"the model's length leaves {room} tokens after the longest prompt, too few to decode for long")
    salt = f"profile {next(_numbers)}"
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    about: dict[str, Any] = {"cache_salt": salt, "stream": False}
    adapters: list[Any] = list(engine.adapters) or [None]  # in turn, as the driver deals them
    return [
        engine.add_request(
            list(item.prompt), params, request_id=f"{salt}-{index}", adapter=adapters[index % len(adapters)], **about
        )
        for index, item in enumerate(items)
    ]


def _until_all_decode(engine: LLMEngine, rows: int) -> None:
    calm = 0
    while engine.has_unfinished_requests():
        engine.step()
        record = engine.records[-1] if engine.records else None
        full = record is not None and not record.prefill_tokens and record.decode_tokens == rows
        calm = calm + 1 if full else 0
        if calm == CALM:
            return
    raise NoProfile(f"the engine does not decode {rows} requests together")


def _plain_us(engine: LLMEngine) -> float:
    """A step's mean time, as long as the profiler is off."""
    torch.cuda.synchronize()
    start = engine.clock()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    return 1e6 * (engine.clock() - start) / STEPS


def _trace(engine: LLMEngine) -> dict[str, Any]:
    """Chrome's JSON of STEPS steps, each in an annotation."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for _ in range(STEPS):
                with torch.profiler.record_function(profile.STEP):
                    engine.step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
