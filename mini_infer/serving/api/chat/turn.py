"""One turn of a conversation, whichever API asks for it: the messages go into the engine, and the answer's text is
taken apart into what is said, what is thought and which functions are called."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mini_infer.core.errors import RequestError
from mini_infer.runtime.text.pieces import Kind, Parser
from mini_infer.runtime.text.reasoning import CLOSE as THOUGHT
from mini_infer.runtime.text.reasoning import OPEN as THINK
from mini_infer.runtime.text.reasoning import ReasoningParser
from mini_infer.serving.api.chat.conversation import conversation
from mini_infer.serving.api.chat.tools import ToolUse, tool_use
from mini_infer.serving.api.sampling import constraint, sampling_params
from mini_infer.serving.api.schema import ChatRequest
from mini_infer.serving.api.service import Service
from mini_infer.serving.link.stream import Stream

END_OF_PROMPT = 8  # tokens: enough for <think> and the white space behind it
IN_IDS = string.ascii_letters + string.digits


class Turn(NamedTuple):
    """
    Attributes:
        prompt_tokens: how many the prompt has.
        readers: one for each of the n answers; None where their text is all there is.
    """

    streams: list[Stream]
    num_choices: int
    prompt_tokens: int
    readers: list[AnswerReader] | None


async def start_turn(service: Service, body: ChatRequest) -> Turn:
    """Raises RequestError or ApiError for what cannot be done."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = tool_use(body, service.tool_format)
    more: dict[str, Any] = {}
    if tools is not None and tools.grammar is not None:
        more["grammar"] = tools.grammar
    if tools is not None and tools.format.special:
        more["skip_special_tokens"] = False
    params = sampling_params(body, limit, _alternatives(body), **more)
    prompt = conversation(body, tools.tools if tools else (), service.tokenizer.chat_template)
    room = service.prompts.room(body.truncate_prompt_tokens, limit)
    (token_ids,) = await service.prompts.encode([prompt], "messages", room)
    thinks = service.splits_reasoning and _ends_with(service, token_ids, THINK)
    if thinks and _is_rigid(body, tools):  # no thoughts fit into what the text has to be
        token_ids += service.tokenizer.encode_within(f"\n{THOUGHT}\n\n")
        thinks = False
    if tools is not None and tools.forced:
        token_ids += service.tokenizer.encode_within(tools.format.opening)
    readers = None
    if tools is not None or service.splits_reasoning:
        readers = [AnswerReader(service, tools, thinks, body.include_reasoning is not False) for _ in range(params.n)]
    return Turn(service.submit([token_ids], params, body), params.n, len(token_ids), readers)


def _alternatives(body: ChatRequest) -> int | None:
    """SamplingParams.logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    count = body.top_logprobs or 0
    if not 0 <= count <= 20:
        raise RequestError(f"top_logprobs must be from 0 to 20, got {count}", "top_logprobs")
    return count


def _ends_with(service: Service, token_ids: list[int], markup: str) -> bool:
    return service.tokenizer.decode(token_ids[-END_OF_PROMPT:], skip_special_tokens=False).rstrip().endswith(markup)


def _is_rigid(body: ChatRequest, tools: ToolUse | None) -> bool:
    forced = tools is not None and tools.forced
    return forced or (constraint(body) is not None and not body.bad_words)


@dataclass
class Call:
    index: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)  # as they come


class Part(NamedTuple):
    """`call` is which one's name or arguments it is."""

    kind: Kind
    text: str
    call: Call | None


class AnswerReader:
    """Takes one answer's text apart as it comes.

    Attributes:
        calls: those made so far.

    Args:
        tools: that may be called.
        thinks: the answer begins within a thought.
        with_reasoning: else thoughts are left out.
    """

    def __init__(self, service: Service, tools: ToolUse | None, thinks: bool, with_reasoning: bool) -> None:
        self.calls: list[Call] = []
        self._tools = tools
        self._with_reasoning = with_reasoning
        rest = tools.format.parser() if tools is not None else None
        self._parser: Parser | ReasoningParser | None = rest
        if service.splits_reasoning:
            self._parser = ReasoningParser(thinks, rest)
        if tools is not None and tools.forced:
            self.read(tools.format.opening)

    @property
    def passes(self) -> bool:
        """Whatever comes is said, as it comes."""
        return self._parser is not None and self._parser.passes

    def read(self, text: str, last: bool = False) -> list[Part]:
        """What is certain now. `last`: the answer ends with this text."""
        assert self._parser is not None
        parts = []
        for kind, piece in self._parser.push(text, last):
            if kind is Kind.call:
                self.calls.append(self._call(piece))
            elif kind is Kind.arguments:
                self.calls[-1].arguments.append(piece)
            call = self.calls[-1] if kind in (Kind.call, Kind.arguments) else None
            if kind is Kind.reasoning and not self._with_reasoning:
                continue
            if call is not None and call.index and self._tools is not None and not self._tools.several:
                continue
            parts.append(Part(kind, piece, call))
        return parts

    def _call(self, name: str) -> Call:
        assert self._tools is not None
        length = self._tools.format.id_length
        id = "".join(secrets.choice(IN_IDS) for _ in range(length))
        return Call(len(self.calls), id if length < 10 else f"call_{id}", name)
