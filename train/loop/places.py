"""Where programs read and write: checkpoints by path or by the name "demo", and directories that one run has alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.assets import DEMO, bundled
from eagle_jax.checkpoints import config_directory, read_target_config
from eagle_jax.checkpoints.files.staging import write_whole
from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.data.chat.tokenizers import load_tokenizer
from eagle_jax.data.corpus.sources import Source
from infer.common.programs import naming, use_template

LOCK, RUN = ".lock", "run.json"


def target_path(text: str) -> str:
    """A path or hub id as it is; of "demo", the bundled target's."""
    return str(bundled("target")) if text == DEMO else text


def target_config(text: str) -> DecoderConfig:
    """The configuration of what `--target` names, of which no weights are read.

    Raises:
      CheckpointError: there is none.
    """
    with naming("--target", text):
        return read_target_config(config_directory(target_path(text)))


def head_path(text: str, option: str = "--head", part: str = "hass") -> str:
    """A path or hub id as it is; of "demo", that of the bundled `part`; of a training run, its head's or model's.

    Raises:
      ValueError: the run has no head yet. CheckpointError: there is nothing there.
    """
    if text == DEMO:
        return str(bundled(part))
    run = Path(text).expanduser()
    if (run / "log.jsonl").is_file() and not (run / "config.json").is_file():
        made = [run / folder for folder in ("head", "model") if (run / folder / "config.json").is_file()]
        if not made:
            raise ValueError(f"{option} {text} is the directory of a training run, which has no head yet: one is "
                             "written at the first measurement (--eval-every) or at the end; let it go on")  # fmt: skip
        return str(made[0])
    with naming(option, text):
        config_directory(text)
    return text


def note_run(out: Path, target: str) -> None:
    """Writes down in a run's directory whose head it trains."""
    write_whole(out / RUN, json.dumps({"target": target}) + "\n")


def target_of_head(head: str) -> str | None:
    """The target that a head of `train.head` was trained for, as it was given; None of other heads."""
    note = Path(head).expanduser().parent / RUN
    return json.loads(note.read_text(encoding="utf-8"))["target"] if note.is_file() else None


def sources_of(texts: Sequence[str], option: str = "--data") -> list[Source]:
    """Sources of conversations as an option gives them, each of which is there or reads like a dataset of the hub.

    Raises:
      ValueError: naming the option and the source.
    """
    sources = []
    for text in texts:
        with naming(option, text):
            sources.append(Source.parse(text))
            sources[-1].check()
    return sources


def tokenizer_of(target: str, config: DecoderConfig, args: Any = None) -> Any:
    """What `--tokenizer` names, or else what lies beside `--target`, with `--chat-template` and `--template-args`.

    Args:
      args: a program's, with `tokenizer`, `chat_template` and `template_args`; None is without them.

    Raises:
      CheckpointError: as `load_tokenizer`, naming the option. ValueError: an argument that the template does not read.
    """
    given = None if args is None else args.tokenizer
    option, named = ("--target", target) if given is None else ("--tokenizer", given)
    with naming(option, named):
        found = load_tokenizer(named, config)
    if args is not None:
        use_template(found, args)
    return found


def check_own(out: Path, marks: Sequence[str], what: str) -> None:
    """Refuses a directory that has something in it, and none of the names in `marks`.

    Raises:
      ConfigError: naming the directory.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: give a directory")
    if not out.is_dir() or any((out / mark).exists() for mark in marks):
        return
    if any(path.name != LOCK for path in out.iterdir()):
        raise ConfigError(f"--out {out} has files in it and is not {what}: give another directory")


@contextlib.contextmanager
def alone_in(out: Path, leads: bool = True) -> Iterator[None]:
    """Makes the directory, and keeps other runs out of it until this one ends, in whatever way.

    Of a run's processes the one that `leads` keeps the others' runs out. A directory in which nothing was written is
    removed again.

    Raises:
      ConfigError: another run is at it.
    """
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if not leads:
        yield
        return
    with contextlib.ExitStack() as stack:
        while True:
            lock = stack.enter_context((out / LOCK).open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--out {out}: another run is writing there; wait for it, stop it, or give another directory"
                ) from None
            except OSError as error:  # some network file systems
                logging.info("%s cannot be locked (%s): let no two runs write there", out, error.strerror)
            if os.fstat(lock.fileno()).st_nlink:  # else who had it before has just removed it
                break
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)
            if made and not any(out.iterdir()):
                out.rmdir()
