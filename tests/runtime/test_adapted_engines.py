"""Adapters in engines: what merged weights give, each request what it gets alone, and nobody's blocks but its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrity import check_scheduler
from model_shapes import SMALL
from safetensors.torch import load_file, save_file

from mini_infer import ConfigError, EngineConfig, LLMEngine, ModelError, RequestError
from mini_infer.assets import shipped_path
from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.request import NO_ADAPTER, Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels.lora import LoraWeights
from mini_infer.modeling.adapters import Adapters
from mini_infer.modeling.peft_folder import PeftFolder
from mini_infer.runtime.scheduler.adapter_slots import AdapterSlots

MODEL = "tiny-draft"
NAMES = ["one", "two", "three"]
PROMPTS = ["def fibonacci(n):", "class Tree:\n    def __init__(self"]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of several ranks, of all products or of some."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, rank, targets) in enumerate(zip(NAMES, (8, 4, 16), ("", "q_proj,down_proj", ""), strict=True)):
        tensors = random_adapter(ModelConfig(path=MODEL), rank=rank, seed=seed, scale=0.7, targets=targets)
        found[name] = write_adapter(root / name, tensors, rank=rank, alpha=2 * rank, use_rslora=name == "three")
    return found


@pytest.fixture(scope="module")
def make(folders: dict[str, str]) -> Iterator[Callable[..., LLMEngine]]:
    engines: list[LLMEngine] = []

    def new(slots: int = 3, names: dict[str, str] = folders, **sections: Any) -> LLMEngine:
        model = {"path": MODEL, "device": "cpu", "max_model_len": 128} | sections.pop("model", {})
        lora = {"max_adapters": slots, "adapters": names} | sections.pop("lora", {})
        engines.append(LLMEngine(EngineConfig.from_dict({"model": model, "lora": lora, **sections})))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(make: Callable[..., LLMEngine]) -> LLMEngine:
    return make()


def tokens(engine: LLMEngine, prompts: Any, params: Any, adapters: Any) -> list[list[int]]:
    outputs = engine.generate(prompts, params, adapters=adapters)
    check_scheduler(engine.scheduler)
    return [output.outputs[0].token_ids for output in outputs]


# --- what merged weights give -------------------------------------------------------------------------------------


def merge(adapter: str, to: Path) -> Path:
    """A model with W + scaling B A, written out."""
    base, folder = shipped_path(MODEL), PeftFolder.read(adapter, 64)
    assert base is not None
    shutil.copytree(base, to)
    weights, own = load_file(base / "model.safetensors"), load_file(folder.weights)
    for name in [name for name in own if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = own[name.replace("lora_A", "lora_B")].double() @ own[name].double() * folder.scaling
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + delta).float()
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_tokens_are_those_of_merged_weights(engine: LLMEngine, folders: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    asked = {**GREEDY, "logprobs": 2}
    mixed = engine.generate([PROMPTS[0]] * 4, asked, adapters=[None, *NAMES])
    found = {tuple(output.outputs[0].token_ids) for output in mixed}
    assert len(found) == 4, "adapters make a difference"
    for name, output in zip(NAMES[1:], mixed[2:], strict=True):
        folder = merge(folders[name], tmp_path / name)
        merged = LLMEngine(EngineConfig.from_dict({"model": {"path": str(folder), "device": "cpu"}}))
        expected = merged.generate(PROMPTS[0], asked)[0].outputs[0]
        merged.close()
        own = output.outputs[0]
        assert own.token_ids == expected.token_ids
        ids = torch.tensor([output.prompt_token_ids + own.token_ids])
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0].log_softmax(-1)
        assert own.logprobs is not None
        assert expected.logprobs is not None
        for place, (entry, other) in enumerate(zip(own.logprobs, expected.logprobs, strict=True)):
            row = theirs[len(output.prompt_token_ids) - 1 + place]
            assert entry.token_id == int(row.argmax())
            assert entry.logprob == pytest.approx(float(row.max()), abs=2e-4)
            assert entry.logprob == pytest.approx(other.logprob, abs=2e-4)


def test_tokens_are_those_that_peft_itself_gives(engine: LLMEngine, folders: dict[str, str]) -> None:
    """Of adapters that PEFT has made, one of them trained, in one batch with others: peft_reference.py has run it."""
    folder = Path(__file__).parent / "peft"
    answers = json.loads((folder / "expected.json").read_text())["answers"]
    for name in ("trained", "rslora"):
        engine.adapters.load(name, str(folder / name))
    own = [None if answer["adapter"] == "__base__" else answer["adapter"] for answer in answers]
    asked = {**GREEDY, "max_tokens": len(answers[0]["token_ids"]), "logprobs": 0}
    outputs = engine.generate([*(answer["prompt"] for answer in answers), PROMPTS[0]], asked, adapters=[*own, "one"])
    for answer, output in zip(answers, outputs, strict=False):
        found = output.outputs[0]
        assert found.token_ids == answer["token_ids"], answer["adapter"]
        assert [entry.logprob for entry in found.logprobs or []] == pytest.approx(answer["logprobs"], abs=2e-4)
    assert len({tuple(answer["token_ids"]) for answer in answers}) == len(answers), "adapters make a difference"
    for name in ("trained", "rslora"):
        engine.adapters.unload(name)


def test_it_is_the_same_where_tokens_are_many(make: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(cache={"prefix_caching": False})
    expected = tokens(engine, PROMPTS, GREEDY, NAMES[:2])
    monkeypatch.setattr("mini_infer.modeling.adapters.FEW_TOKENS", 1)
    assert tokens(engine, PROMPTS, GREEDY, NAMES[:2]) == expected


def test_requests_without_one_get_what_an_engine_without_any_gives(engine: LLMEngine) -> None:
    plain = LLMEngine(EngineConfig.from_dict({"model": {"path": MODEL, "device": "cpu", "max_model_len": 128}}))
    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]
    plain.close()
    assert engine.startup.adapter_bytes > plain.startup.adapter_bytes == 0
    assert tokens(engine, PROMPTS, GREEDY, None) == expected
    assert tokens(engine, PROMPTS * 2, GREEDY, [None] * 2 + NAMES[:2])[:2] == expected


# --- under every mechanism ------------------------------------------------------------------------------------------

MECHANISMS: dict[str, dict[str, Any]] = {
    "two slots, short of memory, chunks, overlap": {
        "slots": 2,
        "cache": {"block_size": 4, "num_blocks": 34, "watermark": 0.0},
        "scheduler": {"overlap": "always", "max_num_batched_tokens": 9, "max_num_seqs": 4},
    },
    "swap, drafts of n-grams": {
        "slots": 2,
        "cache": {"block_size": 4, "num_blocks": 34, "watermark": 0.0},
        "scheduler": {"preemption": "swap", "max_num_seqs": 4},
        "speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False},
    },
    "drafts of a model, which has no adapter": {
        "speculation": {"method": "draft", "num_tokens": 2, "adaptive": False, "draft": {"path": MODEL}},
        "scheduler": {"overlap": "always"},
    },
    "weights in 8 bits": {"model": {"quantization": "w8a16"}},
    "one slot, static batches": {"scheduler": {"batching": "static", "max_num_seqs": 5}, "slots": 1},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_gives_what_a_request_gets_alone(
    mechanism: str, make: Callable[..., LLMEngine], engine: LLMEngine
) -> None:
    own = make(**MECHANISMS[mechanism])
    asked = [(prompt, name) for prompt in PROMPTS for name in (None, *NAMES)]
    alone = own if "quantization" in MECHANISMS[mechanism].get("model", {}) else engine
    expected = [tokens(alone, prompt, GREEDY, name)[0] for prompt, name in asked]
    for _ in range(2):  # the second time prefixes hit
        assert tokens(own, [prompt for prompt, _ in asked], GREEDY, [name for _, name in asked]) == expected


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_in_batch_invariant_numerics_it_is_so_to_the_bit(tmp_path: Path) -> None:
    model = {"path": "made up", "load_format": "dummy", "hf_config": SMALL, "device": "cpu"}
    names = {}
    for seed, name in enumerate(NAMES):
        tensors = random_adapter(EngineConfig.from_dict({"model": model}).model, rank=4, seed=seed)
        names[name] = write_adapter(tmp_path / name, tensors, rank=4, alpha=8)
    config = {"model": model, "numerics": "batch_invariant", "lora": {"max_adapters": 2, "adapters": names}}
    scheduler = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "overlap": "always"}
    cache = {"block_size": 8, "num_blocks": 12, "watermark": 0.0}
    engine = LLMEngine(EngineConfig.from_dict({**config, "scheduler": scheduler, "cache": cache}))
    asked = [([7 * i % 101, *range(3, 7 + i)], name) for i, name in enumerate((None, *NAMES))]
    params = {"temperature": 0.8, "seed": 1, "max_tokens": 2, "ignore_eos": True, "logprobs": 3}

    def answers(of: list[tuple[list[int], str | None]]) -> list[Any]:
        outputs = engine.generate([prompt for prompt, _ in of], params, adapters=[name for _, name in of])
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    alone = [answers([one])[0] for one in asked]
    assert answers(asked) == alone
    engine.close()


# --- slots ----------------------------------------------------------------------------------------------------------


def request(adapter: str) -> Request:
    return Request("", [1], SamplingParams(), max_total_tokens=2, adapter=adapter)


def test_a_slot_in_use_stays_as_it_is_and_the_least_recently_used_goes_first() -> None:
    slots = AdapterSlots(2)
    a, b, c, more = request("a"), request("b"), request("c"), request("a")
    slots.take(a)
    slots.take(b)
    assert {a.adapter_slot, b.adapter_slot} == {0, 1}
    assert not slots.room_for(c)
    assert slots.room_for(c, [b])
    assert slots.room_for(more)
    assert slots.room_for(request(""))
    slots.take(more)
    assert not slots.room_for(c, [a]), "somebody else has it, too"
    slots.release(b)
    first = a.adapter_slot
    slots.release(a)
    assert a.adapter_slot == NO_ADAPTER
    assert slots.room_for(c)
    slots.release(more)
    slots.take(c)
    assert c.adapter_slot != first, "b has not been used for longer"


def test_none_at_all() -> None:
    slots, plain = AdapterSlots(0), request("")
    slots.take(plain)
    slots.release(plain)
    assert plain.adapter_slot == NO_ADAPTER


# --- prefixes, names, loading -----------------------------------------------------------------------------------------


def test_no_salt_is_that_of_an_adapter() -> None:
    """Else whoever knows its key could leave blocks of other weights for its requests to find."""
    sections = {"model": {"load_format": "dry"}, "lora": {"max_adapters": 1, "dummy": 1}}
    with closing(LLMEngine(EngineConfig.from_dict(sections))) as engine:

        def cached(salt: str, adapter: str | None) -> int:
            engine.add_request([5] * 64, SamplingParams(max_tokens=1), cache_salt=salt, adapter=adapter, stream=False)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            metrics = outputs[0].outputs[0].metrics
            assert metrics is not None
            return metrics.num_cached_tokens

        asked = [("\0dummy-0", None), ("", "dummy-0"), ("\0dummy-0\0", None), ("\0", "dummy-0"), ("", None)]
        assert [cached(*each) for each in asked] == [0] * 5
        assert all(cached(*each) == 48 for each in asked)


def test_equal_prompts_share_blocks_under_the_same_adapter_alone(make: Callable[..., LLMEngine]) -> None:
    engine = make(slots=2, cache={"block_size": 4})

    def cached(name: str | None) -> int:
        metrics = engine.generate(PROMPTS[1] * 3, GREEDY, adapters=name)[0].outputs[0].metrics
        assert metrics is not None
        return metrics.num_cached_tokens

    assert [cached(name) for name in (None, "one", "two")] == [0, 0, 0]
    hits = [cached(name) for name in ("two", "one", None)]
    assert min(hits) > 0


def test_no_salt_makes_the_blocks_of_an_adapter(make: Callable[..., LLMEngine], folders: dict[str, str]) -> None:
    engine, key = make(cache={"block_size": 4}), PeftFolder.read(folders["one"], 64).key

    def cached(name: str | None, salt: str) -> int:
        engine.add_request(PROMPTS[1] * 3, GREEDY, adapter=name, cache_salt=salt, stream=False)
        while not (outputs := engine.step()):
            pass
        metrics = outputs[0].outputs[0].metrics
        assert metrics is not None
        return metrics.num_cached_tokens

    assert cached("one", "mine") == 0
    assert cached("one", "mine") > 0
    for salt in ("mine", f"mine\0{key}", f"{key}\0mine", f"\0mine\0{key}"):
        assert cached(None, salt) == 0


def test_adapters_come_and_go_while_requests_run(make: Callable[..., LLMEngine], folders: dict[str, str]) -> None:
    engine = make(names={"one": folders["one"]})
    expected = tokens(engine, PROMPTS[0], GREEDY, "one")
    with pytest.raises(RequestError, match="there is no adapter 'oen'; did you mean 'one'"):
        engine.add_request(PROMPTS[0], GREEDY, adapter="oen")
    engine.add_request(PROMPTS[0], GREEDY, adapter="one")
    engine.step()
    engine.adapters.unload("one")
    with pytest.raises(RequestError, match="there is no adapter 'one': none is loaded"):
        engine.generate(PROMPTS[0], GREEDY, adapters="one")
    engine.adapters.load("two", folders["two"])
    other = tokens(engine, PROMPTS[0], GREEDY, "two")
    assert other != expected
    engine.adapters.load("two", folders["one"])
    assert tokens(engine, PROMPTS[0], GREEDY, "two") == expected, "another folder under the same name"
    with pytest.raises(ModelError, match="there is no such folder"):
        engine.adapters.load("four", folders["one"] + "x/y")
    assert list(engine.adapters) == ["two"]


def test_nothing_is_forgotten_that_a_request_has(make: Callable[..., LLMEngine], folders: dict[str, str]) -> None:
    engine = make(slots=1, names={"one": folders["one"]}, scheduler={"max_num_seqs": 1})
    expected = tokens(engine, PROMPTS[0], GREEDY, "one")
    ids = [engine.add_request(PROMPTS[0], GREEDY, adapter="one", stream=False) for _ in range(2)]
    engine.step()
    engine.adapters.load("one", folders["two"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == expected * 2
    engine.adapters.load("three", folders["three"])
    adapters = engine.executor.runner.model.adapters
    assert adapters is not None
    assert len(adapters._loaded) == 2, "what nobody asks for any more is forgotten"


def test_a_step_that_fails_as_a_slot_is_filled_leaves_nothing_half_done(
    make: Callable[..., LLMEngine], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(slots=1, cache={"prefix_caching": False})
    expected = tokens(engine, PROMPTS[0], GREEDY, "one")
    fill = Adapters._fill

    def fails(self: Adapters, slot: int, layers: list[LoraWeights]) -> None:
        fill(self, slot, layers)
        raise RuntimeError("in the middle of it")

    with monkeypatch.context() as patch:
        patch.setattr(Adapters, "_fill", fails)
        with pytest.raises(RuntimeError, match="in the middle of it"):
            engine.generate([PROMPTS[1], PROMPTS[0]], GREEDY, adapters=[None, "two"])
    assert tokens(engine, PROMPTS[0], GREEDY, "one") == expected


def change(folder: str, to: Path, tensors: Callable[[dict[str, torch.Tensor]], Any] | None, **config: Any) -> str:
    shutil.copytree(folder, to)
    values = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(values | config))
    if tensors is not None:
        own = load_file(to / "adapter_model.safetensors")
        tensors(own)
        save_file(own, to / "adapter_model.safetensors")
    return str(to)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (None, {"use_dora": True}, r"magnitudes of DoRA \(use_dora\).*merge_and_unload"),
        (None, {"modules_to_save": ["lm_head"]}, "modules that were trained whole"),
        (None, {"bias": "all"}, r"biases \(bias='all'\)"),
        (None, {"init_lora_weights": "pissa_niter_4"}, "a base that its training has changed"),
        (None, {"rank_pattern": {"q_proj": 2}}, "several ranks"),
        (None, {"peft_type": "IA3"}, "'IA3': only peft_type LORA"),
        (None, {"r": 0}, "no r above 0"),
        (None, {"r": 64}, "has rank 64, and lora.max_rank=16: raise that to 64"),
        (
            lambda own: own.update({"base_model.model.lm_head.lora_A.weight": own[FIRST].clone()}),
            {},
            "lm_head.*of no product",
        ),
        (lambda own: own.update({FIRST: own[FIRST][:, :-1].contiguous()}), {}, "the adapter is another model's"),
        (lambda own: own.pop(FIRST), {}, "has lora_A and not lora_B, or the other"),
    ],
)
def test_what_cannot_be_served_says_so_and_costs_nobody(
    tensors: Any, config: dict[str, Any], message: str, engine: LLMEngine, folders: dict[str, str], tmp_path: Path
) -> None:
    bad = change(folders["one"], tmp_path / "bad", tensors, **config)
    with pytest.raises(ModelError, match=message):
        engine.adapters.load("bad", bad)
    assert "bad" not in list(engine.adapters)


def test_a_folder_that_changes_while_it_is_read_is_refused(
    engine: LLMEngine, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is a hash of what was there before."""
    path = shutil.copytree(folders["one"], tmp_path / "written")
    read = PeftFolder.read

    def read_and_written(*asked: Any) -> PeftFolder:
        folder = read(*asked)
        folder.weights.write_bytes(folder.weights.read_bytes()[:-1] + b"x")
        return folder

    monkeypatch.setattr(PeftFolder, "read", read_and_written)
    with pytest.raises(ModelError, match="has changed while it was read: load it again"):
        engine.adapters.load("written", str(path))
    monkeypatch.undo()
    engine.adapters.load("written", str(path))
    engine.adapters.unload("written")


