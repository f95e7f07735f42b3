"""Traces in both formats: what is read, how it is cut, scaled and shrunk, and what is said about a broken file."""

import dataclasses
import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_tools import DRY, Letters, assert_hits_are_intended, dry_engine, intended, serve_in_turn

from experiments.lab.workloads import Arrivals, Trace
from experiments.lab.workloads.base import generator
from experiments.lab.workloads.random import RandomTokens
from experiments.lab.workloads.trace import HashBlocks, read, shrunk
from mini_infer.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000001,374,44
2023-11-17 00:00:00.0000000,396,109
2023-11-17 00:00:02,90,7
2023-11-17 00:00:02.0000001,91,16
"""
# A system prompt of one block (7), a conversation that comes back (7 8 9), another one (12), and a stranger.
MOONCAKE = [
    (0, 1000, 40, [7, 8]),
    (500, 512, 40, [7]),
    (500, 1400, 80, [7, 8, 9]),
    (1700, 700, 8, [7, 12]),
    (2000, 1024, 8, [20, 21]),
    (9000, 2048, 16, [7, 8, 9, 30]),
]
LONG = Letters(size=512, max_model_len=10**6)


def mooncake_lines(rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    return str(path)


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "conversation.jsonl"
    path.write_text(mooncake_lines(MOONCAKE))
    return str(path)


def test_azure_lengths_and_times(azure):
    inputs = Trace(path=azure, limit=4).make(DRY, seed=0)
    assert [(len(item.prompt), item.output_tokens) for item in inputs.measured] == [
        (374, 44),
        (396, 109),
        (90, 7),
        (91, 16),
    ]
    assert [item.arrival_s for item in inputs.measured] == pytest.approx([0.0, 0.4999999, 2.4999999, 2.5], abs=1e-7)
    assert sum(item.shared_tokens for item in inputs.measured) == 0
    assert assert_hits_are_intended(inputs) == 0


def test_windows_line_ends_blank_lines_a_missing_last_line_end_and_other_columns(tmp_path, azure):
    path = tmp_path / "other.csv"
    rows = [line.split(",") for line in AZURE.splitlines()]
    path.write_bytes(
        b"\xef\xbb\xbf" + "\r\n\r\n".join(f"{out},x,{when}Z,{prompt}" for when, prompt, out in rows[1:]).encode()
    )
    text = path.read_text("utf-8-sig")
    path.write_text("GeneratedTokens,Model,TIMESTAMP,ContextTokens\r\n" + text)
    assert read(str(path)).records == read(azure).records


def test_offsets_from_utc_are_heeded(tmp_path):
    path = tmp_path / "offsets.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(head + "2024-05-12 00:00:00.009930+00:00,9,9\n2024-05-12T02:00:00.509930+02:00,9,9\n")
    first, second = read(str(path)).records
    assert second.time_s - first.time_s == pytest.approx(0.5)


def test_mooncake_blocks_become_shared_prefixes(mooncake):
    inputs = Trace(path=mooncake, limit=6).make(DRY, seed=0)
    a, b, c, d, e, f = inputs.measured
    assert [len(item.prompt) for item in inputs.measured] == [1000, 512, 1400, 700, 1024, 2048]
    assert [item.shared_tokens for item in inputs.measured] == [0, 512, 1000, 512, 0, 1400]
    assert [item.arrival_s for item in inputs.measured] == [0.0, 0.5, 0.5, 1.7, 2.0, 9.0]
    assert a.prompt[:512] == b.prompt == c.prompt[:512] == d.prompt[:512]
    assert c.prompt[:1000] == a.prompt
    assert f.prompt[:1400] == c.prompt
    assert d.prompt[512:528] != c.prompt[512:528]
    assert e.prompt[:16] != a.prompt[:16]
    assert assert_hits_are_intended(inputs) == 496 + 992 + 512 + 1392  # whole blocks of 16, and not all of b


@pytest.mark.parametrize("shrink", [2.0, 3.7, 16.0, 32.0])
def test_shrinking_keeps_the_shares(mooncake, shrink):
    whole = Trace(path=mooncake, limit=6).make(DRY, seed=0).measured
    load = Trace(path=mooncake, limit=6, shrink=shrink)
    inputs = load.make(DRY, seed=0)
    for item, full in zip(inputs.measured, whole, strict=True):
        assert len(item.prompt) == int(len(full.prompt) / shrink)
        assert item.output_tokens == max(1, int(full.output_tokens / shrink))
        assert item.arrival_s == full.arrival_s
        assert abs(item.shared_tokens / len(item.prompt) - full.shared_tokens / len(full.prompt)) <= 1 / len(
            item.prompt
        )
    assert_hits_are_intended(inputs, block_size=4)


def test_caps_cut_prompts_at_their_ends_and_are_counted(mooncake):
    load = Trace(path=mooncake, limit=6, max_prompt_tokens=600, max_output_tokens=30)
    inputs = load.make(DRY, seed=0)
    assert [len(item.prompt) for item in inputs.measured] == [600, 512, 600, 600, 600, 600]
    assert [item.shared_tokens for item in inputs.measured] == [0, 512, 600, 512, 0, 600]
    assert [item.output_tokens for item in inputs.measured] == [30, 30, 30, 8, 8, 16]
    told = load.describe(inputs)
    assert (told["prompts_cut_off"], told["outputs_cut_off"]) == (5, 3)
    assert_hits_are_intended(inputs)


def test_the_run_records_where_the_requests_come_from(mooncake):
    load = Trace(path=mooncake, start=1, limit=3, rate_scale=4.0, shrink=2.0)
    inputs = load.make(DRY, seed=0)
    told = load.describe(inputs)
    expected = {
        "kind": "trace",
        "arrivals": "trace",
        "file": "conversation.jsonl",
        "format": "mooncake",
        "requests_in_file": 6,
        "requests": 3,
        "start": 1,
        "limit": 3,
        "rate_scale": 4.0,
        "shrink": 2.0,
        "prompts_cut_off": 0,
        "recorded_s": 1.2,
        "recorded_prompt_tokens": 512 + 1400 + 700,
        "prompt_tokens": 256 + 700 + 350,
        "shared_tokens": 0 + 256 + 256,  # what came before the cut is not there to be found
        "last_arrival_s": 0.3,
    }
    assert {key: told[key] for key in expected} == pytest.approx(expected)
    with open(mooncake, "rb") as file:
        assert told["sha256"] == hashlib.sha256(file.read()).hexdigest()
    assert json.loads(json.dumps(told)) == told


def test_the_lengths_alone_can_be_taken(mooncake):
    recorded = Trace(path=mooncake, limit=6).make(DRY, seed=0)
    poisson = Trace(path=mooncake, limit=6, arrivals=Arrivals.poisson, rate_per_s=9.0).make(DRY, seed=0)
    closed = Trace(path=mooncake, limit=6, arrivals=Arrivals.closed, concurrency=2)
    assert [item.prompt for item in poisson.measured] == [item.prompt for item in recorded.measured]
    assert [item.arrival_s for item in poisson.measured] != [item.arrival_s for item in recorded.measured]
    assert {item.arrival_s for item in closed.make(DRY, seed=0).measured} == {None}
    assert (closed.in_flight, len(closed.make(DRY, seed=0).warmup)) == (2, 2)


def test_warmup_has_the_lengths_of_the_trace_and_nothing_of_its_prefixes(mooncake):
    inputs = Trace(path=mooncake, limit=6).make(DRY, seed=0)
    lengths = [(len(item.prompt), item.output_tokens) for item in inputs.measured]
    assert [(len(item.prompt), item.output_tokens) for item in inputs.warmup] == lengths
    engine = dry_engine()
    serve_in_turn(engine, inputs.measured)
    assert [hit for _, hit in serve_in_turn(engine, inputs.warmup)] == [0] * 6


rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=5),  # a path through a tree of blocks
        st.integers(1, 512),  # tokens in its last block
    ),
    min_size=1,
    max_size=8,
)


@given(rows, st.floats(1, 128), st.integers(0, 3))
def test_prompts_share_exactly_what_is_intended(paths, shrink, seed):
    """Against every pair of prompts, token by token. Ids are chained, as in a real trace: one names its whole path."""
    tokens = RandomTokens(DRY.size, generator(seed, "tokens"))
    blocks = HashBlocks(tokens, shrink)
    before: list[tuple[int, ...]] = []
    for path, last in paths:
        ids = [sum((step + 1) * 4**level for level, step in enumerate(path[: end + 1])) for end in range(len(path))]
        length = max(1, shrunk((len(path) - 1) * 512 + last, shrink))
        prompt, shared = blocks.prompt(ids, length)
        assert len(prompt) == length
        longest = max((_common(prompt, other) for other in before), default=0)
        # A cut block may by chance go on like another one; within START tokens that is what `draw` rules out.
        assert shared <= longest <= shared + (3 if length < 16 or shrink > 32 else 1)
        before.append(prompt)


def _common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(rows, st.sampled_from([1.0, 5.5, 40.0]))
@settings.get_profile("heavy")
def test_the_engine_finds_what_is_intended(tmp_path_factory, paths, shrink):
    lines = []
    for path, last in paths:
        ids = [sum((step + 1) * 4**level for level, step in enumerate(path[: end + 1])) for end in range(len(path))]
        lines.append((0, (len(path) - 1) * 512 + last, 1, ids))
    file = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    file.write_text(mooncake_lines(lines))
    inputs = Trace(path=str(file), limit=len(lines), shrink=shrink).make(DRY, seed=0)
    found = serve_in_turn(dry_engine(), inputs.measured)
    assert [hit for _, hit in found] == intended(inputs.measured, found)


# --- files that are wrong -------------------------------------------------------------------------------------------

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,374,44\n"
ROW = mooncake_lines([(1000, 600, 5, [1, 2])])
WHOLE, RANGE = r"line 3: Expected `int`, got `str` - at `$.ContextTokens`", "line 2: Expected `int` >= 1 - at `$."
BROKEN = [
    (HEAD + GOOD + "2023-11-16 18:15:47.0,37\n", "line 3: it has 2 of 3 columns: '2023-11-16 18:15:47.0,37'"),
    (HEAD + GOOD + "2023-11-16 18:15:47.0,many,3\n", WHOLE),
    (HEAD + GOOD + "2023-11-16 18:15:47.0,3.5,3\n", WHOLE),
    (HEAD + GOOD + "2023-11-16 18:15:47.0,0,3\n", "line 3: Expected `int` >= 1 - at `$.ContextTokens`"),
    (HEAD + GOOD + "2023-11-16 18:15:47.0,3,-5\n", "line 3: Expected `int` >= 1 - at `$.GeneratedTokens`"),
    (HEAD + GOOD + "16.11.2023,3,5\n", "line 3: Invalid RFC3339 encoded datetime"),
    (HEAD + GOOD + "2023-02-30 18:15:46,3,5\n", "line 3: Invalid RFC3339 encoded datetime"),
    (HEAD + "\n" + GOOD + "2023-11-16 18:15:46.1805900,3,5\n", "line 4: it is 0.500 s earlier than the line before"),
    ("TIMESTAMP,ContextTokens\n" + GOOD, "Azure trace begins with the columns TIMESTAMP,ContextTokens,GeneratedTokens"),
    (HEAD, "has a header and no requests"),
    ("", "is empty"),
    (" \n\n", "is empty"),
    ("prompt,answer\n1,2\n", "is no trace that is known here. Its first line is 'prompt,answer'; an Azure trace"),
    (ROW + ROW[:40], "line 2: Input data was truncated"),
    (ROW + "[1, 2]\n", "line 2: Expected `object`, got `array`"),
    (ROW + '{"timestamp": 1000, "input_length": 5}\n', "line 2: Object missing required field `output_length`"),
    (ROW + ROW.replace("600", "0"), RANGE + "input_length`"),
    (ROW + ROW.replace("600", "-600"), RANGE + "input_length`"),
    (ROW + ROW.replace("5, ", "0, "), RANGE + "output_length`"),
    (ROW + ROW.replace("600", "600.5"), "line 2: Expected `int`, got `float` - at `$.input_length`"),
    (ROW + ROW.replace("600", "true"), "line 2: Expected `int`, got `bool` - at `$.input_length`"),
    (ROW + ROW.replace("[1, 2]", "[1]"), "line 2: input_length=600 makes 2 blocks of 512 tokens, but hash_ids holds 1"),
    (ROW + ROW.replace("[1, 2]", '[1, "x"]'), "line 2: Expected `int`, got `str` - at `$.hash_ids[1]`"),
    (ROW + ROW.replace("1000", "NaN"), "line 2: JSON is malformed: invalid character"),
    (ROW + ROW.replace("1000", '"soon"'), "line 2: Expected `float`, got `str` - at `$.timestamp`"),
    (ROW + ROW.replace("1000", "9" * 400), "line 2: Number out of range - at `$.timestamp`"),
    (HEAD + GOOD.replace("374", "9" * 12), "line 2: Expected `int` <= 1000000000 - at `$.ContextTokens`"),
    (HEAD + GOOD.replace("374", "9" * 5000), "line 2: Integer value out of range - at `$.ContextTokens`"),
    (ROW + ROW.replace("1000", "900"), "line 2: it is 0.100 s earlier than the line before it"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, text, message):
    path = tmp_path / "broken.trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        Trace(path=str(path), limit=1).make(LONG, seed=0)
    assert "broken.trace" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"workload\.path=nowhere\.csv cannot be read: No such file"):
        Trace(path="nowhere.csv").make(DRY, seed=0)
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        Trace(path=str(tmp_path)).make(DRY, seed=0)
    with pytest.raises(ConfigError, match=r"workload\.path is empty: name a trace file"):
        Trace().require_files()
    path = tmp_path / "packed.csv"
    path.write_bytes(HEAD.encode() + b"\x1f\x8b\x08")
    with pytest.raises(ConfigError, match=r"packed\.csv, line 2: it is no UTF-8 text"):
        Trace(path=str(path)).make(DRY, seed=0)


def test_a_cut_beyond_the_file_and_a_shrink_beyond_its_blocks(mooncake, azure):
    with pytest.raises(
        ConfigError, match=r"workload\.start=4 and workload\.limit=3 reach beyond .*, which has 6 requests"
    ):
        Trace(path=mooncake, start=4, limit=3).make(DRY, seed=0)
    with pytest.raises(ConfigError, match=r"workload\.shrink=200.* 128 is the most.*workload\.max_prompt_tokens"):
        Trace(path=mooncake, limit=6, shrink=200).make(DRY, seed=0)
    tiny = Trace(path=azure, limit=4, shrink=200).make(DRY, seed=0)  # no blocks, no bound; nothing shrinks away
    assert [(len(item.prompt), item.output_tokens) for item in tiny.measured] == [(1, 1)] * 4


def test_the_same_cut_of_a_longer_file_is_the_same(tmp_path, mooncake):
    path = tmp_path / "longer.jsonl"
    path.write_text(mooncake_lines([*MOONCAKE, (9500, 100, 1, [99])]))
    load = Trace(path=mooncake, limit=6)
    assert dataclasses.replace(load, path=str(path)).make(DRY, seed=0).measured == load.make(DRY, seed=0).measured
