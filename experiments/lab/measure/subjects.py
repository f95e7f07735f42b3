"""The engine as what is measured: how it is driven through a workload on schedule, and how its decode steps are
profiled, in a pass of their own that nothing is timed in."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.lab.measure.block_map import BlockWatch, NoMap
from experiments.lab.measure.kinds import Kind, Subject
from experiments.lab.measure.profile import CALM, STEP, STEPS, KernelRow, NoProfile, StepProfile, analyse
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.measure.traces import BlockRow, Served
from experiments.lab.workloads import Item
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepRecord
from mini_infer.core.request import FinishReason
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport
from mini_infer.speculative.policy.costs import StepCosts


class EngineSubject(Subject):
    """One engine. Whatever it has cached stays from pass to pass, until it is to forget it."""

    def __init__(self, config: EngineConfig, tell: Callable[[int, int], None] = lambda ended, total: None) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        if (path := config.cache.disk_prefix_path) is not None:  # in there, one of its own: nothing of other passes
            Path(path).mkdir(parents=True, exist_ok=True)
            self._folder = TemporaryDirectory(dir=path, ignore_cleanup_errors=True)
            config = replace(config, cache=replace(config.cache, disk_prefix_path=self._folder.name))
        others = torch.cuda.memory_allocated()
        self.engine = LLMEngine(config)
        self._held = torch.cuda.memory_allocated() - others  # of a GPU's memory, between passes; 0 without one
        self._step_costs: StepCosts | None = None  # by rows and drafts
        if config.speculation.most:
            self._step_costs = self.engine.executor.step_costs()
            self.engine.core.reset()
        self.about = _facts(self.engine.startup)
        self._on_gpu = self.engine.startup.device != "cpu"  # as the dry model says, wherever it is
        self._compiled = compiled_kernels() if self._on_gpu else []
        self._tell = tell

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        known, reserved, allocated = len(self._compiled), torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        served = drive(self.engine, items, concurrency, tell=self._tell)
        peak = self._peak_memory(served.records, allocated)
        self._held += torch.cuda.memory_allocated() - allocated
        return replace(
            served,
            peak_memory=peak,
            memory_growth=max(0, torch.cuda.memory_reserved() - reserved),
            compiled=tuple(self._compiled[known:]),
            step_costs=self._step_costs,
            kv_token_bytes=self.engine.startup.kv_token_bytes or None,
        )

    def _peak_memory(self, records: Sequence[StepRecord], before: int) -> int | None:
        """Bytes at the fullest moment of a pass: on a GPU what torch's allocator had given out to this engine, with the
        whole KV pool; `before` the pass it had given out so much, to all that live here. On a CPU, whose high water
        would mostly be torch itself, weights and KV blocks in use. None of the dry model, which has neither."""
        if self._on_gpu:
            return self._held + torch.cuda.max_memory_allocated() - before
        startup, used = self.engine.startup, max((record.kv.used_blocks for record in records), default=0)
        return startup.weight_bytes + used * (startup.kv_bytes // startup.num_kv_blocks) or None

    def forget(self) -> None:
        """An empty block pool, and nothing of what was drafted and accepted: as it was when it had started."""
        self.engine.core.reset()
        if self.engine.executor.files is not None:
            shutil.rmtree(self.engine.executor.files.folder, ignore_errors=True)

    def profile(self, items: Sequence[Item], variant: str, point: str) -> tuple[StepProfile, list[KernelRow]]:
        return profile_decode(self.engine, items, variant, point)

    def map_blocks(self, items: Sequence[Item], concurrency: int, variant: str, point: str) -> list[BlockRow]:
        watch = BlockWatch(self.engine.core)
        self.engine.observers.append(watch)
        try:
            served = drive(self.engine, items, concurrency, tell=self._tell)
        finally:
            self.engine.observers.remove(watch)
        if failed := [request.error for request in served.requests if request.error]:
            raise NoMap(f"{len(failed)} of {len(items)} requests failed: {failed[0]}")
        return list(watch.rows(variant, point))

    def reserve_memory(self) -> None:
        self.engine.executor.reserve_memory()

    def close(self) -> None:
        self.engine.close()
        if self._folder is not None:
            self._folder.cleanup()


def drive(
    engine: LLMEngine,
    items: Sequence[Item],
    concurrency: int,
    *,
    tell: Callable[[int, int], None] = lambda ended, total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Serves `items` greedily, each with exactly its output length. Prompts and parameters are made before the clock
    starts. After each step `tell` is told how many requests have ended, of how many.

    Two kinds of request, which may be mixed:
        closed loop   no arrival time: the next one arrives when there is a place among `concurrency` in flight
        open loop     it arrives at its scheduled time, however many are in flight, and its latency starts then

    A request that follows another one (multi-turn) arrives `think_s` after that answer's last token, with that prompt
    and the tokens that were really generated in front of its own. It is closed loop or open as its conversation's first
    one. The engine runs in this thread, so a request can only be handed over between two steps.
    """
    outcomes, records = Outcomes(items, engine.clock), list[StepRecord]()
    params = [SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True) for item in items]
    adapters: Sequence[str | None] = list(engine.adapters) or [None]  # requests have them in turn
    failures, last_error = 0, ""

    def send(index: int) -> None:
        engine.add_request(
            outcomes.prompts[index],
            params[index],
            request_id=outcomes.names[index],
            priority=items[index].priority,
            adapter=adapters[index % len(adapters)],
            arrival_time=outcomes.sent[index].arrival,
            stream=False,
        )

    def advance(due: float | None) -> bool:
        nonlocal failures, last_error
        if not engine.has_unfinished_requests():
            if due is not None:
                sleep(max(0.0, due - engine.clock()))
            return due is not None
        try:
            outputs, failures = engine.step(), 0
        except Exception as error:
            failures += 1
            if failures > len(items):  # each should have ended a request
                raise
            outputs, last_error = [], f"{type(error).__name__}: {error}"
        outcomes.answered()
        failed = {
            FinishReason.error: last_error or "the engine could not finish it",
            FinishReason.abort: "it was aborted",
        }
        for output in outputs:
            if output.finished:
                (completion,) = output.outputs
                metrics = completion.metrics
                assert metrics is not None
                outcomes.end(
                    outcomes.index_of[output.request_id],
                    failed.get(completion.finish_reason, "") if completion.finish_reason else "",
                    metrics.token_times,
                    completion.token_ids,
                    cached_tokens=metrics.num_cached_tokens,
                    first_scheduled=metrics.first_scheduled_time,
                    preemptions=metrics.num_preemptions,
                )
        tell(len(outcomes.traces), len(items))
        return True

    engine.observers.append(records.append)
    try:
        return outcomes.run(concurrency, send, advance, records)
    finally:
        engine.observers.remove(records.append)


