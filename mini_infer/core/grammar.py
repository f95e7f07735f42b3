"""What a constrained text must look like: a JSON schema, any JSON object, a regular expression or a Lark grammar.

Only the description lives here; runtime/text/grammar.py compiles it.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from mini_infer.core.errors import RequestError

MAX_GRAMMAR_LENGTH = 2**18  # characters: compiling takes time in proportion


class GrammarKind(str, Enum):
    json_object = "json_object"  # any JSON object; takes no text
    json_schema = "json_schema"
    regex = "regex"  # the whole text matches it
    lark = "lark"  # with a rule `start`


class Grammar(NamedTuple):
    """`text` is the schema as JSON, the expression, or the grammar."""

    kind: GrammarKind
    text: str = ""

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """From "json_object" or a pair such as ("json_schema", {...}) or ("regex", "[a-z]+"). Raises RequestError."""
        kind, text = (value, "") if isinstance(value, str) else _pair(value)
        if kind not in list(GrammarKind):
            _refuse(f"is of kind {', '.join(k.value for k in GrammarKind)}; got {kind!r}")
        kind = GrammarKind(kind)
        if kind is GrammarKind.json_object:
            if text != "":
                _refuse(f"json_object takes no text, got {text!r}: use json_schema")
            return cls(kind)
        if kind is GrammarKind.json_schema and isinstance(text, (dict, bool)):
            try:
                text = json.dumps(text, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                _refuse(f"json_schema cannot be written as JSON: {error}")
        if not isinstance(text, str) or not text:
            _refuse(f"{kind.value} needs its text as a string that is not empty, got {text!r}")
        if len(text) > MAX_GRAMMAR_LENGTH:
            _refuse(f"{kind.value} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(f"{kind.value} holds half a surrogate pair at character {error.start}: send whole characters")
        if kind is GrammarKind.json_schema:
            _check_json(text)
        return cls(kind, text)


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        _refuse(f"is 'json_object', or a pair of kind and text such as ('regex', '[a-z]+'); got {value!r}")
    return value[0], value[1]


def _check_json(text: str) -> None:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        schema = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        _refuse(f"json_schema is not JSON: {error}")
    if not isinstance(schema, (dict, bool)):
        _refuse(f"json_schema must be a JSON object, got {text[:80]}")


def _refuse(problem: str) -> NoReturn:
    raise RequestError(f"grammar {problem}", "grammar")
