"""From tokens to what the caller sees: text, stop strings, logprobs, and the n completions of one request together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from mini_infer.core.plan import StepResult
from mini_infer.core.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from mini_infer.runtime.scheduler.planned_step import Ending, TokenUpdate
from mini_infer.runtime.text.detokenizer import Detokenizer
from mini_infer.runtime.text.grammar import GrammarCompiler

logger = logging.getLogger(__name__)


class _Completion:
    """What one of a request's n sequences has produced so far."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, stream: bool) -> None:
        self.index = index
        self.request = request
        self.detokenizer = detokenizer
        self.detokenizes_every_step = stream or bool(request.params.stop)
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] | None = [] if request.params.logprobs is not None else None
        self._detokenized = request.prompt_len  # tokens that have become text, or need not
        self._reported_tokens = request.prompt_len  # what the caller has seen
        self._reported_texts = 0

    def detokenize(self) -> None:
        """Turns the tokens since the last call into text. The token that ended the request is no text."""
        request = self.request
        end = request.num_tokens - request.ended_by_token
        if end > self._detokenized:
            self.texts.append(self.detokenizer.append(request.token_ids[self._detokenized : end]))
            self._detokenized = end
        if request.finish_reason is not None:
            self.texts.append(self.detokenizer.finish())

    def drop_tokens_behind_stop_string(self) -> int:
        """Forgets the tokens that came with the one that ended the text, but after it. Returns their number."""
        request = self.request
        num_tokens = request.prompt_len + self.detokenizer.num_tokens
        dropped = request.num_tokens - num_tokens
        if dropped:
            request.num_tokens, request.ended_by_token = num_tokens, False
            request.token_ids = request.token_ids[:num_tokens]  # the prefix cache may have use for the others, too
            del request.token_times[num_tokens - request.prompt_len :]
            if self.logprobs is not None:
                del self.logprobs[num_tokens - request.prompt_len :]
        return dropped

    def output(self) -> CompletionOutput:
        """Everything since the last call."""
        request, texts = self.request, self.texts
        num_texts, num_tokens, reason = len(texts), request.num_tokens, request.finish_reason
        first_text, self._reported_texts = self._reported_texts, num_texts
        first_token, self._reported_tokens = self._reported_tokens, num_tokens
        return CompletionOutput(
            self.index,
            texts[-1] if num_texts == first_text + 1 else "".join(texts[first_text:]),
            request.token_ids[first_token:num_tokens],
            reason,
            request.stop_reason,
            None if reason is None else RequestMetrics.of(request),
            texts,
            num_texts,
            request.token_ids,
            (request.prompt_len, num_tokens),
            self.logprobs,
        )


class _Group:
    """The n sequences of one request of the caller's."""

    def __init__(
        self, request_id: str, prompt: str | None, sequences: list[tuple[Request, Detokenizer]], stream: bool
    ) -> None:
        leader = sequences[0][0]
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = leader.token_ids[: leader.prompt_len]
        self.stream = stream
        self.completions = [_Completion(i, request, detok, stream) for i, (request, detok) in enumerate(sequences)]
        self.several = len(sequences) > 1
        self.num_unfinished = len(sequences)
        self.owes_prompt_logprobs = leader.prompt_logprobs is not None

    def report(self, outputs: list[CompletionOutput]) -> RequestOutput:
        output = RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, not self.num_unfinished, outputs)
        if self.owes_prompt_logprobs:
            logprobs = self.completions[0].request.prompt_logprobs
            if logprobs is not None and len(logprobs) == len(self.prompt_token_ids):
                output.prompt_logprobs, self.owes_prompt_logprobs = logprobs, False
        return output


class OutputProcessor:
    """Keeps the text state of every unfinished request, and where its outputs go."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self.inboxes: dict[str, deque[RequestOutput]] = {}  # of unfinished requests whose caller follows them, by id
        self.outbox: list[RequestOutput] = []  # of all others, for the next `step` of the engine to hand out
        self._groups: dict[str, _Group] = {}
        self._of_request: dict[Request, tuple[_Group, _Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(
        self, request_id: str, prompt: str | None, sequences: list[tuple[Request, Detokenizer]], stream: bool
    ) -> None:
        """`stream`: an output for every step that brings something new; else one at the end, which costs less."""
        group = _Group(request_id, prompt, sequences, stream)
        self._groups[request_id] = group
        for completion in group.completions:
            self._of_request[completion.request] = (group, completion)

    def unfinished(self, request_id: str | None = None) -> list[Request]:
        """The unfinished sequences of a request, or of all."""
        if request_id is None:
            return list(self._of_request)
        group = self._groups.get(request_id)
        return [c.request for c in group.completions if c.request in self._of_request] if group else []

    def process(self, updates: Sequence[TokenUpdate], result: StepResult) -> list[Ending]:
        """Takes in a step's tokens. Returns the requests that their text ends: by a stop string, or because it
        cannot be made. The caller ends them before it posts the outputs."""
        self._grammars.update_masks()
        endings = []
        of_request = self._of_request
        for request, token_ids, row in updates:
            _, completion = of_request[request]
            if completion.logprobs is not None:
                completion.logprobs += result.logprobs[row][: len(token_ids)]
            if not completion.detokenizes_every_step and request.finish_reason is None:
                continue
            try:
                completion.detokenize()
            except Exception:  # one request's text must not cost the others theirs
                logger.exception("request %r ends, because its tokens cannot be made text", request.request_id)
                endings.append(Ending(request, FinishReason.error, None))
                continue
            if request.params.stop:
                stop = completion.detokenizer.stop_string
                if stop is not None:
                    dropped = completion.drop_tokens_behind_stop_string()
                    endings.append(Ending(request, FinishReason.stop, stop, dropped))
        return endings

    def post(self, requests: Iterable[Request]) -> None:
        """Puts the outputs that callers get after `requests` have changed where they look for them."""
        outputs = self._outputs_of(requests)
        if not self.inboxes:
            self.outbox += outputs
            return
        for output in outputs:
            self.inboxes.get(output.request_id, self.outbox).append(output)
            if output.finished:
                self.inboxes.pop(output.request_id, None)

    def _outputs_of(self, requests: Iterable[Request]) -> list[RequestOutput]:
        outputs = []
        several: dict[_Group, list[_Completion]] = {}  # what has changed of requests with n > 1
        of_request = self._of_request
        for request in requests:
            group, completion = of_request[request]
            if request.finish_reason is not None:
                del of_request[request]
                group.num_unfinished -= 1
                if not group.num_unfinished:
                    del self._groups[group.request_id]
            if group.several:
                several.setdefault(group, []).append(completion)
            elif group.stream or not group.num_unfinished:
                outputs.append(group.report([completion.output()]))
        for group, changed in several.items():
            if group.stream or not group.num_unfinished:
                outputs.append(group.report([c.output() for c in (changed if group.stream else group.completions)]))
        return outputs

    def finish_texts(self, requests: Iterable[Request]) -> None:
        """Completes the text of requests that end without a token: held-back characters come out."""
        for request in requests:
            if request.finish_reason is not FinishReason.error:
                self._of_request[request][1].detokenize()
