"""The pure parts of vLLM as a peer: its arguments from our settings, and the loop that drives it, on an engine that is
made up."""

import importlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from made_up_trace import trace

from experiments.lab.judge import validity
from experiments.lab.judge.validity import Evidence
from experiments.lab.measure.profile import CALM, STEP, STEPS, NoProfile
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.peers import vllm
from experiments.lab.peers.vllm import VLLM, engine_arguments, model_folder, open_peer
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

SHAPE = {"model_type": "qwen3", "vocab_size": 100}
DUMMY = {"load_format": "dummy", "hf_config": SHAPE}


@pytest.fixture
def arguments(tmp_path):
    return lambda **sections: engine_arguments(EngineConfig.from_dict(sections), tmp_path)


@pytest.mark.parametrize(("routing", "strategy"), [("uniform", "uniform_random"), ("learned", None)])
def test_it_draws_experts_where_ours_does(monkeypatch, arguments, routing, strategy):
    monkeypatch.setenv(vllm.ROUTING, "")
    monkeypatch.delenv(vllm.ROUTING)
    model = {"path": "tiny-moe", "routing": routing}
    vllm.set_routing(EngineConfig.from_dict({"model": model}))
    assert os.environ.get(vllm.ROUTING) == strategy
    assert arguments(model=model)["model"] == "tiny-moe", "and nothing else says so"
    with pytest.raises(ConfigError, match=r"has no model\.routing=zipf"):
        arguments(model=model | {"routing": "zipf"})


def test_our_settings_have_their_names_there(arguments):
    found = arguments(
        model={"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096},
        parallel={"tensor": 2},
        cache={"block_size": 32, "prefix_caching": False, "gpu_memory_utilization": 0.4},
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 2048, "policy": "priority"},
    )
    assert found == {
        "model": "tiny-target",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_cudagraph_capture_size": 512,
        "enable_chunked_prefill": True,
        "scheduling_policy": "priority",
        "block_size": 32,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,
        "seed": 0,
        "disable_log_stats": True,
    }


def test_its_draws_are_those_of_the_process(arguments):
    assert arguments(seed=5)["seed"] == 5
    assert arguments(seed=2**31 + 7)["seed"] == 7  # seeds of processes have 32 bits, and kernels take signed ones


def test_quantized_weights_are_told_in_its_words(arguments):
    def of(**model):
        found = arguments(model={**DUMMY, **model})
        config = json.loads((Path(found["model"]) / "config.json").read_text())
        shutil.rmtree(found["model"])
        return found.get("quantization"), config.get("quantization_config")

    assert of() == (None, None)
    assert of(quantization="fp8") == ("fp8", None)
    assert of(quantization="fp8_block")[1]["weight_block_size"] == [128, 128]
    for scheme, form, bits, group in (
        ("w8a8", "int-quantized", 8, None),
        ("w8a16", "pack-quantized", 8, None),
        ("w4a16", "pack-quantized", 4, 64),
    ):
        name, config = of(quantization=scheme, quantization_group=64)
        weights = config["config_groups"]["group_0"]["weights"]
        assert (name, config["format"], weights["num_bits"], weights.get("group_size")) == (None, form, bits, group)
        assert config["ignore"] == ["lm_head"]
    assert arguments(cache={"dtype": "fp8"})["kv_cache_dtype"] == "fp8"
    with pytest.raises(ConfigError, match=r"no model\.quantization=mixed"):
        of(quantization="mixed")
    with pytest.raises(ConfigError, match=r"no model\.quantization=w8a8 of tiny-target: it rounds to fp8 alone"):
        arguments(model={"quantization": "w8a8"})


def test_kv_memory_in_bytes_or_blocks_takes_the_place_of_a_share(arguments):
    found = arguments(cache={"memory_gib": 2.0, "num_blocks": 100})
    assert found["kv_cache_memory_bytes"] == 2**31
    assert found["num_gpu_blocks_override"] == 100
    assert found["gpu_memory_utilization"] == vllm.NO_CLAIM


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"cache": {"layout": "contiguous", "prefix_caching": False}}, "cache.layout=contiguous"),
        ({"scheduler": {"batching": "static"}}, "scheduler.batching=static"),
        ({"scheduler": {"preemption": "swap"}}, "scheduler.preemption=swap"),
        ({"model": {"load_format": "dry"}}, "model.load_format=dry"),
        ({"speculation": {"method": "suffix"}}, "speculation.method=suffix"),
        ({"speculation": {"method": "ngram"}}, "speculation.adaptive=true"),
    ],
)
def test_what_it_does_not_have_is_refused(sections, setting, arguments):
    with pytest.raises(ConfigError, match=rf"the variant kind `vllm` has no {setting}"):
        arguments(**sections)


