"""The engine's API on the dry model: every way to ask, every way to be refused, and what is observed."""

from __future__ import annotations

from array import array

import pytest
from compiled import replaces_methods
from integrity import check_scheduler

from mini_infer import LLM, ConfigError, EngineConfig, LLMEngine, RequestError, SamplingParams
from mini_infer.core.config import When
from mini_infer.core.request import FinishReason, RequestOutput
from mini_infer.llm import _config

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def dry(max_model_len: int = 64, **sections: dict) -> LLMEngine:
    model = {"load_format": "dry", "dry": {"max_model_len": max_model_len}, **sections.pop("model", {})}
    return LLMEngine(EngineConfig.from_dict({"model": model, **sections}))


@pytest.fixture
def engine() -> LLMEngine:
    return dry()


def assert_idle(engine: LLMEngine) -> None:
    check_scheduler(engine.scheduler)
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.usage().used_blocks == 0
    assert not engine._outputs.inboxes
    assert not engine._outputs.unfinished()


def test_short_import() -> None:
    from mini_infer.config import EngineConfig as Config

    assert Config is EngineConfig


def test_prompt_as_text_as_ids_and_as_chat(engine: LLMEngine) -> None:
    text, ids = engine.generate(["hello", list(b"hello")], GREEDY)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert (text.prompt, ids.prompt) == ("hello", None)
    assert text.prompt_token_ids == list(b"hello")
    chat = [{"role": "user", "content": "hello"}]
    (answer,) = engine.generate(chat, GREEDY)
    assert answer.prompt_token_ids == engine.tokenizer.apply_chat_template(chat)
    assert [len(out.outputs[0].token_ids) for out in engine.generate([chat, chat], GREEDY)] == [8, 8]
    assert len(engine.generate(list(b"one"), GREEDY)) == 1
    (packed,) = engine.generate([array("I", b"h\0\0\0i\0\0\0")], GREEDY)
    assert packed.prompt_token_ids == list(b"hi")
    assert_idle(engine)


def test_parameters_for_each_prompt(engine: LLMEngine) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = engine.generate(["a", "b"], params)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [1, 5]
    with pytest.raises(RequestError, match="2 prompts but 1"):
        engine.generate(["a", "b"], params[:1])
    assert engine.generate([], GREEDY) == []


def test_stream_yields_deltas_that_add_up(engine: LLMEngine) -> None:
    whole = engine.generate("hello", GREEDY)[0].outputs[0]
    steps = [output.outputs[0] for output in engine.stream("hello", GREEDY)]
    assert len(steps) == 8
    assert [token for step in steps for token in step.token_ids_delta] == whole.token_ids
    assert "".join(step.text_delta for step in steps) == steps[-1].text == whole.text
    assert [step.finished for step in steps] == [False] * 7 + [True]
    assert steps[3].token_ids == whole.token_ids[:4], "an output does not change after it was given"


def test_streams_read_in_turns_and_left_early(engine: LLMEngine) -> None:
    expected = {prompt: engine.generate(prompt, GREEDY)[0].outputs[0].text for prompt in ("a", "b")}
    a, b = engine.stream("a", GREEDY), engine.stream("b", GREEDY)
    texts = {"a": "", "b": ""}
    for _ in range(8):
        texts["a"] += next(a).outputs[0].text_delta
        texts["b"] += next(b).outputs[0].text_delta
    assert texts == expected
    assert list(a) == list(b) == []
    left = engine.stream("c", GREEDY)
    next(left)
    left.close()
    assert_idle(engine)
    engine.stream("never read", GREEDY)
    with pytest.raises(RequestError, match="empty"):
        engine.stream("", GREEDY)  # found at once, not at the first output
    assert_idle(engine)


def test_generate_beside_running_requests_keeps_their_outputs(engine: LLMEngine) -> None:
    request_id = engine.add_request("mine", GREEDY)
    engine.generate("other", SamplingParams(max_tokens=2))
    tokens = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == request_id
            tokens += output.outputs[0].token_ids_delta
    assert tokens == engine.generate("mine", GREEDY)[0].outputs[0].token_ids


