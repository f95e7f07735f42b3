"""Deltas, joined, are the text; none holds half a character; a stop string ends it as in a search of the full text."""

import itertools
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, metaspace, sentencepiece, word_piece

from mini_infer.core.request import SamplingParams
from mini_infer.runtime.text.detokenizer import ByteStream, Detokenizer, StopChecker, WindowStream
from mini_infer.runtime.text.tokenizer import ByteTokenizer, NoTokenizer

FAMILIES = {
    "bytes": lambda: ByteTokenizer(512),
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
UNICODE = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("ab .\n\tStheworld▁ĠÉé日本語"),
        st.sampled_from(
            ["👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301", "עִבְרִית", "العربية", "हिन्दी", "\u200d", "\ufffd", "\u202e"]
        ),
    ),
    max_size=20,
).map("".join)
EMOJI = "👩‍👩‍👧‍👦 is a family, 日本語 is not; naïve e\u0301 עברית 🇩🇪"


families = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)


def chunks_of(data, token_ids):
    """The tokens in random chunks, some of them empty."""
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    rest = list(token_ids)
    for size in itertools.cycle(sizes):
        if not rest:
            return
        yield rest[:size]
        rest = rest[size:]


def stream(detokenizer, chunks):
    """The deltas, with what finish() adds as the last."""
    return [detokenizer.append(chunk) for chunk in chunks] + [detokenizer.finish()]


