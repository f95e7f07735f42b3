"""How much each scheme changes the answers of a mixture of experts, and where its tokens go.

It is no ablation: nothing is timed. The engine reads held-out text token by token, in decode steps, as it would serve
it; what it computes on a CPU is the definition that kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoTokenizer

from experiments.lab.config.ablation_spec import made
from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count, ExperimentSpec
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import Gate
from experiments.lab.judge.logit_gate import probe_batch
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure import hardware
from experiments.lab.show.progress import Steps
from mini_infer import LLMEngine
from mini_infer.assets.prompts import heldout_sources
from mini_infer.assets.tokens import document_stream
from mini_infer.calibration.accuracy import Logits, Reading, TeacherForced, spread_windows, teacher_forced
from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import Routes, Stream, TokenPlaces
from mini_infer.modeling.loader import load_spec
from mini_infer.modeling.model_files import resolve_folder
from mini_infer.modeling.moe import Router
from mini_infer.modeling.spec import MoESpec
from mini_infer.runtime.worker.torch_model import TorchModel

Found = TypeVar("Found")
METRICS = {
    "agreement": Metric("equal greedy tokens, teacher-forced", "", Better.higher, share=True),
    "perplexity_increase_pct": Metric("perplexity of held-out text over the reference's", "%", Better.lower),
    "divergence_mnats": Metric("KL from the reference, mean of a token", "mnats", Better.lower),
    "same_experts": Metric("a token's experts that are the reference's", "", Better.higher, share=True),
    "busiest": Metric("tokens of a layer's busiest expert, over the mean of its experts", "", Better.lower),
}
WHOLE = Point.of({"layers": "all"})
GATE_TOKENS, GATE_ANSWER = 40, 12  # of a prompt, from each window, and of its answer


@dataclass(frozen=True)
class ExpertQuantizationSpec(ExperimentSpec):
    # Name -> label, and what differs from the engine's settings, which are the reference's.
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    windows: Count = 8  # of held-out text; others in each process and repeat
    window_tokens: Count = 256


class ExpertQuantization(Probe):
    reads = (
        *("engine.attention", "engine.cache", "engine.model.hf_config", "engine.model.load_format"),
        *("engine.model.max_model_len", "engine.model.path", "engine.model.seed", "engine.numerics"),
        *("engine.scheduler", "measure.gates", "measure.repeats", "measure.seed"),
    )
    spec: ExpertQuantizationSpec
    device = Device.cpu
    generates = True
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.variants = {name: settings.get("label", name) for name, settings in self.spec.variants.items()}
        self._configs = {name: made(config, name, changes)[1] for name, changes in self.spec.variants.items()}
        moes = [layer.feed_forward for layer in load_spec(self.engine.model).layers]
        routers = [moe.router for moe in moes if isinstance(moe, MoESpec)]
        if not routers:
            raise ConfigError("expert_quantization takes a mixture of experts: model=tiny_moe, say")
        self._experts = routers[0].num_experts
        self.points = [WHOLE, *(Point.of({"layer": index}) for index in range(len(routers)))]
        self._found: dict[tuple[str, int], tuple[TeacherForced, list[Tensor]]] = {}
        self._references: dict[int, tuple[Reading, list[Tensor]]] = {}

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        turn = self.repeat
        if turn not in self._references:
            self._references[turn] = self._reads(self.engine, lambda logits: Reading.of(logits, self._text(turn)))
        reading, expected = self._references[turn]
        if (variant, turn) not in self._found:
            self._found[variant, turn] = self._reads(self._configs[variant], partial(teacher_forced, reading))
        answers, routes = self._found[variant, turn]
        chosen = slice(None) if point is WHOLE else slice(point.values["layer"], point.values["layer"] + 1)
        ids, others = torch.stack(routes)[chosen], torch.stack(expected)[chosen]  # [layers, tokens, k]
        loads = torch.stack([layer.flatten().bincount(minlength=self._experts) for layer in ids]).float()
        found: dict[str, float | None] = {
            "same_experts": float((ids[..., None] == others[..., None, :]).any(-1).float().mean()),
            "busiest": float((loads.amax(1) / loads.mean(1)).mean()),
        }
        if point is WHOLE:
            found["agreement"] = answers.agreement
            found["perplexity_increase_pct"] = 100 * answers.increase
            found["divergence_mnats"] = 1000 * answers.divergence
        return found

    def measure(self, steps: Steps) -> Findings:
        gates = self._gates() if self.settings.gates else []
        return replace(super().measure(steps), gates=gates)

    def _gates(self) -> list[Gate]:
        """What is read here goes past the scheduler: through it, in company, the same weights answer as alone."""
        prompts = [row[:GATE_TOKENS].tolist() for row in self._text(0)]
        exact = ExactGate("cpu")
        with hardware.torch_threads(self.threads):
            return [exact.of_prompts(name, config, prompts, GATE_ANSWER) for name, config in self._configs.items()]

    def _text(self, turn: int) -> Tensor:
        """[windows, window_tokens + 1], in each turn from another place on."""
        tokenizer = AutoTokenizer.from_pretrained(resolve_folder(self.engine.model.path))
        stream = torch.from_numpy(document_stream(heldout_sources(), tokenizer).astype("int64"))
        start = float(torch.rand((), generator=torch.Generator().manual_seed(1000 * self.settings.seed + turn)))
        return spread_windows(stream, self.spec.windows, self.spec.window_tokens, start)

    def _reads(self, config: EngineConfig, read: Callable[[Logits], Found]) -> tuple[Found, list[Tensor]]:
        """(what is made of an engine's logits, and of each layer with experts [tokens, k] where its tokens went)."""
        with hardware.torch_threads(self.threads), torch.no_grad(), closing(LLMEngine(config)) as engine:
            model = engine.executor.runner.model
            assert isinstance(model, TorchModel), "it has experts"
            routers = [module for module in model.module.modules() if isinstance(module, Router)]
            seen = [_watched(router) for router in routers]
            found = read(lambda ids: torch.stack(probe_batch(engine, [(row.tolist(), 1) for row in ids])))
            return found, [torch.cat(ids) for ids in seen]


def _watched(router: Router) -> list[Tensor]:
    """To which is added where tokens go, from now on."""
    seen: list[Tensor] = []
    ask = router.of_stream

    def of_stream(stream: Stream, tokens: TokenPlaces) -> tuple[Tensor, Tensor, Routes]:
        x, total, routes = ask(stream, tokens)
        seen.append(routes.ids.long())
        return x, total, routes

    router.of_stream = of_stream  # type: ignore[method-assign]
    return seen
