"""transformers beside the engine, in this process and in its own: the same tokens, arrivals on schedule, clear
refusals."""

from contextlib import closing

import pytest

from experiments.lab.measure.kinds import Kind, PeerSettings
from experiments.lab.measure.subjects import EngineSubject
from experiments.lab.peers import pool
from experiments.lab.peers.hf import HFGenerate
from experiments.lab.peers.hf_continuous import HFContinuous
from experiments.lab.peers.pool import Peers
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
PROMPTS = [Item(tuple(range(3, 3 + n)), output) for n, output in ((20, 9), (5, 12), (11, 4), (7, 6))]


@pytest.fixture
def config(checkpoint):
    return EngineConfig.from_dict(
        {"model": {"path": str(checkpoint), "device": "cpu"}, "cache": {"num_blocks": 64}, "scheduler": {}}
    )


@pytest.fixture
def peer(config):
    subject = HFContinuous(config)
    yield subject
    subject.close()


def test_it_generates_the_engines_tokens_whatever_the_checkpoint_says(config, peer):
    ours = EngineSubject(config).serve(PROMPTS, concurrency=2)
    for _ in range(2):  # a warm-up and a measured pass share one peer
        theirs = peer.serve(PROMPTS, concurrency=2)
        assert [r.token_ids for r in theirs.requests] == [r.token_ids for r in ours.requests]
        assert [len(r.token_times) for r in theirs.requests] == [9, 12, 4, 6]
        assert [r.prompt_tokens for r in theirs.requests] == [20, 5, 11, 7]


def test_its_times_lie_in_the_pass_and_places_are_kept(peer):
    served = peer.serve(PROMPTS, concurrency=2)
    first, second, third, fourth = served.requests
    assert served.start <= first.arrival <= first.token_times[0]
    assert all(list(r.token_times) == sorted(r.token_times) for r in served.requests)
    assert max(r.token_times[-1] for r in served.requests) <= served.end
    ends = sorted(r.token_times[-1] for r in (first, second))
    assert third.arrival >= ends[0]  # it had to wait for a place
    assert fourth.arrival >= third.arrival
    assert all(r.sent is None for r in served.requests)


def test_requests_arrive_on_schedule(peer):
    late = [Item(PROMPTS[0].prompt, 4, arrival_s=0.2), Item(PROMPTS[1].prompt, 4, arrival_s=0.0)]
    served = peer.serve(late, concurrency=1)
    assert [r.arrival - served.start for r in served.requests] == pytest.approx([0.2, 0.0])
    for request in served.requests:
        assert request.arrival <= request.sent <= request.token_times[0]
        assert request.lag < 0.1


def test_a_pool_that_is_too_small_is_an_error_and_no_hang(config):
    small = EngineConfig.from_dict({**config.to_dict(), "cache": {"num_blocks": 1, "block_size": 16}})
    subject = HFContinuous(small)
    try:
        with pytest.raises(RuntimeError, match="continuous batching failed: No requests can be scheduled"):
            subject.serve(PROMPTS, concurrency=1)
    finally:
        subject.close()


def test_memory_that_is_not_there_is_refused(config):
    huge = EngineConfig.from_dict({**config.to_dict(), "cache": {"num_blocks": 2**32}})
    with pytest.raises(ConfigError, match=r"Memory footprint .* cache.memory_gib"):
        HFContinuous(huge)


def test_it_needs_a_checkpoint():
    with pytest.raises(ConfigError, match=r"`hf_continuous` needs weights: .*load_format=auto; got dry"):
        HFContinuous(EngineConfig(model=ModelConfig(load_format=LoadFormat.dry)))


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_the_engines(tied):
    model = ModelConfig(
        "random", LoadFormat.dummy, hf_config={**SHAPE, "tie_word_embeddings": tied}, device="cpu", seed=3
    )
    ours = EngineSubject(EngineConfig(model=model)).serve(PROMPTS, concurrency=4)
    theirs = HFGenerate(model).serve(PROMPTS, concurrency=4)
    assert [r.token_ids for r in theirs.requests] == [r.token_ids for r in ours.requests]
    assert len({token for r in ours.requests for token in r.token_ids}) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("peers_are_forked")
@pytest.mark.parametrize("kind", [Kind.hf, Kind.hf_continuous])
def test_in_a_process_of_its_own_it_gives_the_engines_tokens(config, kind, monkeypatch):
    assert Peers(PeerSettings()).open(kind, config) is None  # on a CPU it runs in this one
    monkeypatch.setattr(pool, "_has_own_process", lambda kind, device: True)
    ours = EngineSubject(config).serve(PROMPTS, concurrency=4)
    with closing(Peers(PeerSettings())) as peers:
        for _ in range(2):
            peer = peers.open(kind, config)
            theirs = peer.serve(PROMPTS, concurrency=4)
            assert [r.token_ids for r in theirs.requests] == [r.token_ids for r in ours.requests]
        assert peer.about["dtype"] == "float32"
        assert "sdpa" in peer.about["attention"]