def test_a_file_that_is_cut_short_says_so(engine: LLMEngine, folders: dict[str, str], tmp_path: Path) -> None:
    bad = Path(change(folders["one"], tmp_path / "bad", None)) / "adapter_model.safetensors"
    bad.write_bytes(bad.read_bytes()[:-5])
    with pytest.raises(ModelError, match="The file may be cut short"):
        engine.adapters.load("bad", str(bad.parent))
    bad.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        engine.adapters.load("bad", str(bad.parent))
    with pytest.raises(ModelError, match="cannot be read: Could not determine home directory"):
        engine.adapters.load("bad", "~nobody-of-this-name/adapter")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora": {"adapters": {"a": "b"}}}, "lora.max_adapters=0 takes none"),
        ({"lora": {"max_adapters": 1}, "parallel": {"prefill": 1, "decode": 1}}, "which adapter a prompt has"),
        (
            {"lora": {"max_adapters": 1}, "model": {"path": MODEL, "implementation": "transformers", "device": "cpu"}},
            "Merge the adapter into the model, or set lora.max_adapters=0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(EngineConfig.from_dict(config))


def test_a_dry_model_takes_their_names(folders: dict[str, str]) -> None:
    lora = {"max_adapters": 1, "adapters": folders, "dummy": 1}
    with closing(LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "lora": lora}))) as dry:
        dry.adapters.load("four", folders["one"])
        assert list(dry.adapters) == [*NAMES, "dummy-0", "four"]
        for names in (None, [*NAMES, "dummy-0"]):
            assert len({tuple(answer) for answer in tokens(dry, [PROMPTS[0]] * 4, GREEDY, names)}) == 1


