"""Text to token ids and back: a Hugging Face tokenizer, plain bytes for the dry model, or none at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from mini_infer import assets
from mini_infer.core.config import LoadFormat, ModelConfig
from mini_infer.core.errors import ModelError, RequestError
from mini_infer.core.lean_imports import without_models
from mini_infer.runtime.text.conversation import Conversation, checked_messages, checked_text

VOCABULARY_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of `config.tokenizer`, or else of the model itself, which may have none. Raises ModelError where it
    cannot be read, or the one that was asked for does not exist."""
    if config.load_format is LoadFormat.dry:
        return ByteTokenizer(config.dry.vocab_size)
    if config.tokenizer is None and config.hf_config is not None:
        return NoTokenizer("model.hf_config gives a model's shape and no tokenizer")
    name = config.tokenizer or config.path
    hf = _load_hf(name)
    if hf is not None:
        return HFTokenizer(hf)
    missing = f"{name!r} holds no tokenizer (none of {', '.join(VOCABULARY_FILES)} with a vocabulary)"
    if config.tokenizer is not None:
        raise ModelError(f"{missing}: set model.tokenizer to a folder or a hub name that does")
    return NoTokenizer(missing)


def _load_hf(name: str) -> Any | None:
    """The Hugging Face tokenizer of a folder, a hub name or a shipped model; None where there is no vocabulary."""
    folder = assets.shipped_path(name) or Path(name).expanduser()
    source = folder if folder.is_dir() else name
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
        return None
    try:
        if folder == assets.shipped_path(folder.name):  # AutoTokenizer would find the same, and takes seconds to import
            with without_models():
                from transformers import Qwen2Tokenizer
            return Qwen2Tokenizer.from_pretrained(source)
        with without_models():
            # Takes a second to import, which the dry model need not wait for.
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
            from transformers.models.auto.tokenization_auto import get_tokenizer_config

        settings = get_tokenizer_config(source)
        # AutoTokenizer would replace normalizer and pre-tokenizer of a tokenizer.json by those of the model's
        # architecture, even where the folder asks for a tokenizer just as it is written there.
        as_written = settings.get("tokenizer_class") in GENERIC_CLASSES and "auto_map" not in settings
        hf = (PreTrainedTokenizerFast if as_written else AutoTokenizer).from_pretrained(source)
    except Exception as error:  # the Rust side raises bare Exceptions
        raise ModelError(
            f"the tokenizer of {name!r} cannot be loaded: {error}. model.tokenizer takes a folder, a hub name or a "
            "shipped model (tiny-target, tiny-draft)"
        ) from error
    # Without a vocabulary file, transformers invents a tokenizer that knows its special tokens and nothing else.
    return hf if len(hf) > len(hf.added_tokens_decoder) else None


