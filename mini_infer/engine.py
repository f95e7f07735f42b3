"""Short way to the engine: `from mini_infer.engine import LLMEngine`."""

from mini_infer.runtime.engine import LLMEngine

__all__ = ["LLMEngine"]
