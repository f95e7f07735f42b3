"""Tokens to text as they come: whole characters only, cut at a stop string.

token ids -> text stream (bytes or windows) -> stop checker -> delta
              holds back half characters        holds back what may begin a stop string
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mini_infer.core.request import SamplingParams
from mini_infer.runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
UNFINISHED_TOKENS = 16  # more than a character has: what still ends in U+FFFD then is one that was meant
CONTEXT_TOKENS = 8  # of the prompt: enough for one that is not special


class Detokenizer:
    """The text of one completion, delta by delta.

    Without stop strings the deltas and `finish()`, joined, equal tokenizer.decode of all output tokens, read as the
    prompt's continuation: SentencePiece's first space is not lost.

    A stop string counts when it begins behind the text of the first `min_tokens` tokens. The first one to be complete
    wins, as if the text came character by character, and of those the longest. Nothing is returned after it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._stream: ByteStream | WindowStream
        if tokenizer.token_bytes is not None:
            self._stream = ByteStream(tokenizer.token_bytes, skipped)
        else:
            self._stream = WindowStream(tokenizer, skipped, prompt_ids)
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.num_tokens = 0  # taken in, up to the one that completed a stop string

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._checker.matched if self._checker else None

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes in output tokens and returns the text that is now certain."""
        if self._checker is None:
            self.num_tokens += len(token_ids)
            return self._stream.push(token_ids)
        texts = []
        for token in token_ids:  # one by one, to know which of them ends the text
            if self._checker.matched is not None:
                break
            self.num_tokens += 1
            text = self._stream.push((token,))
            texts.append(self._checker.push(text) if self.num_tokens > self._min_tokens else text)
        return "".join(texts)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come; half a character becomes U+FFFD."""
        text = self._stream.finish()
        if self._checker is None:
            return text
        if self.num_tokens > self._min_tokens:
            text = self._checker.push(text)
        return text + self._checker.finish()


class StopChecker:
    """Passes text on up to the first stop string. What may turn out to begin one is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _safe_length(self, text: str) -> int:
        """Where the longest end of the text that begins a stop string starts."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


class ByteStream:
    """For tokenizers whose tokens are bytes (byte-level BPE): a table look-up and an incremental UTF-8 decoder."""

    def __init__(self, token_bytes: Sequence[bytes], skipped: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._size = len(token_bytes)
        self._held = b""  # the beginning of a character

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped, size = self._bytes, self._skipped, self._size
        if len(token_ids) == 1:  # a step of hundreds of streams is spent here
            token = token_ids[0]
            data = table[token] if token < size and token not in skipped else b""
        else:
            data = b"".join([table[i] for i in token_ids if i < size and i not in skipped])
        if self._held:
            data = self._held + data
        elif data.isascii():
            return data.decode()
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_bytes:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class WindowStream:
    """For any other tokenizer. Decodes a window of tokens with and without the new ones; the difference is new.

        ids    ... a  b | c  d | e        c, d: context, whose text was returned by the last push
                        ^read    ^end     e: pending, its text not returned yet

    The context is needed since the text of a token can depend on the one before it, as a space between words does.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = self._whole(self._known(prompt_ids[-CONTEXT_TOKENS:]))
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += self._known(token_ids)
        if not self._pending or self._pending[-1] in self._tokenizer.byte_fallback_ids:
            return ""
        most = len(self._pending)
        # A chunk of tokens may end within a character: those before it are whole.
        for count in range(most, max(0, most - UNFINISHED_TOKENS), -1):
            if self._pending[count - 1] in self._tokenizer.byte_fallback_ids:
                continue
            text = self._new_text(count)
            if not text:
                return ""
            if not text.endswith(REPLACEMENT):
                return self._take(count, text)
        return "" if most <= UNFINISHED_TOKENS else self._take(most, self._new_text())  # which means the sign itself

    def finish(self) -> str:
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _take(self, count: int, text: str) -> str:
        self._context, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _new_text(self, count: int | None = None) -> str:
        """Of so many of the pending tokens; of all of them."""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending[:count])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that have a text: one without must not part two that belong together."""
        size = self._tokenizer.vocab_size
        return [i for i in token_ids if i < size and i not in self._skipped]

    def _whole(self, token_ids: list[int]) -> list[int]:
        """Context that ends within a character would change when the rest of it comes: better none."""
        if token_ids and token_ids[-1] in self._tokenizer.byte_fallback_ids:
            return []
        return [] if self._decode(token_ids).endswith(REPLACEMENT) else token_ids
