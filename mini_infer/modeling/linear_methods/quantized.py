"""Weights in fewer bits, by whatever scheme and from whatever folder (mini_infer/quantization).

q_proj, k_proj, v_proj of a folder --> LayerFormat.read --> codes, scales, zeros --> rows of one QuantizedWeight
x [T, K] --> columns in the weight's order --> Kernels.quantized_linear --> [T, N]
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.kernels.interface import Gated, Kernels, Part, Places, QKNorm, Stream
from mini_infer.kernels.ops import InvariantKernels, TorchKernels
from mini_infer.modeling.linear_methods.base import (
    Build,
    LinearMethod,
    LinearShape,
    Parallel,
    empty_parameter,
)
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ONE_RANK
from mini_infer.quantization.checkpoints import LayerFormat, Rounded
from mini_infer.quantization.formats import Number
from mini_infer.quantization.packing import pack_int4
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight

logger = logging.getLogger(__name__)

_TILE, _WORD = 128, 8  # inputs and outputs that a folder or a kernel may hold together


@functools.cache
def _say_slow(refusal: str) -> None:
    """Once, not for every layer."""
    logger.warning("some products of quantized weights are computed by torch operations, which is slow: %s", refusal)


class QuantizedLinear(LinearMethod):
    """Parts in one format, one under the other.

    Attributes:
        weight, bias: what is computed with. An output without a scale of its own has that of its part.
        activations: their format; None: they stay as they are.
        order: [K] int64, the columns of x in the order of the weight's; None: in their own.
        outlier_columns, outlier_weight: [n] int64 and [N, n], of the model's dtype: columns of x that are not
            quantized, whose codes are 0, and their part of the weight; both None where there are none.
    """

    def __init__(self, name: str, shape: LinearShape, build: Build, form: LayerFormat) -> None:
        self._name, self._shape, self._build, self._format = name, shape, build, form
        scheme, device = form.scheme, build.device
        weights, rows, columns = scheme.weights, shape.out_size, shape.in_size
        packed = weights.number is Number.int4
        self._scale_dtype = build.dtype if packed else torch.float32
        codes = empty_parameter(
            rows,
            -(-columns // 128) * 64 if packed else columns,
            dtype=torch.uint8 if packed else weights.number.code_dtype,
            device=device,
        )
        scales_shape = weights.scales_shape(rows, columns)
        scales = empty_parameter(*scales_shape, dtype=self._scale_dtype, device=device)
        zeros = None if weights.symmetric else empty_parameter(*scales_shape, dtype=torch.int8, device=device)
        self.weight = QuantizedWeight(codes, scales, zeros, weights)
        self.bias = empty_parameter(rows, dtype=build.dtype, device=device) if shape.bias else None
        self.activations = scheme.activations
        self.order = empty_parameter(columns, dtype=torch.int64, device=device) if form.act_order else None
        self.outlier_columns = self.outlier_weight = None
        if count := scheme.num_outliers(columns):
            self.outlier_columns = empty_parameter(count, dtype=torch.int64, device=device)
            self.outlier_weight = empty_parameter(rows, count, dtype=build.dtype, device=device)
        self._kernels: Kernels = build.kernels
        refusal = build.kernels.quantized_refusal(weights, scheme.activations, columns)
        if refusal is not None:
            if isinstance(build.kernels, InvariantKernels):
                raise ConfigError(f"numerics=batch_invariant: {name or 'a layer'}: {refusal}. Set numerics=fast")
            _say_slow(refusal)
            self._kernels = TorchKernels()
        # A row's scale is made of all its inputs, whoever has them.
        self._rounds_rows = shape.parallel is Parallel.row and scheme.weights.columns is None
        self._read_size = columns * build.parallel.size if self._rounds_rows and isinstance(form, Rounded) else columns
        if build.parallel.size > 1:
            self._require_shareable()
        self._taken: dict[str, dict[str, Tensor]] = {part: {} for part in shape.parts}  # until all are there
        self._placed = False

    def weights(self) -> dict[str, nn.Parameter]:
        codes, scales, zeros, _ = self.weight
        found = {
            "codes": codes,
            "scales": scales,
            "zeros": zeros,
            "bias": self.bias,
            "order": self.order,
            "outlier_columns": self.outlier_columns,
            "outlier_weight": self.outlier_weight,
        }
        return {name: weight for name, weight in found.items() if isinstance(weight, nn.Parameter)}

    def _require_shareable(self) -> None:
        """Raises ConfigError where ranks cannot share the layer, as if they could it would be another one."""
        shape, form, ranks = self._shape, self._format, self._build.parallel.size
        asked = f"parallel.tensor={ranks}: {self._name or 'a layer'}"
        if shape.parallel is Parallel.row:
            if form.act_order:
                raise ConfigError(
                    f"{asked}: ranks cannot share the inputs of a weight with act-order (desc_act=true), whose groups "
                    "have columns from anywhere; take a checkpoint without, or one rank"
                )
            if form.scheme.outliers:
                raise ConfigError(
                    f"{asked}: ranks cannot share the inputs of a weight with outlier columns, which may be anywhere; "
                    "take another scheme, or one rank"
                )
            if self._kernels.num_chunks(shape.in_size * ranks, self._build.dtype) is not None:
                raise ConfigError(
                    f"{asked}: in numerics=batch_invariant ranks share weights that are not quantized alone. Set "
                    "numerics=fast, or take one rank"
                )
            unit = math.lcm(form.scheme.weights.columns or 1, _TILE)
            if shape.in_size % unit:
                raise ConfigError(f"{asked} has {shape.in_size} inputs a rank, no multiple of {unit}: take fewer ranks")
        else:
            unit = math.lcm(form.scheme.weights.rows, _WORD)
            for part, size in shape.parts.items():
                if size % unit and shape.copies.get(part, 1) < ranks:
                    raise ConfigError(f"{asked}: {part} has {size} outputs a rank, no multiple of {unit}: take fewer")

    @property
    def rounds(self) -> bool:
        """Whether its weights are whole in a folder, and rounded as they are read."""
        return isinstance(self._format, Rounded)

    def dequantized(self) -> Tensor:
        """The weight [N, K] that it stands for, float32, its columns in x's order."""
        weight = self.weight.dequantized(self._shape.in_size)
        if self.order is not None:
            weight = weight[:, self.order.argsort()]
        if self.outlier_columns is not None and self.outlier_weight is not None:
            weight[:, self.outlier_columns] = self.outlier_weight.float()
        return weight

    @property
    def takes_gated(self) -> bool:
        return self.activations is not None and not self._rearranged

    def apply(self, x: Tensor | Gated) -> Tensor:
        if isinstance(x, Gated):
            return self._kernels.quantized_linear(self._codes(x), self.weight, self.bias, self.activations)
        if self.order is not None:
            x = x.index_select(1, self.order)
        columns, outliers = self.outlier_columns, None
        if columns is not None and self.outlier_weight is not None:
            outliers = self._kernels.outlier_linear(x.index_select(1, columns), self.outlier_weight)
            x = x.index_fill(1, columns, 0)  # in whose scales the outliers have no part
        elif (gemv := self._gemv_for(x)) is not None:
            return gemv(self._codes(x), self.weight, self.bias)
        return self._kernels.quantized_linear(x, self.weight, self.bias, self.activations, outliers)

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor] | None:
        if self._rearranged:
            return None
        x, total = self._normed(stream)
        if (gemv := self._gemv_for(stream.x)) is not None:
            return gemv(x, self.weight, self.bias, silu_mul=silu_mul), total
        y = self._kernels.quantized_linear(x, self.weight, self.bias, self.activations)
        if silu_mul:  # whoever is next is likely to take codes, too
            return (self._build.kernels.silu_mul(y) if self.activations is None else Gated(y)), total
        return y, total

    def norm_apply_rope(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor] | None:
        gemv = None if self._rearranged or qk_norm is not None else self._gemv_for(stream.x)
        if gemv is None or not self._heads_fit(stream.x.dtype, places):
            return None
        x, total = self._normed(stream)
        return gemv(x, self.weight, self.bias, places=places), total

    def apply_add(self, x: Tensor | Gated, residual: Tensor) -> tuple[Tensor, None] | None:
        if self._rearranged:
            return None
        if (gemv := self._gemv_for(residual)) is not None:
            return gemv(self._codes(x), self.weight, self.bias, residual=residual), None
        if not self._kernels.adds_residual(self.weight, self.activations, len(residual)):
            return None
        return self._kernels.quantized_linear(self._codes(x), self.weight, self.bias, self.activations, residual), None

    @property
    def _rearranged(self) -> bool:
        """Whether x is not what the product takes, but for its format."""
        return self.order is not None or self.outlier_columns is not None

    def _gemv_for(self, x: Tensor | Part) -> Callable[..., Tensor] | None:
        return self._kernels.quantized_gemv(self.weight, self.activations, len(x), x.dtype)

    def _heads_fit(self, dtype: torch.dtype, places: Places) -> bool:
        gemv = self._kernels.gemv
        return gemv is not None and gemv.takes_heads(dtype, places)

    def _codes(self, x: Tensor | Gated) -> Tensor | QuantizedTokens:
        if self.activations is None:
            assert isinstance(x, Tensor)
            return x
        if isinstance(x, Gated):
            return self._kernels.quantize_tokens(x.gate_up, self.activations, silu_mul=True)
        return self._kernels.quantize_tokens(x, self.activations)

    def _normed(self, stream: Stream) -> tuple[Tensor | QuantizedTokens, Tensor]:
        if self.activations is None:
            return self._build.kernels.add_rms_norm(stream)
        return self._kernels.quantized_norm(stream, self.activations)

    # --- loading --------------------------------------------------------------------------------------------------

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        found, start = {}, 0
        for part, size in self._shape.parts.items():
            with self._naming(part):
                stored = self._format.tensors(size, self._read_size)
            for key, tensor in stored.items():
                take = partial(self._take, part, key) if tensor.used else _pass_over
                if tensor.says_shape:
                    take = partial(self._take_shape, part, key)
                found[f"{part}.{key}"] = CheckpointTensor(
                    tensor.shapes[0],
                    take,
                    tensor.dtypes,
                    required=tensor.required,
                    other_shapes=tensor.shapes[1:],
                    whole=tensor.whole,
                )
            if self.bias is not None:
                found[f"{part}.bias"] = CheckpointTensor.copied_to(self.bias[start : start + size])
            elif not isinstance(self._format, Rounded):  # some quantizers write biases of zeros
                found[f"{part}.bias"] = CheckpointTensor((size,), partial(self._require_zeros, part), required=False)
            start += size
        return found

    def loaded(self) -> None:
        if not self._placed:
            self._place(self._taken, self._format)

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """What the layer would have unquantized, rounded: a model in fp32 is a reference for it."""
        shape = self._shape
        if self._rounds_rows:
            shape = replace(shape, in_size=shape.in_size * self._build.parallel.size)
        plain = Unquantized.create(self._name, shape, replace(self._build, parallel=ONE_RANK))
        plain.fill_dummy(draw)
        self.round(plain.weight, plain.bias)

    def round(self, weight: Tensor, bias: Tensor | None) -> None:
        """Takes weight [N, K], rounded to nearest, and bias [N] of the unquantized layer; or with all ranks' inputs."""
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)
        parts = weight.split(list(self._shape.parts.values()))
        tensors = {part: {"weight": own} for part, own in zip(self._shape.parts, parts, strict=True)}
        self._place(tensors, Rounded(self._format.scheme))

    def _take_shape(self, part: str, key: str, tensor: Tensor) -> None:
        """Of the whole weight: what is said of the rank's part is its own."""
        own, said = (self._shape.parts[part], self._shape.in_size), tensor.tolist()
        ranks = range(1, self._build.parallel.size + 1)
        if any(number not in [size * n for n in ranks] for number, size in zip(said, own, strict=True)):
            raise ModelError(f"{self._name}.{part}: {key} says {said[0]} x {said[1]}, which is not the weight's shape")
        self._take(part, key, torch.tensor(own))

    def _take(self, part: str, key: str, tensor: Tensor) -> None:
        """Keeps it until the layer has all it needs: then the layer is placed, so that no more than a few wait."""
        if self._placed:  # one that need not be there, from another file: an order of the columns
            if bool((tensor.diff() < 0).any()):
                raise ModelError(f"{part}.{key} sorts the columns, which the config does not say")
            return
        self._taken[part][key] = tensor.to(self._build.device)
        sizes = self._shape.parts.items()
        if all(self._format.complete(self._taken[name], size, self._shape.in_size) for name, size in sizes):
            self._place(self._taken, self._format)

    def _place(self, tensors: Mapping[str, Mapping[str, Tensor]], form: LayerFormat) -> None:
        codes, scales, zeros, own = self.weight
        if self.outlier_columns is not None:
            if isinstance(form, Rounded):
                tensors = self._without_outliers(tensors)
            else:
                self._take_outliers(tensors)
        orders, start = [], 0
        for part, size in self._shape.parts.items():
            with self._naming(part):
                weight, order = form.read(tensors[part], self._scale_dtype)
            orders.append(torch.arange(self._shape.in_size, device=codes.device) if order is None else order)
            rows = slice(start, start + size)
            new = weight.codes
            if new.shape[1] > self._shape.in_size:
                new = new[:, self._build.parallel.part(new.shape[1], self._shape.in_size)]
            if own.number is Number.int4:
                new = pack_int4(new, own.symmetric)
            codes[rows] = new
            high = slice(start // own.rows, -(-(start + size) // own.rows))
            scales[high] = weight.scales.to(scales.dtype)
            if zeros is not None and weight.zeros is not None:
                zeros[high] = weight.zeros
            start += size
        if self.order is not None:
            if any(not torch.equal(order, orders[0]) for order in orders):
                raise ModelError(
                    f"{self._name}: {', '.join(self._shape.parts)} have different orders of columns (g_idx), and are "
                    "computed in one product; take a checkpoint with desc_act=false"
                )
            self.order.copy_(orders[0])
        self._taken, self._placed = {}, True

    def _without_outliers(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Sets the columns with the largest weights apart."""
        assert self.outlier_columns is not None
        assert self.outlier_weight is not None
        weight = torch.cat([tensors[part]["weight"] for part in self._shape.parts])
        largest = weight.abs().amax(0).float().topk(len(self.outlier_columns)).indices.sort().values
        self.outlier_columns.copy_(largest)
        self.outlier_weight.copy_(weight[:, largest])
        rest = weight.index_fill(1, largest, 0).split(list(self._shape.parts.values()))
        return {part: {"weight": own} for part, own in zip(self._shape.parts, rest, strict=True)}

    def _take_outliers(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        assert self.outlier_columns is not None
        assert self.outlier_weight is not None
        parts = [tensors[part] for part in self._shape.parts]
        columns = parts[0]["outlier_columns"]
        if any(not torch.equal(part["outlier_columns"], columns) for part in parts):
            raise ModelError(
                f"{self._name}: {', '.join(self._shape.parts)} have different outlier_columns, and are computed in one "
                "product; quantize the folder again with mini-infer-quantize"
            )
        if not bool(((columns >= 0) & (columns < self._shape.in_size)).all()):
            raise ModelError(f"{self._name}: outlier_columns must be from 0 to {self._shape.in_size - 1}")
        self.outlier_columns.copy_(columns)
        self.outlier_weight.copy_(torch.cat([part["outlier_weight"] for part in parts]))

    def _require_zeros(self, part: str, bias: Tensor) -> None:
        if bias.any():
            raise ModelError(f"{self._name}.{part}.bias is not zero, and this architecture has none there")

    @contextlib.contextmanager
    def _naming(self, part: str) -> Iterator[None]:
        """What is wrong inside is wrong with that part."""
        try:
            yield
        except ModelError as error:
            raise ModelError(f"{self._name}.{part}: {error}") from error


def _pass_over(tensor: Tensor) -> None:
    """It is known, and nothing becomes of it."""
