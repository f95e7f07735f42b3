"""A decoder of transformers of which one layer at a time is in memory.

Quantizing needs each layer's true inputs, for any decoder that transformers loads. Its own modules compute them: our
Decoder knows a few architectures alone, and computes packed rows against a paged cache. The modules are made without
memory, and a part is filled from the safetensors when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mini_infer.core.errors import ModelError
from mini_infer.modeling.checkpoint import checkpoint_dtype
from mini_infer.modeling.model_files import read_json, safetensors_files


class StreamedDecoder:
    """
    Attributes:
        layers: the decoder's layers, in order; without memory but in `loaded`.
        dtype: of the checkpoint.
        layer_names: of each, as in the checkpoint: "model.layers.0".
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ModelError where transformers has no such decoder, or `folder` is quantized already."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if read_json(folder / "config.json").get("quantization_config") is not None:
            raise ModelError(f"{folder} is quantized already (its config.json has a quantization_config): give the "
                             "folder that it was made from")  # fmt: skip
        try:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(folder, local_files_only=True)
                self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except (ValueError, KeyError, OSError) as error:
            raise ModelError(f"{folder}: transformers cannot make this model: {error}") from error
        self.config, self._device = config, device
        self.dtype = checkpoint_dtype(folder)
        self._decoder = self._model.get_decoder()
        for module in self._decoder.modules():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # of positions: files do not hold them
                module.to_empty(device=device, recurse=False)
                self._model._init_weights(module)
        lists = [name for name, m in self._decoder.named_children() if isinstance(m, nn.ModuleList)]
        found = [name for name in lists if len(getattr(self._decoder, name)) == config.num_hidden_layers]
        if len(found) != 1:
            raise ModelError(f"{folder}: {type(self._decoder).__name__} has no list of its "
                             f"{config.num_hidden_layers} layers; it cannot be quantized layer by layer")  # fmt: skip
        self._list_name = found[0]
        self.layers: nn.ModuleList = getattr(self._decoder, found[0])
        names = {id(module): name for name, module in self._model.named_modules()}
        self.layer_names = [names[id(layer)] for layer in self.layers]
        self._files = {name: file for file in safetensors_files(folder) for name in _names(file)}
        self._folder = folder

    def linear_names(self) -> list[str]:
        """Of all linear layers, also those outside of its layers."""
        return [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]

    def other_names(self) -> list[str]:
        """Of the checkpoint's tensors that are no layer's."""
        prefixes = tuple(f"{name}." for name in self.layer_names)
        return [name for name in self._files if not name.startswith(prefixes)]

    @contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """A layer with its weights, in float32."""
        layer = self.layers[index]
        self._fill(layer, self.layer_names[index])
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.no_grad()
    def inputs(self, ids: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
        """ids [B, L] -> hidden states before the first layer [B, L, H] in float32, and what each layer is told beside
        its hidden states (positions, masks), which is the same for every row. Raises ModelError where it is not."""
        root = next(name for name, module in self._model.named_modules() if module is self._decoder)
        outside = [
            (f"{root}.{name}" if root else name, module)
            for name, module in self._decoder.named_children()
            if module is not self.layers
        ]
        for name, module in outside:
            self._fill(module, name)
        recorders = [_Recorder(layer) for layer in self.layers]
        setattr(self._decoder, self._list_name, nn.ModuleList(recorders))
        try:
            hidden = []
            for row in ids:
                before = [dict(recorder.told) for recorder in recorders]
                self._decoder(input_ids=row[None].to(self._device), use_cache=False)
                hidden.append(recorders[0].hidden)
                if len(hidden) > 1 and not all(_same(b, r.told) for b, r in zip(before, recorders, strict=True)):
                    raise ModelError(f"{self._folder}: its layers are told more of the tokens than hidden states; it "
                                     "cannot be quantized layer by layer")  # fmt: skip
        finally:
            setattr(self._decoder, self._list_name, self.layers)
            for _, module in outside:
                if any(True for _ in module.parameters()):
                    module.to("meta")
        return torch.cat(hidden), [recorder.told for recorder in recorders]

    def _fill(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in list(module.named_parameters()):
            whole = f"{prefix}.{name}"
            if whole not in self._files:
                raise ModelError(
                    f"{self._folder} has no tensor {whole}: its files name weights otherwise than transformers' "
                    "modules. Load it with transformers and save_pretrained it first"
                )
            value = self.tensor(whole)
            if value.shape != parameter.shape:
                raise ModelError(f"{whole} has shape {tuple(value.shape)}; the config asks for "
                                 f"{tuple(parameter.shape)}")  # fmt: skip
            if not bool(torch.isfinite(value).all()):
                raise ModelError(f"{whole} holds values that are not finite: it cannot be quantized. Fetch the folder "
                                 "again, or mend what wrote it")  # fmt: skip
            owner, _, last = name.rpartition(".")
            filled = nn.Parameter(value.to(self._device, torch.float32), requires_grad=False)
            setattr(module.get_submodule(owner), last, filled)

    def tensor(self, name: str) -> Tensor:
        """Of the checkpoint, as its file has it."""
        with safe_open(self._files[name], framework="pt", device="cpu") as tensors:
            return tensors.get_tensor(name)


class _Recorder(nn.Module):
    """In a layer's place: it keeps what the layer would be called with, and passes the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # no child: it is not to be found among the modules
        self.told: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def forward(self, hidden_states: Tensor, **told: Any) -> Tensor:
        self.hidden, self.told = hidden_states, told
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)  # of which type its attention is, say


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt", device="cpu") as tensors:
        return list(tensors.keys())
