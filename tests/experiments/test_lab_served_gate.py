"""The gate of tokens over HTTP finds what a server does to a request on its way to an engine and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from experiments.lab.judge import exact_gate
from experiments.lab.judge.exact_gate import Ask, ExactGate, Question
from experiments.lab.load.asked import answers, served
from experiments.lab.load.client import Target
from experiments.lab.measure.kinds import PeerError, PeerSettings
from mini_infer import EngineConfig, SamplingParams

CONFIG = EngineConfig.from_dict(
    {"model": {"path": "tiny-draft", "device": "cpu"}, "parallel": {"replicas": 2, "routing": "prefix_aware"}}
)


@pytest.fixture(scope="module")
def gate() -> Iterator[ExactGate]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_gate, "MODEL", exact_gate.DRAFT)
        yield ExactGate("cpu")


@pytest.fixture(scope="module")
def ask(gate: ExactGate) -> Iterator[Ask]:
    """Of a server of two engines with the settings that the gate gives it."""
    with served(PeerSettings(), gate._comparable(exact_gate._stressed(CONFIG))) as ask:
        yield ask


def test_a_server_answers_as_its_engine_does_alone(gate: ExactGate, ask: Ask) -> None:
    given = list[EngineConfig]()

    @contextmanager
    def serve(config: EngineConfig) -> Iterator[Ask]:
        given.append(config)
        yield ask

    found = gate.of_served("served", CONFIG, serve)
    assert (found.variant, found.passed, found.equal_tokens) == ("served", True, 2 * (288 + 12 * exact_gate.CROWD))
    assert "over HTTP" in found.against
    (config,) = given
    assert config.parallel == CONFIG.parallel, "what is between clients and engines is gated with them"
    assert config.scheduler.max_num_seqs == exact_gate.CROWD
    assert config.cache.num_blocks == 48, "with little memory"


def test_a_question_without_an_answer_is_an_error_with_the_servers_words(ask: Ask) -> None:
    told = "mini-infer-serve does not answer a question of the gate: "
    with pytest.raises(PeerError, match=rf"{told}.*maximum context length"):
        ask([([1] * 10_000, SamplingParams(max_tokens=1))])
    with pytest.raises(PeerError, match=rf"{told}.*refused"):
        answers(Target("127.0.0.1", 1, "/v1/completions", "nobody"), [([1], SamplingParams(max_tokens=1))])


Change = Callable[[Question], Question]
FAULTS: dict[str, Change] = {
    "top_p is ignored": lambda q: (q[0], replace(q[1], top_p=1.0)),
    "top_k is ignored": lambda q: (q[0], replace(q[1], top_k=0)),
    "seeds are another request's": lambda q: (q[0], replace(q[1], seed=(q[1].seed or 0) + 1)),
    "the prompt's first token is lost": lambda q: (q[0][1:], q[1]),
    "an answer is too short": lambda q: (q[0], replace(q[1], max_tokens=(q[1].max_tokens or 0) - 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_happens_on_the_way_is_found(fault: str, gate: ExactGate, ask: Ask) -> None:
    def changed(questions: Sequence[Question]) -> Sequence[Sequence[int]]:
        return ask([FAULTS[fault](question) for question in questions])

    assert not gate.of_served("served", CONFIG, lambda config: nullcontext(changed)).passed


def test_answers_of_others_are_found(gate: ExactGate, ask: Ask) -> None:
    def turned(questions: Sequence[Question]) -> Sequence[Sequence[int]]:
        return [*ask(questions)[1:], []]

    found = gate.of_served("served", CONFIG, lambda config: nullcontext(turned))
    assert found.first_difference is not None
    assert found.first_difference.request == 0
