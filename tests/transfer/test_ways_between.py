"""Two engines with links as in earnest: whatever the way of the KV, requests go on as they would in one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cable import Cable
from engine_pair import PREFILL, Linked, Pair
from model_shapes import SMALL

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import replace
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import StepPlan
from mini_infer.core.request import RequestOutput
from mini_infer.runtime.scheduler.prefix_loads import LoadCosts
from mini_infer.transfer.protocol import Ask, Blocks, End

WAYS = {"memory": ("memory", ""), "stream": ("stream", ""), "tcp": ("stream", "tcp://127.0.0.1")}
MakeLinked = Callable[..., Linked]


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[MakeLinked]:
    made: list[Linked] = []

    def make(config: EngineConfig, way: str) -> Linked:
        connector, where = WAYS[way]
        config = replace(config, parallel={"connector": connector, "hand_over": "always"})
        made.append(Linked(config, where or str(tmp_path / "prompts")))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- sampling goes on ---------------------------------------------------------------------------------------------

EXACT = EngineConfig.from_dict(
    {
        "model": {
            "path": "made up",
            "load_format": "dummy",
            "hf_config": SMALL | {"vocab_size": 2048, "num_hidden_layers": 2},
            "tokenizer": "tiny-draft",
            "device": "cpu",
            "threads": 1,
            "max_model_len": 64,
        },
        "cache": {"prefix_caching": False, "num_blocks": 24},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 6},
        "numerics": "batch_invariant",
    }
)
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two": {"temperature": 1.0, "seed": 7, "n": 2},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "grammar": {"temperature": 1.0, "seed": 5, "grammar": ("regex", "[a-z]{3,8}( [a-z]+)*")},
}
TEXT = "def fibonacci(n):\n    if n == 1:\n        return 1\n"


def requests() -> list[tuple[str, str, SamplingParams]]:
    return [
        (name, f"# {name}\n{TEXT}", SamplingParams(max_tokens=4, logprobs=2, **case)) for name, case in SAMPLED.items()
    ]


def told(output: RequestOutput) -> list[Any]:
    return [(completion.text, completion.token_ids, completion.logprobs) for completion in output.outputs]


@pytest.fixture(scope="module")
def in_one_engine() -> dict[str, list[Any]]:
    engine, (names, prompts, params) = LLMEngine(EXACT), zip(*requests(), strict=True)
    outputs = engine.generate(list(prompts), list(params))
    engine.close()
    return dict(zip(names, map(told, outputs), strict=True))


@pytest.mark.parametrize("way", ["memory", pytest.param("stream", marks=pytest.mark.soak), "tcp"])
def test_tokens_and_logprobs_are_to_the_bit_those_of_one_engine(
    in_one_engine: dict[str, list[Any]], linked: MakeLinked, way: str
) -> None:
    engines = linked(EXACT, way)
    for name, prompt, params in requests():
        engines.decode.add_request(prompt, params, request_id=name, stream=False, prefill_at=engines.address)
    assert {name: told(output) for name, output in engines.run().items()} == in_one_engine
    assert (engines.receiver.num_received, engines.receiver.num_failed) == (len(SAMPLED), 0)


# --- where the time goes, and what goes over ----------------------------------------------------------------------

CHUNK = 16
DRY = EngineConfig.from_dict(
    {
        "model": {"load_format": "dry", "dry": {"step_ms": 2, "max_model_len": 512}},
        "cache": {"block_size": 4, "num_blocks": 160},
        "scheduler": {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4},
    }
)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompt_of(chunks: int, seed: int = 0) -> list[int]:
    return [33 + (seed + 7 * n) % 90 for n in range(chunks * CHUNK + 1)]


def alone(prompt: list[int]) -> list[int]:
    return LLMEngine(DRY).generate([prompt], SHORT)[0].outputs[0].token_ids


@pytest.mark.parametrize("way", WAYS)
def test_spans_add_up_to_the_time_to_the_first_token(linked: MakeLinked, way: str) -> None:
    engines = linked(DRY, way)
    for number in range(2):
        prompt = prompt_of(3, seed=number)
        engines.decode.add_request(prompt, SHORT, request_id=f"r{number}", stream=False, prefill_at=engines.address)
    for output in engines.run().values():
        (completion,) = output.outputs
        assert completion.metrics is not None
        spans = completion.metrics.spans
        assert spans is not None
        names = ["queue", "prefill", "transfer_exposed", "decode_wait", "first_decode_step", "transfer"]
        assert list(spans) == names
        assert min(spans.values()) >= 0
        ttft = completion.metrics.token_times[0] - completion.metrics.arrival_time
        assert sum(spans[name] for name in names[:-1]) == pytest.approx(ttft, abs=1e-9)
        assert spans["prefill"] > 3 * 0.002, "as many steps"
        assert spans["first_decode_step"] > 0.002
        assert spans["transfer"] > 0


@pytest.mark.parametrize("way", ["memory", "stream"])
def test_a_chunk_is_on_its_way_before_the_next_one_is_computed(way: str) -> None:
    pair = Pair(replace(DRY, parallel={"connector": WAYS[way][0], "hand_over": "always"}))
    assert pair.prefill is not None
    runner, prompt = pair.prefill.executor.runner, prompt_of(3)
    blocks = [CHUNK // 4 * chunk for chunk in range(3)]
    gone: list[int] = []
    launch = runner.launch

    def observed(plan: StepPlan) -> Any:
        if way == "stream":
            messages = [message for message, _ in pair.wires[0].back if isinstance(message, Blocks)]
            gone.append(len({block for message in messages for block in message.blocks}))
        else:
            states = pair.decode.executor.holding.store.plane(0, "state")
            gone.append(int(states.ne(0).all(1).sum()))
        return launch(plan)

    runner.launch = observed  # type: ignore[method-assign]
    pair.decode.add_request(prompt, SHORT, request_id="r", prefill_at=PREFILL)
    pair.step()
    while len(gone) < 3:
        for wire in pair.wires:
            pair.deliver(wire, back=False)
        pair.step_prefill()
    assert gone == blocks
    pair.settle()


@pytest.mark.parametrize(
    ("said", "reason"), [(b"abc", "multiple of item size"), (b"", "empty"), (b"\xff" * 4, "has id")]
)
def test_bytes_that_are_no_prompt_are_answered_with_why(said: bytes, reason: str) -> None:
    pair = Pair(replace(DRY, parallel={"connector": "stream", "hand_over": "always"}))
    pair.receiver.start([Ask(7, PREFILL, [1], "", 0, 0, [3])], [])
    (wire,) = pair.wires
    hello, (ask, _) = wire.there.popleft(), wire.there.popleft()
    wire.there.extend([hello, (ask._replace(token_ids=said), bytearray())])  # type: ignore[call-arg]
    pair.deliver(wire, back=False)
    pair.deliver(wire, back=False)
    pair.step_prefill()
    ((end, _),) = wire.back
    assert isinstance(end, End)
    assert reason in end.reason
    pair.settle()
    pair.check_empty()


def test_what_a_tier_of_the_decoding_engine_has_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *known: True)
    cache = {"num_blocks": 24, "host_prefix_gib": 100 * 4 * DRY_TOKEN_BYTES / 2**30}
    pair = Pair(replace(DRY, cache=cache, parallel={"connector": "memory", "hand_over": "always"}))
    asked, start = list[tuple[int, int]](), pair.receiver.start

    def observed(asks: Sequence[Ask], cancelled: Sequence[int]) -> None:
        asked.extend((ask.first, len(ask.blocks)) for ask in asks)
        start(asks, cancelled)

    monkeypatch.setattr(pair.receiver, "start", observed)

    def complete(prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        pair.decode.add_request(prompt, SHORT, request_id="r", prefill_at=PREFILL)
        while pair.decode.has_unfinished_requests():
            tokens += [token for output in pair.step() for each in output.outputs for token in each.token_ids_delta]
            pair.settle()
        return tokens

    prompt, other = prompt_of(3), prompt_of(5, seed=1)
    for each in (prompt, other, [*prompt[:-1], 7, *prompt[:9]]):  # the second one takes the place of the first
        assert complete(each) == alone(each)
    records = pair.decode.records
    assert sum(record.prefix_hit_tokens for record in records) == 3 * CHUNK
    assert sum(record.host_hit_tokens for record in records) > CHUNK, "all but what nobody took the place of"
    assert asked == [(0, 12), (0, 20), (12, 3)], "blocks of the last prompt: from which on, and how many"
    pair.check_empty()


# --- a link that is cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before anything comes", "in the middle", "before all has come"])
def test_a_link_that_is_cut_costs_no_answer(linked: MakeLinked, when: str) -> None:
    engines = linked(DRY, "tcp")
    cable, prompts = Cable(engines.address), [prompt_of(20, seed) for seed in range(3)]

    def complete(prompt: list[int]) -> list[int]:
        cable.passed = 0
        engines.decode.add_request(prompt, SHORT, request_id="r", stream=False, prefill_at=cable.address)
        return engines.run()["r"].outputs[0].token_ids

    assert complete(prompts[0]) == alone(prompts[0])
    whole = cable.passed
    assert whole > len(prompts[0]) * DRY_TOKEN_BYTES
    cable.cut_after = {"before anything comes": 0, "in the middle": whole // 2, "before all has come": whole - 1}[when]
    assert complete(prompts[1]) == alone(prompts[1])
    assert (engines.receiver.num_received, engines.receiver.num_failed) == (1, 1)
    cable.cut_after = None
    assert complete(prompts[2]) == alone(prompts[2])
    assert (engines.receiver.num_received, engines.receiver.num_failed) == (2, 1)
    for engine in (engines.prefill, engines.decode):
        while engine.has_unfinished_requests():
            engines.sender.turn()
            engine.step()
        assert engine.scheduler.usage().used_blocks == 0
    cable.close()
