"""How a model writes calls: told by its chat template, or by whoever serves it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer.runtime.text.pieces import Parser
from mini_infer.runtime.text.tools import parsers
from mini_infer.runtime.text.tools.calls import Parse, calls_rules, literal

Functions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolFormat:
    """
    Attributes:
        marker: what begins calls; in a chat template, and nowhere else.
        opening: how calls begin. Where one has to be made, this stands at the end of the prompt, and a grammar makes
            the model go on with {"name": ..., KEY: {...}} between `head`, `between` and `tail`.
        other_text: a regular expression of answers that are no calls, where these stand alone; else text may stand
            before them.
        token_id: of the opening, where it is a special token, which no text is.
        id_length: of a call's id, in letters and digits.
    """

    parse: Parse
    marker: str
    opening: str
    head: str = ""
    between: str = ""
    tail: str = ""
    key: str = "arguments"
    other_text: str | None = None
    special: bool = False
    token_id: int | None = None
    id_length: int = 24

    def parser(self) -> Parser:
        return Parser(self.parse)

    def forced(self, tools: Functions, several: bool) -> str:
        """A Lark grammar of what stands behind the opening where a call has to be made.

        Args:
            tools: each with a `name` and perhaps `parameters`, a JSON schema.
        """
        return f"start: calls\n{self._calls(tools, several)}"

    def free(self, tools: Functions, several: bool) -> str:
        """A Lark grammar of any text, in which calls follow the schemas."""
        text = self.other_text or f"(?s:.*)/ & ~/(?s:.*{re.escape(self.marker)}.*)"
        if self.other_text is not None:
            start = "start: TEXT | calls"
        elif self.token_id is not None:
            start = f"start: TEXT ({self._open()} calls)?"
        else:  # one token of the grammar: it takes as much of a text as one of them can
            start = f"start: TEXT | OPEN calls\nOPEN: TEXT {self._open()}"
        start += f"\nTEXT: /{text}/"
        return f"{start}\n{self._calls(tools, several)}"

    def or_json(self, tools: Functions, several: bool, schema: str) -> str:
        """A Lark grammar of calls, or of JSON that follows a schema, which is given as its text."""
        return f"start: {self._open()} calls | answer\nanswer: %json {schema}\n{self._calls(tools, several)}"

    def _calls(self, tools: Functions, several: bool) -> str:
        return calls_rules(tools, self.key, self.head, self.between if several else "", self.tail)

    def _open(self) -> str:
        return literal(self.opening) if self.token_id is None else f"<[{self.token_id}]>"


FORMATS = {
    "hermes": ToolFormat(
        parsers.hermes,
        marker=parsers.OPEN,
        opening=f"{parsers.OPEN}\n",
        between=f"\n{parsers.CLOSE}\n{parsers.OPEN}\n",
        tail=f"\n{parsers.CLOSE}",
    ),
    "mistral": ToolFormat(
        parsers.mistral,
        marker=parsers.TOOL_CALLS,
        opening=parsers.TOOL_CALLS,
        head="[",
        between=", ",
        tail="]",
        special=True,
        id_length=9,  # what its templates insist on
    ),
    "llama3": ToolFormat(
        parsers.llama3,
        marker=parsers.PYTHON_TAG,
        opening="",
        between="; ",
        key="parameters",
        other_text=r"([^{\s<](?s:.*))?",
    ),
}
OTHERS = ("<function=",)  # Qwen3-Coder's markup within Hermes' own


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes, as far as it can be told."""
    if any(marker in template for marker in OTHERS):
        return None
    return next((each for each in FORMATS.values() if each.marker in template), None)
