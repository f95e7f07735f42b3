"""Measure the shipped models on the held-out modules: `python -m mini_infer.assets.evaluate`.

Every figure of the model card comes from here, from the shipped files alone, in float32.
"""

from __future__ import annotations

import argparse
import codeop
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    Qwen2Tokenizer,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from mini_infer.assets.chat import IM_END, Conversation, conversations
from mini_infer.assets.prompts import ASSETS, Prompt, draw_prompts, heldout_sources
from mini_infer.assets.tokens import document_stream

WINDOW = 1024  # tokens of context at most
CONTEXTS = ((1, 31), (32, 127), (128, 511), (512, WINDOW))


@dataclass(frozen=True)
class TextMetrics:
    """Teacher-forced, over consecutive windows of WINDOW tokens."""

    tokens: int
    bytes: int
    loss: float  # nats a token
    perplexity: float  # a token
    bits_per_byte: float
    accuracy: float  # share of tokens that are the argmax


@dataclass(frozen=True)
class Load:
    """Tokens of a layer's experts by those of its average one, for each layer that has experts."""

    busiest: list[float]
    idlest: list[float]


@dataclass(frozen=True)
class Agreement:
    """How often the draft would have proposed what the target says, at equal context."""

    heldout: float  # equal argmax, along the held-out files
    by_context: dict[str, float]  # the same, by the tokens of context that precede
    sampled: (
        float  # mean of sum(min(p, q)): acceptance of speculative sampling at temperature 1 (Leviathan et al. 2023)
    )
    greedy: float  # equal argmax along the target's own greedy continuations of held-out prompts
    greedy_tokens: int
    greedy_fresh: float  # the same, over tokens that end no 4-gram seen before: small models repeat, and that is easy
    greedy_fresh_tokens: int
    accepted_of_4: float  # mean drafts accepted a step of 4, along the greedy continuations


@dataclass(frozen=True)
class Samples:
    """What Python makes of the target's greedy continuations of held-out prompts, cut after the last full line."""

    prompts: int
    new_tokens: int
    valid: float  # the module up to the cut compiles
    valid_or_unfinished: float  # it compiles, or could if it went on
    chat_prompts: int
    chat_stopped: float  # answers that end in <|im_end|> within the limit
    chat_valid: float  # answers that end and compile


def load(folder: Path, device: str = "cpu") -> tuple[PreTrainedModel, Qwen2Tokenizer]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True)
class Reading:
    """Both models on each token of a stream but the first. All tensors are [tokens], on the CPU."""

    target_argmax: Tensor  # int64
    draft_argmax: Tensor  # int64
    target_nats: Tensor  # float32, cross-entropy
    draft_nats: Tensor  # float32
    overlap: Tensor  # float32, sum over the vocabulary of min(p, q)


