"""Which backend is chosen, and what is said where one cannot serve."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest
import torch

from mini_infer.attention import backend as backends
from mini_infer.attention.backend import AttentionBackend, Capabilities, Requirements, select_backend
from mini_infer.attention.flash_attn import FlashAttnBackend
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.core.config import AttentionChoice
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.limits import AttentionLimits

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def layout(head_size: int, dtype: torch.dtype = torch.bfloat16) -> KVLayout:
    return KVLayout.of_heads(2, 4, head_size, dtype)


def other(**changes: Any) -> Requirements:
    """NEEDS, with the cache's dtype following the queries'."""
    dtype, head_size = changes.get("dtype", torch.bfloat16), changes.pop("head_size", 128)
    return dataclasses.replace(NEEDS, **{"layout": layout(head_size, dtype), **changes})


NEEDS = Requirements(layout=layout(128), block_size=16, dtype=torch.bfloat16, device=CUDA, sliding_window=False)


class Picky(AttentionBackend):
    """Decodes on a Hopper GPU only, and little else."""

    capabilities = Capabilities(
        prefill=None,
        decode=AttentionLimits(
            dtypes=frozenset({torch.bfloat16}), head_sizes=frozenset({64, 128}), block_sizes=frozenset({8, 16})
        ),
        devices=frozenset({"cuda"}),
        sliding_window=False,
        graph_safe=False,
        gpu_generations=frozenset({9}),
    )

    def decode(self, *args: Any) -> Any:
        raise NotImplementedError

    def prefill(self, *args: Any) -> Any:
        raise NotImplementedError


class Absent(Picky):
    def __init__(self) -> None:
        raise ImportError("it is not installed: pip install it")


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def use(monkeypatch: pytest.MonkeyPatch, **classes: type[AttentionBackend]) -> None:
    """Puts classes of this module in the place of backends."""
    for choice, backend in classes.items():
        monkeypatch.setitem(backends.BACKENDS, AttentionChoice[choice], f"{__name__}:{backend.__name__}")


class TestAuto:
    def test_takes_the_first_that_can_and_says_what_it_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, flash_attn=Absent, triton=Picky)
        decode = select_backend(AttentionChoice.auto, "decode", NEEDS)
        assert isinstance(decode.backend, Picky)
        assert (decode.choice, decode.passed_over) == (AttentionChoice.triton, ())
        assert str(decode) == "triton"

        prefill = select_backend(AttentionChoice.auto, "prefill", NEEDS)
        assert isinstance(prefill.backend, SdpaBackend)
        assert prefill.passed_over == ("flash_attn: it has no prefill", "triton: it has no prefill")
        assert str(prefill) == "sdpa (flash_attn: it has no prefill; triton: it has no prefill)"

    def test_the_order_differs_for_prefill_and_decode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        use(monkeypatch, flash_attn=Absent)
        monkeypatch.setattr("mini_infer.kernels.ops.TritonKernels.check", lambda self, device: None)
        decode = select_backend(AttentionChoice.auto, "decode", dataclasses.replace(NEEDS, graphs=True))
        assert (decode.choice, decode.passed_over) == (AttentionChoice.triton, ())
        prefill = select_backend(AttentionChoice.auto, "prefill", other(head_size=256))
        assert prefill.choice is AttentionChoice.triton
        assert prefill.passed_over == ("flash_attn: it has no prefill",)

    def test_is_sdpa_on_a_cpu(self) -> None:
        for kind in backends.AUTO_ORDER["cpu"]:
            selection = select_backend(AttentionChoice.auto, kind, dataclasses.replace(NEEDS, device=CPU))
            assert (selection.choice, selection.passed_over) == (AttentionChoice.sdpa, ())

    def test_names_all_reasons_where_none_can(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, flash_attn=Absent, triton=Absent, sdpa=Picky)
        with pytest.raises(ConfigError, match=r"decode=auto .*triton: it has no slid.*; flash_attn: it has.*; sdpa: "):
            select_backend(AttentionChoice.auto, "decode", dataclasses.replace(NEEDS, sliding_window=True))


class TestRefusal:
    @pytest.mark.parametrize(
        ("kind", "changes", "reason"),
        [
            ("prefill", {}, "it has no prefill"),
            ("decode", {"head_size": 96}, "head sizes 64, 128, not 96"),
            ("decode", {"block_size": 32}, "block sizes 8, 16, not 32"),
            ("decode", {"dtype": torch.float32}, r"torch\.bfloat16, not torch\.float32"),
            ("decode", {"layout": layout(128, torch.float8_e4m3fn)}, r"of the queries' torch\.bfloat16"),
            ("decode", {"layout": KVLayout.alike(2, Plane("latent", (576,), torch.bfloat16))}, "keys and values"),
            ("decode", {"device": CPU}, "runs on cuda, not cpu"),
            ("decode", {"sliding_window": True}, "no sliding window"),
            ("decode", {"graphs": True}, "cannot be captured in a CUDA graph"),
        ],
    )
    def test_a_choice_that_cannot(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, changes: dict[str, Any], reason: str
    ) -> None:
        use(monkeypatch, triton=Picky)
        needs = other(**changes)
        with pytest.raises(ConfigError, match=rf"attention\.{kind}=triton cannot serve.*{reason}.*Others: auto, fl"):
            select_backend(AttentionChoice.triton, kind, needs)

    def test_a_gpu_of_another_generation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        with pytest.raises(ConfigError, match=r"compute capability 9\.x, 10\.x, not 8\.6"):
            select_backend(AttentionChoice.flash_attn, "prefill", NEEDS)

    def test_flash_attn_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
        with pytest.raises(ConfigError, match=r"it is not installed.*pip install -e '\.\[flash\]'"):
            select_backend(AttentionChoice.flash_attn, "prefill", NEEDS)

    def test_triton_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("attention.triton", "kernels.flash_decode", "kernels.paged_decode", "kernels.paged_prefill"):
            monkeypatch.delitem(sys.modules, f"mini_infer.{name}", raising=False)
            monkeypatch.delattr(f"mini_infer.{name}", raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(ConfigError, match=r"triton: it cannot be imported .*triton"):
            select_backend(AttentionChoice.triton, "decode", NEEDS)

    def test_triton_that_cannot_compile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")

        def fails(self: Any, device: torch.device) -> None:
            raise RuntimeError("no C compiler\nset CC")

        monkeypatch.setattr("mini_infer.kernels.ops.TritonKernels.check", fails)
        selection = select_backend(AttentionChoice.auto, "decode", other(dtype=torch.float32))
        assert selection.choice is AttentionChoice.sdpa
        assert selection.passed_over[0] == "triton: it does not work here (RuntimeError: no C compiler)"


def test_what_the_backends_declare() -> None:
    def takes(backend: type[AttentionBackend], **changes: Any) -> bool:
        needs = other(**changes)
        return all(backend.capabilities.refusal(kind, needs) is None for kind in ("prefill", "decode"))

    everything = {"sliding_window": True, "block_size": 1}
    TritonBackend = pytest.importorskip("mini_infer.attention.triton").TritonBackend
    assert takes(SdpaBackend, head_size=80, device=CPU, dtype=torch.float32, **everything)
    assert not takes(SdpaBackend, graphs=True)
    assert takes(TritonBackend, head_size=80, dtype=torch.float32, graphs=True, **everything)
    assert takes(TritonBackend, head_size=100)
    assert not takes(TritonBackend, head_size=512)
    assert takes(FlashAttnBackend, graphs=True, **everything)
    assert not takes(FlashAttnBackend, device=CPU)
    assert not takes(FlashAttnBackend, dtype=torch.float32)
    assert not takes(FlashAttnBackend, head_size=72)


@pytest.mark.parametrize(
    ("choice", "device", "refusal"),
    [
        ("sdpa", CPU, None),
        ("triton", CUDA, None),
        ("batch_invariant", CUDA, None),
        ("flash_attn", CUDA, "queries' torch.bfloat16, alike in all layers, not torch.float8_e4m3fn"),
    ],
)
def test_backends_say_whether_they_take_a_cache_in_fp8(choice: str, device: torch.device, refusal: str | None) -> None:
    if choice not in ("sdpa", "flash_attn"):
        pytest.importorskip("triton")
    module, _, name = backends.BACKENDS[AttentionChoice(choice)].partition(":")
    capabilities = getattr(importlib.import_module(module), name).capabilities
    needs = dataclasses.replace(NEEDS, layout=layout(128, torch.float8_e4m3fn), device=device)
    found = capabilities.refusal("prefill", needs)
    assert found is None if refusal is None else refusal in found


def test_old_gpus_have_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mini_infer.attention.triton import TritonBackend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    needs = dataclasses.replace(NEEDS, layout=layout(128, torch.float8_e4m3fn))
    found = TritonBackend.capabilities.refusal("decode", needs)
    assert found == "it takes torch.float8_e4m3fn on GPUs of compute capability 8.9 and above"
    assert SdpaBackend.capabilities.refusal("decode", needs) is None, "the stated slower path"


def test_flash_attn_takes_keys_and_values_of_two_sizes_where_they_are_deepseeks() -> None:
    limits = FlashAttnBackend.capabilities.prefill
    assert limits is not None
    assert limits.refusal(192, 16, torch.bfloat16, 128) is None
    assert limits.refusal(192, 16, torch.bfloat16, 64) == "it takes keys and values of one size, not 192 and 64"
    assert "it takes head sizes" in str(limits.refusal(192, 16, torch.bfloat16))
