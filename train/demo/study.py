"""Trains heads that differ in one thing each on the same replies, and measures them on the same held-out prompts.

    python -m train.demo.study --replies "runs/replies/*.jsonl" --heldout "held/*.jsonl" --out runs/study --report runs/found
    python -m train.demo.study ... --only eagle2,eagle3 --steps 200

Every run is a `train.head` with the settings of `--base` and what `RUNS` adds: as many updates of as many tokens each.
What they answer: EAGLE-3's ablation (arXiv:2503.01840, table 2: EAGLE-2, then no feature loss, then fused features),
n-alpha of EAGLE-1, HASS and EAGLE-3 (figure 7 there), tau against the number of replies (figure 1 there), and LK
losses (arXiv:2602.23881) against cross-entropy. Prompts of `--heldout` are trained on by none. A study that was stopped
goes on where it was; `OUT/RUN.log` is what a run says. Writes `study.json`, `study.md` and figures into
`--report`; the last line printed is the JSON object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import eagle_jax
from eagle_jax.checkpoints.staging import write_whole
from eagle_jax.data.prompts import prompts_by_source
from eagle_jax.data.stops import with_stop_ids
from eagle_jax.evaluate.acceptance import measure_n_alpha, measure_tau
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from eagle_jax.settings import load_yaml
from infer.common.programs import at_least_one, parse_tree, run
from train.demo.study_report import write_report
from train.head import Args as HeadArgs
from train.loop.places import sources_of, target_config, target_path, tokenizer_of

SHARES = (1, 2, 4, 8)
"""Of the replies, in eighths; each smaller part is within the larger ones."""


class Setting(NamedTuple):
    """One run of the study.

    Attributes:
      title: what is said of it. eighths: of the replies it sees. options: of `train.head`.
      fused: the head reads low, middle and high states of the target, and not its last alone.
    """

    title: str
    eighths: int
    options: str
    fused: bool = True


EAGLE2 = "--method eagle1 --unroll 1 --rate 3e-3"
RUNS = {
    "eagle2": Setting("EAGLE-1/2", 8, EAGLE2, fused=False),
    "eagle3": Setting("EAGLE-3", 8, ""),
    "top": Setting("EAGLE-3, top layer only", 8, "--taps {layers}", fused=False),
    "hass": Setting("HASS", 8, "--method hass --unroll 3 --rate 3e-3", fused=False),
    "eagle3-lk": Setting("EAGLE-3, LK loss", 8, "--token-loss lk"),
    **{f"eagle3-{n}of8": Setting("EAGLE-3", n, "") for n in SHARES[:-1]},
    **{f"eagle2-{n}of8": Setting("EAGLE-1/2", n, EAGLE2, fused=False) for n in SHARES[:-1]},
    "top-feature-loss": Setting(
        "EAGLE-3, top layer only, with feature loss", 8, "--taps {layers} --feature-weight 1", fused=False
    ),
    "eagle3-lk-blend": Setting("EAGLE-3, blended LK loss", 8, "--token-loss lk_blend"),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      replies: files of `train.regenerate` to train on.
      heldout: files of conversations to measure on; every file is a source of its own.
      out: directory of the runs.
      report: directory of what is found.
      base: configuration file of `train.head` that every run begins with.
      target: path or hub id of the model, or "demo".
      steps: updates of every run.
      stored: the target's states are written once in this precision, for all runs to read; "no" runs the target anew in
        every update, which takes twice as long.
      seeds: every run is made once with each.
      only: names of runs, separated by commas; all if not given.
      prompts: per held-out source.
      max_new_tokens: of the replies that are measured.
      max_prompt: longer prompts are left out.
      tree: depth,top_k,num_nodes of the drafts.
    """

    replies: tuple[str, ...]
    heldout: tuple[str, ...]
    out: Path
    report: Path
    base: Path = Path("configs/study_demo.yaml")
    target: str = "demo"
    steps: int = 600
    stored: Literal["float32", "bfloat16", "float16", "float8", "no"] = "bfloat16"
    seeds: tuple[int, ...] = (0,)
    only: str | None = None
    prompts: int = 24
    max_new_tokens: int = 128
    max_prompt: int = 128
    tree: str = "4,2,7"