class HFTokenizer:
    """A tokenizer of the transformers library. ByteTokenizer and NoTokenizer answer the same calls.

    Attributes:
        vocab_size: one more than the highest id with a text. A model may have more rows than that: they are padding.
        special_ids: what `skip_special_tokens` leaves out of a text.
        longest_token: in characters, of a text that is encoded; 0 where none is.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self.vocab_size = len(hf)
        self.eos_token_ids: tuple[int, ...] = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.special_ids = frozenset(i for i, token in hf.added_tokens_decoder.items() if token.special)
        self.longest_token = max(map(len, hf.get_vocab()), default=0)  # a byte-level one has a character for each byte

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer adds by itself, such as a beginning-of-sequence token. Raises
        RequestError where the text is not valid Unicode, or there is no tokenizer."""
        return self._hf.encode(checked_text(text), verbose=False)  # the engine checks the length itself

    def encode_within(self, text: str) -> list[int]:
        """Of text that stands within a sequence: without special tokens but those that it spells."""
        return self._hf.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no valid UTF-8 become U+FFFD; ids without a text are left out."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.special_ids]
        # Cleaning up spaces would change characters that a stream has already sent.
        return self._hf.decode(list(token_ids), clean_up_tokenization_spaces=False)

    @property
    def chat_template(self) -> str:
        """In Jinja; several ones together where the tokenizer has one for each purpose; empty where it has none."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def set_chat_template(self, template: str) -> None:
        """Raises ModelError where it is none."""
        from jinja2 import TemplateError, TemplateSyntaxError

        self._hf.chat_template = template
        try:
            self._hf.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is no Jinja template: {error}") from error
        except (TemplateError, TypeError, ValueError):  # it takes no such conversation
            pass

    def apply_chat_template(self, conversation: Conversation | Sequence[Mapping[str, Any]]) -> list[int]:
        """Encodes a conversation, or its messages, up to where the model's answer begins. Raises RequestError for a
        message of another shape, what the template refuses or does not know, or where there is no template."""
        conversation = Conversation.of(conversation)
        checked = checked_messages(conversation.messages)
        if not self.chat_template:
            raise RequestError(
                "this model's tokenizer has no chat template: send a text prompt, or set model.tokenizer to another",
                "messages",
            )
        conversation.require_template(self.chat_template)
        from jinja2 import TemplateError

        continued = conversation.continue_final_message
        try:
            # Tokens that begin a sequence are in the template; the tokenizer does not add them once more.
            return self._hf.apply_chat_template(
                checked,
                tools=list(conversation.tools) or None,
                add_generation_prompt=conversation.add_generation_prompt and not continued,
                continue_final_message=continued,
                tokenize=True,
                return_dict=False,
                **conversation.variables,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error

    @cached_property
    def token_bytes(self) -> Sequence[bytes] | None:
        """The bytes of each id, where a text is nothing but its tokens' bytes read as UTF-8; None where it is not."""
        from tokenizers.decoders import ByteLevel

        backend = getattr(self._hf, "backend_tokenizer", None)
        if not isinstance(getattr(backend, "decoder", None), ByteLevel):
            return None
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}  # GPT-2's spelling of bytes
        tokens = self._hf.convert_ids_to_tokens(list(range(self.vocab_size)))
        # A token with a foreign character means itself.
        return [
            bytes([byte_of[char] for char in token]) if byte_of.keys() >= set(token) else token.encode()
            for token in (token or "" for token in tokens)
        ]

    @property
    def definition(self) -> str | None:
        """The text of its tokenizer.json, as the tokenizers library writes it; None where it has none."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return None if backend is None else backend.to_str()

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """SentencePiece's <0x00> to <0xFF>. A run of them is one piece of text: its last byte can change its first."""
        vocab = self._hf.get_vocab()
        return frozenset(vocab[token] for token in map("<0x{:02X}>".format, range(256)) if token in vocab)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then five special tokens. Ids beyond those, up to `vocab_size`, decode to a
    printable ASCII character and are never encoded: the dry model's made-up tokens read as text."""

    longest_token = 1
    SPECIAL_TOKENS = ("<eos>", "<bos>", "<im_start>", "<im_end>", "<pad>")
    EOS, BOS, IM_START, IM_END, PAD = range(256, 261)

    def __init__(self, vocab_size: int = 261) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = (self.EOS,)
        self.special_ids = frozenset(range(256, 261))
        self.byte_fallback_ids: frozenset[int] = frozenset()
        self.definition = None
        self.token_bytes: Sequence[bytes] = [
            *(bytes([i]) for i in range(256)),
            *(token.encode() for token in self.SPECIAL_TOKENS),
            *(bytes([i % 95 + 32]) for i in range(261, vocab_size)),
        ]

    def encode(self, text: str) -> list[int]:
        return list(checked_text(text).encode())

    def encode_within(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else ()
        known = [self.token_bytes[i] for i in token_ids if i < self.vocab_size and i not in skipped]
        return b"".join(known).decode(errors="replace")

    # No template, but the words that say what it knows.
    chat_template = "tools, tool_calls: <tool_call> ... </tool_call>; reasoning: <think> ... </think>"

    def set_chat_template(self, template: str) -> None:
        raise ModelError("the dry model has a chat template of its own: leave --chat-template out")

    def apply_chat_template(self, conversation: Conversation | Sequence[Mapping[str, Any]]) -> list[int]:
        conversation = Conversation.of(conversation)
        messages = checked_messages(conversation.messages)
        conversation.require_template(self.chat_template)
        texts = [f"tools\n{json.dumps(tool)}" for tool in conversation.tools]
        for message in messages:
            calls = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in message.get("tool_calls") or ()]
            texts.append("\n".join([message["role"], message["content"], *calls]))
        ends = [[self.IM_END, *b"\n"] for _ in texts]
        if conversation.continue_final_message:
            ends[-1] = []
        elif conversation.add_generation_prompt:
            ends[-1] += [self.IM_START, *b"assistant\n"]
        pairs = zip(texts, ends, strict=True)
        return [token for text, end in pairs for token in (self.IM_START, *text.encode(), *end)]


class NoTokenizer:
    """Stands in for a tokenizer that does not exist: prompts are token ids, and outputs have no text."""

    vocab_size = 0
    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    token_bytes: Sequence[bytes] = ()
    byte_fallback_ids: frozenset[int] = frozenset()
    definition = None
    chat_template = ""
    longest_token = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def encode(self, text: str) -> list[int]:
        raise self._error("prompt")

    def encode_within(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def set_chat_template(self, template: str) -> None:
        raise ModelError(f"a chat template needs a tokenizer: {self._reason}")

    def apply_chat_template(self, conversation: Conversation | Sequence[Mapping[str, Any]]) -> list[int]:
        raise self._error("messages")

    def _error(self, param: str) -> RequestError:
        return RequestError(
            f"text needs a tokenizer: {self._reason}. Send token ids, or set model.tokenizer to a folder or a hub name",
            param,
        )


Tokenizer: TypeAlias = HFTokenizer | ByteTokenizer | NoTokenizer