def test_a_shape_becomes_a_folder(arguments, tmp_path):
    assert json.loads(Path(arguments(model=DUMMY)["model"], "config.json").read_text()) == SHAPE
    assert model_folder("/a/folder", None, tmp_path) == "/a/folder"


def test_drafts_are_the_same_ones(arguments):
    lookup = {"method": "ngram", "num_tokens": 3, "ngram_min": 1, "adaptive": False}
    assert "worker_cls" not in arguments(speculation=lookup)
    assert arguments(speculation=lookup)["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    draft = {"load_format": "dummy", "hf_config": {**SHAPE, "vocab_size": 90}}
    synthetic = {"method": "synthetic", "acceptance": 0.5, "num_tokens": 3, "adaptive": False, "draft": draft}
    found = arguments(model=DUMMY, speculation=synthetic)["speculative_config"]
    assert json.loads(Path(found.pop("model"), "config.json").read_text()) == SHAPE  # rows for the target's tokens
    assert found == {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25, 0.125],  # of all drafts up to each place
    }


def test_a_trained_draft_is_a_folder(arguments):
    given = {"method": "draft", "adaptive": False, "draft": {"path": "tiny-draft"}}
    asked = arguments(speculation=given)
    assert asked["worker_cls"] == vllm.DRAFT_WORKER
    found = asked["speculative_config"]
    assert (found["method"], Path(found["model"]).joinpath("config.json").exists()) == ("draft_model", True)
    with pytest.raises(ConfigError, match="drafts with a model or with ngram"):
        arguments(speculation={"method": "synthetic", "acceptance": 0.5, "adaptive": False})


@pytest.mark.parametrize("told", [False, True])
def test_a_drafter_of_vllm_is_told_of_its_graphs_once(monkeypatch, told):
    class Worker:
        def __init__(self):
            self.model_runner = MagicMock()

        def initialize_from_config(self, kv_cache_config):
            self.model_runner.compilation_config.cudagraph_mode = kv_cache_config
            self.model_runner.drafter.cudagraph_dispatcher.keys_initialized = told

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.worker.gpu_worker"].Worker = Worker
    module, _, name = vllm.DRAFT_WORKER.rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    worker = getattr(importlib.import_module(module), name)()
    del sys.modules[module]  # which was made of the stand-in
    worker.initialize_from_config("settled")
    assert worker.model_runner.drafter.initialize_cudagraph_keys.mock_calls == ([] if told else [call("settled")])


def test_it_is_absent_where_it_cannot_be_imported():
    with pytest.raises(vllm.PeerAbsent, match=r"vLLM cannot be imported here \(No module named 'vllm'\): peers.vllm"):
        open_peer(EngineConfig(), {"args": {}})


class InProcess:
    """An engine core without a process: a step adds one token to every request, the number of its step."""

    def __init__(self, step_s=0.0):
        self.engine_core = MagicMock()  # whose queue has outputs whenever it is asked
        self.running = {}
        self.steps = 0
        self.cached = ["a block"]
        self._step_s = step_s

    def add_request(self, name, prompt, params, priority=0):
        if len(prompt["prompt_token_ids"]) > 50:
            raise ValueError("the prompt is too long")
        self.running[name] = [prompt["prompt_token_ids"], params, []]

    def step(self):
        time.sleep(self._step_s)
        self.steps += 1
        return self.advance()

    def advance(self):
        outputs = []
        for name, (prompt, wanted, tokens) in list(self.running.items()):
            tokens.append(prompt[0])
            done = len(tokens) == wanted
            out = SimpleNamespace(token_ids=[prompt[0]], finish_reason="length" if done else None)
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[out], finished=done, num_cached_tokens=len(self.cached))
            )
            if done:
                del self.running[name]
        return outputs

    def reset_prefix_cache(self):
        if self.running or self.steps % 2:
            self.steps += 1
            return False
        self.cached.clear()
        return True


class Beside(InProcess):
    """Its steps run in a thread, and leave their outputs in a queue."""

    def __init__(self, step_s):
        super().__init__(step_s)
        self.engine_core.outputs_queue = queue.Queue()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def add_request(self, *args, **kwargs):
        with self._lock:
            super().add_request(*args, **kwargs)

    def _run(self):
        while True:
            time.sleep(self._step_s)
            with self._lock:
                outputs = self.advance()
            if outputs:
                self.engine_core.outputs_queue.put(outputs)

    def step(self):
        return self.engine_core.outputs_queue.get()


def peer(engine):
    return VLLM(engine, lambda output_tokens: output_tokens, {}, Path())


def test_a_closed_loop_keeps_its_places():
    served = peer(InProcess(0.001)).serve([Item((n,), 2 + n % 2, name="x") for n in range(5)], 2)
    assert [r.token_ids for r in served.requests] == [(n,) * (2 + n % 2) for n in range(5)]
    assert all(len(r.token_times) == len(r.token_ids) and r.sent is None for r in served.requests)
    events = [(r.arrival, 1) for r in served.requests] + [(r.token_times[-1], -1) for r in served.requests]
    in_flight = deque([0])
    for _, change in sorted(events, key=lambda event: (event[0], event[1])):
        in_flight.append(in_flight[-1] + change)
    assert max(in_flight) == 2
    assert served.start <= served.requests[0].arrival
    assert served.requests[-1].token_times[-1] <= served.end


