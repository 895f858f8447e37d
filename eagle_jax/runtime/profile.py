"""Profiles: which method and tree is fastest for a target on a machine, by batch size, temperature and prompt length.

`python -m infer.tune` measures and writes one; `eagle_jax.generate(target, "auto", prompts, profile=...)` follows it.
The choice is made on the host from the prompts' number and length and the temperature, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
import weakref
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
import yaml

from eagle_jax.assets import bundled
from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core.types import TargetFn
from eagle_jax.parallel.processes import to_host
from eagle_jax.runtime.compilation import machine
from eagle_jax.runtime.drafters import BoundDrafter, lookahead, prompt_lookup
from eagle_jax.runtime.loading import load_draft_model, load_drafter, load_medusa
from eagle_jax.runtime.target import Target, check_target
from eagle_jax.settings import load_yaml

SCHEMA = "eagle_jax.profile/1"
BUNDLED = "bundled"
"""`Entry.weights` of the heads that come with the package."""

Method = Literal["vanilla", "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3"]
NUMBERS: dict[str, tuple[str, ...]] = {"pld": ("ngram", "length"), "lookahead": ("ngram", "window", "guesses")}
"""What the methods without weights are described by."""
OPTIONAL = {"pld": ("shortest", "latest")}
"""What they may be described by as well."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What to use for a batch size and a temperature.

    Attributes:
      batch: rows. temperature: 0 is greedy. prompt: tokens of the longest prompt that it is for; None is any.
      method: by the papers' names; vanilla is plain decoding, used where no method was safely faster.
      weights: a path, a hub id, or "bundled"; None for methods without.
      tree: of a method with weights. ngram, length, and where they are not 1 and false shortest, latest: of pld, as of
        `prompt_lookup`. ngram, window, guesses: of lookahead.
      predicted, measured: tokens per second over those of plain decoding, the mean over the tasks it was tuned on.
      worst: the least measured one of a task.
    """

    batch: int
    temperature: float
    prompt: int | None = dataclasses.field(default=None, kw_only=True)
    method: Method = "vanilla"
    weights: str | None = None
    tree: TreeConfig | None = None
    ngram: int | None = None
    length: int | None = None
    shortest: int | None = None
    latest: bool | None = None
    window: int | None = None
    guesses: int | None = None
    predicted: float | None = None
    measured: float | None = None
    worst: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"batch={self.batch} must be at least 1 and temperature={self.temperature} at least 0")
        if self.prompt is not None and self.prompt < 1:
            raise ConfigError(f"prompt={self.prompt} must be at least 1 token; leave it out for prompts of any length")
        if self.method not in get_args(Method):
            raise ConfigError(f"method={self.method!r} must be one of {', '.join(get_args(Method))}")
        own = NUMBERS.get(self.method, () if self.method == "vanilla" else ("weights", "tree"))
        also = OPTIONAL.get(self.method, ())
        for name in ("weights", "tree", "ngram", "length", "shortest", "latest", "window", "guesses"):
            if name not in also and (getattr(self, name) is None) == (name in own):
                verb = "needs" if name in own else "takes no"
                raise ConfigError(
                    f"method {self.method} {verb} {name}; its fields are {', '.join(own + also) or 'none'}"
                )
        if self.tree is not None and self.tree.verification != "deterministic":
            raise ConfigError(
                f"verification={self.tree.verification!r} makes the text of a key depend on the drafts; a profile "
                "changes no text: leave verification out"
            )

    def bind(self, target: Target, weights: dict[tuple[str, str], Any]) -> BoundDrafter | None:
        """The method bound to `target`; None is plain decoding.

        Args:
          weights: those loaded already, by method and where they are; loads into it what is missing.

        Raises:
          CheckpointError: weights that are missing or do not fit. ConfigError: a tree that the method cannot fill.
        """
        if self.method == "vanilla":
            return None
        if self.method in NUMBERS:
            make: Any = prompt_lookup if self.method == "pld" else lookahead
            names = NUMBERS[self.method] + OPTIONAL.get(self.method, ())
            return make(target, **{name: value for name in names if (value := getattr(self, name)) is not None})
        where = str(self.weights)
        if (self.method, where) not in weights:
            load: dict[str, Any] = {"sps": load_draft_model, "medusa": load_medusa, "hydra": load_medusa}
            path = where
            if where == BUNDLED:
                path = str(bundled(self.method))
            weights[self.method, where] = load.get(self.method, load_drafter)(path, target)
        return weights[self.method, where].with_tree(self.tree)


@dataclasses.dataclass(frozen=True)
class ProfileFile:
    """The contents of a profile.

    Attributes:
      schema: of the file. target: name of the target, as it was loaded. fingerprint: of its weights.
      dtype: of the target, which the choice depends on. machine: where it was measured.
      entries: at most one for every batch size, temperature and longest prompt.
    """

    schema: Literal["eagle_jax.profile/1"]
    target: str
    fingerprint: str
    dtype: str
    machine: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ConfigError("entries is empty: a profile needs at least one; make it with python -m infer.tune")
        places = [(entry.batch, entry.temperature, entry.prompt) for entry in self.entries]
        for batch, temperature, prompt in places:
            if places.count((batch, temperature, prompt)) > 1:
                to = "" if prompt is None else f" for prompts to {prompt} tokens"
                raise ConfigError(f"entries: batch {batch} at temperature {temperature:g}{to} is given twice; keep one")

    def find(self, batch: int, temperature: float, prompt: int) -> Entry | None:
        """The entry that holds for a batch size, a temperature and a prompt length; None where nothing was measured.

        It is that of the smallest measured batch size not below `batch`, of these that of the lowest temperature not
        below `temperature`, and of these that for the shortest prompts that `prompt`, the tokens of the longest one, is
        not above. Drafts are mostly worth less as all three grow, so that what pays there should pay here; that is not
        certain (docs/tuning.md). Beyond the largest that were measured nothing is known, and plain decoding cannot be
        slower than itself.
        """

        def place(entry: Entry) -> tuple[float, float, float]:
            return entry.batch, entry.temperature, float("inf") if entry.prompt is None else entry.prompt

        asked = (batch, temperature, prompt)
        fitting = [e for e in self.entries if all(a >= b for a, b in zip(place(e), asked, strict=True))]
        return min(fitting, key=place, default=None)

    def to_yaml(self, comment: str = "") -> str:
        """The file as text, an entry per line; `comment` becomes its first lines."""
        lines = [f"# {line}" for line in comment.splitlines()]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        entries = fields.pop("entries")
        lines.append(yaml.safe_dump(fields, sort_keys=False, width=1000).rstrip())
        lines.append("entries:")
        for entry in entries:
            text = yaml.safe_dump(_differing(entry), default_flow_style=True, sort_keys=False, width=1000)
            lines.append(f"- {text.rstrip()}")
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A profile bound to a target: its methods in memory.

    Attributes:
      file: what was read. drafters: of every entry; None is plain decoding. target_fn: of the target it is bound to.
    """

    file: ProfileFile
    drafters: tuple[BoundDrafter | None, ...] = dataclasses.field(repr=False)
    target_fn: TargetFn = dataclasses.field(repr=False)

    def choose(self, batch: int, temperature: float, prompt: int) -> BoundDrafter | None:
        """The method for what a call asks, see `ProfileFile.find`; None is plain decoding."""
        entry = self.file.find(batch, temperature, prompt)
        return None if entry is None else self.drafters[self.file.entries.index(entry)]


