"""Grammars that would take all time and memory are refused with the reason, and hold up nobody."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from mini_infer import RequestError
from mini_infer.core.sampling_params import Grammar
from mini_infer.runtime.text import grammar as grammar_module
from mini_infer.runtime.text.grammar import GrammarCompiler
from mini_infer.runtime.text.tokenizer import ByteTokenizer
from mini_infer.serving.link.connection import Connection
from mini_infer.serving.link.wire import Add
from mini_infer.serving.processes import grammar_trials
from mini_infer.serving.processes.grammar_trials import COMMAND, GrammarTrials, Trial
from mini_infer.serving.processes.newcomers import Newcomers, Owner

ENDLESS = '{"type": "integer", "multipleOf": %d}'
MANY_OPTIONAL = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})


def schema(text: str) -> Grammar:
    return Grammar.of(("json_schema", text))


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(GrammarCompiler(ByteTokenizer(), 261, [ByteTokenizer.EOS]))
    yield trials
    trials.close()


def test_a_good_grammar_comes_through_with_its_size(trials: GrammarTrials) -> None:
    assert Trial(trials, Grammar.of(("regex", "[a-z]{5}"))).wait() >= 0
    assert Trial(trials, schema(ENDLESS % 100_003)).wait() > 2**20  # which begins in the quick queue


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.of(("regex", "a?" * 200 + "a" * 200)), "cannot be followed"),
        (schema(MANY_OPTIONAL), "cannot be followed"),
        (Grammar.of(("regex", "[")), "cannot be followed"),
        (schema('{"type": "nonsense"}'), "cannot be followed"),
    ],
    ids=["ambiguous", "many optional", "no regex", "no schema"],
)
def test_what_cannot_be_followed_is_known_before_its_first_token(
    trials: GrammarTrials, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        Trial(trials, grammar).wait()


def test_bad_ones_hold_up_no_good_one_and_can_be_given_up(trials: GrammarTrials) -> None:
    bad = [Trial(trials, schema(ENDLESS % (10_000_019 + i))) for i in range(4)]
    waiting = [ThreadPoolExecutor(1).submit(trial.wait) for trial in bad]
    Trial(trials, Grammar.of(("regex", "[0-9]{7}"))).wait()
    assert not any(ended.done() for ended in waiting)  # each takes more than 4 s of CPU time
    for trial, ended in zip(bad, waiting, strict=True):
        trial.give_up()
        with pytest.raises(RuntimeError, match="broken off"):
            ended.result(10)
    (nursery,) = [p for p in psutil.Process().children() if COMMAND[1] in p.cmdline()]
    until = time.monotonic() + 5
    while nursery.children():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("bound", "reason"), [("LIMITS_S = (0.1, 0.3)", "0.3 s"), ("MEMORY = 2**24", "16 MB")])
def test_time_and_memory_end_a_trial_with_the_reason(monkeypatch: pytest.MonkeyPatch, bound: str, reason: str) -> None:
    bounded = f"from mini_infer.serving.processes import grammar_trials as trials; trials.{bound}; trials.main()"
    monkeypatch.setattr(grammar_trials, "COMMAND", ("-c", bounded))
    trials = GrammarTrials(GrammarCompiler(ByteTokenizer(), 261, [ByteTokenizer.EOS]))
    with pytest.raises(RequestError, match=f"more than {reason}"):
        Trial(trials, schema(ENDLESS % 10_000_019)).wait()
    trials.close()


def test_a_grammar_that_came_through_is_there_when_its_request_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although so many came behind it that it is not kept any more."""
    monkeypatch.setattr(grammar_module, "_KEPT", 1)
    monkeypatch.setattr(Trial, "wait", lambda trial: 100)
    made = []
    compiled = grammar_module.CompiledGrammar
    monkeypatch.setattr(grammar_module, "CompiledGrammar", lambda *args: made.append(args[0]) or compiled(*args))
    grammars = GrammarCompiler(ByteTokenizer(), 261, [ByteTokenizer.EOS])
    newcomers = Newcomers(grammars)
    kinds = [Grammar.of(("regex", f"[ab]{{{n}}}")) for n in (1, 2, 3, 1)]
    connection = Connection(socket.socket(), "a test")
    for number, grammar in enumerate(kinds):
        add = Add(number, [1], {"grammar": tuple(grammar)}, 0, "", True, 0.0, None)
        assert newcomers.put(Owner(connection, number), add)
        while newcomers._preparing:
            newcomers.fetch_prepared()
    assert made == kinds[:3], "the fourth waits beside the first"
    while newcomers:
        taken_in = newcomers.pop()
        grammars.compile(Grammar.of(taken_in.add.params["grammar"]))
    assert made == kinds[:3]
    newcomers.close()
