"""Train the shipped models: `python -m mini_infer.assets.train --out DIR`.

In order: the corpus is read and split, the tokenizer is trained, tiny-target is trained, tiny-draft is distilled
from it; or, with `--models moe`, tiny-moe is trained alone. The folder gets the models, the held-out modules and a
record of the training.
`--prepare-only --tokens DIR` stops after the tokenizer; a later `--tokens DIR` starts from there, on any machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import DeepseekV2ForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen2Tokenizer

from mini_infer.assets.balance import BALANCE_WEIGHT, balanced
from mini_infer.assets.corpus import load_corpus, stdlib_dir, write_heldout
from mini_infer.assets.curve import draw_curve
from mini_infer.assets.distill import KL_WEIGHT, distillation, write_text
from mini_infer.assets.shapes import DRAFT, MOE, TARGET, MoEShape, Shape, build_model, build_moe, num_parameters
from mini_infer.assets.tokens import TokenSet, tokenize_corpus
from mini_infer.assets.trainer import LogRow, Schedule, Stream, TrainingRun, train

CHAT_SHARE = 0.1  # of the rows of a batch
WRITTEN_SHARE = 0.45  # of the draft's rows: text that the target wrote
TEMPERATURES = (1.0, 0.5)
MAX_LOG_ROWS = 500


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    tokens = prepare(args)
    if args.prepare_only:
        return
    tokens = replace(
        tokens, validation=tokens.validation[: args.eval_tokens], heldout=tokens.heldout[: args.eval_tokens]
    )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.models == "moe":
        moe, moe_run = train_moe(tokens, target_schedule(args), device)
        save_model(moe, tokens.tokenizer, args.out / "tiny-moe")
        record(args, tokens, device, {"moe": (moe, moe_run)})
        return
    target, target_run = train_target(tokens, target_schedule(args), device)
    save_model(target, tokens.tokenizer, args.out / "tiny-target")
    draft, draft_run = train_draft(tokens, target, draft_schedule(args), args.written_rows, device)
    save_model(draft, tokens.tokenizer, args.out / "tiny-draft")
    record(args, tokens, device, {"target": (target, target_run), "draft": (draft, draft_run)})


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus-dir", type=Path, default=stdlib_dir(), help="a standard library folder")
    parser.add_argument("--tokens", type=Path, help="folder of prepared tokens: read, or written by --prepare-only")
    parser.add_argument("--prepare-only", action="store_true", help="stop once --tokens is written")
    parser.add_argument("--out", type=Path, default=Path("outputs/assets"), help="where the models go")
    parser.add_argument("--models", choices=("pair", "moe"), default="pair", help="target and draft, or the mixture")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--steps", type=int, default=4500, help="steps of the target or the mixture")
    parser.add_argument("--rows", type=int, default=32, help="windows a step of these")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--draft-steps", type=int, default=9000)
    parser.add_argument("--draft-rows", type=int, default=16)
    parser.add_argument("--draft-lr", type=float, default=4e-3)
    parser.add_argument("--draft-weight-decay", type=float, default=0.05)
    parser.add_argument("--written-rows", type=int, default=8192, help="texts by the target, at each temperature")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a window")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between two rows of the log")
    parser.add_argument("--eval-tokens", type=int, help="of validation and of held-out text; default: all of both")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(arguments)
    if args.prepare_only and args.tokens is None:
        parser.error("--prepare-only needs --tokens DIR to write to")
    return args


def prepare(args: argparse.Namespace) -> TokenSet:
    if args.tokens is not None and not args.prepare_only:
        return TokenSet.load(args.tokens)
    corpus = load_corpus(args.corpus_dir)
    write_heldout(corpus, args.corpus_dir, (args.tokens or args.out) / "heldout")
    tokens = tokenize_corpus(corpus)
    if args.tokens is not None:
        tokens.save(args.tokens)
    print(json.dumps(tokens.report, indent=2))
    return tokens


def target_schedule(args: argparse.Namespace) -> Schedule:
    return Schedule(
        steps=args.steps,
        rows=args.rows,
        seq_len=args.seq_len,
        learning_rate=args.lr,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        eval_every=args.eval_every,
        seed=args.seed,
    )


def draft_schedule(args: argparse.Namespace) -> Schedule:
    return Schedule(
        steps=args.draft_steps,
        rows=args.draft_rows,
        seq_len=args.seq_len,
        learning_rate=args.draft_lr,
        weight_decay=args.draft_weight_decay,
        eval_every=args.eval_every,
        seed=args.seed + 1,
    )


def train_target(
    tokens: TokenSet, schedule: Schedule, device: torch.device, shape: Shape = TARGET
) -> tuple[Qwen2ForCausalLM, TrainingRun]:
    model = build_model(shape, tokens.tokenizer, schedule.seed).to(device)
    run = train(model, _text(tokens), tokens.validation, tokens.heldout, schedule, title="tiny-target")
    return model, run


def train_moe(
    tokens: TokenSet, schedule: Schedule, device: torch.device, shape: MoEShape = MOE
) -> tuple[DeepseekV2ForCausalLM, TrainingRun]:
    model = build_moe(shape, tokens.tokenizer, schedule.seed).to(device)
    with balanced(model) as objective:
        run = train(model, _text(tokens), tokens.validation, tokens.heldout, schedule, objective, title="tiny-moe")
    return model, run


def _text(tokens: TokenSet) -> list[Stream]:
    return [Stream(tokens.code, 1 - CHAT_SHARE), Stream(tokens.chat, CHAT_SHARE, tokens.chat_answer)]


def train_draft(
    tokens: TokenSet,
    target: Qwen2ForCausalLM,
    schedule: Schedule,
    written_rows: int,
    device: torch.device,
    shape: Shape = DRAFT,
) -> tuple[Qwen2ForCausalLM, TrainingRun]:
    model = build_model(shape, tokens.tokenizer, schedule.seed).to(device)
    written = write_text(target, tokens.code, written_rows, TEMPERATURES, seed=schedule.seed)
    streams = [
        Stream(tokens.code, 1 - CHAT_SHARE - WRITTEN_SHARE),
        Stream(tokens.chat, CHAT_SHARE, tokens.chat_answer),
        Stream(written, WRITTEN_SHARE),
    ]
    objective = distillation(target)
    run = train(model, streams, tokens.validation, tokens.heldout, schedule, objective, title="tiny-draft")
    return model, run


def save_model(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """A Hugging Face folder with bfloat16 weights: half the size, and what a GPU would compute in anyway."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.to(torch.float32)


