"""One training loop for all models: AdamW, linear warm-up and decay to zero, the checkpoint of least validation loss.

What is learned is the caller's `Objective`: cross-entropy for the target, distillation for the draft,
balanced experts for the mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mini_infer.core.errors import ConfigError

IGNORE = -100  # label of a position that is read but not learned

# (logits [tokens, vocab], inputs [rows, seq], labels [tokens] with IGNORE) -> scalar loss
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stream:
    """A token stream, the positions of it that are learned, and its share of the rows of a batch."""

    tokens: npt.NDArray[np.uint16]
    share: float
    learned: npt.NDArray[np.bool_] | None = None  # None: every position


@dataclass(frozen=True)
class Schedule:
    steps: int
    rows: int  # windows a step
    seq_len: int  # tokens a window
    learning_rate: float
    weight_decay: float
    dropout: float = 0.0  # of the output of every attention and MLP block, while training
    warmup: float = 0.05  # share of the steps
    eval_every: int = 50  # steps
    seed: int = 1234


@dataclass(frozen=True)
class LogRow:
    step: int
    tokens: int  # read since the start
    train_loss: float  # the objective, mean since the row before
    validation_loss: float  # cross-entropy, nats a token
    heldout_loss: float
    learning_rate: float


@dataclass(frozen=True)
class TrainingRun:
    log: list[LogRow]
    best_step: int
    tokens: int
    seconds: float  # wall time, compilation included


def cross_entropy(logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE)


def token_logits(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """[rows, seq] -> [rows * seq, vocab]."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)


