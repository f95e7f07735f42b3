"""Log-probabilities in the two shapes of the OpenAI API. Lists are iterators, gone through as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice
from typing import Any

from mini_infer.core.request import TokenLogprob
from mini_infer.runtime.text.tokenizer import Tokenizer


class TokenTexts:
    """How single tokens are written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        """Its text, where bytes that are no whole characters are U+FFFD, and its bytes."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def unambiguous(self, token_id: int) -> str:
        """Its text, or bytes:\\xe2\\x80 where they are no whole characters: as a key, two tokens differ."""
        text, raw = self[token_id]
        if not text:
            return f"token_id:{token_id}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if "\ufffd" in text and raw else text

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        table = self._tokenizer.token_bytes
        if table is not None:
            raw = table[token_id] if token_id < len(table) else b""
            return raw.decode(errors="replace"), list(raw)
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text, list(text.encode())


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = (
        {
            **_chat_token(token.token_id, token.logprob, texts),
            "top_logprobs": [_chat_token(token_id, logprob, texts) for token_id, logprob in token.top],
        }
        for token in tokens
    )
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, raw = texts[token_id]
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def completion_logprobs(
    tokens: Sequence[Iterable[TokenLogprob | None]],
    token_ids: Sequence[int],
    texts: TokenTexts,
    alternatives: int,
    offset: int,
) -> dict[str, Any]:
    """`logprobs` of a completion choice.

    Args:
        tokens: one for each of `token_ids`, in pieces; None for a prompt's first token, which nothing predicts.
        alternatives: how many were asked for; the chosen token is listed beside them.
        offset: where in the choice's text the first token begins, in characters.
    """
    lengths = (len(texts[token_id][0]) for token_id in token_ids)
    return {
        "tokens": (texts.unambiguous(token_id) for token_id in token_ids),
        "token_logprobs": (None if token is None else _finite(token.logprob) for token in chain.from_iterable(tokens)),
        "top_logprobs": (
            (None if token is None else _top(token, texts) for token in chain.from_iterable(tokens))
            if alternatives
            else None
        ),
        "text_offset": islice(accumulate(lengths, initial=offset), len(token_ids)),
    }


def _top(token: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    pairs = [*token.top, (token.token_id, token.logprob)]
    return {texts.unambiguous(token_id): _finite(logprob) for token_id, logprob in pairs}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's own server says -9999 for what cannot happen."""
    return max(logprob, -9999.0)
