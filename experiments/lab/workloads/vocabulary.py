"""The vocabulary of a model and the length it takes, read without loading its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mini_infer.core.config import LoadFormat, ModelConfig
from mini_infer.modeling.loader import load_spec
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.text.tokenizer import Tokenizer, load_tokenizer


class ModelVocabulary:
    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    @property
    def size(self) -> int:
        """Ids that the model takes; its tokenizer may know fewer."""
        return self._model.dry.vocab_size if self._is_dry else self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together. The KV pool of an engine may be too small for as many."""
        limit = self._model.dry.max_model_len if self._is_dry else self._spec.max_model_len
        return min(self._model.max_model_len or limit, limit)

    @property
    def _is_dry(self) -> bool:
        return self._model.load_format is LoadFormat.dry

    @cached_property
    def _spec(self) -> ModelSpec:
        return load_spec(self._model)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
