"""What a config.json's `quantization_config` says, as a ModelFormat. What is not supported names itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mini_infer.core.errors import ModelError
from mini_infer.quantization.checkpoints import (
    AWQ,
    GPTQ,
    CompressedTensors,
    FP8Blocks,
    LayerFormat,
    ModelFormat,
    Rounded,
)
from mini_infer.quantization.formats import SCHEMES, ActivationFormat, Number, Scheme, WeightFormat

_HEAD = ("lm_head", None)  # stays in the model's dtype
_STATIC = "static scales of activations are passed over: each token has its own"
_ALL = ".*"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")  # of compressed-tensors


class _Config:
    """A part of the config.json, whose values are asked for by name."""

    def __init__(self, values: Any, source: str) -> None:
        if not isinstance(values, dict):
            raise ModelError(f"{source} must be a mapping, got {values!r}")
        self.values, self.source = values, source

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def part(self, name: str) -> _Config:
        return _Config(self.values.get(name), f"{self.source}.{name}")

    def one_of(self, name: str, allowed: tuple, default: Any = None) -> Any:
        """Raises ModelError where the value is another."""
        value = self.get(name, default)
        value = value.lower() if isinstance(value, str) else value
        if value not in allowed:
            raise self.refusal(f"{name} is {value!r}; supported are {', '.join(map(str, allowed))}")
        return value

    def names(self, *names: str) -> list[str]:
        """The lists of these names together."""
        found: list[str] = []
        for name in names:
            values = self.get(name, [])
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise self.refusal(f"{name} must be a list of names, got {values!r}")
            found += values
        return found

    def refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{self.source}: {what}. Or take the original weights, which model.quantization "
            f"({', '.join(SCHEMES)}) quantizes while they are loaded"
        )


def rounding(name: str, group: int, symmetric: bool) -> ModelFormat:
    """An unquantized folder, whose weights are quantized while they are loaded: `name` is one of SCHEMES.

    Args:
        group, symmetric: of int4 weights.
    """
    return ModelFormat(
        f"{name}, rounded while loading", (_HEAD, (_ALL, Rounded(SCHEMES[name].grouped(group, symmetric))))
    )


def checkpoint_format(values: Any, source: str) -> ModelFormat:
    """Of a `quantization_config`. `source` names the config.json in errors. Raises ModelError."""
    config = _Config(values, f"{source}: quantization_config")
    return _READERS[config.one_of("quant_method", tuple(_READERS))](config)


def _gptq(config: _Config) -> ModelFormat:
    bits = config.one_of("bits", (4, 8))
    symmetric = bool(config.get("sym", True))
    if bits == 8 and not symmetric:
        raise config.refusal("bits=8 with sym=false: 8-bit codes have no zeros here; supported is sym=true")
    if config.get("lm_head", False):
        raise config.refusal("lm_head=true: a quantized head is not supported")
    version = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    form = WeightFormat(Number.int4 if bits == 4 else Number.int8, _group(config, "group_size"), symmetric=symmetric)
    rules: list[tuple[str, LayerFormat | None]] = [_HEAD]
    for pattern in config.get("dynamic", {}):
        if not pattern.startswith("-:"):
            raise config.refusal(f"dynamic has {pattern!r}: modules with settings of their own are not supported")
        rules.append((f"(?:{pattern[2:]}).*", None))
    layer = GPTQ(Scheme(form), bool(config.get("desc_act", False)), version == "gptq")
    inside = config.get("modules_in_block_to_quantize", [])
    inside = [name for names in inside for name in (names if isinstance(names, list) else [names])]
    rules += [(rf".*\.{re.escape(name)}", layer) for name in inside] or [(_ALL, layer)]
    return ModelFormat("gptq", tuple(rules))


def _awq(config: _Config) -> ModelFormat:
    config.one_of("bits", (4,))
    config.one_of("version", ("gemm",), "gemm")
    config.one_of("zero_point", (True,), True)
    layer = AWQ(Scheme(WeightFormat(Number.int4, _group(config, "group_size"), symmetric=False)))
    return ModelFormat("awq", (_HEAD, *_left_alone(config.names("modules_to_not_convert")), (_ALL, layer)))


def _fp8(config: _Config) -> ModelFormat:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    static = config.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = config.get("weight_block_size")
    scheme = SCHEMES["fp8"]
    if block is not None:
        rows, columns = _block(config, block)
        scheme = Scheme(WeightFormat(Number.fp8, columns, rows), ActivationFormat(Number.fp8, columns))
    left_alone = _left_alone(config.names("modules_to_not_convert", "ignored_layers"))
    notes = (_STATIC,) if static else ()
    return ModelFormat("fp8", (_HEAD, *left_alone, (_ALL, FP8Blocks(scheme))), notes=notes)


def _compressed_tensors(config: _Config) -> ModelFormat:
    # Older writers call codes frozen, too; weights that are none are refused by their dtype.
    config.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    for name, harmless in (("sparsity_config", ("format", "dense")), ("transform_config", ("config_groups", {}))):
        key, value = harmless
        if config.get(name) and config.part(name).get(key, value) != value:
            raise config.refusal(f"{name} is not supported")
    groups = config.part("config_groups")
    notes: list[str] = []
    found: list[tuple[int, str, LayerFormat | None]] = []
    for name in groups.values:
        group = groups.part(name)
        layer, static = _group_format(group, config.get("format"))
        notes += [_STATIC] * (static and not notes)
        for target in group.names("targets"):
            found.append((*_target(target, group), layer))
    ignored = [(_target(name, config)[1], None) for name in config.names("ignore")]
    rules = (*ignored, *((pattern, layer) for _, pattern, layer in sorted(found, key=lambda rule: rule[0])))
    model = ModelFormat("compressed-tensors", rules, _fp8_kv(config), tuple(notes))
    if model.layer("lm_head") is not None:
        raise config.refusal("lm_head is quantized (it is not in ignore), which is not supported")
    return model


def _mixed(config: _Config) -> ModelFormat:
    """As the quantizer writes it: compressed-tensors' w8a8, and columns that stayed as they were."""
    outliers = SCHEMES[config.one_of("scheme", ("mixed",))].outliers
    model = _compressed_tensors(config)
    rules = tuple(
        (pattern, layer and replace(layer, scheme=replace(layer.scheme, outliers=outliers)))
        for pattern, layer in model.rules
    )
    return replace(model, rules=rules)


