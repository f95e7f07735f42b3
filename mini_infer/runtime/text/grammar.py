"""Constrained decoding: which tokens may come next, so that the text matches a grammar. By llguidance.

A grammar is compiled once, when a request brings it. Each sequence then has a matcher of its own, which takes in every
booked token and gives the mask of what may follow. The masks of a step are made together, on several threads, behind
the booking: with overlap the device is computing the next step meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from mini_infer.core.errors import RequestError
from mini_infer.core.request import FinishReason
from mini_infer.core.sampling_params import Grammar, GrammarKind
from mini_infer.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Without a bound a weak model may go on with spaces for ever. A schema that brings options of its own ("x-guidance":
# {"whitespace_flexible": false}, say) is taken as it is.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_KEPT = 256  # compiled grammars
_KEPT_BYTES = 2**29  # of those whose size is known
_MOST_THREADS = 8


class GrammarCompiler:
    """Of a model's vocabulary, of which tokens behind the tokenizer's last one are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # of what is compiled, held for a moment only: a known grammar waits for nobody's
        self._masks: _Masks | None = None
        self._compiled: dict[Grammar, tuple[CompiledGrammar, int]] = {}  # and bytes; the one used last comes last
        self._held: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()  # by whomever

    @property
    def vocabulary(self) -> Vocabulary:
        """For `Vocabulary.read` in another process."""
        definition = self._tokenizer.definition
        tokenizer = self._tokenizer if definition is None else None
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        end_ids = [token for token in self._eos_token_ids if token < size] or list(self._tokenizer.eos_token_ids)
        return Vocabulary(tokenizer, definition, size if self._tokenizer.vocab_size else 0, end_ids)

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """What `compile` gives at once, for as long as somebody holds it; None where it has to be compiled."""
        with self._lock:
            kept = self._compiled.pop(grammar, None)
            if kept is not None:
                self._compiled[grammar] = kept
            return self._held.get(grammar)

    def compile(self, grammar: Grammar, num_bytes: int = 0) -> CompiledGrammar:
        """May be called in any thread. The first call also reads the vocabulary, which takes about a second. Raises
        RequestError where the grammar cannot be followed, or llguidance does not know the tokenizer or is not there.

        Args:
            num_bytes: what the compiled grammar takes, if that is known.
        """
        if (known := self.known(grammar)) is not None:
            return known
        with self._reading:
            if self._masks is None:
                self._masks = _Masks(self.vocabulary, self._vocab_size)
        compiled = CompiledGrammar(grammar, self._masks)
        with self._lock:
            self._compiled[grammar], self._held[grammar] = (compiled, num_bytes), compiled
            while len(self._compiled) > _KEPT or sum(size for _, size in self._compiled.values()) > _KEPT_BYTES:
                del self._compiled[next(iter(self._compiled))]
        return compiled

    def update_masks(self) -> None:
        """Makes the masks of all sequences that have taken in a token."""
        if self._masks is not None and self._masks.stale:
            stale, self._masks.stale = self._masks.stale, []
            self._masks.make(stale)
            for constraint in stale:
                if constraint.failed:
                    logger.warning("a text cannot go on as its grammar wants: %s", constraint.matcher.get_error())


class CompiledGrammar:
    def __init__(self, grammar: Grammar, masks: _Masks) -> None:
        self._first = GrammarConstraint(make_matcher(grammar, masks.tokenizer), b"", masks)
        masks.make([self._first])
        if self._first.failed:
            refuse(grammar, "no text of this model's tokens matches it")

    def start(self) -> GrammarConstraint:
        """For a sequence that has no output yet."""
        first = self._first
        return GrammarConstraint(first.matcher.deep_copy(), first.mask, first.masks)


def make_matcher(grammar: Grammar, tokenizer: Any) -> Any:
    """llguidance's LLMatcher, of its LLTokenizer. Raises RequestError."""
    llguidance = _import()
    limits = llguidance.LLParserLimits(verbose_errors=False)
    try:
        source = _source(grammar, llguidance)
    except ValueError as error:
        refuse(grammar, str(error))
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        refuse(grammar, matcher.get_error())
    return matcher


class GrammarConstraint:
    """A Constraint (core/request.py)."""

    __slots__ = ("failed", "mask", "masks", "matcher")

    def __init__(self, matcher: Any, mask: bytes, masks: _Masks) -> None:
        self.matcher = matcher
        self.mask = mask
        self.masks = masks
        self.failed = False  # nothing may follow, and yet the text is not complete

    def accept(self, token_id: int) -> FinishReason | None:
        if self.failed:  # `update_masks` has said why
            return FinishReason.error
        if not self.matcher.consume_token(token_id):
            logger.warning("a text cannot go on as its grammar wants: %s", self.matcher.get_error())
            return FinishReason.error
        if self.matcher.is_stopped():
            return FinishReason.stop
        self.masks.stale.append(self)
        return None

    def is_end(self, token_id: int) -> bool:
        return token_id in self.masks.end_ids