def record(
    args: argparse.Namespace,
    tokens: TokenSet,
    device: torch.device,
    runs: Mapping[str, tuple[PreTrainedModel, TrainingRun]],
) -> None:
    """Write logs, loss curve and summary.json to `args.out / "training"`, those of the mixture as moe_*."""
    folder, prefix = args.out / "training", "moe_" if "moe" in runs else ""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, run) in runs.items():
        write_log(folder / f"{name}_log.csv", run.log)
    titles = {
        "target": "tiny-target: cross-entropy, with dropout",
        "draft": f"tiny-draft: {KL_WEIGHT:.1f} KL to the target + {1 - KL_WEIGHT:.1f} cross-entropy",
        "moe": f"tiny-moe: cross-entropy + {BALANCE_WEIGHT} imbalance, with dropout",
    }
    draw_curve({titles[name]: run.log for name, (_, run) in runs.items()}, folder / f"{prefix}loss_curve.png")
    of_draft = {"written_share": WRITTEN_SHARE, "kl_weight": KL_WEIGHT}
    settings = vars(args) | {"chat_share": CHAT_SHARE} | ({"balance_weight": BALANCE_WEIGHT} if prefix else of_draft)
    places = "corpus_dir", "tokens", "out", "prepare_only", "models"  # they say nothing of the result
    left_out = (*places, "draft", "written") if prefix else places
    summary: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "settings": {name: value for name, value in settings.items() if not name.startswith(left_out)},
        "corpus": tokens.report,
        "models": {
            name: {
                "parameters": num_parameters(model),
                "tokens_seen": run.tokens,
                "seconds": round(run.seconds, 1),
                "best_step": run.best_step,
                "best": asdict(next(row for row in run.log if row.step == run.best_step)),
            }
            for name, (model, run) in runs.items()
        },
    }
    (folder / f"{prefix}summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def write_log(path: Path, log: list[LogRow]) -> None:
    """One CSV row a LogRow, thinned evenly to MAX_LOG_ROWS; the last row always stays."""
    stride = -(-len(log) // MAX_LOG_ROWS)
    kept = log[::-1][::stride][::-1]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(LogRow)])
        for row in kept:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in asdict(row).values()])


if __name__ == "__main__":
    main()
