"""The loss curve that stands in the model card."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mini_infer.assets.trainer import LogRow

# Okabe-Ito colours, told apart by line style as well.
LINES = (
    ("train_loss", "training loss", "#999999", ":"),
    ("validation_loss", "validation cross-entropy", "#0072B2", "-"),
    ("heldout_loss", "held-out cross-entropy", "#D55E00", "--"),
)


def draw_curve(logs: dict[str, list[LogRow]], path: Path) -> None:
    """One panel a title: losses in nats a token over tokens read."""
    figure = Figure(figsize=(4.2 * len(logs), 3.2), layout="constrained")
    for index, (title, log) in enumerate(logs.items(), start=1):
        axes = figure.add_subplot(1, len(logs), index)
        tokens = [row.tokens / 1e6 for row in log]
        for field, label, colour, style in LINES:
            axes.plot(tokens, [getattr(row, field) for row in log], style, color=colour, label=label, linewidth=1.6)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens read (millions)")
        axes.set_ylabel("nats a token")
        axes.set_ylim(0, 2.2 * min(row.validation_loss for row in log))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
