"""Answers taken apart: calls by format, thoughts, and the promise that deltas may be cut anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.runtime.text.pieces import Kind, Parser, Piece, joined
from mini_infer.runtime.text.reasoning import ReasoningParser
from mini_infer.runtime.text.tools.formats import FORMATS, format_of

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}]\\""}]}}'
ARGUMENTS = '{"a": [1, {"b": "}]\\""}]}'
ONE = [(Kind.call, "f"), (Kind.arguments, ARGUMENTS)]
TEXT = [  # format, text, pieces
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ONE),
    ("hermes", f"Let me see. \n<tool_call>{CALL}</tool_call>\n", [(Kind.text, "Let me see."), *ONE]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", ONE * 2),
    ("hermes", f"<tool_call>{CALL}</tool_call> and on", [*ONE, (Kind.text, "and on")]),
    ("hermes", f"<tool_call>{CALL}", ONE),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "g"}', [(Kind.call, "g"), (Kind.arguments, '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "g"}', [(Kind.call, "g"), (Kind.arguments, "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}',
        [(Kind.call, "g"), (Kind.arguments, '{"x": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": ', [(Kind.call, "g"), (Kind.arguments, '{"x": ')]),
    ("hermes", "a <tool_call> b", [(Kind.text, "a <tool_call> b")]),
    ("hermes", ' \n<tool_call>\n{"name": 5}', [(Kind.text, ' \n<tool_call>\n{"name": 5}')]),
    ("hermes", "2 <tool > 1  ", [(Kind.text, "2 <tool > 1  ")]),
    ("llama3", CALL.replace("arguments", "parameters"), ONE),
    ("llama3", f" <|python_tag|> {CALL}; {CALL}\n", ONE * 2),
    ("llama3", f"See {CALL}", [(Kind.text, f"See {CALL}")]),
    ("llama3", ' {"answer": 42} ', [(Kind.text, ' {"answer": 42} ')]),
    ("llama3", f"{CALL}; so", [*ONE, (Kind.text, "; so")]),
    ("llama3", "<|python_tag|>print(1)", [(Kind.text, "<|python_tag|>print(1)")]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", ONE * 2),
    ("mistral", f"Well [TOOL_CALLS][{CALL}]\n", [(Kind.text, "Well"), *ONE]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]f{ARGUMENTS}", ONE * 2),
    ("mistral", f"[TOOL_CALLS][{CALL}, 5]", [*ONE, (Kind.text, ", 5]")]),
    ("mistral", "[TOOL_CALLS]: see", [(Kind.text, "[TOOL_CALLS]: see")]),
]
MARKUP = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "f", ";", ",",
    "[", "]", "{", "}", '"', "\\", ":", " ", "\n", "é", CALL, ARGUMENTS,
    '{"name": "f", "parameters": ', '"arguments"', "<", "1",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=3)), max_size=12).map("".join)


def taken_apart(parser: Parser | ReasoningParser, deltas: list[str]) -> list[Piece]:
    pieces = [piece for delta in deltas for piece in parser.push(delta)]
    return joined(pieces + parser.push("", last=True))


@pytest.mark.parametrize(("name", "text", "pieces"), TEXT)
def test_formats(name: str, text: str, pieces: list[tuple[Kind, str]]) -> None:
    assert taken_apart(FORMATS[name].parser(), [text]) == pieces
    assert taken_apart(FORMATS[name].parser(), list(text)) == pieces


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", [*FORMATS, None])
@given(text=texts, places=st.lists(st.integers(0, 200), max_size=8), inside=st.booleans())
def test_deltas_may_be_cut_anywhere(name: str | None, text: str, places: list[int], inside: bool) -> None:
    def whole() -> ReasoningParser:
        return ReasoningParser(inside, None if name is None else FORMATS[name].parser())

    expected = taken_apart(whole(), [text])
    assert taken_apart(whole(), cut(text, places)) == expected
    assert taken_apart(whole(), list(text)) == expected


@pytest.mark.parametrize("name", list(FORMATS))
@given(text=texts)
def test_no_character_is_lost_or_repeated(name: str, text: str) -> None:
    pieces = taken_apart(FORMATS[name].parser(), [text])
    if not any(piece.kind is Kind.call for piece in pieces):
        assert "".join(piece.text for piece in pieces) == text
    at = 0
    for piece in pieces:
        if piece.kind is Kind.arguments and piece.text not in text:
            continue  # written as a string, or left out
        at = text.index(piece.text, at) + len(piece.text)


def test_arguments_are_told_before_they_are_complete() -> None:
    parser = FORMATS["hermes"].parser()
    parser.push("Hm <tool")
    assert parser.push('_call>{"name": "f", "arguments": {"a"') == [
        Piece(Kind.call, "f"),
        Piece(Kind.arguments, '{"a"'),
    ]
    assert parser.push(": 1") == [Piece(Kind.arguments, ": 1")]


def test_arguments_may_be_nested_deeper_than_python_reads() -> None:
    parser = FORMATS["hermes"].parser()
    text = '<tool_call>{"arguments": ' + '{"a": ' * 3000 + "1" + "}" * 3000 + ', "name": "f"}</tool_call>'
    assert "".join(piece.text for piece in parser.push(text))


@pytest.mark.parametrize(
    ("text", "inside", "pieces"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, [(Kind.reasoning, "hm"), (Kind.text, "Yes")]),
        ("hm</think>Yes ", True, [(Kind.reasoning, "hm"), (Kind.text, "Yes ")]),
        ("hm ", True, [(Kind.reasoning, "hm ")]),
        (" Yes <think>", False, [(Kind.text, " Yes <think>")]),
        ("<think></think>", False, []),
    ],
)
def test_reasoning(text: str, inside: bool, pieces: list[tuple[Kind, str]]) -> None:
    assert taken_apart(ReasoningParser(inside, None), [text]) == pieces
    assert taken_apart(ReasoningParser(inside, None), list(text)) == pieces


def test_a_template_tells_the_format() -> None:
    assert format_of("... <tool_call> ...") is FORMATS["hermes"]
    assert format_of("... [TOOL_CALLS] ...") is FORMATS["mistral"]
    assert format_of("... <|python_tag|> ...") is FORMATS["llama3"]
    assert format_of("... <tool_call><function=f> ...") is None
    assert format_of("{{ messages }}") is None


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_a_grammar_makes_is_read(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tool_format = FORMATS[name]
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "required": ["x"],
        "$defs": {"n": {"type": "integer"}},
    }
    tools = [{"name": "f", "parameters": schema}, {"name": "g"}]
    calls = [("f", {"x": 5}), ("g", {})]
    written = [json.dumps({"name": name, tool_format.key: given}) for name, given in calls]
    text = tool_format.head + tool_format.between.join(written) + tool_format.tail
    grammars = [tool_format.forced(tools, True), tool_format.free(tools, True), tool_format.or_json(tools, True, "{}")]
    for grammar in grammars:
        assert not llguidance.LLMatcher.validate_grammar(grammar)
    pieces = taken_apart(tool_format.parser(), [tool_format.opening, text])
    assert [(piece.kind, piece.text) for piece in pieces] == [
        (Kind.call, "f"), (Kind.arguments, '{"x": 5}'), (Kind.call, "g"), (Kind.arguments, "{}")
    ]  # fmt: skip


class Bytes:
    """A tokenizer for llguidance."""

    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>", b"[TOOL_CALLS]")
    special_token_ids = (256, 257)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


GOOD, BAD = '{"name": "f", "KEY": {"x": 5}}', '{"name": "f", "KEY": {"x": "5"}}'


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", b"See. <tool_call>\n", "\n</tool_call>"),
        ("llama3", b"", ""),
        ("mistral", [*b"See. ", 257, *b"["], "]"),
    ],
)
def test_what_a_strict_model_may_say(name: str, before: bytes | list[int], after: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    tool_format = dataclasses.replace(FORMATS[name], token_id=257 if name == "mistral" else None)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    grammar = tool_format.free([{"name": "f", "parameters": schema}], several=True)

    def accepts(tokens: list[int]) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert accepts(list(b"It rains <today>."))
    assert accepts([*before, *GOOD.replace("KEY", tool_format.key).encode(), *after.encode()])
    assert not accepts([*before, *BAD.replace("KEY", tool_format.key).encode(), *after.encode()])


def test_what_is_text_for_good_is_known() -> None:
    reasoning = ReasoningParser(False, None)
    assert [reasoning.push(text) and reasoning.passes for text in (" ", "<think>a", "</think>", "b")] == [
        [],
        False,
        [],
        True,
    ]
    llama = FORMATS["llama3"].parser()
    llama.push("Well")
    assert llama.passes
    both = ReasoningParser(False, FORMATS["hermes"].parser())
    both.push("Well")
    assert not both.passes
