"""What was asked of a request: how its tokens are chosen, what they must look like, and when it ends."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from mini_infer.core.errors import RequestError

MAX_GRAMMAR_LENGTH = 2**18  # characters: compiling takes time in proportion


class GrammarKind(str, Enum):
    json_object = "json_object"  # any JSON object; takes no text
    json_schema = "json_schema"
    regex = "regex"  # the whole text matches it
    lark = "lark"  # with a rule `start`


class Grammar(NamedTuple):
    """`text` is the schema as JSON, the expression, or the grammar."""

    kind: GrammarKind
    text: str = ""

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """From "json_object" or a pair such as ("json_schema", {...}) or ("regex", "[a-z]+"). Raises RequestError."""
        kind, text = (value, "") if isinstance(value, str) else _pair(value)
        if kind not in list(GrammarKind):
            _refuse(f"is of kind {', '.join(k.value for k in GrammarKind)}; got {kind!r}")
        kind = GrammarKind(kind)
        if kind is GrammarKind.json_object:
            if text != "":
                _refuse(f"json_object takes no text, got {text!r}: use json_schema")
            return cls(kind)
        if kind is GrammarKind.json_schema and isinstance(text, (dict, bool)):
            try:
                text = json.dumps(text, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                _refuse(f"json_schema cannot be written as JSON: {error}")
        if not isinstance(text, str) or not text:
            _refuse(f"{kind.value} needs its text as a string that is not empty, got {text!r}")
        if len(text) > MAX_GRAMMAR_LENGTH:
            _refuse(f"{kind.value} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(f"{kind.value} holds half a surrogate pair at character {error.start}: send whole characters")
        if kind is GrammarKind.json_schema:
            _check_json(text)
        return cls(kind, text)


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        _refuse(f"is 'json_object', or a pair of kind and text such as ('regex', '[a-z]+'); got {value!r}")
    return value[0], value[1]


def _check_json(text: str) -> None:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        schema = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        _refuse(f"json_schema is not JSON: {error}")
    if not isinstance(schema, (dict, bool)):
        _refuse(f"json_schema must be a JSON object, got {text[:80]}")


def _refuse(problem: str) -> NoReturn:
    raise RequestError(f"grammar {problem}", "grammar")


MAX_STOP_LENGTH = 1024
# What is allowed of a number, and how that is said.
_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda t: 0 <= t <= 100, "from 0 (greedy) to 100"),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "min_p": (lambda p: 0 <= p <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda p: 0 < p <= 10, "above 0, at most 10"),
    "presence_penalty": (lambda p: abs(p) <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda p: abs(p) <= 2, "from -2 to 2"),
}
_INTEGERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: 1 <= n <= 256, "from 1 to 256"),
    "top_k": (lambda k: k >= -1, "0 or -1 (all tokens), or more"),
    "min_tokens": (lambda n: n >= 0, "from 0 to max_tokens"),
    "max_tokens": (lambda n: n >= 1, "at least 1, or None"),
    "logprobs": (lambda n: 0 <= n <= 64, "from 0 to 64, or None"),
    "prompt_logprobs": (lambda n: 0 <= n <= 64, "from 0 to 64, or None"),
    "seed": (lambda seed: 0 <= seed < 2**63, "from 0 to 2**63 - 1"),
}
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Raises RequestError on impossible values."""

    n: int = 1  # completions of the same prompt, which share the prompt's KV blocks
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all, as -1 does, which becomes 0
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches top_p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    seed: int | None = None  # the same seed and prompt give the same tokens, whatever else is in the batch
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, arXiv:1909.05858)
    presence_penalty: float = 0.0  # subtracted once from a token that the output holds
    frequency_penalty: float = 0.0  # subtracted for every time that the output holds it
    # Token id -> what is added to its logit, -100 to 100. Kept as (id, bias) pairs in order of the ids.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    # "json_object", or a pair of kind and text: json_schema (a dict will do), regex or lark. Kept as a Grammar.
    grammar: Any = None
    max_tokens: int | None = 128  # None: up to the model's length
    min_tokens: int = 0  # no end-of-sequence, stop token or stop string before this many
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # strings that end the text; a single string, or None, will do
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # this many alternatives beside each token; 0: the token's own only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, which are then all computed anew
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        for check, bounds in ((_number, _NUMBERS), (_integer, _INTEGERS)):
            for name, (is_allowed, allowed) in bounds.items():
                value = getattr(self, name)
                if value is not None or name not in _MAY_BE_NONE:
                    check(name, value)
                    _require(name, value, is_allowed(value), allowed)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _require("min_tokens", self.min_tokens, self.min_tokens <= limit, f"from 0 to max_tokens ({limit})")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}", "stop")
            if len(text) > MAX_STOP_LENGTH:  # each token's text is held against all of it
                raise RequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed", "stop"
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))

    @classmethod
    def of(cls, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """From itself, from a mapping of its arguments, or from nothing. Raises RequestError for anything else."""
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise RequestError(f"sampling parameters are SamplingParams or a mapping, not {type(given).__name__}")
        values = dict(given or {})
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise RequestError(f"unknown sampling parameter {name!r}{hint} Known: {', '.join(known)}", str(name))
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are drawn from anything but the model's own logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token id, bias) pairs."""
        return self.logit_bias  # type: ignore[return-value]  # __post_init__ made it so


def _tuple(name: str, value: object) -> tuple:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list, got {value!r}", name)
    return tuple(value)


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)


def _number(name: str, value: object) -> None:
    ok = not isinstance(value, bool) and isinstance(value, (int, float))
    if not ok or not abs(value) < math.inf:  # type: ignore[arg-type]  # an int may be too large for isfinite
        raise RequestError(f"{name} must be a finite number, got {value!r}", name)


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {allowed}; got {value!r}", name)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else list(_tuple("logit_bias", value))
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RequestError(f"logit_bias must map token ids to numbers, got {pair!r}", "logit_bias")
        _integer("logit_bias", pair[0])
        _number("logit_bias", pair[1])
        _require("logit_bias", pair[1], -100 <= pair[1] <= 100, "from -100 to 100")
    return tuple(sorted((token, float(bias)) for token, bias in dict(pairs).items()))