def test_generate_tells_of_each_request_as_it_ends(engine: LLMEngine) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 2, 9)]
    told: list[tuple[str, int]] = []
    engine.generate(["a", "b", "c"], params, on_output=lambda out: told.append((out.prompt or "", len(engine.records))))
    assert told == [("b", 2), ("c", 9), ("a", 30)]


def test_the_id_of_a_request_that_generate_has_finished_is_free_again(engine: LLMEngine) -> None:
    def reuse(output: RequestOutput) -> None:
        if output.prompt == "short":
            engine.add_request("again", GREEDY, request_id=output.request_id)

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 4)]
    short, _ = engine.generate(["short", "long"], params, on_output=reuse)
    assert short.prompt == "short"
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].request_id == short.request_id
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert_idle(engine)


def test_outputs_of_requests_that_ended_meanwhile_are_still_handed_over(engine: LLMEngine) -> None:
    ended = engine.add_request("short", SamplingParams(max_tokens=1))
    aborted = engine.add_request("aborted", GREEDY)
    engine.generate("other", SamplingParams(max_tokens=3, ignore_eos=True))
    engine.abort(aborted)
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.request_id for output in engine.step() if output.finished]
    assert seen == [ended, aborted]


def test_n_completions_differ_and_reproduce(engine: LLMEngine) -> None:
    params = SamplingParams(n=4, temperature=2.0, seed=7, max_tokens=12, ignore_eos=True)
    (first,) = engine.generate("hello", params)
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    texts = [c.text for c in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [c.text for c in dry().generate("hello", params)[0].outputs]
    assert all(c.metrics is not None and len(c.metrics.token_times) == 12 for c in first.outputs)


def test_unseeded_requests_differ_in_every_engine_and_a_stated_seed_reproduces() -> None:
    params = SamplingParams(temperature=3.0, max_tokens=12, ignore_eos=True)

    def tokens(**settings: object) -> list[tuple[int, ...]]:
        return [tuple(out.outputs[0].token_ids) for out in dry(**settings).generate(["same"] * 3, params)]

    assert len({*tokens(), *tokens(), *tokens()}) == 9, "every engine draws from entropy of its own"
    assert tokens(seed=7) == tokens(seed=7) != tokens(seed=8)
    seeded = SamplingParams(temperature=3.0, max_tokens=12, ignore_eos=True, seed=3)
    one, other = (dry().generate("same", seeded)[0].outputs[0].token_ids for _ in range(2))
    assert one == other


def test_a_mapping_stands_for_sampling_parameters(engine: LLMEngine) -> None:
    assert len(engine.generate(["a"], {"max_tokens": 2, "ignore_eos": True})[0].outputs[0].token_ids) == 2
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'max_token'; did you mean 'max_tokens'"):
        engine.generate(["a"], {"max_token": 2})


@pytest.mark.parametrize("prompts", [5, None, 2.5, {"a": 1}, {1, 2}, object()])
def test_what_is_no_prompt_is_refused(engine: LLMEngine, prompts: object) -> None:
    with pytest.raises(RequestError, match="one prompt or a list of them"):
        engine.generate(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [5, "greedy", {1, 2}])
def test_what_are_no_sampling_parameters_is_refused(engine: LLMEngine, params: object) -> None:
    with pytest.raises(RequestError, match="sampling parameters are"):
        engine.generate(["a"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling parameters are"):
        engine.add_request("a", params)  # type: ignore[arg-type]


def test_top_k_of_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_llm_takes_the_names_of_others() -> None:
    llm = LLM("dry", load_format="dry", enforce_eager=True, max_num_seqs=4, tensor_parallel_size=1, seed=1)
    config = llm.engine.config
    assert (config.graphs.capture, config.scheduler.max_num_seqs, config.seed) == (When.never, 4, 1)
    output = llm.generate(["Hello"], sampling_params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 3
    assert llm.chat([{"role": "user", "content": "Hello"}], {"max_tokens": 1})[0].finished
    others = {"kv_cache_dtype": "fp8", "quantization": "fp8", "max_loras": 2, "parallel": {"pipeline": 2}}
    config = _config("a", {"tensor_parallel_size": 2, **others})
    assert (config.parallel.tensor, config.parallel.pipeline, config.lora.max_adapters) == (2, 2, 2)
    assert (config.cache.dtype, config.model.quantization) == ("fp8", "fp8")
    meant = {"dtype": "half", "quantization": "awq", "enable_prefix_caching": False, "async_scheduling": False}
    config = _config("a", meant | {"enforce_eager": 0})
    assert (config.model.dtype, config.model.quantization) == ("float16", "none")
    assert (config.cache.prefix_caching, config.scheduler.overlap, config.graphs.capture) == (False, "never", "auto")
    with pytest.raises(ConfigError, match=r"no option 'trust_remote_code'=True. Known: max_model_len, .*, cache, "):
        LLM("dry", load_format="dry", trust_remote_code=True)


def test_stop_string_ends_the_request_and_is_left_out(engine: LLMEngine) -> None:
    whole = engine.generate("hello", GREEDY)[0].outputs[0].text
    stop = whole[3:5]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=stop)
    (output,) = engine.generate("hello", params)
    completion = output.outputs[0]
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.stop, stop)
    assert len(completion.token_ids) < 8
    streamed = "".join(out.outputs[0].text_delta for out in engine.stream("hello", params))
    assert streamed == completion.text
    assert_idle(engine)


def test_stop_string_in_the_very_last_token_counts_as_stop(engine: LLMEngine) -> None:
    whole = engine.generate("hello", GREEDY)[0].outputs[0].text
    assert whole.index(whole[-2:]) == len(whole) - 2
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[whole[-2:]])
    completion = engine.generate("hello", params)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.stop, whole[-2:])
    assert completion.text == whole[:-2]


