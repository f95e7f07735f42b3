"""Questions put to a server of ours over HTTP, all at once, each with its own sampling parameters."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from urllib.error import HTTPError

from experiments.lab.judge.exact_gate import Ask, Question
from experiments.lab.load.client import Target
from experiments.lab.load.connection import read_answer
from experiments.lab.load.subject import OverHTTP
from experiments.lab.measure.kinds import Kind, PeerError, PeerSettings
from experiments.lab.peers.pool import Peers
from mini_infer.core.config import EngineConfig

ANSWERED_S = 120.0  # a server that is silent for longer stands still


@contextmanager
def served(settings: PeerSettings, config: EngineConfig) -> Iterator[Ask]:
    """mini-infer-serve with these settings of its engine, for as long as it is asked."""
    with closing(Peers(settings)) as peers:
        server = peers.open(Kind.served, config)
        assert isinstance(server, OverHTTP)
        yield partial(answers, server.target)


def answers(target: Target, questions: Sequence[Question]) -> list[list[int]]:
    """The tokens of each answer. Raises PeerError where one is refused or does not come."""
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(partial(_answer, target), questions))


def _answer(target: Target, question: Question) -> list[int]:
    """As a stream, which is what measured requests read."""
    prompt, params = question
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
    body = {"model": target.model, "prompt": prompt, "return_token_ids": True, "stream": True}
    body |= {name: value for name in names if (value := getattr(params, name)) is not None}
    url, headers = f"http://{target.host}:{target.port}{target.path}", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERED_S) as stream:
            answer = read_answer([(0.0, stream.read())])  # nothing is timed
    except OSError as error:
        told = error.read().decode(errors="replace") if isinstance(error, HTTPError) else str(error)
        raise PeerError(f"mini-infer-serve does not answer a question of the gate: {told}") from error
    if answer.error:
        raise PeerError(f"mini-infer-serve does not answer a question of the gate: {answer.error}")
    return answer.token_ids
