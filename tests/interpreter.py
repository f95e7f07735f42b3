"""Triton's interpreter without the work that it does again at every operation; what it computes is the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def prepare(patch: pytest.MonkeyPatch) -> interpreter._LangPatchScope:
    """Makes kernels take less than half of their time. Undone by the scope's `restore` and by `patch`."""
    _prepare_operators(patch)

    # Its own functions come into triton.language once, and not whenever a device function is called.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())

    # Whether a sum of integers overflows is computed for an assertion that is only made with debug.
    assert not interpreter.interpreter_builder.options.debug
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)

    patch.setattr(interpreter, "_convert_float", _converted_at_once(interpreter._convert_float))

    # Each value has one of a few types.
    patch.setattr(interpreter, "_get_np_dtype", _once_a_name(interpreter._get_np_dtype))
    blocks = dict[tuple[str, str], Any]()
    with_element_type = core.block_type.with_element_ty

    def block_of(self: Any, element: Any) -> Any:
        key = self.name, element.name
        if key not in blocks:
            blocks[key] = with_element_type(self, element)
        return blocks[key]

    patch.setattr(core.block_type, "with_element_ty", block_of)
    get_block, made = interpreter.InterpreterBuilder.get_block_ty, dict[tuple[str, tuple[int, ...]], Any]()

    def get_block_once(self: Any, element: Any, shape: Any) -> Any:
        key = element.name, tuple(shape)
        if key not in made:
            made[key] = get_block(self, element, shape)
        return made[key]

    patch.setattr(interpreter.InterpreterBuilder, "get_block_ty", get_block_once)
    make_tensor = core.tensor.__init__
    shapes = dict[str, tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    patch.setattr(core.tensor, "__init__", init)
    return scope


def _prepare_operators(patch: pytest.MonkeyPatch) -> None:
    """What comes of two types, a block and a number, or two shapes is found out once."""
    call_with, no_argument = interpreter.interpreter_semantic, object()

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the question whether `_semantic` is there

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = call_with
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    patch.setattr(interpreter, "_patch_attr", patch_attr)

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = no_argument) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is no_argument else attr

    patch.setattr(interpreter.TensorHandle, "__init__", make_handle)
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    shaped = dict[tuple[str, str], tuple[Any, Any]]()

    def broadcast_once(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        names = one.type.name, other.type.name
        if names[0] == names[1]:
            return one, other
        if names not in shaped:
            both = broadcast(self, one, other)
            if one.type.is_block() and other.type.is_block() and len(one.shape) == len(other.shape):
                shaped[names] = tuple(each.type for each in both)
            return both
        return tuple(
            each
            if each.type.name == wanted.name
            else self.tensor(self.builder.create_broadcast(each.handle, wanted.shape.values), wanted)
            for each, wanted in zip((one, other), shaped[names], strict=True)
        )

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_once)
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    plain = {"fp32": (int, float), "int32": (int,), "int64": (int,)}  # and the numbers that become of these types
    offsets = plain.keys() - {"fp32"}  # from pointers

    def number_like(self: Any, number: Any, block: Any) -> Any:
        """None where Triton's own rules decide."""
        scalar = block.type.scalar
        if type(number) not in plain.get(scalar.name, ()):
            return None
        if scalar.name != "fp32" and not -(2**31) <= number < 2**31:
            return None
        numpy_type = interpreter._get_np_dtype(scalar)
        data = np.full(block.handle.data.shape, number or 0, numpy_type)
        return self.tensor(interpreter.TensorHandle(data, scalar), block.type)

    def check_fast(self: Any, one: Any, other: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
        if type(one) is core.tensor:
            if type(other) is core.tensor:
                left, right = one.type.scalar, other.type.scalar
                if (left.name in plain and left.name == right.name) or (
                    left.is_ptr() and rest and right.name in offsets
                ):
                    return (one, other) if one.shape == other.shape == () else self.broadcast_impl_value(one, other)
            elif (made := number_like(self, other, one)) is not None:
                return one, made
        elif type(other) is core.tensor and (made := number_like(self, one, other)) is not None:
            return made, other
        return check(self, one, other, *rest, **more)

    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", check_fast)


def _once_a_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known = dict[str, Any]()

    def call(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = function(type)
        return known[type.name]

    return call


def _converted_at_once(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Numbers of 8 and 16 bits are looked up among all that there are; of a float32 the upper half is its bfloat16."""
    tables = dict[tuple[str, str, Any], np.ndarray]()

    def call(numbers: np.ndarray, given: Any, wanted: Any, rounding: Any) -> np.ndarray:
        size = given.primitive_bitwidth
        codes = numbers.view(f"uint{size}")
        if size <= 16:
            key = given.name, wanted.name, rounding
            if key not in tables:
                tables[key] = convert(np.arange(2**size, dtype=codes.dtype), given, wanted, rounding)
            return tables[key][codes]
        if rounding is None and (given.name, wanted.name) == ("fp32", "bf16"):
            subnormal = (codes & 0x7F800000 == 0) & (codes & 0x007FFFFF != 0)  # which the interpreter turns into others
            if not subnormal.any():
                return (codes >> 16).astype(np.uint16)
        return convert(numbers, given, wanted, rounding)

    return call
