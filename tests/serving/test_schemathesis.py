"""Requests made up from the app's own OpenAPI document: those that fit it, and those with something wrong in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from http_server import Server, http_client, running
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from mini_infer.serving.api.app import create_app

KEY = {"Authorization": "Bearer secret"}
SMALL = ("--model.dry.max_model_len", "256", "--scheduler.max_num_seqs", "16", "--max-queued", "16")
ERRORS = (400, 401, 403, 404, 429)  # and no other is right for what is sent here, but
TOO_LATE = 504  # for a made-up `timeout` of next to nothing
DOCUMENT: dict[str, Any] = create_app().openapi()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    TEXT: {"prompt": "hello", "max_tokens": 4},
}
OPEN = ("/healthz", "/readyz", "/version", "/metrics")  # without the key
OPERATIONS = [(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods]
# A failure is printed as it was found: shrinking takes longer than reading.
UNSHRUNK = [Phase.explicit, Phase.generate]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(*SMALL, environ={"MINI_INFER_API_KEY": "secret"}) as server:
        server.http.headers.update(KEY)
        yield server


@pytest.fixture(autouse=True)
def _as_before(server: Server) -> Iterator[None]:
    yield
    server.check_unharmed()


def send(server: Server, case: Case, headers: dict[str, str]) -> Any:
    """The answer, which is one of those that a request can rightly get."""
    answer = case.call(base_url=server.url, headers=headers)
    assert answer.status_code in (200, TOO_LATE, *ERRORS), (case.body, answer.text)
    if answer.status_code != 200:
        (error,) = answer.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert answer.status_code != TOO_LATE or "timeout" in case.body
    return answer


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), [each for each in OPERATIONS if each[0] not in OPEN])
def test_nothing_is_too_odd(server: Server, path: str, method: str, mode: GenerationMode) -> None:
    @settings(settings.get_profile("heavy"), max_examples=8 if method == "POST" else 4, phases=UNSHRUNK)
    @given(schemathesis.openapi.from_dict(DOCUMENT)[path][method].as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # a made-up name would be all that is wrong with it
        send(server, case, KEY)

    ask()


@pytest.mark.parametrize("path", GOOD)
def test_one_odd_field_in_a_good_request(server: Server, path: str) -> None:
    @settings(max_examples=8, phases=UNSHRUNK)  # each has many fields, and takes longer to make up than they to send
    @given(schemathesis.openapi.from_dict(DOCUMENT)[path]["POST"].as_strategy())
    def ask(case: Case) -> None:
        for odd, value in dict(case.body).items():
            case.body = {**GOOD[path], odd: value}
            send(server, case, KEY)

    ask()


ALLOWED: dict[str, st.SearchStrategy[Any]] = {
    "min_tokens": st.just(1),
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**63 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 10),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=8),
    "stop_token_ids": st.lists(st.integers(0, 511), max_size=8),
    "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=8),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stream": st.booleans(),
    "priority": st.integers(-(2**63), 2**63 - 1),
    "cache_salt": st.text(max_size=8),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 20),
}


@pytest.mark.parametrize("mixtures", [60, pytest.param(4704, marks=pytest.mark.soak)])
def test_every_mixture_of_allowed_values_is_answered(server: Server, mixtures: int) -> None:
    prompts = st.one_of(st.text(min_size=1, max_size=32), st.lists(st.integers(0, 511), min_size=1, max_size=200))

    @settings(max_examples=mixtures, phases=UNSHRUNK)
    @given(st.fixed_dictionaries({"prompt": prompts, "max_tokens": st.integers(1, 8)}, optional=ALLOWED))
    def ask(body: dict[str, Any]) -> None:
        response = server.post(TEXT, **body)
        assert response.status_code == 200, (body, response.text)
        if body.get("stream"):
            assert response.text.endswith("data: [DONE]\n\n"), body

    ask()


# --- the key, and what is not there -------------------------------------------------------------------------------


def test_without_the_key_nothing_is_told(server: Server) -> None:
    with http_client(server.url) as client:
        for path, method in OPERATIONS:
            for given_key in (
                {},
                {"Authorization": ""},
                {"Authorization": "Bearer"},
                {"Authorization": "Bearer secret x"},
            ):
                response = client.request(method, path, json={}, headers=given_key)
                assert response.status_code == (200 if path in OPEN else 401), (path, given_key)
                assert "secret" not in response.text


ODD_PATHS = (
    "/v1",
    "/v1/",
    "//v1/models",
    "/V1/models",
    "/v1/models/..%2f..",
    "/%00",
    "/%ff%fe",
    "/é",
    "/" + "a" * 5000,
)


def test_what_is_not_there(server: Server) -> None:
    for path in ODD_PATHS:
        for method in ("GET", "POST", "DELETE"):
            response = server.http.request(method, path)
            assert response.status_code in (404, 405), (path, response.text)
            assert set(response.json()) == {"error"}
