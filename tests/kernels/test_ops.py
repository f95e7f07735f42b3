from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reimported import reimported
from torch import Tensor

from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import KernelChoice, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.kernels import ops
from mini_infer.kernels.interface import Kernels, Norm, Places, Stream
from mini_infer.kernels.ops import TorchKernels, TritonKernels, select_kernels
from mini_infer.modeling.layers import Linear
from mini_infer.modeling.linear_methods.base import Build, Parallel
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.rope import RopeSpec, RotaryTable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "mlp_bias": True}

# (start, count, block table) of each row: two decode rows, a chunk that goes on, a prompt; blocks of 4.
PAST = [(0, 9, [5, 1, 7]), (0, 2, [0]), (0, 5, [3, 9])]
ROWS = [(9, 1, [5, 1, 7]), (2, 1, [0]), (5, 3, [3, 9]), (0, 6, [2, 8])]


class Model:
    """Random weights, the same for every `kernels`, over a cache of its own."""

    def __init__(self, values: dict[str, Any], kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        config = ModelConfig(load_format="dummy", hf_config=SHAPE | values)
        self.spec = load_spec(config)
        self.model = load_model(config, self.spec, dtype, device, kernels=kernels)
        for parameter in self.model.parameters():
            parameter.data.mul_(5)  # not so small that every activation is close to linear
        self.store = KVStore(KVLayout.of_heads(2, 1, 32, dtype), num_blocks=10, block_size=4, device=device)

    @torch.inference_mode()
    def step(self, batch: AttentionBatch) -> Tensor:
        device = self.store.device
        backend = SdpaBackend()
        attention = ModelAttention(self.store, self.spec.windows, self.spec.attention.scale)
        context = AttentionContext(batch, attention, backend, backend)
        tokens = torch.arange(batch.num_tokens, device=device) * 7 % SHAPE["vocab_size"]
        return self.model.compute_logits(self.model.forward(tokens, batch.positions, context))


# The interpreter cuts bfloat16 off instead of rounding it, which adds up over a model.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 3e-2, marks=pytest.mark.gpu)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("values", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_a_model_computes_the_same(
    values: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    step_rows: Callable[..., AttentionBatch],
    device: torch.device,
) -> None:
    pytest.importorskip("triton")
    fused, plain = (Model(values, kernels, dtype, device) for kernels in (TritonKernels(), TorchKernels()))
    for rows, num_decode_rows in ((PAST, 0), (ROWS, 2)):
        step = step_rows(rows, num_decode_rows, 4, unused_block=0, device=device)
        logits, expected = fused.step(step), plain.step(step)
        assert logits.dtype == dtype
        assert expected.float().std() > 0.1
        assert (logits - expected).float().norm() / expected.float().norm() < tolerance
        assert (fused.store.tensors[0] - plain.store.tensors[0]).float().norm() / plain.store.tensors[
            0
        ].float().norm() < tolerance
        assert torch.equal(fused.store.tensors[0] == 0, plain.store.tensors[0] == 0), "the same slots are written"


