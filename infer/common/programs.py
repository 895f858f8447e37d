"""Parses arguments, runs a program and prints an error as one line, for `infer/` and `train/`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import tyro

from eagle_jax.config import TreeConfig
from eagle_jax.data.chat import set_chat_template, set_template_args
from eagle_jax.devices import DeviceError, device_message, is_out_of_memory, shortage
from eagle_jax.settings import load_yaml
from infer.common.interrupts import handle_interrupts

T = TypeVar("T")
PYTHON = {"True": "true", "False": "false", "None": "null", "yes": "true", "on": "true", "no": "false", "off": "false"}
"""Python's constants as JSON: as strings all of them would be true."""
EXTRAS = {"grain": "train", "tensorboardX": "train"}
"""Optional packages that programs import, and the extra of `pyproject.toml` that installs each."""


def arguments(cls: type[T], description: str | None, argv: Sequence[str] | None = None) -> T:
    """Parses the command line into a `cls`; `--config FILE.yaml` gives defaults that options override.

    If `cls` has a method `resolved`, its result is returned: options that follow from others.

    Args:
      cls: a dataclass.
      description: the program's docstring.
      argv: words after the program; None takes `sys.argv`.

    Raises:
      ConfigError: the file is missing, or has a key that `cls` has not. ValueError: as `cls.resolved`.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    prog = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    finder = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, words = finder.parse_known_args(argv)
    text = f"{(description or '').rstrip()}\n\n--config FILE.yaml gives defaults of the options below."
    options: dict[str, Any] = {"prog": prog, "args": words, "description": text}
    if found.config is not None:
        with naming("--config", found.config):
            options["default"] = load_yaml(cls, found.config)
    parsed: Any = tyro.cli(cls, **options)
    return parsed.resolved() if hasattr(cls, "resolved") else parsed


def run(
    main: Callable[[T], Any], cls: type[T], description: str | None, log: Literal["plain", "timed"] | None = None
) -> NoReturn:
    """Runs a program and exits: 0 or the int of `main`, 1 after an error of the user, 130 after Ctrl-C.

    A `ValueError` or `OSError` is printed as one sentence. Any other exception is a bug and keeps its traceback. A
    warning is one line. With `log`, log records go to stderr, each with the time if "timed".
    """
    if log is not None:
        stamp = "%(asctime)s " if log == "timed" else ""
        # `force` replaces the handler that absl, which Orbax imports, puts on the root logger.
        logging.basicConfig(level=logging.INFO, format=stamp + "%(message)s", force=True)
    # Notes about absent backends, HTTP requests and retries do not concern a user. `import datasets` resets the level
    # of huggingface_hub itself.
    for chatty in ("jax", "datasets", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    # Prints the text without the line of code that it comes from.
    warnings.showwarning = lambda text, *_, **__: print(f"warning: {text}", file=sys.stderr, flush=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file has every line at once
    try:
        handle_interrupts()
        status = main(arguments(cls, description))
        sys.exit(status if isinstance(status, int) else 0)
    except Exception as error:
        if (message := of_error(error)) is None:
            raise
        sys.exit(f"error: {message}")
    except KeyboardInterrupt:
        print("\nInterrupted.", flush=True)
        os._exit(130)  # at once, whatever other threads are compiling


def of_error(error: Exception) -> str | None:
    """Returns a sentence for an error that a user can act on; None for a bug."""
    if isinstance(error, OSError):
        return _sentence(error)
    if isinstance(error, (ValueError, MemoryError, DeviceError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(error.name or "")):
        return f"{error.name} must be installed, got no such package. Run python -m pip install -e '.[{extra}]'."
    if is_out_of_memory(error):
        return (
            f"the device's memory is used up{shortage(str(error))}: lower the batch (--batch, --rows, --batches) or "
            "raise --micro-batches, lower lengths (--max-new-tokens, --length, --context) or the tree, take --dtype "
            "bfloat16, or spread the model over a mesh"
        )
    return device_message(error)


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


@contextlib.contextmanager
def naming(option: str, value: object) -> Iterator[None]:
    """Prefixes an error about a file, checkpoint or number with the option that gave it.

    Raises:
      ValueError: of the kind raised inside; an `OSError` becomes one.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {value}: {_sentence(error).removeprefix(f'{value}: ')}") from error
    except ValueError as error:
        if str(error).startswith((f"{value} ", f"{value}: ")):
            error.args = (f"{option} {error}",)
        elif not str(error).startswith(f"{option} "):  # otherwise the function inside named it
            error.args = (f"{option} {value}: {error}",)
        raise