def train(
    model: PreTrainedModel,
    streams: Sequence[Stream],
    validation: npt.NDArray[np.uint16],
    heldout: npt.NDArray[np.uint16],
    schedule: Schedule,
    objective: Objective = cross_entropy,
    title: str = "training",
) -> TrainingRun:
    """Train `model` in place, on its device, and leave it with the weights of least validation loss.

    Float32 weights; on a CUDA device the step is compiled and computes in bfloat16.

    Raises:
        ConfigError: a stream is shorter than one window.
    """
    shortest = min(map(len, [validation, heldout, *(stream.tokens for stream in streams)]))
    if shortest <= schedule.seq_len:
        raise ConfigError(
            f"a token stream has {shortest} tokens, and seq_len={schedule.seq_len} needs more than that; "
            "use a smaller seq_len or a larger corpus"
        )
    started = time.perf_counter()
    device = next(model.parameters()).device
    optimizer = _adamw(model, schedule)
    batches = _batches(streams, schedule, device)

    def forward_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return objective(token_logits(model, inputs), inputs, labels.flatten())

    step_loss = torch.compile(forward_loss) if device.type == "cuda" else forward_loss
    log: list[LogRow] = []
    best_loss, best_step = float("inf"), 0
    best = _copy_weights(model)
    running = torch.zeros((), device=device)
    tokens = 0
    model.train()
    with _progress() as progress, _residual_dropout(model, schedule.dropout):
        task = progress.add_task(title, total=schedule.steps, note="")
        for step in range(1, schedule.steps + 1):
            learning_rate = rate_at(step, schedule)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            inputs, labels = next(batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = step_loss(inputs, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running += loss.detach()
            tokens += inputs.numel()
            if step % schedule.eval_every == 0 or step == schedule.steps:
                since = step - (log[-1].step if log else 0)
                row = LogRow(
                    step,
                    tokens,
                    float(running) / since,
                    stream_loss(model, validation, schedule.seq_len),
                    stream_loss(model, heldout, schedule.seq_len),
                    learning_rate,
                )
                log.append(row)
                running.zero_()
                if row.validation_loss < best_loss:
                    best_loss, best_step, best = row.validation_loss, step, _copy_weights(model)
                note = f"train {row.train_loss:.3f}  val {row.validation_loss:.3f}"
                progress.update(task, note=f"{note}  held out {row.heldout_loss:.3f}")
                if not progress.console.is_terminal:
                    seconds = time.perf_counter() - started
                    progress.console.print(
                        f"{title} {step}/{schedule.steps} {note} held {row.heldout_loss:.3f} {seconds:.0f} s"
                    )
            progress.advance(task)
    model.load_state_dict(best)
    model.eval()
    return TrainingRun(log, best_step, tokens, time.perf_counter() - started)


def rate_at(step: int, schedule: Schedule) -> float:
    """Linear up to the peak, then linear down to zero after the last step (steps count from 1)."""
    warmup = max(1, round(schedule.warmup * schedule.steps))
    if step <= warmup:
        return schedule.learning_rate * step / warmup
    return schedule.learning_rate * (schedule.steps - step + 1) / (schedule.steps - warmup + 1)


@torch.no_grad()
def stream_loss(model: PreTrainedModel, stream: npt.NDArray[np.uint16], seq_len: int) -> float:
    """Mean cross-entropy in nats a token over the whole windows of `stream`, in the training precision."""
    device = next(model.parameters()).device
    windows = (len(stream) - 1) // seq_len
    tokens = torch.from_numpy(stream[: windows * seq_len + 1].astype(np.int64)).to(device)
    inputs = tokens[:-1].view(windows, seq_len)
    labels = tokens[1:].view(windows, seq_len)
    total = 0.0
    model.eval()
    for start in range(0, windows, 32):
        rows = slice(start, start + 32)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = token_logits(model, inputs[rows])
        total += float(F.cross_entropy(logits.float(), labels[rows].flatten(), reduction="sum"))
    model.train()
    return total / (windows * seq_len)


def _batches(streams: Sequence[Stream], schedule: Schedule, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, labels), each [rows, seq]: every row a window of one stream, rows split by share."""
    total = sum(stream.share for stream in streams)
    counts = [round(stream.share / total * schedule.rows) for stream in streams]
    counts[0] += schedule.rows - sum(counts)
    sources = []
    for index, (stream, count) in enumerate(zip(streams, counts, strict=True)):
        tokens = torch.from_numpy(stream.tokens.astype(np.int64)).to(device)
        labels = tokens
        if stream.learned is not None:
            labels = tokens.masked_fill(~torch.from_numpy(stream.learned).to(device), IGNORE)
        starts = _window_starts(len(tokens), schedule.seq_len + 1, count, schedule.seed + index)
        sources.append((tokens, labels, starts))
    span = torch.arange(schedule.seq_len, device=device)
    while True:
        inputs, targets = [], []
        for tokens, labels, starts in sources:
            at = next(starts).to(device)[:, None] + span
            inputs.append(tokens[at])
            targets.append(labels[at + 1])
        yield torch.cat(inputs), torch.cat(targets)


def _window_starts(length: int, window: int, count: int, seed: int) -> Iterator[Tensor]:
    """Endless [count] int64 window starts: each pass covers the stream once, shifted and shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    pending = torch.empty(0, dtype=torch.int64)
    while True:
        while len(pending) < count:
            shift = int(torch.randint(min(window, length - window + 1), (1,), generator=generator))
            starts = torch.arange(shift, length - window + 1, window)
            pending = torch.cat([pending, starts[torch.randperm(len(starts), generator=generator)]])
        yield pending[:count]
        pending = pending[count:]


def _adamw(model: PreTrainedModel, schedule: Schedule) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]  # norms and biases
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)


@contextmanager
def _residual_dropout(model: PreTrainedModel, probability: float) -> Iterator[None]:
    """Dropout on what each block adds to the residual stream (Vaswani et al. 2017, 5.4), which the models
    themselves lack."""

    def drop_mlp(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    def drop_attention(module: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return F.dropout(output[0], probability, module.training), output[1]

    handles = []
    if probability > 0:
        for layer in model.model.layers:
            handles.append(layer.mlp.register_forward_hook(drop_mlp))
            handles.append(layer.self_attn.register_forward_hook(drop_attention))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
