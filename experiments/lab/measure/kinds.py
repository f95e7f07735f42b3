"""The systems that can be measured, and what each of them can do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from experiments.lab.points import keys


class Kind(str, Enum):
    engine = "engine"  # mini-infer
    hf = "hf"  # transformers.generate over static, left-padded batches
    hf_continuous = "hf_continuous"  # transformers' continuous batching
    vllm = "vllm"
    served = "served"  # mini-infer behind its own HTTP server
    vllm_served = "vllm_served"  # vLLM behind its own
    served_bench = "served_bench"  # the load of `vllm bench serve` on `served`
    vllm_bench = "vllm_bench"  # and on `vllm_served`
    simulated = "simulated"  # mini-infer on a virtual clock, whose steps take what they are known to take
    http = "http"  # any server that speaks the OpenAI API, at peers.http.url

    @property
    def label(self) -> str:
        return SYSTEMS[self].label

    @property
    def can(self) -> System:
        return SYSTEMS[self]


@dataclass(frozen=True)
class System:
    label: str
    module: str = ""  # with its `open_peer`, of those that can run in a process of their own; "" of others
    over_http: bool = False  # the load client talks to it
    client_of: Kind | None = None  # the system with the server that it loads, of those that are a load client
    ours: bool = False  # it is this engine, which gates check before it is timed
    steps: bool = False  # it tells StepRecords
    profiled: bool = False  # its decode steps can be profiled
    own_weights: bool = False  # of random weights it makes its own; else it has the engine's
    caches: bool = False  # it has the engine's switch for a prefix cache
    open_loop: bool = True  # it takes requests at their times
    chains: bool = True  # it takes requests that follow others, and priorities
    elsewhere: bool = False  # somebody else has started it: it has an address, and its memory is not ours
    needs_gpu: bool = False  # it is measured on a CUDA device alone
    reads: tuple[str, ...] = ()  # settings, or sections of them, beside those that every system has


_OURS = ("engine", "measure.gates")
_SERVED = (*_OURS, "peers.served", "peers.client")
_MODEL = keys("engine.model", "path hf_config load_format tokenizer dtype device max_model_len")
_ROOM = keys("engine.cache", "gpu_memory_utilization memory_gib")
_HF = (*_MODEL, *_ROOM, "engine.model.seed", "peers.hf")
_VLLM = (
    *(*_MODEL, *_ROOM, "engine.parallel.tensor", "engine.speculation", "peers.vllm"),
    *keys("engine.model", "quantization quantization_group quantization_symmetric routing"),
    *keys("engine.cache", "block_size dtype layout num_blocks prefix_caching"),
    *keys("engine.scheduler", "batching chunked_prefill max_num_batched_tokens max_num_seqs policy preemption"),
)
_HF_CONTINUOUS = (
    *(*_HF, *keys("engine.cache", "block_size num_blocks")),
    *keys("engine.scheduler", "max_num_batched_tokens max_num_seqs"),
)
_VLLM_SERVER = (*_VLLM, "engine.parallel.replicas")
_VLLM_SERVED = (*_VLLM_SERVER, "peers.client")
_BENCH = ("engine", "peers.served", "peers.vllm")
_HTTP = (*_MODEL, "peers.http", "peers.client")
SYSTEMS = {
    Kind.engine: System("mini-infer", ours=True, steps=True, profiled=True, caches=True, reads=_OURS),
    Kind.hf: System("transformers.generate", "experiments.lab.peers.hf", open_loop=False, chains=False, reads=_HF),
    Kind.hf_continuous: System(
        "transformers continuous batching", "experiments.lab.peers.hf_continuous", chains=False, reads=_HF_CONTINUOUS
    ),
    Kind.vllm: System(
        "vLLM", "experiments.lab.peers.vllm", profiled=True, own_weights=True, caches=True, needs_gpu=True, reads=_VLLM
    ),
    Kind.served: System(
        "mini-infer over HTTP", "experiments.lab.load.subject", ours=True, over_http=True, caches=True, reads=_SERVED
    ),
    Kind.vllm_served: System(
        "vLLM over HTTP",
        "experiments.lab.load.vllm_server",
        over_http=True,
        own_weights=True,
        caches=True,
        needs_gpu=True,
        reads=_VLLM_SERVED,
    ),
    Kind.served_bench: System("vllm bench serve", client_of=Kind.served, open_loop=False, chains=False, reads=_BENCH),
    Kind.vllm_bench: System(
        "vllm bench serve on vLLM",
        client_of=Kind.vllm_served,
        own_weights=True,
        open_loop=False,
        chains=False,
        needs_gpu=True,
        reads=_VLLM_SERVER,
    ),
    Kind.simulated: System("mini-infer, simulated", steps=True, caches=True, reads=("engine", "measure.costs")),
    Kind.http: System("an OpenAI server", over_http=True, own_weights=True, elsewhere=True, reads=_HTTP),
}
SERVED = {Kind.engine: Kind.served, Kind.vllm: Kind.vllm_served}  # behind its own HTTP server
