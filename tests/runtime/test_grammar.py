"""Constrained decoding: texts match their grammar, bad grammars are refused, and nobody else notices."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_tokenizers
import torch
from integrity import check_scheduler
from schemas import PERSON

from mini_infer import EngineConfig, LLMEngine, RequestError, SamplingParams
from mini_infer.core.request import FinishReason
from mini_infer.core.sampling_params import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from mini_infer.kernels.sampling.draw import pick_rows
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.text import grammar as grammar_module
from mini_infer.runtime.text.grammar import GrammarCompiler
from mini_infer.runtime.text.tokenizer import NoTokenizer

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def dry(**sections: Any) -> LLMEngine:
    model = {"load_format": "dry", "dry": {"max_model_len": 256}}
    return LLMEngine(EngineConfig.from_dict({"model": model, **sections}))


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return dry()


@pytest.fixture(scope="module")
def tiny() -> LLMEngine:
    return LLMEngine(EngineConfig.from_dict({"model": {"path": "tiny-target", "device": "cpu"}}))


def regex(pattern: str, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "grammar": ("regex", pattern), **values})


class TestTexts:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_of_the_shipped_model(self, tiny: LLMEngine, temperature: float) -> None:
        date = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
        lark = 'start: "I " verb " " THING "."\nverb: "like" | "hate"\nTHING: /[a-z]{3,9}/'
        grammars = [("json_schema", PERSON), ("regex", date), ("lark", lark), ("regex", "naïve €")]
        params = [SamplingParams(temperature=temperature, seed=3, max_tokens=60, grammar=g) for g in grammars]
        outputs = [output.outputs[0] for output in tiny.generate(["Answer: "] * len(grammars), params)]
        assert {output.finish_reason for output in outputs} == {FinishReason.stop}
        assert all(output.stop_reason is None for output in outputs)
        person, day, sentence, fixed = [output.text for output in outputs]
        parsed = json.loads(person)
        assert list(parsed) == ["name", "age"]
        assert isinstance(parsed["age"], int)
        assert re.fullmatch(date, day)
        assert re.fullmatch(r"I (like|hate) [a-z]{3,9}\.", sentence)
        assert fixed == "naïve €"

    def test_of_siblings(self, engine: LLMEngine) -> None:
        params = regex("[a-f]{6}", n=4, temperature=3, seed=1)
        texts = [completion.text for completion in engine.generate("hello", params)[0].outputs]
        assert len(set(texts)) == 4
        assert all(re.fullmatch("[a-f]{6}", text) for text in texts)
        assert texts == [completion.text for completion in dry().generate("hello", params)[0].outputs]

    def test_a_grammar_that_a_prompt_has_cached(self, engine: LLMEngine) -> None:
        params = regex("[A-Z]{9}", logprobs=2)
        first, second = (engine.generate("a prompt of some length, to be cached", params)[0].outputs[0] for _ in "ab")
        assert second.metrics is not None
        assert second.metrics.num_cached_tokens > 0
        assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)

    def test_penalties_biases_and_logprobs(self, engine: LLMEngine) -> None:
        values = {"repetition_penalty": 5.0, "frequency_penalty": 2.0, "logit_bias": {ord("a"): -100, ord("z"): 100}}
        completion = engine.generate("x", regex("a[bcd]{3}", logprobs=1, **values))[0].outputs[0]
        assert completion.text[0] == "a"
        assert set(completion.text[1:]) == set("bcd"), "repeated tokens count as less likely, inside the grammar too"
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        assert all(entry.logprob <= entry.top[0][1] for entry in completion.logprobs)


class TestEnd:
    """Token 256 is the dry tokenizer's end-of-sequence."""

    def test_a_complete_text_ends_without_a_token_for_it(self, engine: LLMEngine) -> None:
        completion = engine.generate("x", regex("yes"))[0].outputs[0]
        assert (completion.text, completion.token_ids) == ("yes", list(b"yes"))
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.stop, None)

    def test_end_of_sequence_only_where_the_text_may_end(self, engine: LLMEngine) -> None:
        completion = engine.generate("x", regex("ab+", logit_bias={256: 100}))[0].outputs[0]
        assert (completion.text, completion.token_ids[-1]) == ("ab", 256)
        assert completion.finish_reason is FinishReason.stop

    @pytest.mark.parametrize("values", [{"ignore_eos": True}, {"min_tokens": 3, "max_tokens": 9}])
    def test_end_of_sequence_is_no_text_whatever_it_is_to_the_request(self, engine: LLMEngine, values: dict) -> None:
        params = regex("ab*", logit_bias={256: 100}, skip_special_tokens=False, **values)
        completion = engine.generate("x", params)[0].outputs[0]
        assert completion.text == ("a" if "ignore_eos" in values else "abb")
        assert (completion.finish_reason, completion.token_ids[-1]) == (FinishReason.stop, 256)

    def test_the_grammar_outranks_min_tokens_and_stop_tokens(self, engine: LLMEngine) -> None:
        completion = engine.generate("x", regex("yes", min_tokens=20))[0].outputs[0]
        assert (completion.text, completion.finish_reason) == ("yes", FinishReason.stop)
        early = regex("yes|no", min_tokens=20, stop_token_ids=list(b"yesno"))
        assert engine.generate("x", early)[0].outputs[0].text in ("yes", "no")

    def test_stop_tokens_and_stop_strings_as_ever(self, engine: LLMEngine) -> None:
        by_token = engine.generate("x", regex("a{5}b{5}", stop_token_ids=[ord("b")]))[0].outputs[0]
        assert (by_token.text, by_token.stop_reason) == ("aaaaa", ord("b"))
        by_text = engine.generate("x", regex("a{5}b{5}", stop="ab"))[0].outputs[0]
        assert (by_text.text, by_text.stop_reason) == ("aaaa", "ab")

    def test_length(self, engine: LLMEngine) -> None:
        (short, exact) = engine.generate(["x", "x"], [regex("yes", max_tokens=2), regex("yes", max_tokens=3)])
        assert (short.outputs[0].text, short.outputs[0].finish_reason) == ("ye", FinishReason.length)
        assert (exact.outputs[0].text, exact.outputs[0].finish_reason) == ("yes", FinishReason.stop)

    def test_white_space_comes_to_an_end(self, engine: LLMEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, grammar="json_object", logit_bias={32: 100})
        text = engine.generate("x", params)[0].outputs[0].text
        assert text.startswith("{" + 32 * " " + '"'), "spaces can go on only inside a string"

    def test_any_object(self, engine: LLMEngine) -> None:
        params = SamplingParams(temperature=0, grammar="json_object", logit_bias={ord("}"): 100})
        completion = engine.generate("x", params)[0].outputs[0]
        assert (completion.text, completion.finish_reason) == ("{}", FinishReason.stop)


