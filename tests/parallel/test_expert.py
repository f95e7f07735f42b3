"""Experts that ranks share: where tokens go, what comes back, and what it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import Dispatch, ModelConfig, ParallelConfig
from mini_infer.core.plan import ExpertTraffic
from mini_infer.kernels.interface import ExpertWeights, Routes
from mini_infer.kernels.moe.reference import experts_reference
from mini_infer.kernels.ops import InvariantKernels, Kernels, TorchKernels
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model import Model
from mini_infer.modeling.sharding import require_ranks, require_shared_experts
from mini_infer.parallel import peer_memory
from mini_infer.parallel.all_reduce import Collectives, join_store, listen, open_store
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.expert import ExpertExchange, ExpertRanks, settled
from mini_infer.parallel.expert_meter import Meter, traffic_of

pytestmark = pytest.mark.usefixtures("plain_sampler")
CPU = torch.device("cpu")
EXPERTS, CHOSEN, HIDDEN, INNER = 6, 3, 16, 8
OVER_GROUPS = [Dispatch.grouped, Dispatch.packed, Dispatch.padded]  # direct takes processes
T = TypeVar("T")


def together(size: int, work: Callable[[ParallelContext], T]) -> list[T]:
    """What each of `size` ranks gets, in threads of this process. Who waits for one that failed is left waiting."""
    store, done = open_store(listen()), SimpleQueue()

    def rank(number: int) -> None:
        try:
            own = store if number == 0 else join_store(store.port)
            done.put((number, work(ParallelContext(number, size, Collectives(own, number, size, CPU))), None))
        except BaseException as error:
            done.put((number, None, error))

    threads = [Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    found = {}
    while len(found) < size:
        number, result, error = done.get(timeout=60)
        if error is not None:
            raise error
        found[number] = result
    # While a thread ends, for a moment after it can be joined, it holds locks of MKL's: what a test forked then would
    # wait for one for ever.
    while any(Path(f"/proc/self/task/{thread.native_id}").exists() for thread in threads):
        time.sleep(0.001)
    return [found[number] for number in range(size)]


class OneAtATime(InvariantKernels):
    """Triton's interpreter knows one thread."""

    _lock = Lock()

    def experts(self, *arguments: Any) -> Tensor:
        with self._lock:
            return super().experts(*arguments)

    def add_experts(self, *arguments: Any) -> Tensor:
        with self._lock:
            return super().add_experts(*arguments)


class Layer(NamedTuple):
    x: Tensor  # [T, H]
    routes: Routes
    weights: ExpertWeights

    @classmethod
    def made(cls, tokens: int, one_expert: bool = False) -> Layer:
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)]).int()
        if one_expert:
            ids = torch.zeros_like(ids)
        weights = ExpertWeights(random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER))
        return cls(random(tokens, HIDDEN), Routes(ids, random(tokens, CHOSEN).abs()), weights)

    def over(self, size: int, form: Dispatch, kernels: Kernels) -> tuple[Tensor, list[ExpertTraffic]]:
        """What `size` ranks make of it, and what it took each."""

        def work(context: ParallelContext) -> tuple[Tensor, ExpertTraffic]:
            own = context.rows_of(range(EXPERTS))
            weights = ExpertWeights(*(part[own.start : own.stop] for part in self.weights[:2]))
            routes = Routes(*map(context.rows_of, self.routes))
            meter = Meter(CPU, kernels)
            exchange = ExpertExchange(ExpertRanks(context, form), EXPERTS, kernels)
            y = exchange.experts(context.rows_of(self.x), routes, weights, None, len(self.x), meter)
            return y, traffic_of(meter.take())

        found = together(size, work)
        assert all(torch.equal(y, found[0][0]) for y, _ in found)
        return found[0][0], [traffic for _, traffic in found]


