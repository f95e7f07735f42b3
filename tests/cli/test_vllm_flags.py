"""A command line for vLLM's server, given to ours."""

from __future__ import annotations

import shlex

import pytest

from mini_infer.cli.serve import LORA, parse
from mini_infer.cli.vllm_flags import INSTEAD, NAMES
from mini_infer.core.config import CacheDType, Policy, When
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import Reasoning, Tools, table

OURS = {LORA, *(flag for row in table() for flag in row.flags)}

THEIRS = """serve tiny-target --max-model-len 512 --tensor-parallel-size=1 --gpu-memory-utilization 0.8 --dtype float
    --served-model-name mine --max-num-seqs 8 --max_num_batched_tokens 256 --no-enable-prefix-caching
    --enable-chunked-prefill --enforce-eager --kv-cache-dtype fp8_e4m3 --scheduling-policy priority --port 9000
    --host 0.0.0.0 --api-key k --enable-auto-tool-choice --tool-call-parser llama3_json --reasoning-parser qwen3
    --api-server-count 2 --disable-log-requests -tp 1 --seed 3 --allowed-origins *"""


def test_a_command_line_of_vllms() -> None:
    settings = parse(shlex.split(THEIRS), {})
    (model,) = settings.models
    engine = model.engine
    assert (model.model, model.model_name, engine.model.max_model_len) == ("tiny-target", "mine", 512)
    assert (settings.host, settings.port, settings.api_key, settings.api_processes) == ("0.0.0.0", 9000, "k", 2)
    assert (model.tool_format, model.reasoning_format) == (Tools.llama3, Reasoning.think)
    assert engine.cache.gpu_memory_utilization == 0.8
    assert (engine.cache.prefix_caching, engine.cache.dtype) == (False, CacheDType.fp8)
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (8, 256)
    assert (engine.scheduler.policy, engine.scheduler.chunked_prefill) == (Policy.priority, True)
    assert (engine.graphs.capture, engine.seed, settings.origins) == (When.never, 3, ["*"])


def test_what_has_no_counterpart() -> None:
    for name, instead in INSTEAD.items():
        with pytest.raises(ConfigError) as error:
            parse([f"--{name}", "1"], {})
        assert instead in str(error.value)
    with pytest.raises(ConfigError, match="unknown argument"):
        parse(["--nonsense", "2"], {})
    with pytest.raises(ConfigError, match="must be one of"):
        parse(["--tool-call-parser", "pythonic"], {})
    with pytest.raises(ConfigError, match="unknown argument 'tiny-draft'"):
        parse(["--enable-lora", "tiny-draft"], {})


def test_no_flag_of_ours_is_taken_for_one_of_vllms() -> None:
    assert not {f"--{name}" for name in (*NAMES, *INSTEAD)} & (OURS - {"--seed"})
    missing = {ours.name for ours in NAMES.values() if ours.name and ours.name not in OURS}
    assert missing <= {"--parallel.tensor", "--parallel.replicas", "--parallel.pipeline"}
