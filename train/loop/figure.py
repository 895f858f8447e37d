"""Draws a training run: loss, accuracy by position, tau and n-alpha."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.files.staging import write_whole


def draw(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws the lines of a `log.jsonl` into a PNG."""
    from matplotlib.figure import Figure

    updates = [line for line in lines if "loss" in line]
    measured = [line for line in lines if "tau" in line]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, tau = figure.subplots(1, 3)
    steps = [line["step"] for line in updates]
    loss.plot(steps, [line["loss"] for line in updates])
    loss.set(title="loss, weighted sum of the steps", xlabel="update", ylabel="nats")
    positions = len(updates[0]["accuracy"]) if updates else 0
    for position in range(positions):
        accuracy.plot(steps, [line["accuracy"][position] for line in updates], label=f"step {position}")
    accuracy.set(title="favourite token is the target's", xlabel="update", ylabel="share", ylim=(0, 1))
    if positions:
        accuracy.legend(fontsize="small", ncols=2)
    at = [line["step"] for line in measured]
    tau.plot(at, [line["tau"] for line in measured], "o-", color="black", label="tau")
    tau.set(title="on held-out prompts", xlabel="update", ylabel="tau, tokens per target pass")
    tau.set_ylim(bottom=1)
    if measured:
        beside = tau.twinx()
        for n in range(len(measured[0]["n_alpha"])):
            if all(line["n_alpha"][n] is None for line in measured):
                continue
            beside.plot(at, [line["n_alpha"][n] for line in measured], ".--", alpha=0.6, label=f"{n}-alpha")
        beside.set(ylabel="n-alpha", ylim=(-0.02, 1.02), xlim=(0, None))
        beside.legend(
            handles=[*tau.lines, *beside.lines], fontsize="small", loc="center left", bbox_to_anchor=(1.2, 0.5)
        )
    for axes in (loss, accuracy, tau):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())
