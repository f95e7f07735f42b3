"""How folders hold quantized weights: from a config.json's `quantization_config` to each projection's tensors.

    compressed-tensors   llm-compressor: int8, int4 and fp8, packed or a code a byte; also scales of keys and values
    gptq                 AutoGPTQ, GPTQModel (Frantar et al. 2022, arXiv:2210.17323): words of codes along the inputs
    awq                  AutoAWQ (Lin et al. 2023, arXiv:2306.00978): words of codes along the outputs
    fp8                  DeepSeek-V3's and Qwen3's blocks (arXiv:2412.19437), and a scale a tensor

An unquantized folder whose weights are quantized while they are loaded is one more: `Rounded`. What a config says is
read in quantization/checkpoint_config.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.errors import ModelError
from mini_infer.quantization.formats import Number, Quantized, Scheme, WeightFormat, encode, quantize
from mini_infer.quantization.packing import AWQ_PLACES, unpack_words

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALAR = ((), (1,), (1, 1))


@dataclass(frozen=True)
class Stored:
    """A tensor that a folder has of a projection.

    Attributes:
        shapes: it has one of these.
        required: the folder is not whole without it.
        used: it becomes part of the weight; else it may be there, and is passed over.
        whole: it is about all inputs, also where ranks have some of them.
        says_shape: it holds the weight's shape.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    required: bool = True
    used: bool = True
    whole: bool = False
    says_shape: bool = False


class Read(NamedTuple):
    """
    Attributes:
        order: [K] int64, the column of x that each column of the weight is for, where columns are sorted by group
            (act-order); None: its own.
    """

    weight: Quantized
    order: Tensor | None = None


@dataclass(frozen=True)
class LayerFormat(ABC):
    """How the weight [N, K] of one projection is stored."""

    scheme: Scheme

    @property
    def act_order(self) -> bool:
        """Groups have columns from anywhere."""
        return False

    @abstractmethod
    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        """Name behind the projection's ("weight_scale") -> what is stored. Raises ModelError where a weight of this
        size cannot be."""

    def complete(self, names: Collection[str], out_size: int, in_size: int) -> bool:
        """Whether tensors of these names are enough."""
        return all(name in names for name, stored in self.tensors(out_size, in_size).items() if stored.required)

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        """Of all that is used of what is stored. Raises ModelError where numbers cannot be right.

        Args:
            scale_dtype: of scales in memory, for codes that are made here.
        """


@dataclass(frozen=True)
class Rounded(LayerFormat):
    """Not quantized in the folder: rounded to nearest while it is loaded."""

    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        return {"weight": Stored(((out_size, in_size),))}

    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        weight, form = tensors["weight"], self.scheme.weights
        try:
            quantized = quantize(weight, form)
        except ValueError as error:
            raise ModelError(str(error)) from error
        if form.number is not Number.int4:  # whose scales are float32 in any model
            return Read(quantized)
        # Numbers of bfloat16, as most folders have them, so that models of any dtype have the same weights.
        scales = quantized.scales.bfloat16().float()
        return Read(Quantized(encode(weight, scales, quantized.zeros, form), scales, quantized.zeros))


