"""vLLM's server, its load client and its kernels as peers, with a stand-in for vLLM in the processes that hold them."""

import importlib.util
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small_runs import served_by

from experiments.lab.kernels import apart
from experiments.lab.kernels import case as kernel_timer
from experiments.lab.kernels.apart import Apart
from experiments.lab.kernels.attention import DecodeAttention, FlashDecode, PrefillAttention
from experiments.lab.kernels.case import VariantAbsent
from experiments.lab.load import bench
from experiments.lab.load.vllm_server import flags, write_tokenizer
from experiments.lab.measure.kinds import Kind, PeerError, PeerSettings, VLLMSettings
from experiments.lab.measure.subjects import EngineSubject
from experiments.lab.peers.pool import Peers
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("peers_are_forked")

STAND_IN = str(Path(__file__).parent / "stand_in")
SETTINGS = PeerSettings(vllm=VLLMSettings(pythonpath=STAND_IN, api_processes=2, timeout_s=90))
DRY = EngineConfig.from_dict(
    {"model": {"path": "dry", "load_format": "dry", "device": "cpu"}, "cache": {"num_blocks": 64}}
)
DUMMY = EngineConfig.from_dict({"model": {"load_format": "dummy", "hf_config": {"vocab_size": 40}, "device": "cpu"}})
ITEMS = [Item(tuple(range(20 + i, 60 + i)), 6) for i in range(3)]

# --- its server --------------------------------------------------------------------------------------------------


def test_arguments_become_flags():
    given = {
        "enable_x": True,
        "chunked": False,
        "disable_log_stats": False,
        "length": None,
        "spec": {"k": [0.5]},
        "n": 3,
    }
    assert flags(given) == ["--enable-x", "--no-chunked", '--spec={"k": [0.5]}', "--n=3"]


def test_made_up_words_are_a_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "words", 30))
    assert (tokenizer.decode([1, 29]), tokenizer("w4 w17").input_ids, len(tokenizer)) == ("w1 w29", [4, 17], 30)


def test_its_server_is_asked_by_our_client():
    served = served_by(Kind.vllm_served, DUMMY, SETTINGS)
    try:
        found = served.serve(ITEMS, 2)
        expected = EngineSubject(DRY).serve(ITEMS, 2).requests
        assert [r.token_ids for r in found.requests] == [r.token_ids for r in expected]
        assert found.host.tells_cached
        assert found.host.engine_s >= 0
        assert {"server": "vllm serve", "vllm": "made up", "api_server_count": 2}.items() <= served.about.items()
        assert not {"model", "tokenizer"} & set(served.about)
    finally:
        served.close()
    assert not served.alive


def test_a_server_that_does_not_start_is_an_error_with_its_log():
    settings = PeerSettings(vllm=VLLMSettings(pythonpath=STAND_IN, args={"seed": 13}))
    with pytest.raises(PeerError, match=r"vllm serve ended with code 1(?s:.*)does not like 13"):
        served_by(Kind.vllm_served, DUMMY, settings)


# --- its load client ---------------------------------------------------------------------------------------------


def test_its_client_and_ours_take_turns_at_one_server():
    with closing(Peers(SETTINGS)) as peers:
        ours, theirs = peers.open(Kind.served, DRY), peers.open(Kind.served_bench, DRY)
        assert theirs._server is ours
        assert theirs.about["client"] == "vllm bench serve made up"
        start = time.perf_counter()
        found = theirs.serve(ITEMS, 2)
        # By our clock, and not by what it says of its own.
        assert found.requests[-1].arrival - found.start < found.outside_s < time.perf_counter() - start
        for request in found.requests:
            assert (request.prompt_tokens, request.error, request.tells_tokens) == (40, "", False)
            after = [time - request.arrival for time in request.token_times]
            assert after == pytest.approx([0.01, 0.01, 0.03, 0.03, 0.05, 0.05])  # two tokens an event
        assert found.start == found.requests[0].arrival
        assert found.end == pytest.approx(found.requests[-1].token_times[-1])
        assert sum(r.cached_tokens for r in ours.serve(ITEMS[:1], 1).requests) == 32  # what the other one has sent
        theirs.forget()
        assert sum(r.cached_tokens for r in ours.serve(ITEMS[:1], 1).requests) == 0
        with pytest.raises(ConfigError, match="asks for one output length"):
            theirs.serve([*ITEMS, Item((1,), 9)], 2)


def test_a_request_that_failed_there_is_told():
    row = {"start_times": [1.0], "ttfts": [0.0], "itls": [[]], "output_lens": [0], "errors": ["no"]}
    (trace,) = bench.read(row, [[1] * 4], 5).requests
    assert (trace.error, trace.token_times) == ("no", ())


# --- its kernels -------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(apart, "NEEDS", "cpu")
    monkeypatch.setattr(kernel_timer, "SAMPLES", 1)
    monkeypatch.setattr(kernel_timer, "MAX_COPIES", 2)
    found = Apart(SETTINGS.vllm)
    yield found
    found.close()


def test_a_kernel_is_timed_where_it_lives(on_a_cpu):
    shape = {"heads": "4/2", "head_dim": 16, "batch": 1, "length": 20}
    timed, error = on_a_cpu.prepare(FlashDecode(shape, torch.float32, torch.device("cpu")), "fa3", seed=0)
    assert error < 1e-5
    assert timed.sample().us > 0
    assert not timed.captured


@pytest.mark.parametrize(("case", "more"), [(DecodeAttention, {}), (PrefillAttention, {"queries": 20})])
def test_it_is_asked_what_our_kernels_are(monkeypatch, case, more):
    monkeypatch.setattr(kernel_timer, "SAMPLES", 1)
    monkeypatch.setattr(kernel_timer, "MAX_COPIES", 2)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", stand_in())
    shape = {"heads": "4/2", "head_dim": 16, "batch": 3, "length": 50, **more}
    peer = apart.KernelPeer()
    assert peer.prepare(partial(case, shape, torch.float32, torch.device("cpu")), "fa3", 0)[1] < 1e-5
    assert peer.sample().us > 0


def stand_in():
    spec = importlib.util.spec_from_file_location("fake", Path(STAND_IN, "vllm", "vllm_flash_attn.py"))
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    return fake


def test_a_plan_that_is_used_up_is_no_fast_kernel(monkeypatch):
    """As of a kernel whose scheduler's counter nobody sets back: it writes nothing from the second call on."""
    fake = stand_in()
    attend, written = fake.flash_attn_varlen_func, []

    def once(*, out, **plan):
        if out.data_ptr() not in written:
            written.append(attend(out=out, **plan).data_ptr())
        return out

    fake.flash_attn_varlen_func = once
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", fake)
    shape = {"heads": "4/2", "head_dim": 16, "batch": 1, "length": 20}
    assert (
        apart.KernelPeer().prepare(partial(FlashDecode, shape, torch.float32, torch.device("cpu")), "fa3", 0)[1] > 0.5
    )


def test_without_vllm_it_is_absent(monkeypatch, tmp_path):
    case = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(VariantAbsent, match="it runs on cuda, not cpu"):
        Apart(SETTINGS.vllm).prepare(SimpleNamespace(device=torch.device("cpu")), "fa3", 0)
    nowhere = Apart(VLLMSettings(pythonpath=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(VariantAbsent, match=r"vLLM cannot be imported here"):
            nowhere.prepare(case, "fa3", 0)
