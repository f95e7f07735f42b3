"""Executor: the seam between the engine's loop and whatever computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepPlan, StepResult

if TYPE_CHECKING:  # the loop needs no torch
    from mini_infer.cache.block_files import BlockFiles
    from mini_infer.core.limits import Limits
    from mini_infer.runtime.text.tokenizer import Tokenizer
    from mini_infer.runtime.worker.model_runner import Runner
    from mini_infer.runtime.worker.startup import StartupReport
    from mini_infer.speculative.policy.costs import StepCosts
    from mini_infer.transfer.shares import Holding


class Executor:
    """Steps are launched and collected in one order. As many may be in flight as there are stages, and one more where
    they overlap.

    Attributes:
        overlap: a step may be launched before the tokens of an earlier one, which it builds on, are collected.
        stages: that compute a step one after the other, each another step at a time: of other requests, but for parts
            of one prompt, and where there are no others.
        runner: what computes, where that is in this process.
        files: of prefixes, where there are any.
        holding: its KV, where other engines have to do with it.
        kv_origin: what that depends on beside tokens, by name (fingerprints.py).
        adapters: name -> key of those that the config names.
        step_costs: what steps cost by rows and drafts, measured when first asked for. It overwrites KV: nobody may
            hold any.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: Limits
    overlap: bool
    stages: int = 1
    files: BlockFiles | None = None
    holding: Holding | None = None
    kv_origin: Callable[[], dict[str, str]]
    adapters: Mapping[str, str] = {}
    startup: StartupReport
    runner: Runner
    step_costs: Callable[[], StepCosts]

    def launch(self, plan: StepPlan) -> Any:
        """Starts a plan that is not empty, and returns without waiting where the device works by itself."""
        return self.runner.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        """Waits for what `launch` started."""
        return self.runner.collect(handle)

    def reserve_memory(self) -> None:
        """Takes what the largest step needs from the device, where something else may have taken it since the start."""

    def read_adapter(self, path: str) -> Future[Any]:
        """Begins to read a PEFT folder beside the steps, for `load_adapter`. Raises ConfigError where there are no
        adapters."""
        raise ConfigError("lora.max_adapters=0: this engine has no adapters. Start it with 1 or more")

    def load_adapter(self, path: str) -> str:
        """Takes in what `read_adapter` was told to read, once it has been read: from now on requests may have it by
        the key that is returned. Raises ModelError where it cannot be served."""
        raise NotImplementedError

    def forget_adapter(self, key: str) -> None:
        """No request has it, or will have it."""
        self.runner.forget_adapter(key)

    def require_alive(self) -> None:
        """Raises RankError where a process that it needs has ended meanwhile: steps find out by themselves."""

    def close(self) -> None:
        """Ends other processes and threads, where it has any. There are no steps afterwards."""


def make_executor(config: EngineConfig) -> Executor:
    # Imported where it is chosen: the dry model needs no model code, and a model no dry one.
    if config.model.load_format is LoadFormat.dry:
        from mini_infer.runtime.executor.dry import DryExecutor

        return DryExecutor(config)
    if config.parallel.ranks > 1:
        from mini_infer.runtime.executor.ranks import RanksExecutor

        return RanksExecutor(config)
    from mini_infer.runtime.executor.local import LocalExecutor

    return LocalExecutor(config)