@torch.no_grad()
def read(target: PreTrainedModel, draft: PreTrainedModel, stream: npt.NDArray[np.uint16]) -> Reading:
    """Run both models over consecutive windows of WINDOW tokens of `stream`."""
    tokens = torch.from_numpy(stream.astype(np.int64)).to(target.device)
    parts = []
    for start in range(0, len(tokens) - 1, WINDOW):
        chunk = tokens[start : start + WINDOW + 1]
        logs = [F.log_softmax(model(chunk[None, :-1]).logits[0].float(), dim=-1) for model in (target, draft)]
        nats = [-log.gather(1, chunk[1:, None])[:, 0] for log in logs]
        overlap = torch.minimum(logs[0], logs[1]).exp().sum(-1)
        parts.append([logs[0].argmax(-1), logs[1].argmax(-1), *nats, overlap])
    return Reading(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """[experts] int64 of each layer that has some: the tokens that they get inside."""
    routers = [module for module in model.modules() if isinstance(module, DeepseekV2TopkRouter)]
    counts = [torch.zeros(router.num_experts, dtype=torch.int64) for router in routers]

    def count(own: Tensor, module: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        own += output[2].flatten().cpu().bincount(minlength=len(own))

    hooks = [router.register_forward_hook(partial(count, own)) for router, own in zip(routers, counts, strict=True)]
    yield counts
    for hook in hooks:
        hook.remove()


def load_of(counts: list[Tensor]) -> Load:
    relative = [layer / layer.float().mean() for layer in counts]
    return Load([float(layer.max()) for layer in relative], [float(layer.min()) for layer in relative])


def text_metrics(argmax: Tensor, nats: Tensor, stream: npt.NDArray[np.uint16], num_bytes: int) -> TextMetrics:
    labels = torch.from_numpy(stream[1:].astype(np.int64))
    loss = float(nats.double().mean())
    return TextMetrics(
        tokens=len(labels),
        bytes=num_bytes,
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=float(nats.double().sum()) / math.log(2) / num_bytes,
        accuracy=float((argmax == labels).float().mean()),
    )


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation, up to and with the first stop token."""
    cache = DynamicCache()
    ids = prompt
    written: list[int] = []
    while len(written) < new_tokens and not (written and written[-1] in model.generation_config.eos_token_id):
        logits = model(torch.tensor([ids], device=model.device), past_key_values=cache).logits
        ids = [int(logits[0, -1].argmax())]
        written += ids
    return written


@torch.no_grad()
def draft_hits(draft: PreTrainedModel, prompt: list[int], continuation: list[int]) -> list[bool]:
    """For each token of the target's continuation: would the draft have proposed it?"""
    ids = torch.tensor([prompt + continuation], device=draft.device)
    argmax = draft(ids[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1)
    return (argmax == ids[0, len(prompt) :]).tolist()


def mean_accepted(hits: list[list[bool]], drafted: int) -> float:
    """Mean number of accepted drafts a verification step, for greedy speculation with `drafted` tokens a step."""
    accepted = steps = 0
    for row in hits:
        at = 0
        while at + drafted < len(row):
            run = 0
            while run < drafted and row[at + run]:
                run += 1
            accepted, steps, at = accepted + run, steps + 1, at + run + 1
    return accepted / max(1, steps)


def is_python(source: str, allow_unfinished: bool = False) -> bool:
    """True where `source` compiles, or, if allowed, could compile with more lines after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return codeop.compile_command(source, symbol="exec") is not None or allow_unfinished
        except (SyntaxError, ValueError, OverflowError):
            return False


def full_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def agreement(
    draft: PreTrainedModel, reading: Reading, prompts: list[list[int]], continuations: list[list[int]]
) -> Agreement:
    same = (reading.target_argmax == reading.draft_argmax).float()
    context = torch.arange(len(same)) % WINDOW + 1
    hits = [draft_hits(draft, prompt, text) for prompt, text in zip(prompts, continuations, strict=True)]
    all_hits = [hit for row in hits for hit in row]
    fresh = [new for prompt, text in zip(prompts, continuations, strict=True) for new in fresh_tokens(prompt, text)]
    return Agreement(
        heldout=float(same.mean()),
        by_context={
            f"{low}-{high}": float(same[(context >= low) & (context <= high)].mean()) for low, high in CONTEXTS
        },
        sampled=float(reading.overlap.mean()),
        greedy=sum(all_hits) / len(all_hits),
        greedy_tokens=len(all_hits),
        greedy_fresh=sum(hit for hit, new in zip(all_hits, fresh, strict=True) if new) / max(1, sum(fresh)),
        greedy_fresh_tokens=sum(fresh),
        accepted_of_4=mean_accepted(hits, 4),
    )


def fresh_tokens(prompt: list[int], continuation: list[int]) -> list[bool]:
    """For each token of the continuation: is the 4-gram that it ends new to prompt and continuation?"""
    ids = prompt + continuation
    seen: set[tuple[int, ...]] = set()
    fresh = []
    for end in range(1, len(ids) + 1):
        gram = tuple(ids[max(0, end - 4) : end])
        if end > len(prompt):
            fresh.append(gram not in seen)
        seen.add(gram)
    return fresh


def samples(
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    prompts: list[Prompt],
    continuations: list[list[int]],
    chats: list[Conversation],
    new_tokens: int,
) -> Samples:
    texts = [
        full_lines(prompt.source.text[: prompt.end] + tokenizer.decode(text))
        for prompt, text in zip(prompts, continuations, strict=True)
    ]
    answers = [greedy(model, tokenizer.encode(chat.prompt), new_tokens) for chat in chats]
    end = tokenizer.convert_tokens_to_ids(IM_END)
    finished = [tokenizer.decode(answer[:-1]) for answer in answers if answer[-1] == end]
    return Samples(
        prompts=len(prompts),
        new_tokens=new_tokens,
        valid=sum(map(is_python, texts)) / len(texts),
        valid_or_unfinished=sum(is_python(text, allow_unfinished=True) for text in texts) / len(texts),
        chat_prompts=len(chats),
        chat_stopped=len(finished) / len(answers),
        chat_valid=sum(map(is_python, finished)) / len(answers),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ASSETS, help="folder of the shipped models")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()

    target, tokenizer = load(args.models / "tiny-target", args.device)
    draft, _ = load(args.models / "tiny-draft", args.device)
    sources = heldout_sources()
    stream = document_stream(sources, tokenizer)
    num_bytes = sum(source.num_bytes for source in sources)
    reading = read(target, draft, stream)
    moe, _ = load(args.models / "tiny-moe", args.device)
    with counted(moe) as counts:
        of_moe = read(target, moe, stream)

    prompts = draw_prompts(args.prompts)
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    continuations = [greedy(target, prompt, args.new_tokens) for prompt in ids]
    for prompt, text in list(zip(prompts, continuations, strict=True))[: args.show]:
        print(f"{prompt.text[-400:]}\n[{prompt.source.path}: the target goes on]\n{tokenizer.decode(text)}\n{'-' * 80}")
    figures: dict[str, Any] = {
        "target": text_metrics(reading.target_argmax, reading.target_nats, stream, num_bytes),
        "draft": text_metrics(reading.draft_argmax, reading.draft_nats, stream, num_bytes),
        "moe": text_metrics(of_moe.draft_argmax, of_moe.draft_nats, stream, num_bytes),
        "moe_load": load_of(counts),
        "agreement": agreement(draft, reading, ids, continuations),
        "samples": samples(
            target, tokenizer, prompts, continuations, list(conversations(sources))[: args.prompts], args.new_tokens
        ),
    }
    report = json.dumps({name: rounded(asdict(figure)) for name, figure in figures.items()}, indent=2)
    print(report)
    if args.out is not None:
        args.out.write_text(report + "\n")


def rounded(value: Any) -> Any:
    """Floats to four decimals, however deep."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