def test_random_ones_are_the_same_from_run_to_run(make: Callable[..., LLMEngine]) -> None:
    found = []
    for _ in range(2):
        engine = make(slots=2, names={}, lora={"dummy": 2})
        found.append(tokens(engine, [PROMPTS[0]] * 3, GREEDY, ["dummy-0", "dummy-1", None]))
    assert found[0] == found[1]
    other = make(slots=2, names={}, lora={"dummy": 2, "max_rank": 8})
    assert other.adapters.key("dummy-0") != engine.adapters.key("dummy-0"), "files of prefixes tell them apart"


def test_an_engine_without_any_says_how_to_have_some(folders: dict[str, str]) -> None:
    plain = LLMEngine(EngineConfig.from_dict({"model": {"path": MODEL, "device": "cpu"}}))
    with pytest.raises(ConfigError, match=r"lora\.max_adapters=0: this engine has no adapters"):
        plain.adapters.load("one", folders["one"])
    plain.close()


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_product_may_give_memory_back_that_its_kernels_still_use(folders: dict[str, str]) -> None:
    """As those with quantized activations do: what is computed beside them, of the same size, does not get it."""
    model = {"path": MODEL, "dtype": "float32", "max_model_len": 128}
    lora = {"max_adapters": 2, "adapters": folders}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "lora": lora, "graphs": {"capture": "never"}}))
    expected = tokens(engine, PROMPTS, GREEDY, NAMES[:2])
    adapters = engine.executor._worker.adapters  # type: ignore[attr-defined]
    for layer in adapters._layers:

        def apply(x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor] = layer.base.apply) -> torch.Tensor:
            y = own(x)
            given_back = torch.empty_like(y)
            torch.cuda._sleep(200_000)
            given_back.fill_(torch.nan)
            return y

        layer.base.apply = apply
    assert tokens(engine, PROMPTS, GREEDY, NAMES[:2]) == expected
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["fast", "batch_invariant"])
@pytest.mark.parametrize("capture", ["never", "always"])
def test_graphs_give_what_a_request_gets_alone(numerics: str, capture: str, folders: dict[str, str]) -> None:
    config = EngineConfig.from_dict(
        {
            "model": {"path": MODEL, "dtype": "float32" if numerics == "fast" else "bfloat16", "max_model_len": 128},
            "lora": {"max_adapters": 2, "adapters": folders},
            "numerics": numerics,
            "graphs": {"capture": capture},
        }
    )
    engine = LLMEngine(config)
    long = ["many words " * n for n in (9, 20)]  # so that a prompt's graph is larger than what it computes
    asked = [(prompt, name) for prompt in [*PROMPTS, *long] for name in (None, *NAMES)]
    alone = [tokens(engine, prompt, GREEDY, name)[0] for prompt, name in asked]
    assert tokens(engine, [prompt for prompt, _ in asked], GREEDY, [name for _, name in asked]) == alone
    engine.close()