class _Masks:
    """The vocabulary as llguidance has it, and what makes masks."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokenizer = vocabulary.read()
        self.end_ids = frozenset(self.tokenizer.eos_tokens)
        self.stale: list[GrammarConstraint] = []  # whose masks are those of the token before
        self._num_bytes = -(-vocab_size // 8)
        self._words = -(-self.tokenizer.vocab_size // 32)
        self._not_end = np.full(max(self._num_bytes, 4 * self._words), 0xFF, np.uint8)
        for token in self.end_ids:
            self._not_end[token // 8] &= ~(1 << token % 8) & 0xFF
        self._executor = _import().LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))

    def make(self, constraints: Sequence[GrammarConstraint]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        words = np.zeros((len(constraints), self._words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(c.matcher, i) for i, c in enumerate(constraints)], words)
        bits = words.view(np.uint8)[:, : self._num_bytes]
        for constraint, own in zip(constraints, bits, strict=True):
            more = (own & self._not_end[: len(own)]).any()
            constraint.mask = own.tobytes().ljust(self._num_bytes, b"\0")
            matcher = constraint.matcher
            constraint.failed = matcher.is_error() or not (more or matcher.is_accepting())


def _import() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"grammars, JSON schemas and json_object need the package llguidance ({error}): pip install llguidance",
            "grammar",
        ) from error
    return llguidance


def _source(grammar: Grammar, llguidance: ModuleType) -> str:
    """The grammar as llguidance writes it down. Raises ValueError."""
    matcher = llguidance.LLMatcher
    if grammar.kind is GrammarKind.regex:
        return matcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.lark:
        return matcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text) if grammar.kind is GrammarKind.json_schema else {"type": "object"}
    own_options = isinstance(schema, dict) and "x-guidance" in schema
    return matcher.grammar_from_json_schema(grammar.text or json.dumps(schema), None if own_options else _JSON_OPTIONS)


class Vocabulary(NamedTuple):
    """What llguidance needs to know of a model's tokens; it can be pickled."""

    tokenizer: Tokenizer | None  # where there is no definition
    definition: str | None  # the text of a tokenizer.json
    size: int  # 0: there is no tokenizer
    end_ids: list[int]

    def read(self) -> Any:
        """As llguidance's LLTokenizer. Raises RequestError."""
        llguidance = _import()
        if not self.size:
            raise RequestError("grammar needs a tokenizer: set model.tokenizer to a folder or a hub name", "grammar")
        try:
            if self.definition is not None:
                definition = _without_metaspace(self.definition)
                return llguidance.LLTokenizer(definition, n_vocab=self.size, eos_token=self.end_ids or None)
            if self.tokenizer is not None and self.tokenizer.token_bytes is not None and self.end_ids:
                wrapped = llguidance.TokenizerWrapper(_Bytes(self.tokenizer, self.end_ids[0]))
                return llguidance.LLTokenizer(wrapped, eos_token=self.end_ids)
            reason = "neither a tokenizer.json nor the bytes of its tokens are known"
        except ValueError as error:
            reason = str(error)
        raise RequestError(f"grammars do not work with this model's tokenizer: {reason}", "grammar")


def _without_metaspace(definition: str) -> str:
    """SentencePiece's decoder of spaces in its other spelling, which is the one that llguidance knows."""
    if '"Metaspace"' not in definition:
        return definition
    parts = json.loads(definition)
    decoder = parts.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    steps = [
        {"type": "Replace", "pattern": {"String": step["replacement"]}, "content": " "}
        if step.get("type") == "Metaspace"
        else step
        for step in steps
    ]
    return json.dumps({**parts, "decoder": {"type": "Sequence", "decoders": steps}})


class _Bytes:
    """A tokenizer whose texts are its tokens' bytes, as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        assert tokenizer.token_bytes is not None
        self.eos_token_id = eos_token_id
        self.tokens = list(tokenizer.token_bytes)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def refuse(grammar: Grammar, reason: str) -> NoReturn:
    """Raises the RequestError that says why the grammar cannot be followed."""
    lines = [line for line in reason.strip().splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    message = "\n".join(lines)[:1000] or "it cannot be compiled"
    raise RequestError(f"grammar: this {grammar.kind.value} cannot be followed: {message}", "grammar")
