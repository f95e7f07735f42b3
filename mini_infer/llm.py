"""LLM: the engine under the names that vLLM's and nano-vllm's users type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.request import RequestOutput
from mini_infer.core.vllm_names import SETTINGS
from mini_infer.runtime.llm_engine import LLMEngine, Params
from mini_infer.runtime.text.prompt import ChatMessage, Prompt

# Of EngineConfig: what is given for one (cache={...}) is taken as it is.
_SECTIONS = ("cache", "scheduler", "attention", "graphs", "speculation", "parallel", "lora")


class LLM:
    """
        llm = LLM("Qwen/Qwen2.5-7B-Instruct", enforce_eager=True, max_model_len=4096)
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))
        print(outputs[0].outputs[0].text)

    Args:
        model: as in `ModelConfig.path`.
        options: vLLM's and nano-vllm's names for settings, or sections of EngineConfig (cache={...}).

    Raises:
        ConfigError: an option that is not known, or settings that cannot work.
        ModelError: a model that cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(_config(model, options))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | Sequence[Params] | None = None
    ) -> list[RequestOutput]:
        """As `LLMEngine.generate`."""
        return self.engine.generate(prompts, sampling_params)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or several."""
        return self.engine.generate(messages, sampling_params)


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    values: dict[str, Any] = {"model": {"path": model}}
    for name in [name for name in _SECTIONS if name in options]:
        values[name] = dict(options.pop(name))
    for name, value in options.items():
        ours = SETTINGS.get(name.replace("_", "-"))
        if ours is None:
            known = ", ".join((*(known.replace("-", "_") for known in SETTINGS), *_SECTIONS))
            raise ConfigError(f"LLM has no option {name!r}={value!r}. Known: {known}")
        section, _, key = ours.name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = ours.value(value)
    return EngineConfig.from_dict(values)
