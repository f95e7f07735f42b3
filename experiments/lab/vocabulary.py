"""The vocabulary of a model, read without loading its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mini_infer.core.config import LoadFormat, ModelConfig
from mini_infer.modeling.loader import load_spec
from mini_infer.runtime.tokenizer import Tokenizer, load_tokenizer


class ModelVocabulary:
    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    @cached_property
    def size(self) -> int:
        """Ids that the model takes; its tokenizer may know fewer."""
        dry = self._model.load_format is LoadFormat.dry
        return self._model.dry.vocab_size if dry else load_spec(self._model).vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