class Counted:
    """TritonKernels that take gemv for small batches of any dtype, and name the operations that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels, self.names = TritonKernels(), list[str]()
        products, rows = self.kernels.gemv, 4
        monkeypatch.setattr(products, "worth_it", lambda t, n, k, dtype: t <= rows)
        operations = {"_rms_norm": self.kernels, "_add_rms_norm": self.kernels, "silu_mul": self.kernels}
        operations |= {"rope_and_store": self.kernels, "gemv": products, "qkv_gemv": products}
        for name, owner in operations.items():
            monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.names.append(name)
            return operation(*args, **options)

        return call


@pytest.mark.parametrize(
    ("values", "before_attention"),
    [(LLAMA, ["qkv_gemv"]), (QWEN3, ["gemv", "rope_and_store"])],
    ids=["llama", "qwen3, with QK-norm"],
)
def test_a_small_step_is_made_of_fewer_kernels(
    values: dict[str, Any],
    before_attention: list[str],
    step_rows: Callable[..., AttentionBatch],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    pytest.importorskip("triton")
    counted = Counted(monkeypatch)
    values = values | {"intermediate_size": 48}
    fused, plain = (Model(values, kernels, torch.float32, device) for kernels in (counted.kernels, TorchKernels()))
    for parameter in fused.model.parameters():
        parameter.data = parameter.data.contiguous()  # as on a GPU
    # Prompts, which take the kernels of large steps; then a row of one token and one of two.
    for rows, num_decode_rows in ((PAST, 0), ([(9, 1, [5, 1, 7]), (5, 2, [3, 9])], 1)):
        step = step_rows(rows, num_decode_rows, 4, unused_block=0, device=device)
        counted.names.clear()
        logits, expected = fused.step(step), plain.step(step)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused.store.tensors[0], plain.store.tensors[0], rtol=1e-4, atol=1e-4)
    layer = [*before_attention, "gemv", "gemv", "gemv"]
    assert counted.names == 2 * layer + ["_rms_norm", "gemv"]


def linear(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> Linear:
    build = Build(weight.dtype, weight.device, kernels, Unquantized.create)
    layer = Linear("", weight.shape[1], {"part": weight.shape[0]}, bias is not None, Parallel.column, build)
    for parameter, values in zip(layer.parameters(), (weight, bias), strict=False):
        parameter.data = values.contiguous()  # as on a GPU
    return layer


def small(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, residual, norm weight, weight and bias."""
    sizes = ((tokens, 40), (tokens, 40), (40,), (24, 40), (24,))
    x, residual, norm_weight, weight, bias = (torch.randn(size, device=device) for size in sizes)
    return x, residual, norm_weight, weight, bias


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_a_product_of_a_stream_with_and_without_its_sum(
    silu_mul: bool, tokens: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    x, residual, *rest = small(tokens, device)
    norm_weight, weight, bias = rest
    for kernels in (TorchKernels(), Counted(monkeypatch).kernels):
        for pending in (None, residual):
            y, total = linear(kernels, weight, bias).of_stream(Stream(x, pending, Norm(norm_weight, 1e-6)), silu_mul)
            torch.testing.assert_close(total, x if pending is None else pending + x)
            expected = torch.nn.functional.rms_norm(total, (40,), norm_weight, 1e-6) @ weight.T + bias
            if silu_mul:
                gate, up = expected.chunk(2, dim=-1)
                expected = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "head_dim", "cache", "fused"),
    [
        (2, 16, torch.float32, True),
        (5, 16, torch.float32, False),
        (2, 8, torch.float32, False),
        (2, 16, torch.bfloat16, False),
    ],
    ids=["fits", "many tokens", "small heads", "cache of another dtype"],
)
@pytest.mark.parametrize("pending", [False, True])
def test_heads_of_a_stream_are_its_product_and_rope_and_store(
    pending: bool,
    tokens: int,
    head_dim: int,
    cache: torch.dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    pytest.importorskip("triton")
    x, residual, norm_weight, *_ = small(tokens, device)
    weight = torch.randn(5 * head_dim, 40, device=device) / 40**0.5
    cos, sin = RotaryTable(RopeSpec(1e4), head_dim, 9, x.dtype, device)(torch.arange(tokens, device=device) + 3)
    results = []
    counted = Counted(monkeypatch)
    for kernels in (TorchKernels(), counted.kernels):
        keys, values = torch.zeros(
            2, 9, 1, head_dim, dtype=x.dtype if kernels.name == "torch" else cache, device=device
        )
        places = Places(cos, sin, torch.arange(tokens, device=device) + 2, keys, values)
        stream = Stream(x, residual if pending else None, Norm(norm_weight, 1e-6))
        q, total = linear(kernels, weight).heads_of_stream(stream, None, places)
        results.append((q, total, keys.float(), values.float()))
    assert ("qkv_gemv" in counted.names) == fused
    assert ("rope_and_store" in counted.names) == (not fused)
    tolerance = 1e-4 if cache == torch.float32 else 2e-2
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [2, 5])
def test_adding_to_a_stream_leaves_the_arguments(
    tokens: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    x, _, _, weight, bias = small(tokens, device)
    residual = torch.randn(tokens, 24, device=device)
    before = residual.clone()
    for kernels, adds in ((TorchKernels(), False), (Counted(monkeypatch).kernels, tokens <= 4)):
        y, pending = linear(kernels, weight, bias).add_to_stream(x, residual)
        assert (pending is None) == adds
        total = y if pending is None else pending + y
        torch.testing.assert_close(total, before + x @ weight.T + bias, rtol=1e-4, atol=1e-4)
        assert torch.equal(residual, before)


class TestSelect:
    @pytest.mark.parametrize("choice", [KernelChoice.auto, KernelChoice.torch])
    def test_a_cpu_gets_torch(self, choice: KernelChoice) -> None:
        kernels = select_kernels(choice, CPU)
        assert (kernels.name, kernels.fallback) == ("torch", None)

    def test_triton_where_it_runs(self, device: torch.device) -> None:
        pytest.importorskip("triton")
        kernels = select_kernels(KernelChoice.triton, device)
        assert (kernels.name, kernels.fallback) == ("triton", None)
        if device.type == "cuda":
            assert select_kernels(KernelChoice.auto, device).name == "triton"

    def test_triton_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr(ops, "_interpreted", lambda: False)
        with pytest.raises(ConfigError, match=r"model\.kernels=triton: .*not on cpu.*TRITON_INTERPRET=1.*or torch"):
            select_kernels(KernelChoice.triton, CPU)

    def test_no_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def init(self: TritonKernels) -> None:
            raise ModuleNotFoundError("No module named 'triton'")

        monkeypatch.setattr(TritonKernels, "__init__", init)
        with pytest.raises(ConfigError, match=r"cannot be imported \(No module named 'triton'\).*model\.kernels=auto"):
            select_kernels(KernelChoice.triton, CUDA)
        kernels = select_kernels(KernelChoice.auto, CUDA)
        assert kernels.name == "torch"
        assert kernels.fallback == "triton: Triton cannot be imported (No module named 'triton')"

    def test_triton_that_does_not_compile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")

        def check(self: TritonKernels, device: torch.device) -> None:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

        monkeypatch.setattr(TritonKernels, "check", check)
        with pytest.raises(ConfigError, match=r"cannot compile .*RuntimeError: Failed to find C compiler\.\)"):
            select_kernels(KernelChoice.triton, CUDA)
        kernels = select_kernels(KernelChoice.auto, CUDA)
        assert kernels.name == "torch"
        assert kernels.fallback is not None
        assert "C compiler" in kernels.fallback

    def test_wrong_results_are_found(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        pytest.importorskip("triton")
        kernels = TritonKernels()
        monkeypatch.setattr(kernels, "silu_mul", lambda gate_up: gate_up + 1)
        with pytest.raises(RuntimeError, match="silu_mul"):
            kernels.check(device)


def test_the_model_needs_no_triton() -> None:
    """As on Windows and macOS."""
    code = (
        "import torch, mini_infer.modeling.loader\n"
        "from mini_infer.core.config import KernelChoice\n"
        "from mini_infer.kernels.ops import select_kernels\n"
        "fallback = select_kernels(KernelChoice.auto, torch.device('cuda')).fallback\n"
        "assert fallback.startswith('triton: Triton cannot be imported'), fallback\n"
    )
    assert reimported(code, without=["triton"]) == 0


def test_linear(device: torch.device) -> None:
    x, weight, bias = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device), torch.randn(5, device=device)
    for kernels in (TorchKernels(), select_kernels(KernelChoice.auto, device)):
        for method, expected in (
            (linear(kernels, weight, bias).method, x @ weight.T + bias),
            (linear(kernels, weight).method, x @ weight.T),
        ):
            torch.testing.assert_close(method.apply(x), expected)
            out = torch.empty(4, 5, device=device)[:3]
            assert method.apply(x, out) is out
            torch.testing.assert_close(out, expected)
