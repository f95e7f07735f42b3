import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece

from mini_infer.core.config import DryConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ModelError, RequestError
from mini_infer.runtime.text.conversation import Conversation
from mini_infer.runtime.text.tokenizer import ByteTokenizer, HFTokenizer, NoTokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "日本"}]


@pytest.fixture
def folder(tmp_path):
    """A model folder of an architecture whose AutoTokenizer brings a normalizer of its own."""
    byte_level()._hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return tmp_path


class TestHFTokenizer:
    def test_loads_the_folder_as_it_is_written(self, folder):
        tokenizer = load_tokenizer(ModelConfig(str(folder)))
        text = "Hello e\u0301 world 日本 <tool>"
        assert isinstance(tokenizer, HFTokenizer)
        assert tokenizer.encode(text) == byte_level().encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.vocab_size == byte_level().vocab_size

    def test_adds_the_first_token_to_a_prompt_but_not_twice_to_a_chat(self):
        tokenizer = byte_level()
        assert tokenizer.encode("Hello").count(0) == 1
        token_ids = tokenizer.apply_chat_template(CHAT)
        assert token_ids.count(0) == 1
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
            "<bos>user: Hello\nassistant: 日本\nassistant:"
        )

    def test_special_tokens(self):
        tokenizer = byte_level()
        assert tokenizer.eos_token_ids == (1,)
        assert tokenizer.special_ids == {0, 1}
        token_ids = tokenizer.encode("x<eos><tool>")
        assert tokenizer.decode(token_ids) == "x<tool>"
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>x<eos><tool>"

    @given(st.lists(st.integers(0, 350), max_size=20), st.booleans())
    def test_decodes_as_transformers(self, token_ids, skip):
        for tokenizer in (byte_level(), sentencepiece()):
            expected = tokenizer._hf.decode(token_ids, skip_special_tokens=skip)
            assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected

    @given(st.lists(st.integers(0, 400), max_size=20))
    def test_the_byte_table_is_the_decoder(self, token_ids):
        tokenizer = byte_level()
        table = tokenizer.token_bytes
        token_ids += tokenizer.encode("a b 日é!<tool>")  # added tokens, spelt in other ways
        joined = b"".join(table[i] for i in token_ids if i < len(table))
        assert joined.decode(errors="replace") == tokenizer.decode(token_ids, skip_special_tokens=False)

    def test_byte_fallback(self):
        assert sentencepiece().token_bytes is None
        assert len(sentencepiece().byte_fallback_ids) == 256
        assert sentencepiece().decode(sentencepiece().encode("🎉")) == "🎉"

    def test_no_chat_template(self):
        with pytest.raises(RequestError, match="no chat template"):
            sentencepiece().apply_chat_template(CHAT)

    def test_what_the_template_refuses(self):
        with pytest.raises(RequestError, match="roles are user and assistant"):
            byte_level().apply_chat_template([{"role": "tool", "content": "x"}])


