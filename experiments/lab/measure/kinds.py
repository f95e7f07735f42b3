"""The systems that can be measured."""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    engine = "engine"  # mini-infer
    hf = "hf"  # transformers.generate over static, left-padded batches
    hf_continuous = "hf_continuous"  # transformers' continuous batching
    vllm = "vllm"
    served = "served"  # mini-infer behind its own HTTP server
    http = "http"  # any server that speaks the OpenAI API, at peers.http.url

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Kind.engine: "mini-infer",
    Kind.hf: "transformers.generate",
    Kind.hf_continuous: "transformers continuous batching",
    Kind.vllm: "vLLM",
    Kind.served: "mini-infer over HTTP",
    Kind.http: "an OpenAI server",
}
