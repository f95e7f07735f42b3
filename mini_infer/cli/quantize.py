"""mini-infer-quantize: a model folder becomes a quantized one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mini_infer.calibration.recipe import GROUPS, METHODS, Method, Recipe
from mini_infer.cli.arguments import command_parser, refuse
from mini_infer.core.errors import MiniInferError
from mini_infer.core.model_config import ModelConfig
from mini_infer.runtime import preflight

NAME = "mini-infer-quantize"
STOPPED = 130  # as shells report a program that Ctrl-C has ended
DESCRIPTION = """\
Quantizes the linear layers of any decoder that transformers loads, one layer at a time in memory.

  mini-infer-quantize tiny-target OUT --scheme w4a16 --method gptq --group 32
  mini-infer-quantize Qwen/Qwen2.5-7B OUT --scheme w8a8 --method smoothquant --text a.txt b.txt
  mini-infer-quantize tiny-target OUT --scheme fp8

OUT is in the compressed-tensors format, which mini-infer, transformers and vLLM read (mixed: mini-infer alone).
Interrupted, it goes on where it was when it is started again with the same arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True, highlight=False)
    try:
        recipe = _recipe(args)
        preflight.check_model(ModelConfig(path=args.model))
        import torch  # which takes seconds, and none of the mistakes above needs

        from mini_infer.calibration.folder import quantize_folder
        from mini_infer.calibration.text import files_text, shipped_text

        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress:
            task = progress.add_task("reading", total=None)

            def done(count: int, total: int) -> None:
                progress.update(task, description="layers", completed=count, total=total)

            def texts() -> Sequence[str]:
                progress.update(task, description="reading calibration text")
                return files_text(args.text) if args.text else shipped_text()

            out = quantize_folder(args.model, args.out, recipe, texts, device, done)
    except KeyboardInterrupt:
        print(f"{NAME}: stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    except MiniInferError as error:
        return refuse(NAME, error)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {recipe.scheme} by {recipe.method.value}, {size / 1e6:,.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(NAME, DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub name or a shipped model")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--scheme", required=True, choices=list(METHODS))
    parser.add_argument(
        "--method", choices=[m.value for m in Method], help="default: the first of the scheme's: " + _defaults()
    )
    parser.add_argument("--group", type=int, default=128, choices=GROUPS, help="columns that share a scale, for w4a16")
    parser.add_argument("--asymmetric", action="store_true", help="codes with zeros beside the scales, for w4a16")
    parser.add_argument("--no-act-order", action="store_true", help="gptq: columns from left to right")
    parser.add_argument(
        "--alpha", type=float, help="smoothquant: migration strength, 0 to 1. Default: for each input what errs least"
    )
    parser.add_argument(
        "--keep", nargs="+", default=[], metavar="NAME", help="leave linear layers alone whose names hold one of these"
    )
    parser.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="calibration text. Default: Python's standard library, "
        "as the shipped models were trained on it"
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences. Default: 128")
    parser.add_argument("--length", type=int, default=512, help="tokens of each. Default: 512")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the texts")
    parser.add_argument("--device", help="cpu or cuda. Default: cuda where there is one")
    return parser


def _defaults() -> str:
    return ", ".join(f"{scheme} {' or '.join(m.value for m in methods)}" for scheme, methods in METHODS.items())


def _recipe(args: argparse.Namespace) -> Recipe:
    return Recipe(
        args.scheme,
        Method(args.method) if args.method else METHODS[args.scheme][0],
        group=args.group,
        symmetric=not args.asymmetric,
        act_order=not args.no_act_order,
        alpha=args.alpha,
        kept=tuple(args.keep),
        samples=args.samples,
        length=args.length,
        seed=args.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
