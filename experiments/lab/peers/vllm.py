"""vLLM's engine, driven step by step as a program that embeds it does (`LLMEngine`, v1).

It gets token ids and gives them back: no tokenizer and no detokenizer run. `step` returns what is new of each request,
and a token's time is when it did. Its scheduler and model run in another process, which does not wait for this one
between steps, and a request that arrives while a step runs is sent then.

What bounds the service is the engine's: dtype, lengths, rows and tokens of a step, KV block size and memory, prefix
cache, policy. All else is vLLM's own choice: attention backend, CUDA graphs, compilation, asynchronous scheduling.
Where a model drafts, a fault of it is mended (vllm_worker.py).
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

from experiments.lab.measure.kinds import PeerAbsent, Subject
from experiments.lab.measure.profile import CALM, STEPS, KernelRow, NoProfile, StepProfile, analyse
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.calibration.compressed import quantization_config
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.core.config import Batching, CacheDType, EngineConfig, Layout, LoadFormat, Policy, Preemption
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import ModelConfig, Quantization, Routing
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.modeling.model_files import read_json, resolve_folder

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    "OMP_NUM_THREADS": "1",  # as vLLM itself has it where it starts several workers
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # a package of its own, and not for greedy tokens
}
ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # to which experts tokens go, where not the router's
LARGEST_GRAPH = 512  # tokens, its own limit; beside few rows it has twice as many, and launches chunks kernel by kernel
NO_CLAIM = 0.05  # of the GPU, which vLLM only looks whether it is free where its KV memory is given in bytes
DRAFT_WORKER = "experiments.lab.peers.vllm_worker.WorkerWithDraftGraphs"
FORGET_S = 10.0  # a step that was launched ahead may still hold blocks of requests that have ended
SETTINGS = {  # as recorded -> where it stands in VllmConfig
    "dtype": "model_config.dtype",
    "max_model_len": "model_config.max_model_len",
    "tensor_parallel": "parallel_config.tensor_parallel_size",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "block_size": "cache_config.block_size",
    "num_blocks": "cache_config.num_gpu_blocks",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "compilation": "compilation_config.mode",
    "cuda_graphs": "compilation_config.cudagraph_mode",
    "largest_graph": "compilation_config.max_cudagraph_capture_size",
    "worker": "parallel_config.worker_cls",  # its own, or ours, which mends a fault (vllm_worker.py)
}


@dataclass
class VLLM(Subject):
    engine: Any  # vLLM's LLMEngine
    make_params: Any  # output tokens -> its SamplingParams
    about: Mapping[str, Any]
    traces: Path  # the folder that its profiler writes to
    numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of passes

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Prompts and parameters are made before the clock starts."""
        engine, clock = self.engine, time.perf_counter
        outcomes = Outcomes(items, clock, f"pass-{next(self.numbers)}-")
        params = [self.make_params(item.output_tokens) for item in items]
        token_ids: list[list[int]] = [[] for _ in items]
        token_times: list[list[float]] = [[] for _ in items]

        def send(index: int) -> None:
            prompt = {"type": "token", "prompt_token_ids": outcomes.prompts[index]}
            engine.add_request(outcomes.names[index], prompt, params[index], priority=items[index].priority)

        def advance(due: float | None) -> bool:
            if not outcomes.schedule.in_flight:
                if due is not None:
                    time.sleep(max(0.0, due - clock()))
                return due is not None
            if due is not None:  # until when an output of the engine's process is waited for
                told = engine.engine_core.outputs_queue
                with told.not_empty:
                    if not told.not_empty.wait_for(lambda: told.queue, max(0.0, due - clock())):
                        return True
            outputs, now = engine.step(), outcomes.answered()
            for output in outputs:
                index, completion = outcomes.index_of[output.request_id], output.outputs[0]
                token_ids[index] += completion.token_ids
                token_times[index] += [now] * len(completion.token_ids)
                if output.finished:
                    reason, cached = completion.finish_reason, output.num_cached_tokens or 0
                    error = "" if reason == "length" else f"vLLM ended it: {reason}"
                    outcomes.end(index, error, token_times[index], token_ids[index], cached_tokens=cached)
            return True

        return outcomes.run(concurrency, send, advance)

    def forget(self) -> None:
        end = time.monotonic() + FORGET_S
        while not self.engine.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError("vLLM does not give its prefix cache up, though no request is running")
            time.sleep(0.01)

    def profile(self, items: Sequence[Item], variant: str, point: str) -> tuple[StepProfile, list[KernelRow]]:
        engine, prompts = self.engine, [list(item.prompt) for item in items]
        room = engine.vllm_config.model_config.max_model_len - max(map(len, prompts))
        if room < 4 * (STEPS + CALM):
            raise NoProfile(f"the model's length leaves {room} tokens after the longest prompt")
        number = next(self.numbers)
        names = [f"profile-{number}-{index}" for index in range(len(prompts))]
        try:
            for name, prompt in zip(names, prompts, strict=True):
                engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, self.make_params(room))
            calm = 0
            while calm < CALM:
                calm = calm + 1 if len(engine.step()) == len(prompts) else 0
                if not engine.has_unfinished_requests():
                    raise NoProfile(f"vLLM does not decode {len(prompts)} requests together")
            start = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            plain_us = 1e6 * (time.perf_counter() - start) / STEPS
            engine.start_profile()
            for _ in range(STEPS):
                engine.step()
            engine.stop_profile()
        finally:
            engine.abort_request(names)
        newest = max(self.traces.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return analyse(json.loads(newest.read_text()), variant, point, len(prompts), plain_us)


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> VLLM:
    """Raises PeerAbsent where vLLM cannot be imported, and ConfigError for what it does not have."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # its default: the core beside its client
    set_routing(config)
    vllm = import_vllm("config", "sampling_params", "v1.engine.llm_engine")
    traces = Path(tempfile.mkdtemp())  # in that of this process, and gone with it
    profiler = vllm.config.ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(traces),
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        own = {"skip_tokenizer_init": True, "profiler_config": profiler}
        arguments = engine_arguments(config, Path(folder)) | own | settings["args"]
        engine = vllm.v1.engine.llm_engine.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))

    def make_params(output_tokens: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )

    return VLLM(engine, make_params, describe(vllm.__version__, engine.vllm_config, settings), traces)


def set_routing(config: EngineConfig) -> None:
    """For a vLLM that this process is to start."""
    if config.model.routing is Routing.uniform:
        os.environ[ROUTING] = "uniform_random"


def import_vllm(*modules: str) -> Any:
    """The package, and these of its modules. Raises PeerAbsent where they cannot be imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        for module in modules:
            importlib.import_module(f"vllm.{module}")
        return importlib.import_module("vllm")
    except ImportError as error:
        raise PeerAbsent(
            f"vLLM cannot be imported here ({error}): peers.vllm.python or peers.vllm.pythonpath say where it is"
        ) from error


def engine_arguments(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """Our settings by the names of vLLM's EngineArgs. In `folder` lies what it reads of models that are no folders."""
    cache, scheduler, model, speculation = config.cache, config.scheduler, config.model, config.speculation
    drafts = speculation.method is not SpeculationMethod.none
    missing = {
        "speculation.method=suffix": speculation.method is SpeculationMethod.suffix,  # a package of its own
        "speculation.adaptive=true": drafts and speculation.adaptive,
        "cache.layout=contiguous": cache.layout is not Layout.paged,
        "scheduler.batching=static": scheduler.batching is not Batching.continuous,
        "speculation.draft.quantization": drafts and speculation.draft.quantization is not Quantization.none,
        "scheduler.policy=shortest": scheduler.policy is Policy.shortest,
        "scheduler.preemption=swap": scheduler.preemption is not Preemption.recompute,
        "model.load_format=dry": model.load_format is LoadFormat.dry,
        "model.routing=zipf": model.routing is Routing.zipf,
    }
    for setting, is_set in missing.items():
        if is_set:
            raise ConfigError(f"the variant kind `vllm` has no {setting}: leave it out of that variant")
    quantization, hf_config = _quantization(model)
    arguments: dict[str, Any] = {
        "model": model_folder(model.path, hf_config, folder / "model"),
        "dtype": model.dtype.value,
        "load_format": model.load_format.value,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": config.parallel.tensor,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_cudagraph_capture_size": LARGEST_GRAPH,
        "enable_chunked_prefill": scheduler.chunked_prefill,
        "scheduling_policy": scheduler.policy.value,
        "block_size": cache.block_size,
        "enable_prefix_caching": cache.prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "disable_log_stats": True,
        "seed": (config.seed or 0) % 2**31,  # of its draws; its random weights are the same each time
        **quantization,
    }
    if cache.dtype is CacheDType.fp8:
        arguments["kv_cache_dtype"] = "fp8"
    if cache.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = cache.num_blocks
    if cache.memory_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cache.memory_gib * 2**30)
        arguments["gpu_memory_utilization"] = NO_CLAIM
    if drafts:
        arguments["speculative_config"] = _speculative_config(speculation, arguments["model"], folder / "draft")
    if speculation.has_draft_model:
        arguments["worker_cls"] = DRAFT_WORKER
    return arguments


def _quantization(model: ModelConfig) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Arguments, and the model's config.json where its weights are random. vLLM rounds bf16 weights to fp8 alone; to
    all else a config.json tells it that they are."""
    scheme = model.quantization
    if scheme is Quantization.none:
        return {}, model.hf_config
    if scheme is Quantization.fp8:
        return {"quantization": "fp8"}, model.hf_config
    if scheme is Quantization.mixed or model.hf_config is None:
        raise ConfigError(
            f"the variant kind `vllm` has no model.quantization={scheme.value} of {model.path or 'random weights'}: it "
            "rounds to fp8 alone, and takes w8a8, w8a16, w4a16 and fp8_block for random weights (model.hf_config)"
        )
    if scheme is Quantization.fp8_block:
        blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {}, {**model.hf_config, "quantization_config": blocks}
    recipe = Recipe(scheme.value, Method.rtn, model.quantization_group, model.quantization_symmetric)
    return {}, {**model.hf_config, "quantization_config": quantization_config(recipe, ["lm_head"])}


def model_folder(path: str, hf_config: Mapping[str, Any] | None, folder: Path) -> str:
    """A folder with the model's config.json: its own, or `folder` with what `hf_config` says."""
    if hf_config is None:
        return path
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    return str(folder)


def _speculative_config(speculation: SpeculationConfig, target: str, folder: Path) -> dict[str, Any]:
    """vLLM's synthetic rates are those of all drafts up to a place, ours is that of a draft behind accepted ones. It
    wants equal vocabularies: a draft of random weights gets the target's."""
    found: dict[str, Any] = {"num_speculative_tokens": speculation.num_tokens}
    if speculation.method is SpeculationMethod.ngram:
        lookup = {"prompt_lookup_min": speculation.ngram_min, "prompt_lookup_max": speculation.ngram_max}
        return {**found, "method": "ngram", **lookup}
    draft = speculation.draft
    if not draft.given:
        raise ConfigError("the variant kind `vllm` drafts with a model or with ngram: set speculation.draft")
    if draft.hf_config is None:
        model = str(resolve_folder(str(draft.path)))
    else:
        vocabulary = read_json(Path(target) / "config.json")["vocab_size"]
        model = model_folder("", {**draft.hf_config, "vocab_size": vocabulary}, folder)
    found |= {"method": "draft_model", "model": model}
    if speculation.rate is not None:
        rates = [speculation.rate**place for place in range(1, speculation.num_tokens + 1)]
        found |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return found


def describe(version: str, config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM has settled on, from its VllmConfig."""
    import torch

    about: dict[str, Any] = {"vllm": version, "torch": str(torch.__version__)}
    about["cpu_threads"] = torch.get_num_threads()
    for name, path in SETTINGS.items():
        value = reduce(lambda node, part: getattr(node, part, None), path.split("."), config)
        if type(value) not in (bool, int, type(None)):  # an enum's member, or a dtype
            value = str(getattr(value, "name", value)).removeprefix("torch.")
        about[name] = value
    if (drafts := config.speculative_config) is not None:
        about["speculation"] = f"{drafts.method}, {drafts.num_speculative_tokens} drafts"
        if rates := getattr(drafts, "synthetic_acceptance_rates", None):
            about["speculation"] += f", all accepted up to each place at {', '.join(f'{rate:.3f}' for rate in rates)}"
    if routing := os.environ.get(ROUTING):
        about["routing"] = routing
    return {**about, "attention": _attention(config), **settings["args"]}


def _attention(config: Any) -> str:
    """The backend that vLLM chooses for this model here. It tells it only in its log, so it is asked once more."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        shape = model.get_head_size(), model.dtype, config.cache_config.cache_dtype
        backend = get_attn_backend(*shape, use_mla=model.use_mla)
        name: str = backend.get_name()
        return f"{name} {get_flash_attn_version()}" if name.startswith("FLASH_ATTN") else name