def main(args: Args) -> None:
    """Trains what is missing, measures, writes the report."""
    at_least_one(args, "steps", "prompts", "max_new_tokens", "max_prompt")
    if not args.seeds:
        raise ValueError("--seeds needs at least one number")
    chosen = list(RUNS) if args.only is None else args.only.split(",")
    if unknown := [name for name in chosen if name not in RUNS]:
        raise ValueError(f"--only {unknown[0]}: there is no such run; there are {', '.join(RUNS)}")
    if not args.base.is_file():
        raise ValueError(f"--base {args.base}: no such configuration file")
    path = target_path(args.target)
    config = target_config(args.target)
    sources_of(args.heldout, "--heldout")  # are there
    tokenizer = tokenizer_of(args.target, config)
    asked = prompts_by_source(args.heldout, tokenizer, args.prompts, args.max_prompt)
    parts = divide(args.replies, args.out / "replies")

    found: dict[str, dict[str, Any]] = {}
    pairs = [(name, seed) for seed in args.seeds for name in chosen]
    for name, seed in pairs:
        setting, out = RUNS[name], args.out / f"{name}-seed{seed}"
        options = ["--config", str(args.base), "--target", args.target, "--data", str(parts[setting.eighths])]
        if args.stored != "no":
            taps = () if setting.fused else (config.num_layers,)
            options += ["--features", str(store(args, parts[setting.eighths], taps))]
        options += [*shlex.split(setting.options.format(layers=config.num_layers)), "--steps", str(args.steps)]
        trained = train([*options, "--seed", str(seed), "--out", str(out)], parts[setting.eighths], out)
        command = f"python -m train.head {shlex.join(options)} --seed {seed}"
        found[out.name] = {"run": name, "title": setting.title, "eighths": setting.eighths, "seed": seed,
                           "command": command, "trained": trained}  # fmt: skip

    target = with_stop_ids(eagle_jax.load_target(path, "float32"), tokenizer)
    for name, record in found.items():
        kept = args.out / name / f"measured-{measurement(args, asked, target.config.eos_ids)}.json"
        if not kept.is_file():
            head = eagle_jax.load_drafter(args.out / name / "head", target, parse_tree(args.tree))
            write_whole(kept, json.dumps(measure(args, target, head, asked)))
        record["measured"] = json.loads(kept.read_text(encoding="utf-8"))
        logging.info("%s: tau %.3f", name, record["measured"]["tau"])
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    replies = {str(n): sum(1 for _ in parts[n].open(encoding="utf-8")) for n in parts}
    report = {"machine": machine(), "settings": settings, "replies": replies, "runs": found}
    write_report(report, args.report)
    print(json.dumps(report))


def measurement(args: Args, asked: Mapping[str, list[list[int]]], stops: Sequence[int]) -> str:
    """What decides a measurement, as part of a file's name: its options, and the prompts as the target reads them."""
    contents = hashlib.sha256(json.dumps([asked, stops]).encode()).hexdigest()[:8]
    return f"{args.prompts}x{args.max_new_tokens}-{args.max_prompt}-{args.tree.replace(',', '_')}-{contents}"


