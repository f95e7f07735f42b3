"""Short way to the engine: `from mini_infer.engine import LLMEngine`."""

from mini_infer.runtime.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