@functools.cache
def compiled_kernels() -> list[str]:
    """Names of the kernels that Triton compiles from now on in this process, to which others are added as they come."""
    from triton import knobs

    names: list[str] = []

    def heard(*, metadata: dict[str, Any], cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            names.append(metadata["name"])

    knobs.compilation.listener = heard
    return names


def _facts(startup: StartupReport) -> dict[str, Any]:
    """On a CPU the run's config says all of it."""
    if startup.device == "cpu":
        return {}
    own, heads = startup.kv_token_bytes, startup.kv_token_bytes_of_heads
    saved = "" if own == heads else f", {own:,} bytes a token instead of {heads:,} ({own / heads - 1:+.1%})"
    drafts = {
        "speculation": startup.speculation,
        "CUDA graphs of steps with drafts": _captured(startup.draft_graphs, "numbers of tokens"),
        "draft model": f"{startup.draft_weight_bytes / 2**30:.2f} GiB, KV {startup.draft_kv_bytes / 2**30:.2f} GiB",
    }
    return {
        "prompts": startup.attention_prefill,
        "decode rows": startup.attention_decode,
        "kernels": startup.kernels,
        "sampler": startup.sampler,
        "overlap": "on" if startup.overlap else "off",
        **({"ranks": f"{startup.tensor_parallel}; sums: {startup.all_reduce}"} if startup.tensor_parallel > 1 else {}),
        "CUDA graphs": _captured(startup.graphs, "batch sizes"),
        "CUDA graphs of steps with prompts": _captured(startup.prefill_graphs, "numbers of tokens"),
        **({} if startup.speculation == "none" else drafts),
        "weights": f"{startup.weight_bytes / 2**30:.2f} GiB",
        **({"adapters": f"{startup.adapter_bytes / 2**30:.2f} GiB"} if startup.adapter_bytes else {}),
        "KV": f"{startup.num_kv_blocks:,} blocks, {startup.kv_bytes / 2**30:.2f} GiB{saved}",
        "started in": f"{startup.seconds:.1f} s",
    }


def _captured(report: CaptureReport, sizes: str) -> str:
    cost = f"{report.seconds:.1f} s, {report.memory_bytes / 2**20:,.0f} MiB"
    pieces = ", in pieces" if report.in_pieces else ""
    captured = f"of {len(report.batch_sizes)} {sizes} up to {max(report.batch_sizes, default=0)}{pieces} ({cost})"
    return "; ".join([*([captured] if report.batch_sizes else []), *report.limits])


_numbers = count()  # profiled passes share no request names and no cached prefixes


def profile_decode(
    engine: LLMEngine, items: Sequence[Item], variant: str, point: str
) -> tuple[StepProfile, list[KernelRow]]:
    """Decodes all `items` together, some steps without the profiler and some under it, and aborts them.

    Raises NoProfile where the engine runs on no GPU, cannot hold the items together, or they leave no room to decode.
    """
    if not torch.cuda.is_available():
        raise NoProfile("it takes a GPU")
    room = engine.max_model_len - max(len(item.prompt) for item in items)
    if room < 4 * (STEPS + CALM):
        raise NoProfile(f"the model's length leaves {room} tokens after the longest prompt, too few to decode for long")
    salt = f"profile {next(_numbers)}"
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    adapters: list[Any] = list(engine.adapters) or [None]  # in turn, as the driver deals them
    names = [
        engine.add_request(
            list(item.prompt),
            params,
            request_id=f"{salt}-{index}",
            adapter=adapters[index % len(adapters)],
            cache_salt=salt,
            stream=False,
        )
        for index, item in enumerate(items)
    ]
    try:
        _until_all_decode(engine, len(items))
        torch.cuda.synchronize()
        start = engine.clock()
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
        plain_us = 1e6 * (engine.clock() - start) / STEPS
        trace = _trace(engine)
        if engine.records[-1].decode_tokens != len(items):  # else the mean would be of fewer rows than it says
            raise NoProfile("some of them ended while its steps were profiled")
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_unfinished_requests():
            engine.step()
    return analyse(trace, variant, point, len(items), plain_us)


def _until_all_decode(engine: LLMEngine, rows: int) -> None:
    calm = 0
    while engine.has_unfinished_requests():
        engine.step()
        last = engine.records[-1] if engine.records else None
        calm = calm + 1 if last and not last.prefill_tokens and last.decode_tokens == rows else 0
        if calm == CALM:
            return
    raise NoProfile(f"the engine does not decode {rows} requests together")


def _trace(engine: LLMEngine) -> dict[str, Any]:
    """Chrome's JSON of STEPS steps, each in an annotation."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            with torch.profiler.record_function(STEP):
                engine.step()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def require_servable(kind: Kind, items: Sequence[Item], variant: str) -> None:
    """Raises ConfigError where a peer cannot do what the workload asks."""
    for what, can, asked in (
        ("requests that follow others", kind.can.chains, any(item.follows is not None for item in items)),
        ("priorities", kind.can.chains, any(item.priority for item in items)),
        ("arrival times (an open loop)", kind.can.open_loop, any(item.arrival_s is not None for item in items)),
    ):
        if asked and not can:
            raise ConfigError(
                f"experiment.variants.{variant}: the kind {kind.value} cannot serve {what}, which the workload has. "
                "Choose another workload, or leave this variant out"
            )
