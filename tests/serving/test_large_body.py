"""Large bodies are read as small ones are, and are bounded by field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.schema import MAX_ENTRIES
from mini_infer.serving.http.bodies import MAX_FIELD, PIECE, LargeBodies, parse_json

BODIES = LargeBodies(["prompt", "messages", "logit_bias", "response_format", "model"])
IDS = list(range(100_000))


def parse(body: bytes) -> dict[str, Any]:
    return asyncio.run(BODIES.parse(body))


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        [IDS[:10], IDS, [], IDS[:70_000], [7]],
        [[[1, 2], [3]] * 9000, [[4]]],
        [],
        [[]],
        [0.5, -1, 1e300, 2**80, None, True],
        ["a, ], [", '"', "é"] * 9000,
        [{"a": [1]}] * 9000,
        "text, " * 9000,
        None,
        {"a": 1},
    ],
    ids=lambda prompt: json.dumps(prompt)[:20],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n ", " : ")], ids=["dense", "usual", "wide"])
def test_a_large_body_is_read_as_a_small_one(prompt: Any, separators: tuple[str, str]) -> None:
    body = json.dumps({"prompt": prompt, "model": "a"}, separators=separators).encode()
    assert parse(body) == parse_json(body) == {"prompt": prompt, "model": "a"}


def test_what_nobody_asks_for_is_not_read() -> None:
    assert parse(b'{"other": [[[]]], "model": "a", "more": {"model": "b"}}') == {"model": "a"}
    assert parse(b'{"model": "a", "model": null}') == {"model": None}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": [1,2,]}',
        b'{"prompt": [1,NaN]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"other": NaN}',
        b'{"prompt": 1} 2',
        b'{"prompt": [' + b"5," * PIECE + b"5",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_no_json(body: bytes) -> None:
    for read in (parse, parse_json):
        with pytest.raises(ApiError) as error:
            read(body)
        assert (error.value.status, error.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[1, 2]", b'"text"', b"5", b"null"])
def test_json_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiError, match="must be a JSON object"):
        parse(body)


def test_lists_that_hold_no_prompt_are_bounded() -> None:
    biases = b'{"logit_bias": {' + b'"1":1,' * MAX_FIELD + b'"1":1}}'
    with pytest.raises(
        ApiError, match=f"at most {MAX_FIELD} are allowed .{MAX_ENTRIES['logit_bias']} entries"
    ) as error:
        parse(biases)
    assert error.value.param == "logit_bias"
    schema = b'{"response_format": {"type": "json_schema", "a": [' + b"1," * MAX_FIELD + b"1]}}"
    with pytest.raises(ApiError, match=f"response_format is .* at most {MAX_FIELD} are allowed$"):
        parse(schema)
    assert len(parse(b'{"model": "' + b"a" * 2 * MAX_FIELD + b'"}')["model"]) == 2 * MAX_FIELD