def load_profile(path: str | os.PathLike[str], target: Target) -> Profile:
    """Reads a profile that `python -m infer.tune` wrote and loads the weights it names, each once.

    Raises:
      ConfigError: no such file, an unknown key or schema, an impossible tree, or a profile for another target or dtype.
      CheckpointError: weights that are missing or do not fit. ValueError: `target` is none.

    Warns:
      UserWarning: it was tuned on another machine.
    """
    check_target(target)
    file = read_profile(path)
    if file.dtype != target.dtype:
        raise ConfigError(
            f"{path} was tuned for {file.target!r} in {file.dtype}, and this target is in {target.dtype}: load it with "
            f"dtype={file.dtype!r}, or tune again with python -m infer.tune --dtypes {target.dtype}"
        )
    if (found := fingerprint(target)) != file.fingerprint:
        raise ConfigError(
            f"{path} was tuned for the target {file.target!r} (fingerprint {file.fingerprint}), not for "
            f"{target.name!r} ({found}): tune this one with python -m infer.tune --target {target.name}"
        )
    if file.machine != (here := machine()):
        warnings.warn(
            f"{path} was tuned on {file.machine!r}, and this is {here!r}: the text is the same, but what is fastest "
            "may be another method; measure it with python -m infer.tune --check, or tune again",
            stacklevel=2,
        )
    weights: dict[tuple[str, str], Any] = {}
    bound = []
    for number, entry in enumerate(file.entries):
        try:
            bound.append(entry.bind(target, weights))
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"{path}, entries[{number}], {entry.method}: {error}") from None
    return Profile(file, tuple(bound), target.fn)


