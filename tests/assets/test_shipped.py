"""The checkpoints as they ship: they load, they share a tokenizer, and they are as good as their model card says."""

from __future__ import annotations

import json
import random
import unicodedata
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.assets.corpus import HELD_OUT_MODULES
from mini_infer.assets.evaluate import counted, fresh_tokens, greedy, is_python, load, load_of, mean_accepted, read
from mini_infer.assets.prompts import ASSETS, HELD_OUT_DIR, draw_prompts, heldout_prompts, heldout_sources
from mini_infer.assets.shapes import DRAFT, MOE, TARGET, num_parameters
from mini_infer.assets.tokens import document_stream
from mini_infer.core.errors import ConfigError

Loaded = tuple[Qwen2ForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer]


@pytest.fixture(scope="module")
def models() -> Loaded:
    target, tokenizer = load(ASSETS / "tiny-target")
    draft, _ = load(ASSETS / "tiny-draft")
    return target, draft, tokenizer


@pytest.fixture(scope="module")
def moe() -> Any:
    return load(ASSETS / "tiny-moe")[0]


def test_models_have_the_stated_shapes(models: Loaded) -> None:
    target, draft, tokenizer = models
    for model, shape in ((target, TARGET), (draft, DRAFT)):
        config = model.config
        assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden_size, shape.num_layers)
        assert config.tie_word_embeddings
        assert config.vocab_size == len(tokenizer) == 2048
        assert config.max_position_embeddings == tokenizer.model_max_length == 2048
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert 5e6 < num_parameters(target) < 7e6
    assert num_parameters(draft) < 1e6


def test_all_models_share_one_tokenizer(models: Loaded) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for other in ("tiny-draft", "tiny-moe"):
            assert (ASSETS / "tiny-target" / name).read_bytes() == (ASSETS / other / name).read_bytes()
    tokenizer = models[2]
    assert tokenizer.is_fast
    stops = models[0].generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.pad_token_id == 0


def test_any_composed_text_makes_the_round_trip(models: Loaded) -> None:
    tokenizer = models[2]
    rng = random.Random(0)
    texts = ["", "\n\n\n   \t x", "naïve 中文 🙂 \u200d\r\n", "a" * 500, "def f():\n\n\n        return 1\n"]
    texts += ["".join(chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(60))]
    for text in texts:
        composed = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(composed)) == composed


def test_chat_template_frames_each_message(models: Loaded) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = models[2].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n")
    assert models[2].encode(text)[:2] == [1, models[2].encode("user")[0]]


def test_quality_on_held_out_text_is_what_the_card_says(models: Loaded) -> None:
    target, draft, tokenizer = models
    card = json.loads((ASSETS / "training" / "metrics.json").read_text())
    sources = [source for source in heldout_sources() if source.path in ("queue.py", "shlex.py")]
    reading = read(target, draft, document_stream(sources, tokenizer)[:6145])
    agreement = float((reading.target_argmax == reading.draft_argmax).float().mean())
    assert card["agreement"]["heldout"] > 0.60
    assert agreement > 0.60
    assert float(reading.target_nats.mean().exp()) < 6.05 * 1.05  # perplexity: as measured, and 5 % more
    assert float(reading.draft_nats.mean()) > float(reading.target_nats.mean())
    assert 0.5 < float(reading.overlap.mean()) <= 1.0


def test_the_mixture_is_what_the_card_says(models: Loaded, moe: Any) -> None:
    target, _, tokenizer = models
    config, card = moe.config, json.loads((ASSETS / "training" / "metrics.json").read_text())
    assert (config.hidden_size, config.num_hidden_layers) == (MOE.hidden_size, MOE.num_layers)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (MOE.num_experts, MOE.top_k)
    size = sum(file.stat().st_size for file in (ASSETS / "tiny-moe").iterdir())
    assert size < 12e6
    sources = [source for source in heldout_sources() if source.path == "queue.py"]
    stream = document_stream(sources, tokenizer)[:2049]
    with counted(moe) as counts:
        reading = read(target, moe, stream)
    assert float(reading.draft_nats.mean()) == pytest.approx(1.906, rel=0.01)
    assert float(reading.draft_nats.mean()) < card["draft"]["loss"]
    found = load_of(counts)
    assert len(found.busiest) == MOE.num_layers - 1
    assert max(found.busiest) < 3  # nobody takes everything, and everybody has something
    assert min(found.idlest) > 0.1


def test_the_engine_writes_what_transformers_writes(models: Loaded, moe: Any) -> None:
    engine = LLMEngine(EngineConfig.from_dict({"model": "tiny-moe", "cache": {"num_blocks": 64}}))
    prompts = heldout_prompts(2, min_tokens=20, max_tokens=60, seed=1)
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for prompt, output in zip(prompts, outputs, strict=True):
        stops = moe.generation_config.eos_token_id
        written = greedy(moe, models[2].encode(prompt), new_tokens=16)
        assert output.outputs[0].token_ids == [token for token in written if token not in stops]


def test_greedy_answer_is_python_and_stops(models: Loaded) -> None:
    target, _, tokenizer = models
    question = [{"role": "user", "content": "Write a function `is_even`: Return True if the number is even."}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    answer = greedy(target, tokenizer.encode(prompt), new_tokens=64)
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert text.startswith("def is_even(")
    assert is_python(text)


def test_heldout_prompts_are_deterministic_distinct_and_of_the_stated_length() -> None:
    prompts = heldout_prompts(60, min_tokens=32, max_tokens=200, seed=3)
    assert prompts == heldout_prompts(60, min_tokens=32, max_tokens=200, seed=3)
    assert prompts != heldout_prompts(60, min_tokens=32, max_tokens=200, seed=4)
    assert len(set(prompts)) == 60
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-target")
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert min(lengths) >= 32
    assert max(lengths) <= 200
    assert max(lengths) - min(lengths) > 100
    assert all(prompt.endswith("\n") for prompt in prompts)
    assert len(heldout_prompts()) > 200


def test_prompts_are_passages_of_shipped_modules() -> None:
    for prompt in draw_prompts(20):
        assert prompt.source.path in HELD_OUT_MODULES
        assert prompt.text in (HELD_OUT_DIR / f"{prompt.source.path}.txt").read_text()


@pytest.mark.parametrize(("n", "low", "high"), [(10_000, 32, 512), (1, 0, 10), (1, 50, 40)])
def test_impossible_prompts_are_refused(n: int, low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="heldout_prompts"):
        heldout_prompts(n, low, high)


def test_held_out_modules_ship_with_their_licence() -> None:
    assert {source.path for source in heldout_sources()} == set(HELD_OUT_MODULES)
    licence = (HELD_OUT_DIR / "LICENSE.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "Python Software Foundation" in (HELD_OUT_DIR / "README.md").read_text()


def test_accepted_drafts_are_counted_a_step() -> None:
    yes, no = True, False
    # Steps of 2: [yes yes] accepted 2 and one more token, [no] accepted 0, [yes no] accepted 1.
    assert mean_accepted([[yes, yes, no, no, yes, no, yes]], 2) == pytest.approx((2 + 0 + 1) / 3)
    assert fresh_tokens([1, 2, 3], [4, 1, 2, 3, 4]) == [True, True, True, True, False]


def test_is_python_tells_unfinished_from_wrong() -> None:
    assert is_python("x = 1\n")
    assert not is_python("x = (1,\n")
    assert is_python("x = (1,\n", allow_unfinished=True)
    assert not is_python("x = = 1\n", allow_unfinished=True)
