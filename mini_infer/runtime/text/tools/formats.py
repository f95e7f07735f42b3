"""How a model writes calls: told by its chat template, or by whoever serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer.runtime.text.pieces import Parser
from mini_infer.runtime.text.tools import hermes, llama3, mistral
from mini_infer.runtime.text.tools.calls import Parse, calls_grammar


@dataclass(frozen=True)
class ToolFormat:
    """
    A call that has to be made is begun for the model: `opening` stands at the end of the prompt, and a grammar makes
    the model go on with {"name": ..., KEY: {...}} between `head`, `between` and `tail`.
    """

    parse: Parse
    marker: str  # in a chat template, and nowhere else
    opening: str
    head: str = ""
    between: str = ""
    tail: str = ""
    key: str = "arguments"
    special_tokens: bool = False  # the markup is made of such, which a text is otherwise without
    id_length: int = 24  # of a call's id, letters and digits

    def parser(self) -> Parser:
        return Parser(self.parse)

    def grammar(self, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
        """In Lark, of one call or several behind `opening`.

        Args:
            tools: each with a `name` and perhaps `parameters`, a JSON schema.
        """
        return calls_grammar(tools, self.key, self.head, self.between if several else "", self.tail)


FORMATS = {
    "hermes": ToolFormat(
        hermes.parse,
        marker=hermes.OPEN,
        opening=f"{hermes.OPEN}\n",
        between=f"\n{hermes.CLOSE}\n{hermes.OPEN}\n",
        tail=f"\n{hermes.CLOSE}",
    ),
    "mistral": ToolFormat(
        mistral.parse,
        marker=mistral.OPEN,
        opening=mistral.OPEN,
        head="[",
        between=", ",
        tail="]",
        special_tokens=True,
        id_length=9,  # what its templates insist on
    ),
    "llama3": ToolFormat(llama3.parse, marker=llama3.OPEN, opening="", between="; ", key="parameters"),
}
OTHERS = ("<function=",)  # Qwen3-Coder's markup within Hermes' own


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template writes, as far as it can be told."""
    if any(marker in template for marker in OTHERS):
        return None
    return next((each for each in FORMATS.values() if each.marker in template), None)