@pytest.mark.parametrize("form", OVER_GROUPS)
@pytest.mark.parametrize(("size", "tokens"), [(2, 11), (3, 7), (2, 1)])  # of one token, the second rank has none
def test_every_form_computes_every_token(form: Dispatch, size: int, tokens: int) -> None:
    layer = Layer.made(tokens)
    y, _ = layer.over(size, form, TorchKernels())
    torch.testing.assert_close(y, experts_reference(*layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", OVER_GROUPS)
def test_one_expert_may_take_everything(form: Dispatch) -> None:
    layer = Layer.made(9, one_expert=True)
    y, _ = layer.over(2, form, TorchKernels())
    torch.testing.assert_close(y, experts_reference(*layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", OVER_GROUPS)
def test_sums_in_one_order_are_those_of_one_rank_to_the_bit(form: Dispatch) -> None:
    layer, kernels = Layer.made(5), OneAtATime()
    y, _ = layer.over(2, form, kernels)
    assert torch.equal(y, kernels.experts(*layer))


def test_bytes_are_those_of_the_rows_that_go() -> None:
    layer, row = Layer.made(10), HIDDEN * 4
    goes = [layer.routes.ids[:5] >= EXPERTS // 2, layer.routes.ids[5:] < EXPERTS // 2]  # each rank's, to the other
    rows = [int(there.any(1).sum()) for there in goes]
    _, packed = layer.over(2, Dispatch.grouped, TorchKernels())
    _, exact = layer.over(2, Dispatch.grouped, OneAtATime())
    _, padded = layer.over(2, Dispatch.padded, TorchKernels())
    busiest = max(int(half.flatten().bincount().max()) for half in layer.routes.ids.split(5))
    for rank in range(2):
        ideal = 2 * rows[rank] * row
        about = rows[rank] * 2 * CHOSEN * 4  # ids and weights
        assert packed[rank][:2] == (ideal + about, ideal)
        assert exact[rank][:2] == (ideal // 2 + about + int(goes[rank].sum()) * row, ideal)
        assert padded[rank][:2] == (2 * EXPERTS // 2 * busiest * row, ideal)
        assert min(packed[rank][3:]) > 0


PROMPTS = [[5, 9, 2, 77, 31], [8] * 9, [5, 9, 2, 77, 31, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
MakeEngine = Callable[..., LLMEngine]


FORMS = [form for form in Dispatch if form is not Dispatch.auto]


def generated(engine: LLMEngine) -> list[tuple[list[int], list[float]]]:
    ends = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    return [(end.token_ids, [entry.logprob for entry in end.logprobs]) for end in ends]


SMALL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
}


def one_process(**sections: Any) -> LLMEngine:
    return LLMEngine(EngineConfig.from_dict({"cache": {"num_blocks": 64}, "seed": 0, **sections}))


SHAPE = {"path": "made up", "load_format": "dummy", "hf_config": SMALL}
MODEL = {**SHAPE, "count_experts": True, "routing": "uniform"}


@pytest.mark.parametrize("form", Dispatch)
def test_engines_over_ranks_give_the_tokens_of_one_process(make_engine: MakeEngine, form: Dispatch) -> None:
    model, few = MODEL, {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    if form is Dispatch.direct:
        pytest.importorskip("triton")
        model = {**MODEL, "kernels": "triton"}
    engine, alone = (
        make_engine(tensor=1, model=model, scheduler=few, parallel={"expert": 2, "dispatch": form}),
        one_process(model=model, scheduler=few),
    )
    ours, theirs = generated(engine), generated(alone)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert (engine.startup.expert_parallel, engine.startup.dispatch) == (
        2,
        "grouped" if form is Dispatch.auto else form,
    )
    assert engine.startup.all_reduce == "none"
    half_of_the_experts = 2 * 3 * 32 * 16 * 4
    assert engine.startup.weight_bytes == alone.startup.weight_bytes - half_of_the_experts
    for own, other in zip(engine.records, alone.records, strict=True):
        assert own.expert_tokens == other.expert_tokens
    traffic = [record.expert_traffic for record in engine.records]
    assert all(step is not None and step.sent_bytes >= step.ideal_bytes > 0 for step in traffic)
    assert alone.records[0].expert_traffic is None


def test_batch_invariant_engines_agree_to_the_bit(make_engine: MakeEngine) -> None:
    sections: dict[str, Any] = {"model": SHAPE, "numerics": "batch_invariant"}
    found = [generated(make_engine(tensor=1, parallel={"expert": 2, "dispatch": form}, **sections)) for form in FORMS]
    assert found == [generated(one_process(**sections))] * len(FORMS)


def test_tokens_go_directly_where_gpus_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mini_infer.kernels.ops import TritonKernels

    def found(form: Dispatch, device: str = "cuda:3", kernels: Kernels | None = None) -> Dispatch:
        """Of the second rank of a second stage."""
        return settled(form, ranks, torch.device(device), kernels or TritonKernels())

    asked, others_reach = list[tuple[int, int]](), True
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: asked.append((gpu.index, peer)) or True)
    ranks: Any = SimpleNamespace(rank=1, size=2, on_all_ranks=lambda here: here and others_reach)
    assert found(Dispatch.packed) is Dispatch.packed
    assert found(Dispatch.auto, kernels=TorchKernels()) is Dispatch.grouped
    assert found(Dispatch.auto, "cpu") is Dispatch.grouped
    assert asked == []
    assert found(Dispatch.auto) is Dispatch.direct
    assert asked == [(3, 2)]
    others_reach = False
    assert found(Dispatch.auto) is Dispatch.grouped, "as all ranks find, whichever of them cannot"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    others_reach, ranks.rank = True, 0
    assert found(Dispatch.auto, "cuda:0") is Dispatch.grouped, "the other one is on another machine"


def test_memory_that_ranks_cannot_reach_is_an_error_that_says_so(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = {"expert": 2, "dispatch": "direct"}
    with pytest.raises(ConfigError, match=r"dispatch=direct: .* torch's\. Set parallel\.dispatch=grouped"):
        make_engine(tensor=1, model=SHAPE, parallel=direct)
    pytest.importorskip("triton")

    def refuse(own: Any, handle: list[int]) -> int:
        raise OSError("there is no way from here to there")

    monkeypatch.setattr(peer_memory._OnCpu, "open", refuse)
    with pytest.raises(ConfigError, match=r"direct or auto: there is no way .* Set parallel\.dispatch=grouped"):
        make_engine(tensor=1, model={**SHAPE, "kernels": "triton"}, parallel=direct)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    spec = load_spec(ModelConfig(**SHAPE))
    with pytest.raises(ConfigError, match=r"expert=3 does not divide .* 4 experts .* work: 1, 2, 4$"):
        require_shared_experts(spec, 3)
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM has no experts .* Set parallel.expert=1"):
        require_shared_experts(load_spec(ModelConfig(path="tiny-target")), 2)
    require_ranks(spec, ParallelConfig(expert=2, tensor=2, redundant_experts=4))
    with pytest.raises(ConfigError, match=r"redundant_experts=6: 2 ranks .* Set it to 4 or less"):
        require_ranks(spec, ParallelConfig(expert=2, redundant_experts=6))
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3 does not divide"):
        require_ranks(spec, ParallelConfig(prefill=1, decode=1, prefill_tensor=3))


@pytest.mark.parametrize("dummy", [True, False])
def test_a_rank_has_its_own_experts_of_one_process(tmp_path: Path, dummy: bool) -> None:
    def made(config: ModelConfig, rank: int, size: int) -> Model:
        experts = ExpertRanks(ParallelContext(rank, size))
        return load_model(config, load_spec(config), torch.float32, CPU, 16, experts=experts)

    config = ModelConfig(**SHAPE)
    whole = made(config, 0, 1)
    if not dummy:
        tensors = {name: t.memory.clone().contiguous() for name, t in whole.checkpoint_tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(SMALL))
        config = ModelConfig(path=str(tmp_path))
    ranks = [dict(made(config, rank, 2).named_parameters()) for rank in range(2)]
    for name, weight in whole.named_parameters():
        own = [parameters[name] for parameters in ranks]
        assert torch.equal(torch.cat(own) if ".experts." in name else own[1], weight), name
