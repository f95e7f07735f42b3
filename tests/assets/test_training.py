from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_infer.assets import train as train_module
from mini_infer.assets.balance import balanced
from mini_infer.assets.chat import IM_END, conversations
from mini_infer.assets.corpus import Source, load_corpus
from mini_infer.assets.distill import distillation, write_text
from mini_infer.assets.shapes import MoEShape, Shape, build_model, build_moe
from mini_infer.assets.tokens import TokenSet, tokenize_corpus
from mini_infer.assets.train import main
from mini_infer.assets.trainer import IGNORE, Schedule, Stream, cross_entropy, rate_at, stream_loss, token_logits, train
from mini_infer.core.errors import ConfigError

MICRO = Shape(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48)

MICRO_MOE = MoEShape(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    kv_rank=8,
    nope_dim=8,
    rope_dim=8,
    value_dim=8,
    dense_size=48,
    num_experts=4,
    top_k=2,
    num_shared=1,
    expert_size=16,
)


@pytest.fixture(scope="module")
def tokens(library: Path) -> TokenSet:
    return tokenize_corpus(load_corpus(library), vocab_size=400)


def schedule(**changes: float) -> Schedule:
    settings = {"steps": 20, "rows": 4, "seq_len": 32, "learning_rate": 1e-2, "weight_decay": 0.1, "eval_every": 10}
    return Schedule(**(settings | changes))  # type: ignore[arg-type]


def test_chat_samples_learn_answers_only(tokens: TokenSet) -> None:
    text = "def scale(x):\n    '''Return x times two, always.'''\n    y = x * 2\n    return y\n"
    (conversation,) = conversations([Source("a.py", text)])
    assert conversation.answer == text
    assert "Return x times two, always." in conversation.question
    shown = tokens.tokenizer.apply_chat_template(
        [{"role": "user", "content": conversation.question}], tokenize=False, add_generation_prompt=True
    )
    assert shown == conversation.prompt
    learned = tokens.tokenizer.decode(tokens.chat[tokens.chat_answer])
    assert "<|im_start|>" not in learned
    assert learned.count(IM_END) == tokens.tokenizer.decode(tokens.chat).count("<|im_start|>assistant")
    assert learned.startswith("def ")


def test_tokens_make_the_round_trip_to_disk(tokens: TokenSet, tmp_path: Path) -> None:
    tokens.save(tmp_path)
    loaded = TokenSet.load(tmp_path)
    for name in ("code", "chat", "chat_answer", "validation", "heldout"):
        assert np.array_equal(getattr(loaded, name), getattr(tokens, name))
    assert loaded.report == tokens.report
    assert loaded.tokenizer.encode("def f(x):") == tokens.tokenizer.encode("def f(x):")
    with pytest.raises(ConfigError, match="--prepare-only"):
        TokenSet.load(tmp_path / "nowhere")