def random_ids(tokenizer):
    """Any tokens: half characters, special tokens, ids without a text."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30)


def byte_ids(tokenizer, text):
    """One token a byte."""
    if tokenizer.byte_fallback_ids:
        return [sorted(tokenizer.byte_fallback_ids)[byte] for byte in text]
    return [list(tokenizer.token_bytes).index(bytes([byte])) for byte in text]


class TestDeltas:
    @families
    @given(data=st.data())
    def test_of_text_join_to_the_text(self, make, data):
        tokenizer = make()
        token_ids = tokenizer.encode(data.draw(UNICODE))
        full = tokenizer.decode(token_ids)
        deltas = stream(Detokenizer(tokenizer, SamplingParams()), chunks_of(data, token_ids))
        assert "".join(deltas) == full
        assert "".join(deltas).count("\ufffd") == full.count("\ufffd")

    @families
    @given(data=st.data(), skip=st.booleans())
    @settings.get_profile("light")
    def test_of_any_tokens_join_to_the_text(self, make, data, skip):
        tokenizer = make()
        token_ids = data.draw(random_ids(tokenizer))
        params = SamplingParams(skip_special_tokens=skip)
        deltas = stream(Detokenizer(tokenizer, params), chunks_of(data, token_ids))
        assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)

    @given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("€é👍".encode()))), max_size=25))
    @example([0xE2, 0x82, 0xAC, 0xFF])  # byte fallback: the last byte spoils the three before it
    @example([0xF0, 0x9F, 0x91, 0x41])
    @example([0xED, 0xA0, 0x80])  # a surrogate
    def test_of_any_bytes_join_to_the_text(self, data_bytes):
        for tokenizer in (ByteTokenizer(), byte_level(), sentencepiece(), metaspace()):
            ids = byte_ids(tokenizer, data_bytes)
            deltas = stream(Detokenizer(tokenizer, SamplingParams()), [[i] for i in ids])
            assert "".join(deltas) == tokenizer.decode(ids)

    def test_tokens_without_a_text_part_no_run_of_bytes(self):
        tokenizer = sentencepiece()
        run = byte_ids(tokenizer, b"\xe2\x82\xac\xff")
        for silent in (tokenizer.eos_token_ids[0], tokenizer.vocab_size + 3):
            ids = [*run[:3], silent, run[3]]
            assert "".join(stream(Detokenizer(tokenizer, SamplingParams()), [[i] for i in ids])) == tokenizer.decode(
                ids
            )

    @pytest.mark.parametrize("text", [EMOJI, "\ufffd in the text itself \ufffd", "", " leading and trailing ", "\n\n"])
    def test_no_delta_holds_half_a_character(self, text):
        for tokenizer in (ByteTokenizer(), byte_level(), sentencepiece()):
            token_ids = tokenizer.encode(text)
            whole = set(tokenizer.decode(token_ids))
            for delta in stream(Detokenizer(tokenizer, SamplingParams()), [[i] for i in token_ids]):
                assert set(delta) <= whole

    def test_a_character_comes_with_its_last_byte(self):
        detokenizer = Detokenizer(ByteTokenizer(), SamplingParams())
        assert [detokenizer.append([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]

    def test_half_a_character_at_the_end(self):
        for tokenizer in (ByteTokenizer(), byte_level(), sentencepiece()):
            euro = byte_ids(tokenizer, "€".encode())
            detokenizer = Detokenizer(tokenizer, SamplingParams())
            assert detokenizer.append(euro[:2]) == ""
            assert set(detokenizer.finish()) == {"\ufffd"}

    def test_added_and_special_tokens(self):
        tokenizer = byte_level()
        ids = tokenizer.encode("x<eos><tool>a b 日é!y<eos>")
        assert "".join(stream(Detokenizer(tokenizer, SamplingParams()), [[i] for i in ids])) == tokenizer.decode(ids)
        shown = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
        assert "".join(stream(shown, [ids])) == tokenizer.decode(ids, skip_special_tokens=False)
        assert "<eos>" in tokenizer.decode(ids, skip_special_tokens=False)


class TestWays:
    def test_byte_level_goes_by_the_table(self):
        assert isinstance(Detokenizer(byte_level(), SamplingParams())._stream, ByteStream)
        assert isinstance(Detokenizer(ByteTokenizer(), SamplingParams())._stream, ByteStream)
        assert isinstance(Detokenizer(sentencepiece(), SamplingParams())._stream, WindowStream)

    @given(st.data())
    def test_both_ways_agree(self, data):
        """The window is right for byte-level tokenizers, too; the table is only faster."""
        tokenizer = byte_level()
        token_ids = data.draw(UNICODE.map(tokenizer.encode) | random_ids(tokenizer))
        window = WindowStream(tokenizer, tokenizer.special_ids)
        texts = [window.push(chunk) for chunk in chunks_of(data, token_ids)] + [window.finish()]
        assert "".join(texts) == tokenizer.decode(token_ids)

    def test_chunks_that_end_within_a_character(self):
        tokenizer = byte_level()
        token_ids = byte_ids(tokenizer, ("a" + "€" * 40).encode())
        for size in (2, 4, 5, 7, 8, 40):
            window = WindowStream(tokenizer, tokenizer.special_ids)
            texts = [window.push(token_ids[i : i + size]) for i in range(0, len(token_ids), size)] + [window.finish()]
            assert "".join(texts) == "a" + "€" * 40
            assert len([text for text in texts if text]) > 2

    def test_who_means_the_sign_for_no_character_gets_it_soon(self):
        """And costs no more with each token."""
        tokenizer = SimpleNamespace(byte_fallback_ids=frozenset(), vocab_size=9)
        tokenizer.decode = lambda token_ids, **_: "\ufffd" * len(token_ids)
        window = WindowStream(tokenizer, frozenset())
        texts = [window.push([1]) for _ in range(100)]
        assert max(map(len, texts)) < 20
        assert len("".join(texts) + window.finish()) == 100

    def test_no_tokenizer_gives_no_text(self):
        detokenizer = Detokenizer(NoTokenizer("none"), SamplingParams(stop="x"), [1, 2])
        assert stream(detokenizer, [[5, 6], [7]]) == ["", "", ""]

    @pytest.mark.slow
    def test_a_token_takes_microseconds(self):
        token_ids = byte_level().encode(EMOJI) * 1000
        detokenizer = Detokenizer(byte_level(), SamplingParams())
        start = time.perf_counter()
        for token in token_ids:
            detokenizer.append([token])
        assert (time.perf_counter() - start) / len(token_ids) < 10e-6


class TestPromptContext:
    """A tokenizer whose words carry their space drops the first one of a text; an output is no first."""

    @pytest.mark.parametrize("make", [sentencepiece, metaspace, word_piece, byte_level])
    def test_prompt_and_output_are_one_text(self, make):
        tokenizer = make()
        token_ids = tokenizer.encode("Hello world, the world is large and then the end")
        full = tokenizer.decode(token_ids)
        for cut in range(1, len(token_ids)):
            prompt, output = token_ids[:cut], token_ids[cut:]
            text = "".join(stream(Detokenizer(tokenizer, SamplingParams(), prompt), [[i] for i in output]))
            assert tokenizer.decode(prompt) + text == full

    def test_the_space_of_the_first_word(self):
        tokenizer = sentencepiece()
        prompt, output = tokenizer.encode("Hello"), tokenizer.encode("world")
        assert "".join(stream(Detokenizer(tokenizer, SamplingParams(), prompt), [output])) == " world"
        assert "".join(stream(Detokenizer(tokenizer, SamplingParams()), [output])) == "world"

    @pytest.mark.parametrize("make", [sentencepiece, byte_level])
    def test_a_prompt_that_ends_within_a_character(self, make):
        tokenizer = make()
        prompt, rest = byte_ids(tokenizer, b"a\xe2\x82"), byte_ids(tokenizer, b"\xac")
        output = rest + tokenizer.encode("the end")
        window = WindowStream(tokenizer, tokenizer.special_ids, prompt)
        assert window.push(output) + window.finish() == tokenizer.decode(output)


def naive_stop(text, stops, begin=0):
    """(text before the stop, stop) of the string that is complete first; of those that end together, the longest."""
    for end in range(begin + 1, len(text) + 1):
        matches = [stop for stop in stops if end - len(stop) >= begin and text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("abc.", min_size=1, max_size=5), min_size=1, max_size=4)


class TestStopStrings:
    @given(st.data(), STOPS, st.booleans())
    @settings.get_profile("light")
    def test_as_a_search_of_the_full_text(self, data, stops, include):
        text = data.draw(st.text("abc.é", max_size=40))
        token_ids = list(text.encode())
        params = SamplingParams(stop=stops, include_stop_str_in_output=include)
        detokenizer = Detokenizer(ByteTokenizer(), params)
        deltas = stream(detokenizer, chunks_of(data, token_ids))
        expected, stop = naive_stop(text, stops)
        assert "".join(deltas) == expected + (stop or "") * include
        assert detokenizer.stop_string == stop
        consumed = len((expected + stop).encode()) if stop else len(token_ids)
        assert detokenizer.num_tokens == consumed

    @given(st.data())
    @settings.get_profile("light")
    def test_how_tokens_chop_the_text_does_not_matter(self, data):
        tokenizer = byte_level()
        token_ids = tokenizer.encode(data.draw(st.sampled_from([EMOJI, "The end. STOP here.", "return a + b  # sum"])))
        full = tokenizer.decode(token_ids)
        begin = data.draw(st.integers(0, len(full) - 1))
        stops = [full[begin : begin + data.draw(st.integers(1, 9))], "never there"]
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
        text = "".join(stream(detokenizer, chunks_of(data, token_ids)))
        assert (text, detokenizer.stop_string) == naive_stop(full, stops)

    @given(st.data(), STOPS)
    @settings.get_profile("light")
    def test_none_begins_in_the_text_of_the_first_min_tokens(self, data, stops):
        text = data.draw(st.text("abc.", max_size=40))
        min_tokens = data.draw(st.integers(0, 20))
        detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(stop=stops, min_tokens=min_tokens))
        deltas = stream(detokenizer, chunks_of(data, list(text.encode())))
        expected, stop = naive_stop(text, stops, begin=min_tokens)
        assert ("".join(deltas), detokenizer.stop_string) == (expected, stop)

    def test_a_possible_beginning_is_held_back(self):
        detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(stop=["STOP"]))
        assert [detokenizer.append([byte]) for byte in b"a STAR ST"] == ["a", " ", "", "", "STA", "R", " ", "", ""]
        assert detokenizer.finish() == "ST"
        assert detokenizer.stop_string is None

    def test_nothing_comes_after_it(self):
        detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(stop="b"))
        assert detokenizer.append(list(b"abc")) == "a"
        assert detokenizer.append(list(b"def")) == ""
        assert detokenizer.finish() == ""
        assert (detokenizer.stop_string, detokenizer.num_tokens) == ("b", 2)

    def test_one_that_is_complete_first_wins(self):
        assert self.cut("xabcd", ["abcd", "bc"]) == ("xa", "bc")

    def test_of_those_that_end_together_the_longest_wins(self):
        assert self.cut("xabcd", ["cd", "bcd"]) == ("xa", "bcd")

    def test_one_that_the_last_flush_completes(self):
        detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(stop="a\ufffd"))
        assert detokenizer.append([ord("x"), ord("a"), 0xE2]) + detokenizer.finish() == "x"
        assert detokenizer.stop_string == "a\ufffd"

    def cut(self, text, stops):
        checker = StopChecker(stops, include=False)
        return checker.push(text) + checker.finish(), checker.matched