class TestLoading:
    def test_dry(self):
        config = ModelConfig(load_format=LoadFormat.dry, dry=DryConfig(vocab_size=300))
        assert load_tokenizer(config).vocab_size == 300

    def test_another_folder_may_lend_the_tokenizer(self, folder, tmp_path_factory):
        config = ModelConfig(str(tmp_path_factory.mktemp("bare")), tokenizer=str(folder))
        assert load_tokenizer(config).encode("Hello") == byte_level().encode("Hello")

    def test_a_model_without_one_takes_token_ids(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
        inline = ModelConfig(load_format=LoadFormat.dummy, hf_config={"model_type": "qwen2"})
        for config in (ModelConfig(str(tmp_path)), inline):
            tokenizer = load_tokenizer(config)
            assert isinstance(tokenizer, NoTokenizer)
            assert tokenizer.decode([1, 2]) == ""
            assert tokenizer.eos_token_ids == ()
            with pytest.raises(RequestError, match="Send token ids"):
                tokenizer.encode("Hello")
            with pytest.raises(RequestError, match="Send token ids"):
                tokenizer.apply_chat_template(CHAT)

    def test_a_vocabulary_that_transformers_makes_up_is_none(self, folder):
        (folder / "tokenizer.json").rename(folder / "tokenizer.lost")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
        assert isinstance(load_tokenizer(ModelConfig(str(folder))), NoTokenizer)

    def test_one_that_was_asked_for_must_exist(self, folder, tmp_path_factory):
        with pytest.raises(ModelError, match="holds no tokenizer"):
            load_tokenizer(ModelConfig(str(folder), tokenizer=str(tmp_path_factory.mktemp("bare"))))

    def test_a_path_that_does_not_exist(self):
        with pytest.raises(ModelError, match="/no/such/folder"):
            load_tokenizer(ModelConfig("/no/such/folder"))

    def test_a_damaged_file(self, folder):
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_tokenizer(ModelConfig(str(folder)))


class TestByteTokenizer:
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_round_trip(self, text):
        tokenizer = ByteTokenizer()
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @given(st.lists(st.integers(0, 10_000)))
    def test_decodes_whatever_comes(self, token_ids):
        assert isinstance(ByteTokenizer(512).decode(token_ids), str)

    def test_ids_past_the_special_tokens_read_as_text(self):
        text = ByteTokenizer(512).decode(range(261, 512))
        assert len(text) == 251
        assert text.isascii()
        assert text.isprintable()

    def test_special_tokens(self):
        tokenizer = ByteTokenizer()
        assert tokenizer.eos_token_ids == (256,)
        assert tokenizer.decode([72, 256, 258, 105]) == "Hi"
        assert tokenizer.decode([72, 256, 258], skip_special_tokens=False) == "H<eos><im_start>"

    def test_chat(self):
        tokenizer = ByteTokenizer()
        assert tokenizer.decode(tokenizer.apply_chat_template(CHAT), skip_special_tokens=False) == (
            "<im_start>user\nHello<im_end>\n<im_start>assistant\n日本<im_end>\n<im_start>assistant\n"
        )


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level])
class TestRefusals:
    def test_half_a_surrogate_pair(self, make):
        with pytest.raises(RequestError, match=r"character 1 of the text is U\+D83D"):
            make().encode("a\ud83d")
        with pytest.raises(RequestError, match=r"U\+DE00"):
            make().apply_chat_template([{"role": "user", "content": "\ude00"}])

    @pytest.mark.parametrize("text", [None, 5, b"bytes", ["list"]])
    def test_no_text(self, make, text):
        with pytest.raises(RequestError, match="must be a string"):
            make().encode(text)

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "at least one"),
            ("hello", "at least one"),
            (None, "at least one"),
            (["hello"], "message 0 must be a mapping"),
            ([{"role": "user"}], "needs 'content'"),
            ([{"content": "x"}], "needs 'role'"),
            ([CHAT[0], {"role": "user", "content": ["x"]}], "message 1 needs 'content' as a string"),
            ([{"role": 3, "content": "x"}], "needs 'role'"),
            ([{"role": "user", "content": "x", "tool_calls": [{}]}], "'tool_calls'"),
            ([{"role": "user", "content": "x", "colour": "red"}], "'colour'"),
        ],
    )
    def test_no_conversation(self, make, messages, message):
        with pytest.raises(RequestError, match=message):
            make().apply_chat_template(messages)


class TestConversations:
    TEMPLATE = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
        "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<answer{{ mood }}>{% endif %}"
    )
    TOOLS = ({"type": "function", "function": {"name": "f"}},)
    CALLS = ({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},)

    def text(self, conversation: Conversation) -> str:
        tokenizer = HFTokenizer(copy.deepcopy(byte_level()._hf))
        tokenizer.set_chat_template(self.TEMPLATE)
        return tokenizer.decode(tokenizer.apply_chat_template(conversation), skip_special_tokens=False)

    def test_what_a_template_is_told(self):
        messages = [*CHAT, {"role": "assistant", "content": "", "tool_calls": self.CALLS}]
        assert self.text(Conversation(messages, self.TOOLS)) == (
            '[{"type": "function", "function": {"name": "f"}}]<user>Hello<assistant>日本'
            '<assistant>{"name": "f", "arguments": {"x": 1}}<answer>'
        )

    def test_where_it_ends(self):
        assert self.text(Conversation(CHAT, add_generation_prompt=False)) == "<user>Hello<assistant>日本"
        assert self.text(Conversation(CHAT, continue_final_message=True)) == "<user>Hello<assistant>日本"
        assert self.text(Conversation(CHAT, variables={"mood": "!"})).endswith("<answer!>")

    @pytest.mark.parametrize(
        ("conversation", "param"),
        [
            (Conversation(CHAT, TOOLS), "tools"),
            (Conversation([{**CHAT[0], "tool_calls": CALLS}]), "messages"),
            (Conversation(CHAT, variables={"mood": "!"}), "chat_template_kwargs"),
            (Conversation(CHAT, variables={"tokenize": False}), "chat_template_kwargs"),
        ],
    )
    def test_a_template_that_knows_no_such_thing(self, conversation, param):
        with pytest.raises(RequestError) as error:
            byte_level().apply_chat_template(conversation)
        assert error.value.param == param

    def test_a_template_that_is_none(self):
        with pytest.raises(ModelError, match="no Jinja template"):
            HFTokenizer(copy.deepcopy(byte_level()._hf)).set_chat_template("{% if %}")
