"""Token streams: what the corpus becomes before training. They can be made on one machine and trained on at another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import Qwen2Tokenizer

from mini_infer.assets.chat import END_OF_TEXT, conversations
from mini_infer.assets.corpus import Corpus, Source, report
from mini_infer.assets.tokenizer import VOCAB_SIZE, load_tokenizer, train_tokenizer
from mini_infer.core.errors import ConfigError

TokenArray = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class TokenSet:
    """Streams of `<|endoftext|> document <|endoftext|> document ...`, uint16, one dimension."""

    code: TokenArray  # training files
    chat: TokenArray  # training conversations
    chat_answer: npt.NDArray[np.bool_]  # True where `chat` is to be learned: the answers
    validation: TokenArray
    heldout: TokenArray
    tokenizer: Qwen2Tokenizer
    report: dict[str, Any]  # the corpus report and token counts

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            folder / "tokens.npz",
            code=self.code,
            chat=self.chat,
            chat_answer=self.chat_answer,
            validation=self.validation,
            heldout=self.heldout,
        )
        self.tokenizer.save_pretrained(folder / "tokenizer")
        (folder / "corpus.json").write_text(json.dumps(self.report, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> TokenSet:
        """Raises ConfigError where `folder` was not written by `save`."""
        if not (folder / "tokens.npz").is_file():
            raise ConfigError(f"{folder} holds no tokens.npz; make it with --prepare-only --tokens {folder}")
        with np.load(folder / "tokens.npz") as arrays:
            return cls(
                **{name: arrays[name] for name in ("code", "chat", "chat_answer", "validation", "heldout")},
                tokenizer=load_tokenizer(folder / "tokenizer"),
                report=json.loads((folder / "corpus.json").read_text()),
            )


def tokenize_corpus(corpus: Corpus, vocab_size: int = VOCAB_SIZE) -> TokenSet:
    tokenizer = train_tokenizer((source.text for source in corpus.train), vocab_size)
    code = document_stream(corpus.train, tokenizer)
    chat, chat_answer = _chat_stream(corpus.train, tokenizer)
    validation = document_stream(corpus.validation, tokenizer)
    heldout = document_stream(corpus.heldout, tokenizer)
    corpus_report = report(corpus).as_dict()
    corpus_report["tokens"] = {
        "train": len(code),
        "train_chat": len(chat),
        "train_chat_answers": int(chat_answer.sum()),
        "validation": len(validation),
        "heldout": len(heldout),
    }
    return TokenSet(code, chat, chat_answer, validation, heldout, tokenizer, corpus_report)


def document_stream(sources: Iterable[Source], tokenizer: Qwen2Tokenizer) -> TokenArray:
    """`<|endoftext|>` before each document and after the last, so that a model learns both to begin and to stop."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer.backend_tokenizer.encode_batch([source.text for source in sources])
    ids = [end]
    for encoding in encoded:
        ids += [*encoding.ids, end]
    return np.asarray(ids, dtype=np.uint16)


def _chat_stream(sources: Iterable[Source], tokenizer: Qwen2Tokenizer) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    samples = list(conversations(sources))
    prompts = tokenizer.backend_tokenizer.encode_batch([sample.prompt for sample in samples])
    answers = tokenizer.backend_tokenizer.encode_batch([sample.completion for sample in samples])
    ids, learned = [end], [False]
    for prompt, answer in zip(prompts, answers, strict=True):
        ids += [*prompt.ids, *answer.ids, end]
        # The newline after <|im_end|> and the document end carry no choice of the model's.
        learned += [False] * len(prompt.ids) + [True] * (len(answer.ids) - 1) + [False, False]
    return np.asarray(ids, dtype=np.uint16), np.asarray(learned, dtype=np.bool_)
