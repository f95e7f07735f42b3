"""Tokenizers of each family, trained in a moment on a few sentences."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mini_infer.runtime.text.tokenizer import HFTokenizer

SENTENCES = [
    "Hello world, this is a test of the tokenizer. The world is large.",
    "def add(a, b):\n    return a + b  # sum\n",
    "naïve café, Grüße, señor; 日本語のテキスト 和 中文文本",
    "The end. STOP here. \n\n And then, the world went on and on.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "{{ '<bos>' if loop.first else '' }}{{ m['role'] + ': ' + m['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@cache
def byte_level() -> HFTokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it, with a beginning-of-sequence token and added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<bos>", "<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    # Not special; the second holds characters that no byte-level vocabulary spells, the third one that it misreads.
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("a b 日"), AddedToken("é!")])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 0)])
    return HFTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
        )
    )


@cache
def sentencepiece() -> HFTokenizer:
    """BPE over words that carry their space (▁), with byte fallback, as Llama 2 and Mistral have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_bytes(tokenizer)


@cache
def metaspace() -> HFTokenizer:
    """The same family in its other spelling: a Metaspace pre-tokenizer and decoder."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_bytes(tokenizer)


def _with_bytes(tokenizer: Tokenizer) -> HFTokenizer:
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    )
    # The bytes are ordinary tokens; only the first three are special.
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] in special]
    return HFTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(parts)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


@cache
def word_piece() -> HFTokenizer:
    """Words and ##pieces, joined by spaces that no token carries."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]"))