def read_profile(path: str | os.PathLike[str]) -> ProfileFile:
    """The contents of a profile, checked; no weights are read.

    Raises:
      ConfigError: no such file, an unknown key or schema, an impossible tree.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give the YAML file that python -m infer.tune wrote")
    if not path.is_file():
        raise ConfigError(f"{path}: no such profile: python -m infer.tune --out {path.name} writes one")
    # Before all else, or a file of a later schema would be refused for the first key that is new in it.
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        values = None  # which `load_yaml` says better
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text: give the YAML file that python -m infer.tune wrote") from None
    if isinstance(values, dict) and values.get("schema", SCHEMA) != SCHEMA:
        raise ConfigError(
            f"{path} has schema {values['schema']!r}, and this version reads {SCHEMA!r}: "
            "tune again with python -m infer.tune"
        )
    return load_yaml(ProfileFile, path)


_BOUND: weakref.WeakKeyDictionary[Target, dict[Path, tuple[Any, Profile]]] = weakref.WeakKeyDictionary()


def bound_profile(profile: Profile | str | os.PathLike[str] | None, target: Target) -> Profile:
    """A profile for `target`; that of a path is loaded once, and again only when the file changes.

    Raises:
      ValueError: no profile, or one that is bound to another target. ConfigError, CheckpointError: as `load_profile`.
    """
    if isinstance(profile, Profile):
        if profile.target_fn is not target.fn:
            raise ValueError(
                f"profile was loaded for another target than {target.name!r}: load it with load_profile(path, target)"
            )
        return profile
    if not isinstance(profile, str | os.PathLike):
        raise ValueError(
            f'drafter="auto" needs profile=, the path of a file that python -m infer.tune wrote or what '
            f"eagle_jax.load_profile returns (found {type(profile).__name__}); without one pass a drafter, or None "
            "for plain decoding"
        )
    path = Path(profile).resolve()
    if not path.is_file():
        return load_profile(profile, target)  # which says so
    status = path.stat()
    stamp = status.st_mtime_ns, status.st_size
    known = _BOUND.setdefault(target, {})
    if path not in known or known[path][0] != stamp:
        known[path] = stamp, load_profile(profile, target)
    return known[path][1]


def fingerprint(target: Target) -> str:
    """Twelve hexadecimal digits that tell targets apart: of sizes and a few weights of every parameter."""
    heads = jax.tree.map(lambda leaf: leaf[(0,) * (leaf.ndim - 1)][:4].astype("float32"), target.params)
    digest = hashlib.sha256()
    for (place, leaf), (_, few) in zip(
        jax.tree_util.tree_leaves_with_path(target.params), jax.tree_util.tree_leaves_with_path(heads), strict=True
    ):
        digest.update(f"{jax.tree_util.keystr(place)}{leaf.shape}".encode())
        digest.update(np.asarray(to_host(few)).tobytes())
    return digest.hexdigest()[:12]


def _differing(entry: Any) -> dict[str, Any]:
    """Fields that are not at their defaults, and the sizes of a tree."""
    found = {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if dataclasses.is_dataclass(value):
            value = _differing(value)
        elif isinstance(value, tuple):
            value = list(value)
        if value != field.default or field.name in ("method", "depth", "top_k", "num_nodes"):
            found[field.name] = value
    return found
