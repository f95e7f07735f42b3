"""One call as JSON, {"name": "f", "arguments": {...}}, which all formats have in common: read, and asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_infer.runtime.text.pieces import Kind, Piece, Source, Steps

ARGUMENTS = ("arguments", "parameters")
WHITE_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}  # a weak model may go on with spaces for ever
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
ELSEWHERE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}  # where else a schema may describe properties
Parse = Callable[[Source, list[Piece]], Steps[None]]


def read_call(source: Source, pieces: list[Piece], begin: int) -> Steps[bool]:
    """Reads an object that should be a call. Its arguments are handed on as they come, once the name is known.

    Args:
        begin: of the markup before the object.

    Returns:
        Whether it was a call. Where it was not, all that was taken since `begin` is text.
    """
    name = ""
    held = ""  # arguments that came before the name
    said = False
    more = yield from source.skip("{")
    while more:
        key = yield from _string(source)
        colon = key is not None and (yield from source.skip(":"))
        if not colon:
            break
        yield from source.skip_white()
        if key in ARGUMENTS and name and (yield from source.peek()) == "{":
            pieces.append(Piece(Kind.call, name))
            said = True
            source.forget()  # a call it is, whatever comes
            yield from value(source, pieces)
        else:
            start = source.at
            yield from value(source, None)
            found = source.text[start : source.at]
            if key == "name":
                name = _name(found)
            elif key in ARGUMENTS:
                held = _arguments(found)
        yield from source.skip_white()
        more = yield from source.skip(",")
        if more:
            yield from source.skip_white()
        elif (yield from source.skip("}")) and (name or said):
            if not said:
                pieces += [Piece(Kind.call, name), Piece(Kind.arguments, held or "{}")]
            return True
    if not said:
        give_back(source, pieces, begin)
    return said


def give_back(source: Source, pieces: list[Piece], begin: int) -> None:
    """What looked like a call is text, all of it: looking for another call inside could take for ever."""
    pieces.append(Piece(Kind.text, source.text[begin : source.at]))
    source.forget()


def _string(source: Source) -> Steps[str | None]:
    """A key, with the white space around it."""
    yield from source.skip_white()
    begin = source.at
    if (yield from source.peek()) != '"':
        return None
    yield from value(source, None)
    found = source.text[begin : source.at]
    yield from source.skip_white()
    return _loaded(found)


def value(source: Source, pieces: list[Piece] | None) -> Steps[None]:
    """Takes one JSON value, as far as brackets and quotes tell where it ends.

    Args:
        pieces: where it is handed on, as it comes, as arguments; the source then forgets it.
    """
    depth = 0
    in_string = False
    while True:
        char = yield from source.peek()
        if not char or (not depth and not in_string and char in ",]}"):
            break
        source.at += 1
        if in_string:
            if char == "\\" and (yield from source.peek()):
                source.at += 1
            in_string = char != '"'
        elif char == '"':
            in_string = True
        else:
            depth += (char in "{[") - (char in "}]")
        if pieces is not None and source.at == len(source.text):
            _hand_on(source, pieces)
        if not depth and not in_string and char in '"}]':
            break
    if pieces is not None:
        _hand_on(source, pieces)


def _hand_on(source: Source, pieces: list[Piece]) -> None:
    if source.at:
        pieces.append(Piece(Kind.arguments, source.text[: source.at]))
        source.forget()


def _name(text: str) -> str:
    found = _loaded(text)
    return found if isinstance(found, str) else ""


def _arguments(text: str) -> str:
    """Some models write them as a string that holds JSON."""
    found = _loaded(text)
    return found if isinstance(found, str) else text


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def calls_rules(tools: Sequence[Mapping[str, Any]], key: str, head: str, between: str, tail: str) -> str:
    """Lark rules; `calls` are calls to these functions, with arguments that follow their schemas.

    Args:
        tools: each with a `name` and perhaps `parameters`, a JSON schema.
        key: under which a call has its arguments.
        head, between, tail: what stands before, between and behind the calls; one call where nothing is between.
    """
    more = f"({literal(between)} call)*" if between else ""
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules = [f"calls: {literal(head)} call {more} {literal(tail)}", f"call: {names}"]
    for index, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool["name"])}, "{key}": '
        schema = _closed(tool.get("parameters") or NO_PARAMETERS)
        rules.append(f'call_{index}: {literal(opening)} args_{index} "}}"')
        rules.append(f"args_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function takes no other arguments than those described, where its schema does not say otherwise."""
    closed = {"x-guidance": WHITE_SPACE, **parameters}
    if "properties" in parameters and not ELSEWHERE & parameters.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def literal(text: str) -> str:
    """In Lark; nothing where the text is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""
