"""Tables and figures of `train.demo.study`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.staging import write_whole

ABLATION = ("eagle2", "top-feature-loss", "top", "eagle3")
N_ALPHA = ("eagle2", "hass", "top", "eagle3")
LOSSES = ("eagle3", "eagle3-lk", "eagle3-lk-blend")
SCALING = {"EAGLE-3": "eagle3", "EAGLE-1/2": "eagle2"}

Records = Mapping[str, Any]


def write_report(report: Records, folder: Path) -> None:
    """Writes `study.json`, `study.md` and the figures of what was run."""
    write_whole(folder / "study.json", json.dumps(report, indent=1) + "\n")
    write_whole(
        folder / "study.md", "\n\n".join(f"{title}:\n\n{text}" for title, text in tables(report).items()) + "\n"
    )
    pictures: dict[str, Callable[[Records, Any], None]] = {
        "ablation": lambda report, axes: draw_taus(report, axes, ABLATION, "EAGLE-3's ablation"),
        "n_alpha": draw_n_alpha,
        "scaling": draw_scaling,
        "losses": lambda report, axes: draw_taus(report, axes, LOSSES, "losses of EAGLE-3"),
    }
    from matplotlib.figure import Figure

    for name, draw in pictures.items():
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.subplots()
        draw(report, axes)
        if axes.has_data():
            figure.savefig(folder / f"study_{name}.png", dpi=110)


def chosen(report: Records, names: tuple[str, ...]) -> list[Records]:
    """Runs of those names in that order, all seeds of each."""
    return [record for name in names for record in report["runs"].values() if record["run"] == name]


def tables(report: Records) -> dict[str, str]:
    """Markdown by title; a table of nothing is left out."""
    whole = tuple(dict.fromkeys(record["run"] for record in report["runs"].values() if record["eighths"] == 8))
    found = {"What each run gives, of all replies": (_tau_table, whole), "Replies": (_scaling_table, ())}
    texts = {title: write(report, names) for title, (write, names) in found.items()}
    return {title: text for title, text in texts.items() if text}


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _tau_table(report: Records, names: tuple[str, ...]) -> str:
    records = chosen(report, names)
    if not records:
        return ""
    sources = list(records[0]["measured"]["by_source"])
    head = ["run", "seed", "tau", "95%", *sources, *(f"{n}-alpha" for n in range(6))]
    lines = [_row(*head), "|---|" + "---:|" * (len(head) - 1)]
    for record in records:
        seen = record["measured"]
        low, high = seen["interval"]
        alpha = ["-" if value is None else f"{value:.2f}" for value in seen["n_alpha"]]
        taus = [f"{seen['by_source'][source]:.2f}" for source in sources]
        lines.append(_row(record["title"], record["seed"], f"**{seen['tau']:.2f}**", f"{low:.2f}-{high:.2f}", *taus,
                          *alpha))  # fmt: skip
    return "\n".join(lines)


def by_replies(report: Records, name: str) -> list[Records]:
    """Runs of a method over growing parts of the replies."""
    names = (*(f"{name}-{n}of8" for n in (1, 2, 4)), name)
    return chosen(report, names)


def _scaling_table(report: Records, _: tuple[str, ...]) -> str:
    lines = []
    for title, name in SCALING.items():
        for record in by_replies(report, name):
            low, high = record["measured"]["interval"]
            replies = report["replies"][str(record["eighths"])]
            lines.append(_row(title, f"{record['eighths']}x", replies, record["seed"],
                              f"{record['measured']['tau']:.2f}", f"{low:.2f}-{high:.2f}"))  # fmt: skip
    return (
        "\n".join([_row("method", "data", "replies", "seed", "tau", "95%"), "|---|" + "---:|" * 5, *lines])
        if lines
        else ""
    )


def _spread(record: Records) -> tuple[list[float], list[float]]:
    tau, (low, high) = record["measured"]["tau"], record["measured"]["interval"]
    return [tau - low], [high - tau]


def draw_taus(report: Records, axes: Any, names: tuple[str, ...], title: str) -> None:
    """A bar of tau per run, with its interval."""
    for place, record in enumerate(records := chosen(report, names)):
        axes.barh(place, record["measured"]["tau"], xerr=_spread(record), color="tab:blue", alpha=0.8, capsize=3)
    axes.set_yticks(range(len(records)), [record["title"].replace(", ", ",\n") for record in records], fontsize="small")
    axes.invert_yaxis()
    axes.set(title=title, xlabel="tau, tokens per target pass", xlim=(1, None))
    axes.grid(alpha=0.3, axis="x")


def draw_n_alpha(report: Records, axes: Any) -> None:
    """n-alpha over n: flat where a head is trained on its own outputs."""
    for name in N_ALPHA:
        for record in chosen(report, (name,)):
            rates = record["measured"]["n_alpha"]
            axes.plot(range(len(rates)), rates, "o-", label=f"{record['title']} (seed {record['seed']})")
    axes.set(title="acceptance after n accepted drafts", xlabel="n", ylabel="n-alpha")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")


def draw_scaling(report: Records, axes: Any) -> None:
    """Tau over the number of replies, logarithmic, updates held fixed."""
    for title, name in SCALING.items():
        records = by_replies(report, name)
        if len(records) < 2:
            continue
        counts = [report["replies"][str(record["eighths"])] for record in records]
        spreads = [_spread(record) for record in records]
        bars = [[spread[side][0] for spread in spreads] for side in (0, 1)]
        taus = [record["measured"]["tau"] for record in records]
        axes.errorbar(counts, taus, yerr=bars, fmt="o-", capsize=3, label=title)
    if axes.has_data():
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(report["replies"].values()), [str(n) for n in sorted(report["replies"].values())])
        axes.set(
            title="tau and the number of replies, same updates", xlabel="replies", ylabel="tau, tokens per target pass"
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
