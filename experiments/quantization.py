"""How much each scheme and method changes a model's answers, for how many bits a weight; and which layers matter.

It is no ablation: what is measured is what the rounded weights and activations compute, in float32 by transformers'
modules and by the definition that kernels are tested against. So it needs no GPU, and no kernel's speed enters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from experiments.lab import points, schema
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.rounds import Probe
from experiments.lab.points import Point
from experiments.lab.spec import ExperimentSpec
from experiments.lab.store.rows import Row
from mini_infer.assets.evaluate import greedy, load
from mini_infer.assets.prompts import draw_prompts, heldout_sources
from mini_infer.assets.tokens import document_stream
from mini_infer.calibration.accuracy import generated, teacher_forced
from mini_infer.calibration.fp8_kv import with_fp8_kv
from mini_infer.calibration.layerwise import RoundedLayer, put_in, quantized_layers
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.calibration.text import calibration_ids, shipped_text
from mini_infer.core.config import Device
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.checkpoint import read_json, resolve_folder

CPU = torch.device("cpu")
METRICS = {
    "bits_per_weight": Metric("bits a weight of the layers, scales included", "bits", Better.lower),
    "perplexity_increase_pct": Metric("perplexity of held-out text over the reference's", "%", Better.lower),
    "divergence_mnats": Metric("KL from the reference, mean of a token", "mnats", Better.lower),
    "share_of_rtn": Metric("KL, as a share of that of RTN in the same format", "", Better.lower, share=True),
    "agreement": Metric("equal greedy tokens, teacher-forced", "", Better.higher, share=True),
    "free_agreement": Metric("generated tokens before the first difference", "", Better.higher, share=True),
    "compiles": Metric("continuations that are Python so far", "", Better.higher, share=True),
}
WHOLE = points.point({"layers": "all"})
FP8_KV = "fp8"


@dataclass(frozen=True)
class QuantizationSpec(ExperimentSpec):
    """
    Attributes:
        variants: name -> label, and settings of a Recipe; or kv: fp8, with weights as they are.
        single: variants that are also measured with one layer quantized at a time, and with one kind of linear layer.
        parts: those kinds: what the names of linear layers end in.
        samples, length: calibration sequences, and tokens of each.
        windows, window_tokens: of held-out text, read teacher-forced; others in each repeat.
        prompts, new_tokens: continued greedily.
    """

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    single: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    samples: int = 64
    length: int = 512
    windows: int = 24
    window_tokens: int = 512
    prompts: int = 16
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("samples", "length", "windows", "window_tokens", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"experiment.{name} must be at least 1, got {getattr(self, name)}")
        unknown = sorted(set(self.single) - set(self.variants))
        if unknown:
            raise ConfigError(f"experiment.single names {unknown[0]}; variants are {', '.join(self.variants)}")


class Quantization(Probe):
    spec_class = QuantizationSpec
    spec: QuantizationSpec
    device = Device.cpu
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec = self.spec
        self._folder = resolve_folder(schema.engine_config(config.engine).model.path)
        seed = self.settings.seed
        self._recipes = {name: _recipe(name, settings, spec, seed) for name, settings in spec.variants.items()}
        self.variants = {name: settings.get("label", name) for name, settings in spec.variants.items()}
        layers = range(read_json(self._folder / "config.json")["num_hidden_layers"])
        single = [points.point({"layer": index}) for index in layers]
        single += [points.point({"part": part}) for part in spec.parts]
        self.points = [WHOLE, *(single if spec.single else [])]
        self.timed = [(name, WHOLE) for name in self.variants]
        self.timed += [(name, point) for name in spec.single for point in single]
        self._turns: dict[tuple[str, str], int] = {}
        self._made: dict[str, list[RoundedLayer]] = {}
        self._study: _Study | None = None

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        turn = self._turns[variant, point.name] = self._turns.get((variant, point.name), -1) + 1
        with _threads(self.threads), torch.no_grad():
            study = self._study = self._study or _Study(self._folder, self.spec, self.settings.seed)
            model, bits = self._model(variant, point, study)
            found = teacher_forced(study.reference_logits, {"": _logits(model)}, study.windows(turn))[""]
            values: dict[str, float | None] = {
                "perplexity_increase_pct": 100 * found.increase,
                "divergence_mnats": 1000 * found.divergence,
                "agreement": found.agreement,
            }
            if point is WHOLE:
                free = study.generated(model)
                values |= {"bits_per_weight": bits, "free_agreement": free.equal, "compiles": free.compiles}
        return values

    def derived(self, found: Sequence[Row]) -> list[tuple[str, Point, dict[str, float | None]]]:
        divergence = {r.variant: r.value for r in found if r.metric == "divergence_mnats" and r.point == WHOLE.name}
        rounded = {recipe: divergence[name] for name, recipe in self._recipes.items() if recipe and name in divergence}
        return [
            (name, WHOLE, {"share_of_rtn": divergence[name] / rounded[nearest]})
            for name, recipe in self._recipes.items()
            if recipe is not None
            and recipe.method is not Method.rtn
            and (nearest := replace(recipe, method=Method.rtn)) in rounded
        ]

    def _model(self, variant: str, point: Point, study: _Study) -> tuple[nn.Module, float]:
        """The variant, quantized as far as the point says, and the bits of a weight in its layers."""
        model = copy.deepcopy(study.reference)
        recipe = self._recipes[variant]
        if recipe is None:
            return with_fp8_kv(model), 16.0
        if variant not in self._made:
            decoder = StreamedDecoder(self._folder, CPU)
            ids = study.calibration(recipe) if recipe.needs_text else None
            self._made[variant] = [layer for layer, _ in quantized_layers(decoder, recipe, ids)]
        layers = self._made[variant]
        for index, layer in enumerate(layers):
            if point.values.get("layer", index) == index:
                put_in(model, layer, recipe, point.values.get("part", ""))
        weights = sum(layer.num_weights for layer in layers)
        return model, sum(layer.bits(recipe) for layer in layers) / weights


class _Study:
    """The reference, and the text that all variants read."""

    def __init__(self, folder: Path, spec: QuantizationSpec, seed: int) -> None:
        self.reference, self._tokenizer = load(folder)
        self._spec, self._seed = spec, seed
        stream = document_stream(heldout_sources(), self._tokenizer)
        self._stream = torch.from_numpy(stream.astype("int64"))
        self._prompts = draw_prompts(spec.prompts, seed=seed)
        self._ids = [self._tokenizer.encode(prompt.text) for prompt in self._prompts]
        self._continuations = [greedy(self.reference, ids, spec.new_tokens) for ids in self._ids]
        self._known: dict[bytes, Tensor] = {}
        self._text: list[str] | None = None

    def windows(self, turn: int) -> Tensor:
        """[windows, window_tokens + 1], drawn anew in each turn."""
        generator = torch.Generator().manual_seed(1000 * self._seed + turn)
        last = len(self._stream) - self._spec.window_tokens - 1
        starts = torch.randint(last, (self._spec.windows,), generator=generator).tolist()
        return torch.stack([self._stream[start : start + self._spec.window_tokens + 1] for start in starts])

    def reference_logits(self, ids: Tensor) -> Tensor:
        """Computed once for all variants."""
        key = ids.numpy().tobytes()
        if key not in self._known:
            self._known[key] = _logits(self.reference)(ids)
        return self._known[key]

    def calibration(self, recipe: Recipe) -> Tensor:
        self._text = self._text or shipped_text()
        return calibration_ids(self._text, self._tokenizer, recipe.samples, recipe.length, recipe.seed)

    def generated(self, model: nn.Module) -> Any:
        def generate(ids: Any) -> list[int]:
            return greedy(model, ids, self._spec.new_tokens)

        return generated(self._prompts, self._ids, self._continuations, generate, self._tokenizer.decode)


def _recipe(name: str, settings: Mapping[str, Any], spec: QuantizationSpec, seed: int) -> Recipe | None:
    """None: weights as they are, keys and values in fp8. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "label"}
    if "kv" in rest:
        if rest != {"kv": FP8_KV}:
            raise ConfigError(f"experiment.variants.{name}: kv must be {FP8_KV}, and stand alone; got {rest}")
        return None
    try:
        rest |= {"method": Method(rest.get("method", "rtn")), "kept": tuple(rest.get("kept", ()))}
        return Recipe(**rest, samples=spec.samples, length=spec.length, seed=seed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"experiment.variants.{name}: {error}") from error


def _logits(model: Any) -> Any:
    return lambda ids: model(ids[None]).logits[0]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
