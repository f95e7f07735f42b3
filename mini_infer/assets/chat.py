"""ChatML: the template that ships with the tokenizer, and training conversations made from documented functions."""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mini_infer.assets.corpus import Source

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MIN_CODE_LINES, MAX_CODE_LINES = 3, 60


@dataclass(frozen=True)
class Conversation:
    question: str
    answer: str  # the function's source, dedented

    @property
    def prompt(self) -> str:
        """Everything up to the first token of the answer, as CHAT_TEMPLATE writes it."""
        return f"{IM_START}user\n{self.question}{IM_END}\n{IM_START}assistant\n"

    @property
    def completion(self) -> str:
        return f"{self.answer}{IM_END}\n"


def conversations(sources: Iterable[Source]) -> Iterator[Conversation]:
    """One conversation for each documented function: half ask for it in words, half give signature and docstring."""
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text)
        lines = source.text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                conversation = _of_function(node, lines)
                if conversation is not None:
                    yield conversation


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Conversation | None:
    docstring = (ast.get_docstring(node) or "").strip()
    end = node.end_lineno or node.lineno
    if not docstring or not MIN_CODE_LINES <= end - node.lineno + 1 <= MAX_CODE_LINES or len(node.body) < 2:
        return None
    first = docstring.splitlines()[0].strip()
    if len(first) < 12 or first.startswith(">>>"):
        return None
    answer = textwrap.dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"
    # The name decides the form, so that the set does not depend on the order of files.
    if int(hashlib.sha256(f"{node.name}{first}".encode()).hexdigest(), 16) % 2:
        question = f"Write a function `{node.name}`: {first}"
    else:
        question = "Complete this function.\n" + _head(node, lines)
    return Conversation(question, answer)


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """Signature and docstring, dedented."""
    docstring_end = node.body[0].end_lineno or node.body[0].lineno
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring_end]))