def divide(patterns: Sequence[str], folder: Path) -> dict[int, Path]:
    """Writes nested parts of the replies, drawn over all files, in eighths.

    Raises:
      ValueError: there are fewer than eight replies.
    """
    rows = [
        line
        for source in sources_of(patterns, "--replies")
        for file in source.files
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    if len(rows) < max(SHARES):
        raise ValueError(f"--replies {' '.join(patterns)}: {len(rows)} replies are too few to be divided by eight")
    order = np.random.default_rng(0).permutation(len(rows))
    parts = {}
    for eighths in SHARES:
        lines = [rows[i] for i in order[: len(rows) * eighths // max(SHARES)]]
        parts[eighths] = folder / f"{eighths}of8.jsonl"
        text = "".join(line + "\n" for line in lines)
        if not parts[eighths].is_file() or parts[eighths].read_text(encoding="utf-8") != text:
            write_whole(parts[eighths], text)
    return parts


def store(args: Args, replies: Path, taps: tuple[int, ...]) -> Path:
    """Writes the target's states over those replies once, for all runs that read them.

    Raises:
      ValueError: `train.features` failed; with its own words.
    """
    out = args.out / "features" / f"{replies.stem}-{'last' if taps else 'fused'}"
    length = load_yaml(HeadArgs, args.base).length
    options = ["--target", args.target, "--data", str(replies), "--out", str(out), "--stored", args.stored, "--dtype",
               "float32", "--length", str(length)]  # fmt: skip
    if not (out / "done").is_file():
        call("train.features", [*options, *(["--taps", *map(str, taps)] if taps else [])], out)
        write_whole(out / "done", "")
    return out


def call(program: str, options: Sequence[str], out: Path) -> dict[str, Any]:
    """Runs a program, whose log goes into its folder; its last line.

    Raises:
      ValueError: it failed; with its own words.
    """
    logging.info("%s %s", program, out.name)
    log = out.parent / f"{out.name}.log"
    out.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as lines:
        command = [sys.executable, "-m", program, *options]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=lines, text=True, check=False)
    if ran.returncode:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{out.name}: {program} ended with {ran.returncode}: {last.removeprefix('error: ')}")
    return json.loads(ran.stdout.splitlines()[-1])


def train(options: Sequence[str], replies: Path, out: Path) -> dict[str, Any]:
    """Runs `train.head`, unless it was run to its end with the same options and replies; what its last line said.

    Raises:
      ValueError: it failed; with its own words.
    """
    kept = out / "trained.json"
    asked = {"options": list(options), "replies": hashlib.sha256(replies.read_bytes()).hexdigest()}
    if kept.is_file():
        said = json.loads(kept.read_text(encoding="utf-8"))
        if said["asked"] == asked:
            return said["report"]
        raise ValueError(f"{out} is a run of other options or replies: give another --out, or remove it")
    report = call("train.head", options, out)
    write_whole(kept, json.dumps({"asked": asked, "report": report}))
    return report


def measure(
    args: Args, target: eagle_jax.Target, head: eagle_jax.DraftHead, asked: dict[str, list[list[int]]]
) -> dict[str, Any]:
    """Tau over all prompts (with the 95% interval over prompts) and by source; n-alpha of chains over all prompts."""
    by_source: dict[str, float] = {}
    new: list[int] = []
    cycles: list[int] = []
    tested, accepted = np.zeros((2, 6), np.int64)
    for source, prompts in asked.items():
        if not prompts:
            continue
        found = measure_tau(target, head, prompts, max_new_tokens=args.max_new_tokens)
        by_source[Path(source).stem] = round(found.tau, 3)
        new += [len(reply) - 1 for reply in found.replies]
        cycles += found.cycles
        alpha = measure_n_alpha(target, head, prompts, max_new_tokens=args.max_new_tokens)
        tested += alpha.tested
        accepted += alpha.accepted
    low, high = interval(np.array(new), np.array(cycles))
    rates = [
        round(hits / tries, 4) if tries else None
        for hits, tries in zip(accepted.tolist(), tested.tolist(), strict=True)
    ]
    return {"tau": round(sum(new) / sum(cycles), 3), "interval": [low, high], "by_source": by_source,
            "n_alpha": rates, "tested": tested.tolist(), "prompts": len(new), "cycles": sum(cycles)}  # fmt: skip


def interval(new: np.ndarray, cycles: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """The middle 95% of tau over prompts drawn with replacement."""
    picks = np.random.default_rng(0).integers(0, len(new), (draws, len(new)))
    taus = new[picks].sum(1) / cycles[picks].sum(1)
    low, high = np.percentile(taus, [2.5, 97.5])
    return round(float(low), 3), round(float(high), 3)


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