def at_least_one(args: object, *names: str) -> None:
    """Raises a `ValueError` that names the option on counts below 1; None passes."""
    _check_least(args, names, 1)


def not_negative(args: object, *names: str) -> None:
    """Raises a `ValueError` that names the option on numbers below 0; None passes."""
    _check_least(args, names, 0)


def _check_least(args: object, names: Sequence[str], least: int) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not all(least <= each for each in (value if isinstance(value, tuple) else [value])):
            raise ValueError(f"{option_of(name)} must be at least {least}, got {value}. Give a larger number.")


def option_of(field: str) -> str:
    """Returns the option of a field: `max_new_tokens` -> `--max-new-tokens`."""
    return f"--{field.replace('_', '-')}"


def check_seed(args: Any) -> None:
    """Raises a `ValueError` on a seed of more than 32 bits, of which JAX keeps the lower 32."""
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, got {args.seed}. JAX keeps 32 bits of a seed.")


def can_write(path: Path, *, folder: bool = True) -> None:
    """Checks, before any work, that `--out` can be written; leaves nothing there.

    Args:
      folder: whether the result is a directory; otherwise it is a file, which will be replaced.

    Raises:
      ValueError: naming the reason.
    """
    if path.exists() and path.is_dir() != folder:
        raise ValueError(f"--out must be a {'directory' if folder else 'file'}, got {path}. Choose another path.")
    above = next(place for place in (path if folder else path.parent, *path.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"--out must be writable, got {path}: {above}: {error.strerror}. Choose another.") from error


def listed(args: object, name: str, kind: Callable[[str], Any] = str, least: int | None = None) -> list[Any]:
    """Splits an option at its commas, each value once: `"0,1"` -> `[0, 1]`.

    Args:
      least: smallest allowed number; infinity is never allowed.

    Raises:
      ValueError: the option is empty, or an entry has another type; the message names the option.
    """
    text = getattr(args, name)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option_of(name)} must have at least one value, got none. Give one.")
    with contextlib.suppress(ValueError):
        values = list(dict.fromkeys(map(kind, words)))
        if least is None or all(least <= value < float("inf") for value in values):
            return values
    what = ("whole numbers" if kind is int else "numbers") + ("" if least is None else f" of at least {least}")
    example = f"{least or 1},{(least or 1) + 1}"
    raise ValueError(f"{option_of(name)} must be {what}, got {text!r}. Separate several by commas, such as {example}.")


def parse_tree(text: str, option: str = "--tree") -> TreeConfig:
    """Parses `"depth,top_k,num_nodes"` into a tree; errors name `option`.

    Raises:
      ValueError: another format. ConfigError: an impossible tree.
    """
    try:
        depth, top_k, num_nodes = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be depth,top_k,num_nodes, got {text!r}. Write it such as 6,10,59.") from None
    with naming(option, text):
        return TreeConfig(depth, top_k, num_nodes)


def use_template(tokenizer: Any, args: Any) -> None:
    """Sets the chat template and its arguments from a program's options.

    Args:
      args: a program's, with `chat_template` and `template_args`.

    Raises:
      CheckpointError: no such template. ValueError: an argument that it does not read, or one that is not NAME=VALUE.
    """
    template_args = parse_template_args(args.template_args)
    if args.chat_template is not None:
        with naming("--chat-template", args.chat_template):
            set_chat_template(tokenizer, args.chat_template)
    if template_args:
        with naming("--template-args", " ".join(args.template_args)):
            set_template_args(tokenizer, template_args)


def parse_template_args(texts: Sequence[str]) -> dict[str, Any]:
    """Parses `["NAME=VALUE"]` into arguments of a chat template; a value is JSON, else a string.

    Raises:
      ValueError: a text without a name, or a name given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(
                f"--template-args must be NAME=VALUE, got {text!r}. Write it such as enable_thinking=false."
            )
        if name in found:
            raise ValueError(f"--template-args must name an argument once, got {name} twice. Leave one out.")
        try:
            found[name] = json.loads(PYTHON.get(value, value))
        except ValueError:
            found[name] = value
    return found