@dataclass(frozen=True)
class CompressedTensors(LayerFormat):
    """
    Attributes:
        packed: words of codes, for the number of bits; else a code a byte.
        one_scale: for the whole tensor.
        grouped: columns belong to the groups that weight_g_idx says.
    """

    packed: bool = False
    one_scale: bool = False
    grouped: bool = False

    @property
    def act_order(self) -> bool:
        return self.grouped

    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        form = self.scheme.weights
        _require_groups(form, in_size)
        scales: tuple[tuple[int, ...], ...] = (form.scales_shape(out_size, in_size),)
        if form.columns is None:
            scales = (*scales, scales[0][:1])
        whole = _SCALAR if self.one_scale else scales
        found = {"weight_scale": Stored(whole)}
        if self.packed:
            words, groups = -(-in_size // self._in_word), scales[0][1]
            found["weight_packed"] = Stored(((out_size, words),), (torch.int32,))
            found["weight_shape"] = Stored(((2,),), (torch.int64, torch.int32), says_shape=True)
            if not form.symmetric:
                found["weight_zero_point"] = Stored(((-(-out_size // self._in_word), groups),), (torch.int32,))
        else:
            found["weight"] = Stored(((out_size, in_size),), (form.number.code_dtype,))
            if not form.symmetric:
                found["weight_zero_point"] = Stored(whole, (torch.int8,))
        if form.symmetric:
            found["weight_zero_point"] = Stored(whole, (torch.int8, *FLOATS), required=False, used=False)
        if self.grouped:
            found["weight_g_idx"] = Stored(((in_size,),), (torch.int32, torch.int64))
        if outliers := self.scheme.num_outliers(in_size):  # the quantizer's own, beside compressed-tensors
            found["outlier_columns"] = Stored(((outliers,),), (torch.int64,))
            found["outlier_weight"] = Stored(((out_size, outliers),))
        if self.scheme.activations is not None:  # static ones: here a scale is made for each token
            found["input_scale"] = Stored(_SCALAR, required=False, used=False)
            found["input_zero_point"] = Stored(_SCALAR, (torch.int8, *FLOATS), required=False, used=False)
        return found

    @property
    def _in_word(self) -> int:
        return 32 // self.scheme.weights.number.bits

    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        form, scales = self.scheme.weights, _finite(tensors, "weight_scale")
        zeros, bits = tensors.get("weight_zero_point"), form.number.bits
        middle = 1 << (bits - 1)
        if self.packed:
            rows, columns = tensors["weight_shape"].tolist()
            packed = tensors["weight_packed"]
            if rows != len(packed) or -(-columns // self._in_word) != packed.shape[1]:
                raise ModelError(f"weight_shape says {rows} x {columns}, which is not the shape of weight_packed")
            codes = unpack_words(packed, bits)[:, :columns]
            if zeros is not None:
                zeros = unpack_words(zeros.T, bits).T[:rows]
            else:
                codes = (codes.to(torch.int16) - middle).to(torch.int8)
        else:
            codes = _finite(tensors, "weight")
            if zeros is not None:
                codes, zeros = codes + middle, zeros + middle
        scales, zeros = self._of_rows(scales.float(), codes), None if zeros is None else self._of_rows(zeros, codes)
        order = _order(tensors["weight_g_idx"], form) if self.grouped else None
        zeros = None if zeros is None else zeros.to(torch.int8)
        return Read(Quantized(_ordered(codes.view(form.number.code_dtype), order), scales, zeros), order)

    def _of_rows(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Scales or zeros with two dimensions, one a row where there is one for the tensor."""
        if self.one_scale:
            return scales.reshape(1, 1).expand(len(codes), 1)
        return scales[:, None] if scales.dim() == 1 else scales


@dataclass(frozen=True)
class GPTQ(LayerFormat):
    """
    Attributes:
        sorted_columns: desc_act: columns were quantized in order of their activations, and g_idx says to which group
            each belongs.
        first_version: zeros are kept less one.
        bits: of a code. Signed ones are kept with a zero in the middle: 8 or 128.
    """

    sorted_columns: bool = False
    first_version: bool = True

    @property
    def act_order(self) -> bool:
        return self.sorted_columns and self.scheme.weights.columns is not None

    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        form, in_word = self.scheme.weights, 32 // self.scheme.weights.number.bits
        _require_groups(form, in_size)
        _require_words(out_size, in_size, in_word)
        groups = form.scales_shape(out_size, in_size)[1]
        return {
            "qweight": Stored(((in_size // in_word, out_size),), (torch.int32,)),
            "qzeros": Stored(((groups, out_size // in_word),), (torch.int32,)),
            "scales": Stored(((groups, out_size),)),
            "g_idx": Stored(((in_size,),), (torch.int32, torch.int64), required=self.act_order, whole=True),
        }

    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        form, bits = self.scheme.weights, self.scheme.weights.number.bits
        codes, middle = unpack_words(tensors["qweight"].T, bits), 1 << (bits - 1)
        stored = unpack_words(tensors["qzeros"], bits).T.to(torch.int16)
        if self.first_version:
            stored = stored + 1 & (1 << bits) - 1
        zeros = None if form.symmetric else stored.to(torch.int8)
        if form.symmetric:
            if bool((stored != middle).any()):
                raise ModelError(
                    f"qzeros are not all {middle}, as sym=true has them: sym or checkpoint_format of the "
                    "quantization_config is wrong"
                )
            codes = codes.to(torch.int16) - middle
        order = None
        if (g_idx := tensors.get("g_idx")) is not None and form.columns is not None:
            order = _order(g_idx, form)
            if not self.act_order:
                if bool((order != torch.arange(len(order), device=order.device)).any()):
                    raise ModelError("g_idx sorts the columns, and the quantization_config says desc_act=false")
                order = None
        scales = _finite(tensors, "scales").T
        return Read(Quantized(_ordered(codes.to(torch.int8), order), scales.float(), zeros), order)


@dataclass(frozen=True)
class AWQ(LayerFormat):
    """Always with zeros."""

    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        form = self.scheme.weights
        _require_groups(form, in_size)
        _require_words(out_size, in_size, 8)
        groups = form.scales_shape(out_size, in_size)[1]
        return {
            "qweight": Stored(((in_size, out_size // 8),), (torch.int32,)),
            "qzeros": Stored(((groups, out_size // 8),), (torch.int32,)),
            "scales": Stored(((groups, out_size),)),
        }

    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        codes, zeros = (unpack_words(tensors[name], 4, AWQ_PLACES).T.to(torch.int8) for name in ("qweight", "qzeros"))
        return Read(Quantized(codes, _finite(tensors, "scales").T.float(), zeros))


@dataclass(frozen=True)
class FP8Blocks(LayerFormat):
    """Blocks, or one scale a tensor. It is multiplied by, whatever its name."""

    def tensors(self, out_size: int, in_size: int) -> dict[str, Stored]:
        form = self.scheme.weights
        shapes = _SCALAR if self.one_scale else (form.scales_shape(out_size, in_size),)
        found = {"weight": Stored(((out_size, in_size),), (form.number.code_dtype,))}
        found["weight_scale_inv"] = Stored(shapes, required=not self.one_scale)
        if self.one_scale:
            found["weight_scale"] = Stored(shapes, required=False)
        for name in ("activation_scale", "input_scale"):  # static ones: here a scale is made for each token
            found[name] = Stored(_SCALAR, required=False, used=False)
        return found

    def complete(self, names: Collection[str], out_size: int, in_size: int) -> bool:
        return "weight" in names and ("weight_scale_inv" in names or "weight_scale" in names)

    def read(self, tensors: Mapping[str, Tensor], scale_dtype: torch.dtype) -> Read:
        name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        if name not in tensors:
            raise ModelError("it has neither weight_scale_inv nor weight_scale")
        codes, scales = _finite(tensors, "weight"), _finite(tensors, name).float()
        return Read(Quantized(codes, scales.reshape(1, 1).expand(len(codes), 1) if self.one_scale else scales))

    @property
    def one_scale(self) -> bool:
        return self.scheme.weights.columns is None


@dataclass(frozen=True)
class ModelFormat:
    """Of all projections of a model.

    Attributes:
        rules: (a pattern of whole names, how such projections are stored or None where they are not quantized); the
            first that matches counts, and what none matches is not quantized.
        fp8_kv: keys and values are meant to be kept in fp8, and the folder has their scales.
    """

    name: str
    rules: tuple[tuple[str, LayerFormat | None], ...]
    fp8_kv: bool = False
    notes: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerFormat | None:
        """Of the projection of this name: "model.layers.0.mlp.gate_proj"."""
        return next((layer for pattern, layer in self.rules if re.fullmatch(pattern, name)), None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Of the projections that are quantized."""
        return tuple(dict.fromkeys(layer.scheme for _, layer in self.rules if layer is not None))

    def describe(self) -> str:
        """For a run's record: "gptq: int4 weights in groups of 128"."""
        schemes = dict.fromkeys(scheme.describe() for scheme in self.schemes)
        return "; ".join((f"{self.name}: {', '.join(schemes)}", *self.notes))


def _finite(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype.itemsize == 1 and not tensor.dtype.is_floating_point:
        return tensor
    if not bool(torch.isfinite(tensor if tensor.dtype in FLOATS else tensor.to(torch.float16)).all()):
        raise ModelError(f"{name} holds numbers that are not finite: the folder is damaged; fetch or copy it again")
    return tensor


def _order(groups: Tensor, form: WeightFormat) -> Tensor:
    """The columns [K] sorted by their group. Raises ModelError where groups are not all of one size."""
    columns = torch.arange(len(groups), device=groups.device)
    order = groups.argsort(stable=True)
    assert form.columns is not None
    if bool((groups[order] != columns // form.columns).any()):
        raise ModelError(f"g_idx does not put {form.columns} columns into each group")
    return order


def _ordered(codes: Tensor, order: Tensor | None) -> Tensor:
    return codes if order is None else codes[:, order]


def _require_groups(form: WeightFormat, in_size: int) -> None:
    if form.rows == 1 and form.columns is not None and in_size % form.columns:
        raise ModelError(f"groups of {form.columns} columns do not divide its {in_size} inputs: the config is wrong")


def _require_words(out_size: int, in_size: int, in_word: int) -> None:
    if out_size % in_word or in_size % in_word:
        raise ModelError(f"{out_size} outputs and {in_size} inputs do not fill words of {in_word} codes")
