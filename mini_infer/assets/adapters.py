"""Random adapters of a model, as PEFT would write them: to try adapters, to test and to measure them.

python -m mini_infer.assets.adapters tiny-target my-adapter --rank 16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.loader import load_spec


class _Shapes:
    """Stands where Adapters stand while a model is outlined."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}  # module -> inputs and outputs

    def adapt(self, name: str, shape: LinearShape, base: LinearMethod, build: Build) -> LinearMethod:
        self.found |= {f"{name}.{part}": (shape.in_size, size) for part, size in shape.parts.items()}
        return base


def adapted_modules(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of all that adapters of the model can have, by the names that its checkpoint has."""
    shapes: Any = _Shapes()
    meta = torch.device("meta")
    Decoder(load_spec(model), 1, Build(torch.float32, meta, TorchKernels(), Unquantized.create, adapters=shapes))
    return dict(shapes.found)


def random_adapter(
    model: ModelConfig, *, rank: int, seed: int, scale: float = 1.0, device: str = "cpu", targets: str = ""
) -> dict[str, Tensor]:
    """A and B of all products, or of those whose names end in one of `targets`, separated by commas, by PEFT's names,
    bfloat16: with lora_alpha = rank, B A x is about `scale` times as large as x's numbers where these are normal."""
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for module, (size, outs) in adapted_modules(model).items():
        if not module.endswith(tuple(targets.split(","))):
            continue
        name = f"base_model.model.{module}"
        a = torch.randn(rank, size, generator=generator, device=device) / size**0.5
        b = torch.randn(outs, rank, generator=generator, device=device) * (scale / rank**0.5)
        found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"] = (x.bfloat16().cpu() for x in (a, b))
    return found


def write_adapter(folder: Path, tensors: dict[str, Tensor] | Path, *, rank: int, alpha: float, **config: Any) -> str:
    """A PEFT folder, of tensors or of another one's file; `config` is added to what PEFT says. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    if isinstance(tensors, Path):
        weights.symlink_to(tensors.absolute())
    else:
        save_file(tensors, weights)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config, indent=2))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a hub name, or a shipped model")
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.1, help="of what it adds, by what it reads")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tensors = random_adapter(ModelConfig(path=args.model), rank=args.rank, seed=args.seed, scale=args.scale)
    print(write_adapter(args.folder, tensors, rank=args.rank, alpha=args.rank))


if __name__ == "__main__":
    main()