def _group_format(group: _Config, default: Any) -> tuple[CompressedTensors, bool]:
    """How the projections of one of config_groups are stored; whether their activations' scales are static."""
    kind = group.get("format", default)
    if kind not in _FORMATS:
        raise group.refusal(f"format is {kind!r}; supported are {', '.join(_FORMATS)}")
    if group.get("output_activations") is not None:
        raise group.refusal("output_activations are not supported")
    weights = group.part("weights")
    weight_bits = weights.one_of("num_bits", (4, 8), 8)
    number = _number(weights, weight_bits, weights.one_of("type", ("int", "float"), "int"))
    symmetric = bool(weights.get("symmetric", True))
    if not symmetric and number is not Number.int4:
        raise weights.refusal("symmetric=false with 8 bits: 8-bit codes have no zeros here")
    group_size = weights.get("group_size", -1)
    assumed = "group" if group_size > 0 else "channel" if weights.get("group_size") else "tensor"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), assumed)
    rows, columns = 1, None
    if strategy == "group":
        columns = _group(weights, "group_size")
    elif strategy == "block":
        rows, columns = _block(weights, weights.get("block_structure"))
    order = weights.one_of("actorder", (None, False, "static", "weight", "group", "dynamic"))
    form = WeightFormat(number, columns, rows, symmetric)
    activations, static = _activations(group, form)
    grouped = order in ("group", "dynamic") and columns is not None
    packed = kind == "pack-quantized"
    return CompressedTensors(Scheme(form, activations), packed, strategy == "tensor", grouped), static


def _activations(group: _Config, weights: WeightFormat) -> tuple[ActivationFormat | None, bool]:
    if group.get("input_activations") is None:
        return None, False
    config = group.part("input_activations")
    number = _number(config, config.one_of("num_bits", (8,), 8), config.one_of("type", ("int", "float"), "int"))
    if number is not weights.number:
        raise config.refusal(
            f"{number.value} activations beside {weights.number.value} weights; supported are activations in the "
            "weights' own format of 8 bits, or none"
        )
    config.one_of("symmetric", (True,), True)
    strategy = config.one_of("strategy", ("tensor", "token", "group"), "tensor")
    columns = _group(config, "group_size") if strategy == "group" else None
    if columns != weights.columns and None not in (columns, weights.columns):
        raise config.refusal(f"groups of {columns} activations beside {weights.columns} columns of a weight")
    return ActivationFormat(number, columns), not config.get("dynamic", False)


def _fp8_kv(config: _Config) -> bool:
    if config.get("kv_cache_scheme") is None:
        return False
    kv = config.part("kv_cache_scheme")
    if _number(kv, kv.one_of("num_bits", (8,), 8), kv.one_of("type", ("float",), "int")) is not Number.fp8:
        raise kv.refusal("keys and values in int8")
    kv.one_of("strategy", ("tensor", "attn_head"), "tensor")
    kv.one_of("dynamic", (False,), False)
    return True


def _number(config: _Config, bits: int, kind: str) -> Number:
    if kind == "float":
        config.one_of("num_bits", (8,))
        return Number.fp8
    return Number.int4 if bits == 4 else Number.int8


def _group(config: _Config, name: str) -> int | None:
    """Columns that share a scale; None: all."""
    size = config.get(name, -1)
    if not isinstance(size, int) or (size != -1 and size < 1):
        raise config.refusal(f"{name} must be -1 (all inputs together) or at least 1, got {size!r}")
    return None if size == -1 else size


def _block(config: _Config, block: Any) -> tuple[int, int]:
    if isinstance(block, str):
        block = [int(size) for size in block.split("x") if size.isdigit()]
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(s, int) and s > 0 for s in block):
        raise config.refusal(f"blocks must be two sizes, such as [128, 128]; got {block!r}")
    return block[0], block[1]


def _left_alone(names: list[str]) -> Iterator[tuple[str, None]]:
    """Modules, and all that is in them."""
    return ((rf"(.*\.)?{re.escape(name)}(\..*)?", None) for name in names)


def _target(target: str, config: _Config) -> tuple[int, str]:
    """Of compressed-tensors -> (rank, pattern of names): names count before expressions, and these before classes."""
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise config.refusal(f"{target!r} is no regular expression ({error})") from error
        return 1, f"(?:{target[3:]}).*"
    if target == "Linear":
        return 2, _ALL
    if "." not in target and target[:1].isupper():
        raise config.refusal(f"the target {target!r} is not supported; supported are Linear, names, and re:expressions")
    return 0, re.escape(target)


_READERS: dict[str, Callable[[_Config], ModelFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "mini-infer": _mixed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
}