class TestOverlap:
    @pytest.mark.parametrize("overlap", ["never", "always"])
    def test_only_the_constrained_row_waits_for_its_token(self, engine: LLMEngine, overlap: str) -> None:
        params = [PLAIN, regex("[a-z]{12}"), PLAIN]
        expected = [engine.generate(text, own)[0].outputs[0].token_ids for text, own in zip("abc", params, strict=True)]
        mixed = dry(scheduler={"overlap": overlap})
        outputs = mixed.generate(list("abc"), params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        sampled = [record.sampled_tokens for record in mixed.records if record.sampled_tokens]
        if overlap == "always":  # every second step has all three
            assert sampled[:12] == [3, 2] * 6
        else:
            assert sampled == [3] * 12

    def test_alone(self) -> None:
        alone = dry(scheduler={"overlap": "always"})
        output = alone.generate("x", regex("[a-z]{5}", n=2))[0]
        assert all(re.fullmatch("[a-z]{5}", completion.text) for completion in output.outputs)
        assert not alone.core._in_flight
        check_scheduler(alone.scheduler)


class TestMasks:
    @pytest.mark.parametrize("main", [None, pick_rows])
    @pytest.mark.parametrize("vocab_size", [50, 64])
    def test_rows_pick_what_their_masks_allow(self, main, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        rows = 40
        params = [SamplingParams(temperature=t, presence_penalty=p) for t, p in [(0, 0), (1, 0), (1, 1), (0, 1)] * 10]
        sampler = Sampler(rows, vocab_size, "cpu", main)
        encoded = [sampler.admit(slot, own, slot, 1, ()) for slot, own in enumerate(params)]
        logits = torch.from_numpy(rng.normal(size=(rows, vocab_size)).astype(np.float32))
        step = SimpleNamespace(
            param_rows=torch.from_numpy(np.stack(encoded)), sampled_positions=torch.ones(rows, dtype=torch.int64)
        )
        arguments = (step, np.arange(rows), np.ones(rows, np.int64), torch.zeros(rows, 9, dtype=torch.int32))
        free = sampler.sample(logits, *arguments)[0]
        allowed = {
            row: sorted(rng.choice(vocab_size, size=rng.integers(1, 4), replace=False)) for row in range(0, 40, 3)
        }
        for row, tokens in allowed.items():
            logits[row, next(t for t in range(vocab_size) if t not in tokens)] = torch.nan  # the largest, if it counted
        tokens = sampler.sample(logits, *arguments, {row: bits(own, vocab_size) for row, own in allowed.items()})[0]
        for row in range(rows):
            if row in allowed:
                assert tokens[row] in allowed[row]
            else:
                assert tokens[row] == free[row]

    @pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
    @pytest.mark.parametrize("padding", [37, -3])
    def test_of_every_family_of_tokenizers(self, kind: str, padding: int) -> None:
        """A walk along the allowed tokens spells a text of the grammar; rows behind the tokenizer are no tokens."""
        tokenizer = getattr(small_tokenizers, kind)()
        vocab_size = tokenizer.vocab_size + padding
        eos = tokenizer.eos_token_ids[0]
        constraint = GrammarCompiler(tokenizer, vocab_size, [eos])
        compiled = constraint.compile(Grammar.of(("regex", r"Hello,? (world |naïve |中文 ){1,4}")))
        for seed in range(5):
            sequence, tokens, reason = compiled.start(), [], None
            while reason is None:
                assert len(sequence.mask) == -(-vocab_size // 8)
                allowed = np.flatnonzero(np.unpackbits(np.frombuffer(sequence.mask, np.uint8), bitorder="little"))
                assert len(allowed)
                assert allowed.max() < tokenizer.vocab_size
                tokens.append(int(Random(seed * 100 + len(tokens)).choice(allowed)))
                reason = sequence.accept(tokens[-1])
                constraint.update_masks()
            assert reason is FinishReason.stop
            prefix = tokenizer.encode("x")
            text = tokenizer.decode(prefix + tokens).removeprefix(tokenizer.decode(prefix))
            assert re.fullmatch(r"Hello,? (world |naïve |中文 ){1,4}", text), text
            assert sequence.is_end(tokens[-1]) == (tokens[-1] == eos)

    def test_a_token_that_is_not_allowed_is_an_error(self, engine: LLMEngine) -> None:
        sequence = engine.grammars.compile(Grammar.of(("regex", "abc"))).start()
        assert sequence.accept(ord("b")) is FinishReason.error


class TestRefusal:
    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            (("json_schema", {"type": "strin"}), "json_schema cannot be followed: Invalid type: strin"),
            (("json_schema", {"type": "array", "uniqueItems": True}), "uniqueItems"),
            (("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
            (("json_schema", {"$ref": "http://localhost/x"}), "does not fetch"),
            (("json_schema", '{"type": '), "json_schema is not JSON"),
            (("json_schema", '{"minimum": NaN}'), "NaN is not a JSON number"),
            (("json_schema", "[1]"), "json_schema must be a JSON object"),
            (("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "json_schema"),
            (("json_schema", {"a": {1, 2}}), "cannot be written as JSON"),
            (("json_schema", {"const": "\ud800"}), "json_schema cannot be followed"),
            (("json_schema", None), "needs its text as a string"),
            (("json_object", "{}"), "json_object takes no text"),
            (("regex", "a(b"), "unclosed group"),
            (("regex", "(" * 10**4 + ")" * 10**4), "regex cannot be followed"),
            (("regex", r"(?=a)b"), "look-around"),
            (("regex", r"[^\s\S]"), "no text of this model's tokens matches it"),
            (("regex", ""), "not empty"),
            (("regex", 5), "needs its text as a string"),
            (("regex", "\ud800"), "half a surrogate pair"),
            (("regex", "a" * (MAX_GRAMMAR_LENGTH + 1)), f"at most {MAX_GRAMMAR_LENGTH} are allowed"),
            (("lark", "start: foo"), 'unknown name: "foo"'),
            (("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
            (("xml", "a"), "of kind json_object, json_schema, regex, lark; got 'xml'"),
            ((["x"], "a"), "of kind json_object"),
            ("xml", "of kind json_object"),
            (("regex", "a", "b"), "a pair of kind and text"),
            ({"type": "object"}, "a pair of kind and text"),
            (7, "a pair of kind and text"),
        ],
    )
    def test_bad_grammars_name_the_problem_and_cost_nobody_anything(self, grammar: Any, message: str) -> None:
        engine = dry()
        bystander = engine.add_request("bystander", PLAIN)
        engine.step()
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            engine.add_request("x", SamplingParams(grammar=grammar))
        assert caught.value.param == "grammar"
        assert len(str(caught.value)) < 1200
        ended = []
        while engine.has_unfinished_requests():
            ended += [o.request_id for o in engine.step() if o.finished]
        assert ended == [bystander]

    def test_models_without_a_usable_tokenizer(self) -> None:
        for tokenizer, message in (
            (NoTokenizer("none is there"), "grammar needs a tokenizer: set model.tokenizer"),
            (small_tokenizers.word_piece(), "do not work with this model's tokenizer: can't determine decoder type"),
        ):
            with pytest.raises(RequestError, match=message):
                GrammarCompiler(tokenizer, 300, [1]).compile(Grammar.of("json_object"))

    def test_without_the_package_everything_else_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        engine = dry()
        with pytest.raises(RequestError, match="pip install llguidance") as caught:
            engine.generate("x", regex("yes"))
        assert caught.value.param == "grammar"
        assert len(engine.generate("x", PLAIN)[0].outputs[0].token_ids) == 12
        monkeypatch.undo()
        assert engine.generate("x", regex("yes"))[0].outputs[0].text == "yes"


class TestCompiling:
    def test_once_for_all_that_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        compiled = grammar_module.CompiledGrammar
        monkeypatch.setattr(grammar_module, "CompiledGrammar", lambda *args: made.append(args[0]) or compiled(*args))
        monkeypatch.setattr(grammar_module, "_KEPT", 2)
        engine = dry()
        yes, no = regex("yes", n=3), regex("no")
        assert not engine.grammars.known(yes.grammar)
        engine.grammars.compile(yes.grammar)
        assert engine.grammars.known(yes.grammar)
        engine.generate(["a", "b"], [yes, no])
        engine.generate("a", yes)
        assert [grammar.text for grammar in made] == ["yes", "no"]
        engine.generate("a", regex("maybe"))
        engine.generate(["a", "a"], [yes, no])
        assert [grammar.text for grammar in made] == ["yes", "no", "maybe", "no"], "the one not used for longest goes"
        assert engine.grammars.known(no.grammar)
        assert engine.grammars.known(yes.grammar), "and is used next"
        engine.grammars.compile(regex("perhaps").grammar)
        assert engine.grammars.known(yes.grammar)

    def test_one_that_is_held_is_known_whatever_comes_after_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_module, "_KEPT", 1)
        grammars, yes = dry().grammars, regex("yes").grammar
        held = grammars.compile(yes)
        grammars.compile(regex("no").grammar)
        assert grammars.known(yes) is grammars.compile(yes) is held
        del held
        assert grammars.known(yes) is None

    def test_in_other_threads_while_the_engine_works(self) -> None:
        engine = dry()
        params = [regex(f"[a-z]{{30}}{i}") for i in range(40)]
        with ThreadPoolExecutor(4) as pool:
            prepared = [pool.submit(engine.grammars.compile, own.grammar) for own in params]
            outputs = engine.generate(["x"] * 40, params[::-1])
            assert all(future.result() for future in prepared)
        for i, output in enumerate(reversed(outputs)):
            assert re.fullmatch(f"[a-z]{{30}}{i}", output.outputs[0].text)

    def test_a_sequence_that_cannot_go_on_ends_with_an_error(self, engine: LLMEngine) -> None:
        bad = engine.add_request("x", regex("[a-z]{50}"), request_id="bad")
        good = engine.add_request("x", regex("[a-z]{5}"), request_id="good")
        constraint = next(r.constraint for r in engine._outputs.unfinished(bad))
        assert constraint is not None
        engine.step()
        constraint.failed = True  # as when the grammar's parser runs into its limits
        reasons = {}
        while engine.has_unfinished_requests():
            reasons |= {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
        assert reasons == {bad: FinishReason.error, good: FinishReason.stop}
        assert engine.scheduler.usage().used_blocks == 0

    def test_forms_of_a_grammar(self) -> None:
        params = SamplingParams(grammar=["json_schema", {"b": 1, "a": [True, None]}])
        assert params.grammar == Grammar(GrammarKind.json_schema, '{"b": 1, "a": [true, null]}')
        assert params == SamplingParams(grammar=params.grammar) == SamplingParams(grammar=tuple(params.grammar))
        assert hash(params) == hash(SamplingParams(grammar=params.grammar))
        assert SamplingParams(grammar="json_object").grammar == ("json_object", "")


def bits(tokens: list[int], vocab_size: int) -> bytes:
    allowed = np.zeros(-(-vocab_size // 8) * 8, np.uint8)
    allowed[tokens] = 1
    return np.packbits(allowed, bitorder="little").tobytes()
