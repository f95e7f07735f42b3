"""From tokens to what the caller sees: text, stop strings, logprobs, and the n completions of one request together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mini_infer.core.plan import StepResult
from mini_infer.core.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from mini_infer.runtime.detokenizer import Detokenizer
from mini_infer.runtime.scheduler import TokenUpdate


class _Completion:
    """What one of a request's n sequences has produced so far."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.index = index
        self.request = request
        self.detokenizer = detokenizer
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] | None = [] if request.params.logprobs is not None else None
        self.last: CompletionOutput | None = None
        self._detokenized = request.prompt_len  # tokens that have become text, or need not
        self._reported = request.prompt_len  # tokens that the caller has seen

    def detokenize(self) -> None:
        """Turns the tokens since the last call into text. The token that ended the request is no text."""
        request = self.request
        end = request.num_tokens - (request.ended_by_token)
        if end > self._detokenized:
            self.texts.append(self.detokenizer.append(request.token_ids[self._detokenized : end]))
            self._detokenized = end

    def output(self) -> CompletionOutput:
        """Everything since the last call."""
        request = self.request
        num_texts = 0 if self.last is None else self.last._num_texts
        self.detokenize()
        if request.finished:
            self.texts.append(self.detokenizer.finish())
        self.last = CompletionOutput(
            index=self.index,
            text_delta="".join(self.texts[num_texts:]),
            token_ids_delta=request.token_ids[self._reported : request.num_tokens],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=_metrics(request) if request.finished else None,
            _texts=self.texts,
            _num_texts=len(self.texts),
            _tokens=request.token_ids,
            _span=(request.prompt_len, request.num_tokens),
            _logprobs=self.logprobs,
        )
        self._reported = request.num_tokens
        return self.last


@dataclass(frozen=True)
class _Group:
    """The n sequences of one request of the caller's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    stream: bool
    completions: list[_Completion]

    @property
    def finished(self) -> bool:
        return all(completion.request.finished for completion in self.completions)

    def report(self, completions: list[_Completion]) -> RequestOutput:
        outputs = [completion.output() for completion in completions]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, self.finished, outputs)


class OutputProcessor:
    """Keeps the text state of every unfinished request."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._of_sequence: dict[str, tuple[_Group, _Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(
        self, request_id: str, prompt: str | None, sequences: list[tuple[Request, Detokenizer]], stream: bool
    ) -> None:
        """`stream`: an output for every step that brings something new; else one at the end, which costs less."""
        completions = [_Completion(i, request, detokenizer) for i, (request, detokenizer) in enumerate(sequences)]
        leader = sequences[0][0]
        group = _Group(request_id, prompt, leader.token_ids[: leader.prompt_len], stream, completions)
        self._groups[request_id] = group
        for completion in completions:
            self._of_sequence[completion.request.request_id] = (group, completion)

    def sequences(self, request_id: str) -> list[Request]:
        """The sequences of a request; none when it is unknown or finished."""
        group = self._groups.get(request_id)
        return [completion.request for completion in group.completions] if group else []

    def request_ids(self) -> list[str]:
        return list(self._groups)

    def process(self, updates: Sequence[TokenUpdate], result: StepResult) -> list[tuple[Request, str]]:
        """Takes in a step's tokens. Returns the requests whose text has just met a stop string, with the string:
        the caller ends them before it collects the outputs."""
        stopped = []
        for request, token_ids, row in updates:
            _, completion = self._of_sequence[request.request_id]
            if completion.logprobs is not None:
                completion.logprobs += result.logprobs[row][: len(token_ids)]
            if request.params.stop:
                completion.detokenize()
                if completion.detokenizer.stop_string is not None:
                    stopped.append((request, completion.detokenizer.stop_string))
        return stopped

    def collect(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """The outputs that the caller gets after a step in which `requests` changed."""
        changed: dict[str, list[_Completion]] = {}
        for request in requests:
            group, completion = self._of_sequence[request.request_id]
            changed.setdefault(group.request_id, []).append(completion)
            if request.finished:
                del self._of_sequence[request.request_id]
        outputs = []
        for request_id, completions in changed.items():
            group = self._groups[request_id]
            if group.finished:
                del self._groups[request_id]
            if group.stream:
                outputs.append(group.report(completions))
            elif group.finished:
                outputs.append(group.report(group.completions))
        return outputs


def _metrics(request: Request) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=request.arrival_time,
        first_scheduled_time=request.first_scheduled_time,
        token_times=tuple(request.token_times),
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
    )