def test_learning_rate_rises_and_falls_to_almost_zero() -> None:
    rates = [rate_at(step, schedule(steps=100)) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(0.01 / 96)


def test_training_keeps_the_weights_of_least_validation_loss(tokens: TokenSet) -> None:
    model = build_model(MICRO, tokens.tokenizer, seed=0)
    before = stream_loss(model, tokens.validation, 32)
    streams = [Stream(tokens.code, 0.5), Stream(tokens.chat, 0.5, tokens.chat_answer)]
    run = train(model, streams, tokens.validation, tokens.heldout, schedule(dropout=0.1))
    assert [row.step for row in run.log] == [10, 20]
    assert run.tokens == 20 * 4 * 32
    least = min(row.validation_loss for row in run.log)
    assert stream_loss(model, tokens.validation, 32) == pytest.approx(least, abs=1e-5)
    assert least < before - 0.2
    assert not model.model.layers[0].mlp._forward_hooks  # dropout is gone
    with pytest.raises(ConfigError, match="seq_len=99999"):
        train(model, streams, tokens.validation, tokens.heldout, schedule(seq_len=99999))


def test_training_is_reproducible(tokens: TokenSet) -> None:
    losses = []
    for _ in range(2):
        model = build_model(MICRO, tokens.tokenizer, seed=0)
        streams = [Stream(tokens.code, 1.0)]
        run = train(model, streams, tokens.validation, tokens.heldout, schedule(steps=5, eval_every=5))
        losses.append(run.log[-1].train_loss)
    assert losses[0] == losses[1]


def test_distillation_is_zero_for_the_teacher_itself(tokens: TokenSet) -> None:
    teacher = build_model(MICRO, tokens.tokenizer, seed=0)
    student = build_model(MICRO, tokens.tokenizer, seed=1)
    inputs = torch.from_numpy(tokens.code[:64].astype(np.int64)).view(2, 32)
    labels = torch.from_numpy(tokens.code[1:65].astype(np.int64))
    labels[:10] = IGNORE
    objective = distillation(teacher, kl_weight=1.0)
    with torch.no_grad():
        own, other = token_logits(teacher, inputs), token_logits(student, inputs)
        assert float(objective(own, inputs, labels)) == pytest.approx(0, abs=1e-6)
        expected = F.kl_div(
            F.log_softmax(other[10:], -1), F.log_softmax(own[10:], -1), log_target=True, reduction="batchmean"
        )
        assert float(objective(other, inputs, labels)) == pytest.approx(float(expected), rel=1e-5)
        mixed = distillation(teacher, kl_weight=0.9)(other, inputs, labels)
        plain = cross_entropy(other, inputs, labels)
        assert float(mixed) == pytest.approx(0.9 * float(expected) + 0.1 * float(plain), rel=1e-5)


def test_experts_are_trained_as_they_will_compute_and_towards_balance(tokens: TokenSet) -> None:
    model = build_moe(MICRO_MOE, tokens.tokenizer, seed=0)
    inputs = torch.from_numpy(tokens.code[:64].astype(np.int64)).view(2, 32)
    labels = torch.from_numpy(tokens.code[1:65].astype(np.int64))
    gate = model.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        gate.normal_(std=0.3)  # it prefers some experts
        expected = token_logits(model, inputs)
    with balanced(model, weight=1.0) as objective:

        def imbalance() -> torch.Tensor:
            logits = token_logits(model, inputs)
            return objective(logits, inputs, labels) - cross_entropy(logits, inputs, labels)

        torch.testing.assert_close(token_logits(model, inputs), expected)
        before = imbalance()
        (gradient,) = torch.autograd.grad(before, gate)
        with torch.no_grad():
            gate -= 0.1 * gradient
        assert float(imbalance()) < float(before)
        with torch.no_grad():
            gate.zero_()  # all experts alike
        assert float(imbalance()) == pytest.approx(1, abs=1e-5)
    assert "forward" not in vars(model.model.layers[1].mlp)


def test_written_text_continues_the_corpus_and_never_stops_early(tokens: TokenSet) -> None:
    model = build_model(MICRO, tokens.tokenizer, seed=0)
    written = write_text(model, tokens.code, rows=3, temperatures=(1.0, 0.5), prompt_len=8, new_tokens=12)
    assert written.shape == (2 * 3 * 20,)
    assert written.dtype == np.uint16
    assert model.generation_config.eos_token_id == [0, 2]  # the caller's model is as it was


def test_the_program_trains_all_models(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for trained in (train_module.train_target, train_module.train_draft):
        monkeypatch.setattr(trained, "__defaults__", (MICRO,))
    monkeypatch.setattr(train_module.train_moe, "__defaults__", (MICRO_MOE,))
    sizes = {
        "steps": 5,
        "draft-steps": 5,
        "rows": 2,
        "draft-rows": 4,
        "seq-len": 32,
        "eval-every": 2,
        "written-rows": 2,
    }
    small = [f"--{name}={value}" for name, value in sizes.items()]
    prepared = tmp_path / "tokens"
    main(["--corpus-dir", str(library), "--tokens", str(prepared), "--prepare-only"])
    assert (prepared / "heldout" / "csv.py.txt").is_file()
    out = tmp_path / "out"
    main(["--tokens", str(prepared), "--out", str(out), "--device", "cpu", "--eval-tokens", "100", *small])
    for name in ("tiny-target", "tiny-draft"):
        model = AutoModelForCausalLM.from_pretrained(out / name)
        assert model.dtype == torch.bfloat16
        assert len(AutoTokenizer.from_pretrained(out / name)) == model.config.vocab_size
    with (out / "training" / "target_log.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4", "5"]
    main(["--tokens", str(prepared), "--models", "moe", "--out", str(out), "--eval-tokens", "100", *small])
    assert AutoModelForCausalLM.from_pretrained(out / "tiny-moe").config.n_routed_experts == 4
    assert (out / "training" / "moe_log.csv").is_file()
    settings = json.loads((out / "training" / "moe_summary.json").read_text())["settings"]
    assert settings["balance_weight"] > 0
    assert not any(name.startswith("draft") for name in settings)
    summary = json.loads((out / "training" / "summary.json").read_text())
    assert summary["models"]["draft"]["tokens_seen"] == 5 * 4 * 32
    assert str(tmp_path) not in json.dumps(summary)
    assert (out / "training" / "loss_curve.png").stat().st_size > 1000
