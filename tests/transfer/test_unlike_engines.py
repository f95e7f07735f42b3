"""Engines that compute the same for the same tokens hand prompts over, and no others do: what differs is named."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_pair import PREFILL, Pair
from model_shapes import SMALL

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.assets import shipped_path
from mini_infer.core.config import Numerics, replace
from mini_infer.runtime.executor import fingerprints

CONFIG = EngineConfig.from_dict(
    {
        "model": {"path": "tiny-draft", "dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 160},
        "cache": {"num_blocks": 24},
        "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        "parallel": {"connector": "memory", "hand_over": "always"},
    }
)
PROMPT = [7 + n * n % 90 for n in range(70)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def as_downloaded(folder: Path) -> Path:
    """The model's files as they are on another machine: elsewhere, and of another time."""
    model = shipped_path("tiny-draft")
    assert model is not None
    shutil.copytree(model, folder)
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))
    return folder


def tokens_of(pair: Pair) -> list[int]:
    pair.decode.add_request(PROMPT, PARAMS, request_id="r", prefill_at=PREFILL)
    tokens: list[int] = []
    while pair.decode.has_unfinished_requests():
        tokens += [token for output in pair.step() for each in output.outputs for token in each.token_ids_delta]
        pair.step_prefill()
        for wire in pair.wires:
            pair.deliver(wire, back=False)
            pair.deliver(wire, back=True)
    pair.settle()
    pair.check_empty()
    return tokens


def close(pair: Pair) -> None:
    pair.kill_prefill()
    pair.receiver.close()


def test_files_of_another_place_and_time_are_the_same_model(tmp_path: Path) -> None:
    pair = Pair(CONFIG, prompts=replace(CONFIG, model={"path": str(as_downloaded(tmp_path / "model"))}))
    assert tokens_of(pair) == LLMEngine(CONFIG).generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    assert (pair.receiver.num_received, pair.receiver.num_failed) == (1, 0)
    close(pair)


UNLIKE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "model": ({"model": {"path": "tiny-target"}}, {"the model", "its weights", "what a token keeps"}),
    "weights": ({"model": {"load_format": "dummy"}}, {"its weights"}),
    "dtype": ({"model": {"dtype": "bfloat16"}}, {"model.dtype", "what a token keeps"}),
    "quantization": ({"model": {"quantization": "w8a16"}}, {"model.quantization"}),
    "KV dtype": ({"cache": {"dtype": "fp8"}}, {"what a token keeps"}),
    "block size": ({"cache": {"block_size": 32}}, {"cache.block_size"}),
    "connector": ({"parallel": {"connector": "stream"}}, {"parallel.connector"}),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_differs_is_named(what: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, names = UNLIKE[what]
    refused(replace(CONFIG, **changes), names, caplog)


def test_other_numerics_are_named(caplog: pytest.LogCaptureFixture) -> None:
    refused(dataclasses.replace(CONFIG, numerics=Numerics.batch_invariant), {"numerics"}, caplog)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fingerprints, "_code", map(str, itertools.count()).__next__)
    refused(CONFIG, {"the version"}, caplog)


@pytest.mark.parametrize(
    ("changes", "name"), [({"seed": 1}, "its weights"), ({"hf_config": SMALL | {"rope_theta": 1e6}}, "the model")]
)
def test_other_random_weights_are_named(changes: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture) -> None:
    dummy = replace(CONFIG, model={"path": "made up", "load_format": "dummy", "hf_config": SMALL})
    refused(replace(dummy, model=changes), {name}, caplog, dummy)


def test_a_model_that_was_trained_further_is_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files have the same names, sizes and headers."""
    folder = as_downloaded(tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(8 + length + 40)
        changed = bytes(byte ^ 1 for byte in file.read(4))
        file.seek(-4, os.SEEK_CUR)
        file.write(changed)
    refused(replace(CONFIG, model={"path": str(folder)}), {"its weights"}, caplog)


def refused(
    other: EngineConfig, names: set[str], caplog: pytest.LogCaptureFixture, config: EngineConfig = CONFIG
) -> None:
    """By an engine for prompts that is `other`."""
    pair = Pair(config, prompts=other)
    assert len(tokens_of(pair)) == 4, "the prompt is computed where it decodes"
    assert (pair.receiver.num_received, pair.receiver.num_failed) == (0, 1)
    start = "prompts are computed here, since the engine for prompts is unlike this one: "
    (said,) = [each.message.removeprefix(start) for each in caplog.records if each.message.startswith(start)]
    assert {each.partition(" is ")[0] for each in said.split("; ")} == names
    close(pair)