@pytest.mark.parametrize("engine", [InProcess(0.001), Beside(0.1)])
def test_requests_arrive_on_schedule(engine):
    items = [Item((1,), 4, arrival_s=0.0), Item((2,), 2, arrival_s=0.03), Item((3,), 2, arrival_s=0.2)]
    served = peer(engine).serve(items, 1)
    assert [r.arrival - served.start for r in served.requests] == pytest.approx([0, 0.03, 0.2])
    for request in served.requests:
        assert request.arrival <= request.sent < request.arrival + 0.05  # also while a step of 100 ms runs
        assert request.token_times[0] >= request.sent
        assert request.lag < 0.05


def test_the_time_to_take_a_request_is_its_own(monkeypatch):
    """As that of the engine in this process is: of a burst the last one waits for all before it."""
    engine = InProcess()
    take = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda *args, **more: (time.sleep(0.002), take(*args, **more)))
    served = peer(engine).serve([Item((n,), 2, arrival_s=0.0) for n in range(20)], 1)
    assert served.requests[-1].sent - served.requests[-1].arrival > 0.03
    assert "client_fell_behind" not in dict(validity.broken(Evidence(served, 100)))


def test_a_client_that_is_busy_with_answers_is_found(monkeypatch):
    answered = Outcomes.answered
    monkeypatch.setattr(Outcomes, "answered", lambda self: (answered(self), time.sleep(0.02))[0])
    served = peer(InProcess(0.001)).serve([Item((n,), 8, arrival_s=0.004 * n) for n in range(6)], 1)
    assert "the client fell behind its schedule" in validity.problem(Evidence(served, 100))


def test_a_turn_begins_with_the_one_before_it():
    items = [Item((1, 2), 2), Item((9,), 1, follows=0, think_s=0.01)]
    first, second = peer(InProcess()).serve(items, 1).requests
    assert second.prompt_tokens == 2 + 2 + 1
    assert second.arrival >= first.token_times[-1] + 0.01


def test_a_request_that_is_refused_leaves_the_others_alone():
    items = [Item((1,) * 60, 2), Item((4,), 2, follows=0), Item((2,), 2)]
    refused, lost, fine = peer(InProcess()).serve(items, 1).requests
    assert refused.error == "the prompt is too long"
    assert "has no answer" in lost.error
    assert (fine.error, fine.token_ids) == ("", (2, 2))


def test_it_forgets_as_soon_as_no_block_is_held(monkeypatch):
    engine = InProcess()
    engine.steps = 1  # one is still on its way
    peer(engine).forget()
    assert engine.cached == []
    engine.running["x"] = None
    monkeypatch.setattr(vllm, "FORGET_S", 0.05)
    with pytest.raises(RuntimeError, match="does not give its prefix cache up"):
        peer(engine).forget()


class Profiled(InProcess):
    """One that writes a made-up trace, with vLLM's name of a step, when its profiler is stopped."""

    def __init__(self, traces, max_model_len=200):
        super().__init__()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        self._traces, self.started_at, self.stopped_at = traces, 0, 0

    def has_unfinished_requests(self):
        return bool(self.running)

    def start_profile(self):
        self.started_at = self.steps

    def stop_profile(self):
        self.stopped_at = self.steps
        text = json.dumps(trace()).replace(STEP, "execute_context_0(0)_generation_2(2)")
        (self._traces / "rank0.1.pt.trace.json").write_text(text)

    def abort_request(self, names):
        for name in names:
            self.running.pop(name, None)


def test_its_kernels_stand_beside_ours(tmp_path):
    engine = Profiled(tmp_path)
    subject = VLLM(engine, lambda output_tokens: output_tokens, {}, tmp_path)
    profile, kernels = subject.profile([Item((1, 2), 2), Item((3,), 2)], "vllm", "batch 2")
    assert (profile.variant, profile.point, profile.rows, profile.busy_us) == ("vllm", "batch 2", 2, pytest.approx(87))
    assert {row.role for row in kernels} == {"linear", "attention", "sample"}
    assert (engine.started_at, engine.stopped_at - engine.started_at) == (CALM + STEPS, STEPS)
    assert not engine.running


def test_without_room_to_decode_there_is_no_profile(tmp_path):
    subject = VLLM(Profiled(tmp_path, 100), lambda output_tokens: output_tokens, {}, tmp_path)
    with pytest.raises(NoProfile, match="the model's length leaves 99 tokens after the longest prompt"):
        subject.profile([Item((1,), 2)], "v", "p")
