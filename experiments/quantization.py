"""How much each scheme and method changes a model's answers, for how many bits a weight; and which layers matter.

It is no ablation: what is measured is what the rounded weights and activations compute, in float32 by transformers'
modules and by the definition that kernels are tested against. So it needs no GPU, and no kernel's speed enters. That an
engine serves these numbers is what its gates say: one loads each variant from a folder, as the quantizer writes it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from experiments.lab.config.explain import require_known
from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count, ExperimentSpec
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge import logit_gate
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import ErrorGate, Gate, compare
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import row_error
from experiments.lab.measure import hardware
from experiments.lab.show import wording
from experiments.lab.show.progress import Steps
from experiments.lab.show.sweeps import Beside
from experiments.lab.store.rows import Row
from mini_infer import LLMEngine, SamplingParams
from mini_infer.assets.evaluate import load
from mini_infer.assets.prompts import draw_prompts, heldout_sources
from mini_infer.assets.tokens import document_stream
from mini_infer.calibration.accuracy import (
    Generated,
    Reading,
    generated,
    greedy_together,
    spread_windows,
    teacher_forced,
)
from mini_infer.calibration.compressed import require_library
from mini_infer.calibration.folder import write_layers
from mini_infer.calibration.fp8_kv import with_fp8_kv, write_scales
from mini_infer.calibration.layerwise import (
    ComputesRounded,
    RoundedLayer,
    Wanted,
    every,
    put_in,
    quantized_layers,
)
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.calibration.sensitivity import sensitivities, worth_leaving
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.calibration.text import calibration_ids, shipped_text
from mini_infer.core.config import CacheConfig, CacheDType, Device, DType, EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import Quantization as Rounding
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model_files import read_json, resolve_folder

CPU = torch.device("cpu")
METRICS = {
    "agreement": Metric("equal greedy tokens, teacher-forced", "", Better.higher, share=True),
    "perplexity_increase_pct": Metric("perplexity of held-out text over the reference's", "%", Better.lower),
    "divergence_mnats": Metric("KL from the reference, mean of a token", "mnats", Better.lower),
    "share_of_rtn": Metric("KL, as a share of that of RTN in the same format", "", Better.lower, share=True),
    "free_agreement": Metric("share of generated tokens before the first difference", "", Better.higher, share=True),
    "compiles": Metric("functions that are Python with what was generated", "", Better.higher, share=True),
    "bits_per_weight": Metric("bits a weight of the layers, scales included", "bits", Better.lower),
    "memory_saved": Metric("bytes of weights saved", "", Better.higher, share=True),
    "kv_tokens": Metric("tokens in the memory of one in bf16", "", Better.higher),
}
WHOLE = Point.of({"layers": "all"})
# What is no Recipe: keys and values alone, and the reference in the checkpoint's dtype.
FP8_KV, BF16 = "fp8", "bfloat16"
NAMED = 8  # of the linear layers that mind most
PREVIEW = 2  # windows of calibration text by which the sweep of sensitivity chooses
FEW, STEPS = 4, 8  # prompts that are also asked alone, and behind which logits are compared; tokens of their answers
MEASURED = "the measured modules'"


@dataclass(frozen=True)
class QuantizationSpec(ExperimentSpec):
    # Name -> label, and settings of a Recipe; or kv: fp8, with weights as they are; or dtype: bfloat16.
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Those that are also measured with one layer quantized at a time, with one kind of linear layer, and with those
    # left alone that mind most.
    single: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # these kinds: "down" is the layers called down_proj
    left: tuple[float, ...] = ()  # shares of the weights that are left alone
    samples: Count = 64  # calibration sequences
    length: Count = 512  # tokens of each
    windows: Count = 24  # of held-out text, read teacher-forced; others in each process and repeat
    window_tokens: Count = 512
    few_windows: Count = 4  # are enough where a layer or a kind is quantized alone
    prompts: Count = 16  # continued greedily
    prompt_tokens: Count = 96  # the last ones of each
    new_tokens: Count = 64
    beside: tuple[Beside, ...] = ()  # what another experiment has measured of the same schemes, for the page

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in self.left:
            if not 0 < share < 1:
                raise ConfigError(f"experiment.left must be shares between 0 and 1, got {share}")
        require_known("experiment.single names", self.single, self.variants)


class Quantization(Probe):
    reads = ("engine.model.path", "measure.gates", "measure.repeats", "measure.seed")
    spec: QuantizationSpec
    device = Device.cpu
    generates = True
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec = self.spec
        self._folder = resolve_folder(self.engine.model.path)
        seed = self.settings.seed
        self._recipes = {name: _recipe(name, settings, spec, seed) for name, settings in spec.variants.items()}
        self.variants = {name: settings.get("label", name) for name, settings in spec.variants.items()}
        for name in spec.single:
            recipe = self._recipes[name]
            if recipe is None or recipe.method not in (Method.rtn, Method.gptq):
                raise ConfigError(
                    f"experiment.single names {name}; one layer alone can be quantized by {Method.rtn.value} and "
                    f"{Method.gptq.value}, which fold no scales into other layers"
                )
        layers = range(read_json(self._folder / "config.json")["num_hidden_layers"])
        single = [Point.of({"layer": index}) for index in layers]
        single += [Point.of({"part": part}) for part in spec.parts]
        single += [Point.of({"left": share}) for share in spec.left]
        self.points = [WHOLE, *(single if spec.single else [])]
        self.timed = [(name, WHOLE) for name in self.variants]
        self.timed += [(name, point) for name in spec.single for point in single]

    @cached_property
    def _study(self) -> _Study:
        return _Study(self._folder, self.spec, self.settings.seed)

    def _model(self, variant: str, point: Point = WHOLE) -> tuple[Any, float]:
        """With the bits of a weight in its layers."""
        study, recipe = self._study, self._recipes[variant]
        if recipe is not None:
            return study.quantized(variant, recipe, study.wanted(point, variant, recipe))
        model = study.copied()
        return model.bfloat16() if self._in_bf16(variant) else with_fp8_kv(model, study.calibration), 16.0

    def _in_bf16(self, variant: str) -> bool:
        return "dtype" in self.spec.variants[variant]

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        with hardware.torch_threads(self.threads), torch.no_grad():
            study, recipe = self._study, self._recipes[variant]
            whole, reading = point is WHOLE, study.reading(self.repeat)
            model, bits = self._model(variant, point)
            chosen = reading.first(self.spec.few_windows) if {"layer", "part"} & set(point.values) else reading
            found = teacher_forced(chosen, study.logits_of(model))
            values: dict[str, float | None] = {
                "perplexity_increase_pct": 100 * found.increase,
                "divergence_mnats": 1000 * found.divergence,
                "agreement": found.agreement,
            }
            if whole or "left" in point.values:
                values["bits_per_weight"] = bits
            if whole:
                free = study.generated(model, variant)
                values |= {"free_agreement": free.equal, "compiles": free.compiles}
                values |= self._memory(recipe, kv=recipe is None and not self._in_bf16(variant))
        return values

    def measure(self, steps: Steps) -> Findings:
        gates = list[Gate | ErrorGate]()
        if self.settings.gates:
            require_library()
        for variant in self.variants if self.settings.gates else ():
            steps.note(f"gates: {self.variants[variant]}, by an engine that loads it")
            with hardware.torch_threads(self.threads), torch.no_grad():
                gates += self._gates(variant)
        found = super().measure(steps)
        return replace(
            found,
            gates=[gate for gate in gates if isinstance(gate, Gate)],
            error_gates=[gate for gate in gates if isinstance(gate, ErrorGate)],
            notes=[*found.notes, *self._study.notes],
        )

    def _gates(self, variant: str) -> Iterator[Gate | ErrorGate]:
        """What is measured goes past an engine, which is to generate the same tokens. Where it rounds activations, or
        keys and values, the last bit of float32 decides now and then to which side, and some layers later what follows
        is as far away as rounding is: there logits are compared, which must not be those without that rounding, and
        tokens with activations left as they are."""
        study, recipe, bf16 = self._study, self._recipes[variant], self._in_bf16(variant)
        model, _ = self._model(variant)
        with TemporaryDirectory() as place:
            config, few = self._served(variant, model, Path(place) / "model"), study.prompts[:FEW]
            yield replace(ExactGate("cpu").of_prompts(variant, config, few, STEPS), point=WHOLE.name)
            with closing(LLMEngine(config)) as engine:
                found, against = study.continued(model, variant), MEASURED
                if not bf16 and (recipe is None or recipe.formats.activations is not None):
                    rows = [([*ids, *own[:STEPS]], len(ids)) for ids, own in zip(few, found[:FEW], strict=True)]
                    rounded, logits = _logits(model, rows), torch.cat(logit_gate.probe_batch(engine, rows))
                    model = study.copied() if recipe is None else _with_activations_left(model)
                    logit_gate.leave_activations(engine)
                    exact = _logits(model, rows)
                    rounding = row_error(exact, rounded)
                    error = logit_gate.compare(logits, rounded, math.sqrt(3) * rounding, f"{MEASURED} logits")
                    if row_error(logits, exact) < rounding / 2:  # an engine that rounds nothing
                        error = replace(error, error=math.inf)
                    yield replace(error, variant=variant, point=WHOLE.name)
                    found, against = study.continued(model), f"with activations left as they are {MEASURED}"
                if recipe is not None:  # bf16 adds up otherwise in every engine, and kv=fp8 has nothing else to load
                    greedy = SamplingParams(temperature=0, max_tokens=self.spec.new_tokens)
                    told = [output.outputs[0].token_ids for output in engine.generate(study.prompts, greedy)]
                    yield compare(variant, WHOLE.name, found, told, against)

    def _served(self, variant: str, model: Any, out: Path) -> EngineConfig:
        """Of an engine that loads what the variant is; `out` is where a folder may be written for it."""
        recipe, dtype, kv = self._recipes[variant], DType.float32, CacheDType.auto
        if recipe is not None:
            self._study.write(variant, recipe, out)
        elif self._in_bf16(variant):
            out, dtype = self._folder, DType.bfloat16
        else:
            write_scales(model, self._folder, out)
            kv = CacheDType.fp8
        return EngineConfig(ModelConfig(path=str(out), device=Device.cpu, dtype=dtype), CacheConfig(dtype=kv))

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

    def _memory(self, recipe: Recipe | None, kv: bool) -> dict[str, float | None]:
        """Of the model as the engine has it in bf16: the same in every repeat."""
        plain = ModelConfig(path=str(self._folder), device=Device.cpu, dtype=DType.bfloat16)
        if kv:
            blocks = []  # for which an engine finds room in the same memory
            for dtype in (CacheDType.auto, CacheDType.fp8):
                config = EngineConfig(model=plain, cache=CacheConfig(memory_gib=2**-6, dtype=dtype))
                with closing(LLMEngine(config)) as engine:
                    blocks.append(engine.startup.num_kv_blocks)
            return {"kv_tokens": blocks[1] / blocks[0]}
        if recipe is None or recipe.kept:
            return {}
        held = replace(
            plain,
            quantization=Rounding(recipe.scheme),
            quantization_group=recipe.group,
            quantization_symmetric=recipe.symmetric,
        )
        return {"memory_saved": 1 - _loaded_bytes(held) / _loaded_bytes(plain)}


def _with_activations_left(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, ComputesRounded):
            module.activations = None
    return model


def _logits(model: Any, rows: Sequence[logit_gate.Probed]) -> Tensor:
    """As `probe_batch` has them, one row after the other."""
    return torch.cat([model(torch.tensor([ids])).logits[0, split - 1 :] for ids, split in rows])


def _loaded_bytes(config: ModelConfig) -> int:
    model = load_model(config, load_spec(config), torch.bfloat16, CPU)
    stores = [weight.untyped_storage() for weight in model.parameters()]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


class _Study:
    """The reference, the text that all variants read, what has been quantized; and `notes` of the sweep of sensitivity,
    one for each variant."""

    def __init__(self, folder: Path, spec: QuantizationSpec, seed: int) -> None:
        self._folder, self._spec, self._seed = folder, spec, seed
        self.notes: list[str] = []
        self._reference, self._tokenizer = load(folder)
        self._stream = torch.from_numpy(document_stream(heldout_sources(), self._tokenizer).astype("int64"))
        self._texts = draw_prompts(spec.prompts, min_tokens=spec.prompt_tokens, seed=seed)
        self.prompts = [self._tokenizer.encode(prompt.text)[-spec.prompt_tokens :] for prompt in self._texts]
        ends = load_spec(ModelConfig(path=str(folder))).eos_token_ids
        self._stops = ends or (self._tokenizer.eos_token_id,)  # as an engine's
        self._continued: dict[str, list[list[int]]] = {}
        self._expected = self.continued(self._reference)
        self._readings: dict[int, Reading] = {}
        self._made: dict[str, list[RoundedLayer]] = {}
        self._sensitivity: dict[str, dict[str, float]] = {}

    def copied(self) -> Any:
        return copy.deepcopy(self._reference)

    def reading(self, turn: int) -> Reading:
        """Of the reference; windows are spread evenly over the held-out text, in each turn from another place on."""
        if turn not in self._readings:
            start = float(torch.rand((), generator=torch.Generator().manual_seed(1000 * self._seed + turn)))
            windows = spread_windows(self._stream, self._spec.windows, self._spec.window_tokens, start)
            # In an order drawn once, so that the first few come from all over the text.
            order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
            self._readings[turn] = Reading.of(self.logits_of(self._reference), windows[order])
        return self._readings[turn]

    def logits_of(self, model: Any) -> Any:
        return lambda ids: model(ids).logits

    @cached_property
    def calibration(self) -> Tensor:
        return calibration_ids(shipped_text(), self._tokenizer, self._spec.samples, self._spec.length, self._seed)

    def quantized(self, variant: str, recipe: Recipe, wanted: Wanted) -> tuple[nn.Module, float]:
        """The reference with these linear layers quantized, and the bits of a weight in its layers."""
        layers, model = self._layers(variant, recipe), self.copied()
        for layer in layers:
            put_in(model, layer, recipe, wanted)
        bits = sum(layer.bits(recipe, wanted) for layer in layers) / sum(layer.num_weights for layer in layers)
        return model, bits

    def wanted(self, point: Point, variant: str, recipe: Recipe) -> Wanted:
        """Which linear layers the point asks to be quantized."""
        (key, value), *_ = point.values.items()
        if key == "layer":
            own = self._layers(variant, recipe)[int(value)].weights
            return lambda name: name in own
        if key == "part":
            return lambda name: name.rpartition(".")[2].removesuffix("_proj") == value
        if key == "left":
            left = self._worth_leaving(variant, recipe, float(value))
            return lambda name: name not in left
        return every

    def generated(self, model: Any, variant: str) -> Generated:
        return generated(self._texts, self._expected, self.continued(model, variant), self._tokenizer.decode)

    def continued(self, model: Any, variant: str = "") -> list[list[int]]:
        """The greedy continuation of each prompt; of a whole variant, which is named, the same each time."""
        if variant not in self._continued:
            ids = torch.tensor(self.prompts)
            found = greedy_together(model, ids, self._spec.new_tokens, self._stops)
            if not variant:
                return found
            self._continued[variant] = found
        return self._continued[variant]

    def write(self, variant: str, recipe: Recipe, out: Path) -> None:
        """A folder with the variant's weights."""
        write_layers(self._folder, out, recipe, self._layers(variant, recipe))

    def _layers(self, variant: str, recipe: Recipe) -> list[RoundedLayer]:
        if variant not in self._made:
            ids = self.calibration if recipe.needs_text else None
            decoder = StreamedDecoder(self._folder, CPU)
            self._made[variant] = [layer for layer, _ in quantized_layers(decoder, recipe, ids)]
        return self._made[variant]

    def _worth_leaving(self, variant: str, recipe: Recipe, share: float) -> list[str]:
        """Chosen by text that the model was trained on: the held-out text is kept for the measurement."""
        layers = self._layers(variant, recipe)
        weights = {name: count for layer in layers for name, count in layer.weights.items()}
        if variant not in self._sensitivity:
            reading = Reading.of(self.logits_of(self._reference), self.calibration[:PREVIEW])

            def divergence(model: nn.Module) -> float:
                return teacher_forced(reading, self.logits_of(model)).divergence

            self._sensitivity[variant] = sensitivities(self.copied(), layers, recipe, divergence)
            paths = [name.split(".") for name in worth_leaving(self._sensitivity[variant], weights, 1.0)[:NAMED]]
            named = ", ".join(f"{path[-1]} of layer {path[2]}" for path in paths)  # model.layers.4.self_attn.v_proj
            label = self._spec.variants[variant].get("label", variant)
            self.notes.append(f"{label}: layers that gain most by staying in bf16{wording.RANKED}{named}.")
        return worth_leaving(self._sensitivity[variant], weights, share)


def _recipe(name: str, settings: Mapping[str, Any], spec: QuantizationSpec, seed: int) -> Recipe | None:
    """None: weights as they are. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "label"}
    if {"kv", "dtype"} & set(rest):
        if rest not in ({"kv": FP8_KV}, {"dtype": BF16}):
            raise ConfigError(f"experiment.variants.{name}: kv: {FP8_KV} or dtype: {BF16} stands alone; got {rest}")
        return None
    try:
        rest |= {"method": Method(rest.get("method", "rtn")), "kept": tuple(rest.get("kept", ()))}
        return Recipe(**rest, samples=spec.samples, length=spec.length, seed=seed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"experiment.variants.{name}: {error}") from error
