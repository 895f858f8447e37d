"""Resolves checkpoints, sources and tokenizers of options, and locks directories of output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import eagle_jax
from eagle_jax.assets import PAIRS, pair_head, pair_target
from eagle_jax.checkpoints import config_directory, read_target_config, write_whole
from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.data.chat import load_tokenizer
from eagle_jax.data.corpus import Source
from infer.common.programs import naming, use_template
from train.loop.options import TargetArgs

LOCK, RUN = ".lock", "run.json"


def target_path(text: str) -> str:
    """Returns a path or hub id; "demo" and "smollm2" become the paths of these targets."""
    return str(pair_target(text)) if text in PAIRS else text


def target_config(text: str) -> DecoderConfig:
    """Reads the configuration of `--target`, without its weights.

    Raises:
      CheckpointError: there is no model.
    """
    with naming("--target", text):
        return read_target_config(config_directory(target_path(text)))


def read_target(args: Any, mesh: jax.sharding.Mesh | None = None) -> eagle_jax.Target:
    """Loads `--target` with `--dtype` and `--weights`.

    Args:
      args: a `TargetArgs` with `dtype`.

    Raises:
      CheckpointError, ConfigError, MemoryError: as `eagle_jax.load_target`; the message names the option.
    """
    with naming("--target", args.target):
        return eagle_jax.load_target(target_path(args.target), args.dtype, weights=args.weights, mesh=mesh)


def head_path(text: str, option: str = "--head", part: str = "hass") -> str:
    """Returns the path or hub id of a head; "demo" is the bundled `part`, "smollm2" the head for SmolLM2.

    Of a run's directory it is the head that was written there.

    Raises:
      ValueError: the run has no head yet. CheckpointError: there is no checkpoint.
    """
    if text in PAIRS:
        return str(pair_head(text, part))
    run = Path(text).expanduser()
    if (run / "log.jsonl").is_file() and not (run / "config.json").is_file():
        made = [run / folder for folder in ("head", "model") if (run / folder / "config.json").is_file()]
        if not made:
            raise ValueError(f"{option} must be a run that has written a head, got {text}. Let it continue to its "
                             "first measurement (--eval-every) or its end.")  # fmt: skip
        return str(made[0])
    with naming(option, text):
        config_directory(text)
    return text


def note_run(out: Path, target: str) -> None:
    """Writes the name of the target into a run's directory."""
    write_whole(out / RUN, json.dumps({"target": target}) + "\n")


def target_of_head(head: str) -> str | None:
    """Returns the `--target` that a head of `train.head` was trained for; None for other heads."""
    note = Path(head).expanduser().parent / RUN
    return json.loads(note.read_text(encoding="utf-8"))["target"] if note.is_file() else None


def sources_of(texts: Sequence[str], option: str = "--data") -> list[Source]:
    """Parses the sources of an option and checks that files exist.

    Raises:
      ValueError: naming the option and the source.
    """
    if not texts and option == "--data":
        raise ValueError("--data must name at least one source, got none. Give files or hub datasets.")
    sources = []
    for text in texts:
        with naming(option, text):
            sources.append(Source.parse(text))
            sources[-1].check()
    return sources


def tokenizer_of(args: TargetArgs, config: DecoderConfig) -> Any:
    """Loads the tokenizer of `--tokenizer` or of `--target`, with `--chat-template` and `--template-args`.

    Raises:
      CheckpointError: as `load_tokenizer`, naming the option. ValueError: the template does not read an argument.
    """
    option, named = ("--target", args.target) if args.tokenizer is None else ("--tokenizer", args.tokenizer)
    with naming(option, named):
        found = load_tokenizer(named, config)
    use_template(found, args)
    return found


@contextlib.contextmanager
def alone_in(out: Path, marks: Sequence[str], what: str) -> Iterator[None]:
    """Creates a directory and locks it until this run ends; removes it if nothing was written.

    Of several processes only the first takes the lock.

    Args:
      marks: names of which a directory that is not empty must hold one. what: what such a directory is.

    Raises:
      ConfigError: it is a file or holds other files, or another run holds the lock.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a directory, got the file {out}. Give another path.")
    made = not out.exists()
    found = set() if made else {path.name for path in out.iterdir()} - {LOCK}
    if found and found.isdisjoint(marks):
        raise ConfigError(f"--out must be empty or {what}, got {out} with other files. Give another directory.")
    out.mkdir(parents=True, exist_ok=True)
    if jax.process_index() > 0:
        yield
        return
    with (out / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out must be a directory that no other run writes, got {out}. Wait for that run, stop it, or give "
                "another directory."
            ) from None
        except OSError as error:  # some network file systems
            logging.info("%s cannot be locked (%s). Let no two runs write there.", out, error.strerror)
        try:
            yield
        finally:
            if made and [path.name for path in out.iterdir()] == [LOCK]:
                (out / LOCK).unlink()
                out.rmdir()
