"""What the flash_attn backend does around the package, with a package that only notes how it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_infer.attention.flash_attn import _Kernels


class Package:
    """Calls its kernel as flash-attn-4 does on Hopper, with `extra` as one more argument."""

    def __init__(self, extra: Any = None) -> None:
        self.calls = self.launches = self.others = 0
        self.extra = extra
        self.compile_cache = {"key": self.kernel}

    def kernel(self, *arguments: Any) -> None:
        self.launches += 1
        q, keys, values, out, _, scale, starts, _, _, lens, tables, left, right = arguments[:13]
        assert len(arguments) == 17
        assert arguments[15] == (None, None)
        assert right == (0 if left is not None else None)
        found = q * scale + keys.sum() + values.sum() + starts.sum() + lens.sum() + tables.sum() + (left or 0)
        out[self.others :] = found[self.others :]

    def __call__(self, q: Any, keys: Any, values: Any, **options: Any) -> tuple:
        assert options["causal"]
        self.calls += 1
        out, left = options["out"], options["window_size_left"]
        out = torch.empty(q.shape) if out is None else out
        if q.shape[0]:
            self.compile_cache["key"](
                q.detach(), keys.detach(), values.detach(), out.detach(), None, options["softmax_scale"],
                options["cu_seqlens_q"], None, None, options["seqused_k"], options["page_table"], left,
                None if left is None else 0, None, None, (None, None), self.extra,
            )  # fmt: skip
        return out, None


def attend(kernels: _Kernels, tokens: int, rows: int = 2, window: int | None = None) -> None:
    """Calls with random arguments and checks the result."""
    q, keys, values = torch.randn(tokens, 4, 8)[:, :2], torch.randn(3, 4, 1, 8), torch.randn(3, 4, 1, 8)
    starts, lens, tables = (torch.randint(9, shape) for shape in ((rows + 1,), (rows,), (rows, 5)))
    scale = torch.rand(()).item()
    out = kernels(q, keys, values, tables, starts, lens, scale=scale, window=window)
    total = keys.sum() + values.sum() + starts.sum() + lens.sum() + tables.sum()
    torch.testing.assert_close(out, q * scale + total + (window - 1 if window else 0))


def test_the_result_lands_where_it_is_wanted() -> None:
    kernels = _Kernels(Package())
    q, keys = torch.randn(3, 2, 8), torch.randn(3, 4, 1, 8)
    ones = torch.ones(3, dtype=torch.int32)
    for _ in range(2):  # through the package, and on its kernel alone
        out = torch.zeros(5, 2, 8)
        result = kernels(q, keys, keys, ones[:, None], ones, ones, scale=1.0, window=None, out=out[2:])
        assert result.data_ptr() == out[2:].data_ptr()
        torch.testing.assert_close(out[2:], q + 2 * keys.sum() + 9)
        assert not out[:2].any()


@pytest.mark.parametrize("extra", [None, 7])
def test_what_is_of_no_row_is_left_alone(extra: Any) -> None:
    """Whether the package allocates or not: a captured step has decode rows in front of its prompts."""
    package = Package(extra)
    package.others = 2
    kernels, ones = _Kernels(package), torch.ones(3, dtype=torch.int32)
    q, keys, out = torch.randn(3, 2, 8), torch.randn(3, 4, 1, 8), torch.full((3, 2, 8), 7.0)
    for _ in range(2):
        kernels(q, keys, keys, ones[:, None], ones, ones, scale=1.0, window=None, out=out)
        assert (out[:2] == 7.0).all()
        assert (out[2] != 7.0).all()


def test_only_the_first_call_of_a_variant_goes_through_the_package() -> None:
    package = Package()
    kernels = _Kernels(package)
    for tokens in (3, 1, 70):
        attend(kernels, tokens)
    assert (package.calls, package.launches) == (1, 3)
    for window in (5, 9, 1):
        attend(kernels, 3, window=window)
    assert (package.calls, package.launches) == (2, 6)
    attend(kernels, 400, rows=300)
    assert package.calls == 3, "many rows are a variant of their own"
    assert list(package.compile_cache) == ["key"], "the package has its own cache back"


@pytest.mark.parametrize("extra", [torch.zeros(2), 7])
def test_a_kernel_that_is_called_with_more_is_left_to_the_package(extra: Any) -> None:
    package = Package(extra)
    kernels = _Kernels(package)
    for tokens in (3, 1, 70):
        attend(kernels, tokens)
    assert package.calls == 3


def test_a_step_without_tokens_says_nothing_about_the_kernel() -> None:
    package = Package()
    kernels = _Kernels(package)
    for tokens in (0, 3, 4):
        attend(kernels, tokens)
    assert (package.calls, package.launches) == (2, 2)
