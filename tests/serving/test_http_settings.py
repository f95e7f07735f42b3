"""One table makes the flags, the variables and --help."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys

import pytest
from http_server import DRY, ROOT, refusal

from mini_infer.cli.serve import main, parse
from mini_infer.core.config import LoadFormat, When
from mini_infer.core.errors import ConfigError
from mini_infer.serving.api.app import create_app
from mini_infer.serving.settings import ServerSettings, from_environment, table


def test_nothing_given_is_the_shipped_model() -> None:
    assert parse([], {}) == ServerSettings()
    assert parse([], {}).models[0].model == "tiny-target"


NOT_EVERY_VALUE = {  # will do, and this one does
    "model.dry.vocab_size": "300",
    "cache.num_host_blocks": "0",
    "scheduler.max_num_batched_tokens": "256",
    "graphs.max_prefill_tokens": "128",
    "model.quantization_group": "64",
    "root_path": "/text",
    "gpus": "0,1",
    "chat_template": "pyproject.toml",
    "ssl_certfile": "pyproject.toml",
}


def test_every_setting_is_a_flag_and_a_variable() -> None:
    samples = {bool: "true", int: "7", float: "0.5", str: "text", dict: '{"a": 1}'}
    alone = {
        "model.hf_config",
        "cache.layout",
        "cache.host_memory_gib",
        "cache.disk_prefix_path",
        "cache.disk_prefix_gib",
        "speculation.acceptance",
        "speculation.ngram_min",
        "parallel.prefill",
        "parallel.decode",
        "parallel.prefill_tensor",
        "parallel.redundant_experts",
        "lora.adapters",
        "lora.dummy",
    }
    alone |= {
        "ssl_keyfile",
        "api_keys",
        "isolate_keys",
        "key_everywhere",
        "speculation.draft.path",
        "speculation.draft.hf_config",
    }  # impossible without another setting
    for row in table():
        if row.key in alone:
            continue
        (kind,) = row.types
        text = row.choices[0] if row.choices else samples[kind]
        text = NOT_EVERY_VALUE.get(row.key, text)
        for flag in row.flags:
            by_flag = parse([flag, text], {})
            assert by_flag == parse([f"{flag}={text}"], {})
            for variable in row.variables:
                assert by_flag == from_environment({variable: text, "UNRELATED": "x"})


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--cache.block_size", "32"], "cache.block_size", 32),
        (["--cache.prefix_caching", "false"], "cache.prefix_caching", False),
        (["--cache.memory_gib", "1"], "cache.memory_gib", 1.0),
        (["--cache.num_blocks", "none"], "cache.num_blocks", None),
        (["--use-cuda-graph"], "graphs.capture", When.always),
        (["--use-cuda-graph", "false"], "graphs.capture", When.auto),
        (["--model", "some/folder"], "model.path", "some/folder"),
        (["--dry-run"], "model.load_format", LoadFormat.dry),
        (["--dry-run"], "model.path", "dry"),
        (["--dry-run", "--model", "name"], "model.path", "name"),
        (["--model.dry.step_ms", "2.5"], "model.dry.step_ms", 2.5),
    ],
)
def test_flags_of_the_engine(flags: list[str], key: str, value: object) -> None:
    node: object = parse(flags, {}).models[0].engine
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


def test_a_flag_wins_over_its_variable() -> None:
    environ = {"MINI_INFER_PORT": "1", "MINI_INFER_HOST": "0.0.0.0"}
    settings = parse(["--port", "2"], environ)
    assert (settings.port, settings.host) == (2, "0.0.0.0")


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (["--cache.blok_size", "3"], {}, "did you mean --cache.block_size?"),
        (["--cache.block_size", "x"], {}, "--cache.block_size must be an integer, got 'x'"),
        (["--cache.block_size", "0"], {}, "cache.block_size must be at least 1"),
        (["--scheduler.policy", "fair"], {}, "--scheduler.policy must be one of fcfs, shortest, priority"),
        (["--dry-run", "perhaps"], {}, "--dry-run must be true or false"),
        (["--port", "99999"], {}, "port must be from 0"),
        (["--log-level", "loud"], {}, "--log-level must be one of"),
        (["--max-queued", "0"], {}, "max_queued must be above 0"),
        (["--api-processes", "0"], {}, "api_processes must be above 0"),
        (["--request-timeout", "-1"], {}, "request_timeout must be above 0"),
        (["--shutdown-timeout", "-1"], {}, "shutdown_timeout must be 0 seconds or more"),
        (["--shutdown-timeout", "nan"], {}, "--shutdown-timeout must be a number"),
        (["--cache.memory_gib", "inf"], {}, "--cache.memory_gib must be a number"),
        (["--model.hf_config", "[]"], {}, "--model.hf_config must be a JSON object"),
        (["--model.dtype", "fp16"], {}, "--model.dtype must be one of auto, float32, bfloat16, float16"),
        (["--api-key", ""], {}, "api_key must be"),
        (["--served-model-name", ""], {}, "served_model_name is empty"),
        (["--gpus", "cuda:0"], {}, "gpus must be numbers of GPUs divided by commas"),
        (["--use-cuda-graph", "--graphs.capture", "never"], {}, "use_cuda_graph is short for graphs.capture=always"),
        (["--dry-run"], {"MINI_INFER_MODEL__LOAD_FORMAT": "dummy"}, "dry_run is short for"),
        (["tiny-target", "stray"], {}, "unknown argument 'stray'"),
        ([], {"MINI_INFER_PROT": "1"}, "did you mean MINI_INFER_PORT?"),
        ([], {"MINI_INFER_PORT": "x"}, "MINI_INFER_PORT must be an integer"),
    ],
)
def test_mistakes_are_named(flags: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flags, environ)
    assert said in str(error.value)


def test_an_app_alone_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_API_PROCESSES", "2")
    app = create_app()

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="api_processes above 1 needs mini-infer-serve"):
        asyncio.run(start())


def test_help_tells_all_and_loads_little() -> None:
    code = "import sys, mini_infer.cli.serve as s; sys.modules['torch'] = sys.modules['uvicorn'] = None; s.main()"
    shown = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for row in table():
        assert all(flag in shown.stdout for flag in row.flags)
        assert row.variables[0] in shown.stdout
        assert row.help, f"{row.key} needs a comment behind its field"
    assert len(re.findall(r"\bdefault:\s", shown.stdout, re.IGNORECASE)) == len(table())
    assert "tokens a block" in shown.stdout
    assert "auto (cuda where there is one)" in " ".join(shown.stdout.split())


def test_an_address_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([*DRY, "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert main([*DRY, "--host", "no such host"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_an_engine_that_cannot_start_is_a_message() -> None:
    code, said = refusal("--port", "0", "--model", "/nowhere")
    assert code == 2
    assert "mini-infer-serve: error:" in said
    assert "/nowhere" in said
    assert "Traceback" not in said