def test_stop_token_is_a_token_but_no_text(engine: LLMEngine) -> None:
    whole = engine.generate("hello", GREEDY)[0].outputs[0]
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    completion = engine.generate("hello", params)[0].outputs[0]
    assert completion.token_ids == whole.token_ids[: first + 1]
    assert completion.text == whole.text[:first]
    assert completion.stop_reason == stop


def test_end_of_sequence_stops_unless_ignored_or_too_early() -> None:
    engine = dry(max_model_len=2048)
    free = engine.generate("q", SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
    eos = engine.tokenizer.eos_token_ids[0]
    assert (free.finish_reason, free.stop_reason, free.token_ids[-1]) == (FinishReason.stop, None, eos)
    n = len(free.token_ids)
    later = engine.generate("q", SamplingParams(temperature=0, max_tokens=n + 5, min_tokens=n))[0].outputs[0]
    assert len(later.token_ids) > n
    assert later.token_ids[: n - 1] == free.token_ids[:-1]
    assert later.token_ids[n - 1] != eos
    ignored = engine.generate("q", SamplingParams(temperature=0, max_tokens=n + 5, ignore_eos=True))[0].outputs[0]
    assert ignored.token_ids[:n] == free.token_ids
    assert ignored.finish_reason is FinishReason.length


def test_logprobs_come_with_their_tokens(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    steps = [out.outputs[0] for out in engine.stream("hello", params)]
    final = steps[-1].logprobs
    assert final is not None
    assert [entry.token_id for entry in final] == steps[-1].token_ids
    assert all(entry.rank == 1 and entry.top[0] == (entry.token_id, entry.logprob) for entry in final)
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in final)
    assert [entry for step in steps for entry in step.logprobs_delta or ()] == final
    assert engine.generate("hello", GREEDY)[0].outputs[0].logprobs is None


def test_abort_reports_once_and_frees_everything(engine: LLMEngine) -> None:
    request_id = engine.add_request("hello", SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    keeper = engine.add_request("other", GREEDY)
    engine.step()
    engine.step()
    engine.abort(request_id)
    engine.abort(request_id)
    engine.abort("never heard of")
    ends = [o for o in engine.step() if o.request_id == request_id and o.finished]
    assert len(ends) == 1
    assert {c.finish_reason for c in ends[0].outputs} == {FinishReason.abort}
    while engine.has_unfinished_requests():
        engine.step()
    assert_idle(engine)
    assert keeper != request_id


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([5, 512], "id 512: ids from 0 to 511 are allowed"),
        ([5, -1], "id -1"),
        (array("I", [5, 512]), "prompt token 1 has id 512"),
        ([5, 1.5], "token 1 is 1.5"),
        ([True, 4], "token ids are integers"),
        (list(range(1, 65)), r"has 64 tokens; at most 63 are allowed.*the model's limit is 64"),
        (7, "a prompt is a string"),
        (b"bytes", "a prompt is a string"),
        ([{"role": "user"}], "content"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompt_is_refused_and_costs_nobody_anything(engine: LLMEngine, prompt, message: str) -> None:
    bystander = engine.add_request("bystander", GREEDY)
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, GREEDY)
    with pytest.raises(RequestError, match=message):
        engine.generate(["good", prompt], GREEDY)
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [t for o in engine.step() if o.request_id == bystander for t in o.outputs[0].token_ids_delta]
    assert len(tokens) == 7
    assert_idle(engine)


def test_prompt_over_the_caches_limit_says_so() -> None:
    engine = dry(cache={"num_blocks": 2, "block_size": 16})
    assert engine.max_model_len == 32
    with pytest.raises(
        RequestError, match=r"at most 31 .*KV pool holds 32 tokens \(2 blocks of 16\): raise cache.num_"
    ):
        engine.generate([40] * 40)
    assert len(engine.generate([40] * 31, GREEDY)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be from 0"),
        ({"temperature": float("nan")}, "finite"),
        ({"temperature": "hot"}, "finite number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"top_k": 1.5}, "integer"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must be from 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be from 0 to max_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": -5}, "seed"),
        ({"stop": [""]}, "non-empty"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be an integer"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list"),
        ({"stop": 5}, "stop must be a list"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"temperature": 10**400}, "temperature must be from 0"),
    ],
)
def test_impossible_sampling_values_name_themselves(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert caught.value.param in values


def test_stop_token_out_of_range(engine: LLMEngine) -> None:
    with pytest.raises(RequestError, match="stop token id 600 is out of range: 0 to 511"):
        engine.generate("a", SamplingParams(stop_token_ids=[600]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_salt": "\ud800"}, "surrogate"),
        ({"cache_salt": None}, "must be a string"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"arrival_time": "now"}, "arrival_time must be seconds"),
        ({"request_id": 5}, "request_id must be a string"),
    ],
)
def test_bad_arguments_of_add_request(engine: LLMEngine, arguments: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", GREEDY, **arguments)
    assert_idle(engine)


def test_names_never_collide(engine: LLMEngine) -> None:
    """Neither with the n completions of another request, nor with the names that the engine gives."""
    engine.add_request("a", SamplingParams(n=2, max_tokens=3, ignore_eos=True), request_id="a")
    engine.add_request("b", GREEDY, request_id="a#0")
    engine.add_request("c", GREEDY, request_id="request-3")
    engine.add_request("d", GREEDY, request_id="request-4")
    assert len(engine.generate(["x", "y"], GREEDY)) == 2
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert sorted(ended) == ["a", "a#0", "request-3", "request-4"]
    assert_idle(engine)


def test_request_id_in_use(engine: LLMEngine) -> None:
    engine.add_request("a", GREEDY, request_id="x")
    with pytest.raises(RequestError, match="'x' is running already"):
        engine.add_request("b", GREEDY, request_id="x")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"cache": {"num_blocks": 3}, "model": {"max_model_len": 64}},
            "KV pool holds 48 tokens.*too few for one request",
        ),
        ({"model": {"max_model_len": 65}}, "beyond the model's own limit of 64"),
        ({"cache": {"layout": "contiguous"}}, "Set cache.prefix_caching=false"),
        ({"scheduler": {"max_num_seqs": 9, "max_num_batched_tokens": 8}}, "max_num_batched_tokens=8 is less than"),
        (
            {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 32, "max_num_seqs": 8}},
            "less than the longest prompt",
        ),
        ({"cache": {"num_host_blocks": 3}}, "needs scheduler.preemption=swap"),
        ({"scheduler": {"preemption": "swap"}, "cache": {"num_host_blocks": 0}}, "needs host memory"),
        ({"cache": {"block_sise": 8}}, "unknown setting 'cache.block_sise'; did you mean 'block_size'"),
        ({"cash": {}}, "unknown setting 'cash'; did you mean 'cache'"),
        ({"cache": {"block_size": "many"}}, "cache.block_size must be int"),
        ({"scheduler": {"policy": "lifo"}}, "scheduler.policy must be one of fcfs, .*; got 'lifo'"),
        ({"cache": 5}, "cache must be a mapping"),
    ],
)
def test_settings_that_cannot_work(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry(**sections)


def test_config_survives_a_round_trip_and_cannot_be_changed() -> None:
    config = EngineConfig.from_dict({"model": {"load_format": "dry"}, "cache": {"block_size": 8}})
    assert EngineConfig.from_dict(config.to_dict()) == config
    with pytest.raises(AttributeError):
        config.cache.block_size = 3  # type: ignore[misc]


def test_an_engine_keeps_as_many_records_as_it_is_told() -> None:
    config = EngineConfig.from_dict({"model": {"load_format": "dry"}})
    for kept in (0, 2):
        engine = LLMEngine(config, records_kept=kept)
        seen: list[int] = []
        engine.observers.append(lambda record, seen=seen: seen.append(record.step))
        engine.generate([[40, 41]], SamplingParams(temperature=0, max_tokens=4))
        assert len(seen) >= 4
        assert [record.step for record in engine.records] == seen[len(seen) - kept :]


def test_records_tell_what_happened_in_each_step() -> None:
    engine = dry(
        cache={"num_blocks": 8, "block_size": 4, "watermark": 0.0},
        model={"max_model_len": 32},
        scheduler={"max_num_batched_tokens": 12, "max_num_seqs": 4},
    )
    seen = []
    engine.observers.append(seen.append)
    engine.generate([list(range(40, 60)), list(range(40, 56))], SamplingParams(temperature=0, max_tokens=8))
    assert seen == list(engine.records)
    first = seen[0]
    assert (first.prefill_tokens, first.decode_tokens, first.sampled_tokens) == (12, 0, 0)
    assert (first.num_prefilling, first.num_waiting) == (1, 1)
    assert (first.kv.used_blocks, first.kv.used_slots, first.kv.reserved_slots) == (5, 12, 20)
    assert sum(r.sampled_tokens for r in seen) == 16
    assert sum(r.prefix_hit_tokens for r in seen) == 12, "all of the second prompt but its last block"
    preempted = [name for r in seen for name in r.preempted]
    assert preempted == ["request-1"]
    assert [name for r in seen for name in r.finished] == ["request-0", "request-1"]
    for r in seen:
        assert r.start_time <= r.end_time
        parts = r.schedule_s + r.execute_s + r.update_s
        assert parts == pytest.approx(r.end_time - r.start_time)


def test_request_timestamps_are_in_order_on_the_engines_clock() -> None:
    ticks = iter(range(10**6))
    model = {"load_format": "dry", "dry": {"max_model_len": 64}}
    engine = LLMEngine(EngineConfig.from_dict({"model": model}), clock=lambda: float(next(ticks)))
    metrics = engine.generate("hello", GREEDY)[0].outputs[0].metrics
    assert metrics is not None
    assert metrics.first_scheduled_time is not None
    times = (metrics.arrival_time, metrics.first_scheduled_time, *metrics.token_times)
    assert list(times) == sorted(times)
    assert len(metrics.token_times) == 8
    engine.add_request("late", GREEDY, request_id="late", arrival_time=-5.0)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    final = outputs[0].outputs[0].metrics
    assert final is not None
    assert final.arrival_time == -5.0


def test_failure_while_a_step_runs_ends_its_requests_and_leaves_a_usable_engine(engine: LLMEngine, monkeypatch) -> None:
    expected = engine.generate("next", GREEDY)[0].outputs[0].token_ids
    runner = engine.executor.runner
    execute = runner.launch

    def fail(plan):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "launch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(["a", "b"], GREEDY)
    monkeypatch.setattr(runner, "launch", execute)
    assert_idle(engine)
    assert engine.generate("next", GREEDY)[0].outputs[0].token_ids == expected


def test_request_swapped_out_in_a_failed_step_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> LLMEngine:
        return dry(
            max_model_len=32,
            cache={"num_blocks": 8, "block_size": 4, "watermark": 0.0, "prefix_caching": False},
            scheduler={"preemption": "swap"},
        )

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["0123456789abcd", "ABCDEFGHIJKLMN"]
    expected = [out.outputs[0].token_ids for out in make().generate(prompts, params)]
    engine = make()
    execute = engine.executor.runner.launch

    def fail_when_swapping(plan):
        if plan.transfers:
            raise RuntimeError("the copy failed")
        return execute(plan)

    monkeypatch.setattr(engine.executor, "launch", fail_when_swapping)
    first, second = (engine.add_request(prompt, params) for prompt in prompts)
    tokens: dict[str, list[int]] = {first: [], second: []}
    reasons = {}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except RuntimeError:
            failures += 1
            continue
        check_scheduler(engine.scheduler)
        for output in outputs:
            tokens[output.request_id] += output.outputs[0].token_ids_delta
            reasons[output.request_id] = output.outputs[0].finish_reason
    assert failures == 1
    assert reasons == {first: FinishReason.length, second: FinishReason.length}, "the step had only blocks to move"
    assert tokens[first] == expected[0]
    assert tokens[second] == expected[1]
    assert not any(record.failed for record in engine.records)


@replaces_methods
@pytest.mark.parametrize("method", ["schedule", "update"])
def test_error_in_the_bookkeeping_ends_everything_and_starts_anew(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    expected = engine.generate("next", GREEDY)[0].outputs[0].token_ids
    for prompt in ("a", "b"):
        engine.add_request(prompt, GREEDY)
    engine.step()
    monkeypatch.setattr(engine.scheduler, method, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.outputs[0].finish_reason for output in engine.step()]
    assert ended == [FinishReason.error] * 2
    assert_idle(engine)
    assert engine.generate("next", GREEDY)[0].outputs[0].token_ids == expected


def test_text_that_cannot_be_made_ends_its_own_request_only(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = engine.add_request("bad", GREEDY)
    good = engine.add_request("good", GREEDY)
    completion = engine._outputs._groups[bad].completions[0]
    monkeypatch.setattr(completion.detokenizer, "append", lambda tokens: 1 / 0)
    reasons = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            reasons[output.request_id] = output.outputs[0].finish_reason
    assert reasons == {bad: FinishReason.error, good: FinishReason.length}
    assert [r.failed for r in engine.records if r.failed] == [(bad,)]
    assert_idle(engine)


def test_observer_that_fails_costs_no_output(engine: LLMEngine) -> None:
    request_id = engine.add_request("a", SamplingParams(max_tokens=1))
    engine.observers.append(lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.observers.clear()
    assert engine.has_unfinished_requests()
    assert [output.request_id for output in engine.step()] == [request_id]


def test_records_tell_who_was_aborted(engine: LLMEngine) -> None:
    request_id = engine.add_request("a", SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort(request_id)
    engine.step()
    assert engine.records[-1].aborted == (request_id, request_id)
    assert engine.records[-1].finished == ()


def test_an_idle_engine_grows_nothing(engine: LLMEngine) -> None:
    for _ in range(50):
        engine.step()
    assert not engine.scheduler.planned
    assert not engine.records


def test_close_aborts_what_is_left(engine: LLMEngine) -> None:
    engine.add_request("a", GREEDY)
    engine.step()
    engine.close()
    engine.step()
    assert_idle(engine)


def test_dry_model_takes_the_time_it_is_told() -> None:
    engine = dry(model={"dry": {"max_model_len": 64, "step_ms": 20.0}})
    engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
    assert all(record.execute_s >= 0.02 for record in engine.records)


def test_swapping_out_needs_no_row_beside_it() -> None:
    """With overlap, the only request that could run may have to give way to one whose last token is on its way."""
    cache = {"block_size": 16, "num_blocks": 4, "watermark": 0.0}
    scheduler = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "preemption": "swap", "overlap": "always"}
    params = SamplingParams(temperature=0, max_tokens=None)
    expected = dry(max_model_len=48, cache=cache).generate([[33]], params)[0].outputs[0].token_ids
    engine = dry(max_model_len=48, cache=cache, scheduler=scheduler)
    tokens: dict[str, list[int]] = {}
    for step in range(200):
        if step in (0, 15):
            arrivals = ["short", "first", "second"] if step == 0 else ["late"]
            for name in arrivals:
                own = SamplingParams(temperature=0, max_tokens=1) if name == "short" else params
                engine.add_request([33], own, request_id=name)
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids_delta)
    assert sum("late" in record.preempted for record in engine.records) >= 1
    assert tokens == {"short": expected[:1]} | dict.fromkeys(("first", "second", "late"), expected)


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_decode_tokens_are_those_that_requests_got(overlap: str) -> None:
    """With overlap a row is computed for a request whose stop token is not read yet, alone or beside others."""
    engine = dry(scheduler={"overlap": overlap})
    plain = engine.generate("hello", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    engine.records.clear()
    stops = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(plain[-1],))
    outputs = engine.generate(["hello", "hello", "world"], [stops, stops, SamplingParams(temperature=0, max_tokens=9)])
    alone = engine.add_request("hello", stops)
    for step in range(8):
        if step == 3:
            engine.add_request("world", SamplingParams(temperature=0, max_tokens=2), request_id="next")
        outputs += [output for output in engine.step() if output.finished]
    assert {alone, "next"} < {output.request_id for output in outputs}
    got = [len(output.outputs[0].token_ids) for output in outputs]
    assert sum(r.sampled_tokens for r in engine.records) == sum(got)
    assert sum(r.decode_tokens for r in engine.records) == sum(got) - len(got), "the first ones come with the prompts"
    dropped = [(r.dropped_rows, r.decode_tokens) for r in engine.records if r.dropped_rows]
    assert dropped == ([(2, 1), (1, 0)] if overlap == "always" else [])
    assert all(r.decode_rows == r.decode_tokens + r.dropped_rows == r.verified_tokens for r in engine.records)


def test_a_step_that_is_not_read_yet_is_not_told_of_beside_an_abort() -> None:
    engine = dry(scheduler={"overlap": "always"})
    engine.abort(engine.add_request(list(range(40, 50)), SamplingParams(temperature=0, max_tokens=5)))
    engine.generate([list(range(50, 62))], SamplingParams(temperature=0, max_tokens=3))
    assert [(r.prefill_tokens, r.decode_tokens, r.aborted) for r in engine.records] == [
        (0, 0, ("request-0",)),
        (12, 0, ()),
        (0, 1, ()),
        (0, 1, ()),
    ]


def test_no_step_is_left_under_way_when_all_requests_have_ended() -> None:
    """With overlap the step behind the last one is launched before anybody knows that it is one too many."""
    engine = dry(scheduler={"overlap": "always"})
    stop = engine.generate("hello", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids[-1]
    engine.generate("hello", SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(stop,)))
    assert not engine.has_unfinished_requests()
    assert not engine.core._in_flight
    check_scheduler(engine.scheduler)
    aborted = engine.add_request("hello", SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.abort(aborted)
    assert engine.step()[0].outputs[0].finish_reason is FinishReason.abort
    assert not engine.core._in_flight
