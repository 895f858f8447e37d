"""Reads profiles: a target's fastest method on a machine by batch size, temperature and prompt length.

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
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import yaml

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core import CycleCost, TargetFn
from eagle_jax.parallel import to_host
from eagle_jax.runtime.compilation import machine
from eagle_jax.runtime.drafters import BoundDrafter, lookahead, prompt_lookup
from eagle_jax.runtime.loading import load_draft_model, load_drafter, load_medusa
from eagle_jax.runtime.target import Target, check_target
from eagle_jax.settings import load_yaml

Method = Literal["vanilla", "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3"]
REQUIRED: dict[str, tuple[str, ...]] = {
    "vanilla": (), "pld": ("ngram", "length"), "lookahead": ("ngram", "window", "guesses")
}  # fmt: skip
"""Required fields of methods without weights; the others need `weights` and `tree`."""
OPTIONAL = {"pld": ("shortest", "latest")}
SETTINGS = ("weights", "tree", "ngram", "length", "shortest", "latest", "window", "guesses")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The fastest method for a batch size, a temperature and a prompt length.

    Attributes:
      batch: rows. temperature: 0 is greedy. prompt: longest prompt in tokens; None is any length.
      method: the papers' name; vanilla is plain decoding, used if no method was safely faster.
      weights: a path, a hub id, or "bundled"; None for methods without.
      tree: of a method with weights. ngram, length, shortest, latest: arguments of `prompt_lookup` (pld).
      ngram, window, guesses: arguments of `lookahead`.
      cost: of the parts of a cycle, from which `generate` chooses the size of every tree; None verifies it whole.
      predicted: speedup of decoding alone over plain decoding, the mean over the tasks of the tuning. Calls begin with
        this expectation if there is a `cost`; None knows nothing.
      measured: speedup of whole calls, the mean over the tasks. worst: the smallest of a task.
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
    cost: CycleCost | None = None
    predicted: float | None = None
    measured: float | None = None
    worst: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("temperature", 0), ("prompt", 1), ("predicted", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(f"{name} must be at least {least}, got {value}. Give a larger number.")
        own, also = REQUIRED.get(self.method, ("weights", "tree")), OPTIONAL.get(self.method, ())
        for name in SETTINGS:
            value = getattr(self, name)
            if name not in also and (value is None) == (name in own):
                fields = ", ".join(own + also) or "none"
                raise ConfigError(f"fields of method {self.method} must be {fields}, got {name} {value!r}. Give these.")
        if self.cost is not None:
            if self.method in ("vanilla", "lookahead"):
                raise ConfigError(f"cost must be left out with method {self.method}, got {self.cost}. Remove it.")
            drafted = self.tree.num_nodes if self.tree is not None else self.length or 0
            self.cost.prices(drafted + 1)
        if self.tree is not None and self.tree.verification != "deterministic":
            raise ConfigError(
                f"verification must be deterministic in a profile, got {self.tree.verification!r}. Leave it out: the "
                "text of a key would depend on the drafts."
            )

    def bind(self, target: Target, weights: dict[tuple[str, str | None], Any]) -> BoundDrafter | None:
        """Binds the method to `target` (None: plain decoding); adds missing `weights`, by method and path.

        Raises:
          CheckpointError: the weights are missing or do not fit. ConfigError: the method cannot draft the tree.
        """
        if self.method == "vanilla":
            return None
        if self.method in REQUIRED:
            bind: Any = prompt_lookup if self.method == "pld" else lookahead
            names = REQUIRED[self.method] + OPTIONAL.get(self.method, ())
            return bind(target, **{name: value for name in names if (value := getattr(self, name)) is not None})
        if (self.method, self.weights) not in weights:
            load: dict[str, Any] = {"sps": load_draft_model, "medusa": load_medusa, "hydra": load_medusa}
            path = bundled(self.method) if self.weights == "bundled" else self.weights
            weights[self.method, self.weights] = load.get(self.method, load_drafter)(str(path), target)
        return weights[self.method, self.weights].with_tree(self.tree)


@dataclasses.dataclass(frozen=True)
class ProfileFile:
    """Contents of a profile: target (name, dtype, fingerprint of the weights), machine and entries.

    There is at most one entry per batch size, temperature and prompt length.
    """

    schema: Literal["eagle_jax.profile/1"]
    target: str
    fingerprint: str
    dtype: str
    machine: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ConfigError("entries must hold an entry, got none. Make a profile with python -m infer.tune.")
        places = [(entry.batch, entry.temperature, entry.prompt) for entry in self.entries]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ConfigError(
                f"entries must have one of each (batch, temperature, prompt), got {twice} twice. Keep one."
            )

    def find(self, batch: int, temperature: float, prompt: int) -> Entry | None:
        """Returns the entry for a batch size, a temperature and a prompt length; None is plain decoding.

        Chooses the first entry, by (batch, temperature, prompt), whose three values are all at least the request's
        (`prompt`: tokens of the longest prompt). Drafts usually gain less as each of the three grows, so a method that
        is faster at the measured values should be faster at smaller ones (docs/tuning.md).
        """

        def place(entry: Entry) -> tuple[float, float, float]:
            return entry.batch, entry.temperature, float("inf") if entry.prompt is None else entry.prompt

        request = (batch, temperature, prompt)
        fitting = [e for e in self.entries if all(a >= b for a, b in zip(place(e), request, strict=True))]
        return min(fitting, key=place, default=None)

    def to_yaml(self, comment: str = "") -> str:
        """Returns the file as YAML, an entry per line, with `comment` as its first lines."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]}
        head = yaml.safe_dump(fields, sort_keys=False, width=1000).rstrip()
        lines = [*(f"# {line}" for line in comment.splitlines()), head, "entries:"]
        for entry in self.entries:
            text = yaml.safe_dump(_differing(entry), default_flow_style=True, sort_keys=False, width=1000)
            lines.append(f"- {text.rstrip()}")
        return "\n".join(lines) + "\n"


class Chosen(NamedTuple):
    """Holds a drafter (None: plain decoding), the cost of its cycles and the expected tokens per plain step."""

    drafter: BoundDrafter | None
    cost: float | CycleCost | None = None
    expected: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A profile bound to a target, with all its drafters loaded.

    Attributes:
      file: contents. drafters: by entry; None is plain decoding. target_fn: functions of the target.
    """

    file: ProfileFile
    drafters: dict[Entry, BoundDrafter | None] = dataclasses.field(repr=False)
    target_fn: TargetFn = dataclasses.field(repr=False)

    def choose(self, batch: int, temperature: float, prompt: int) -> Chosen:
        """Returns the method for a call, as `ProfileFile.find` does; without a drafter it is plain decoding."""
        entry = self.file.find(batch, temperature, prompt)
        return Chosen(None) if entry is None else Chosen(self.drafters[entry], entry.cost, entry.predicted)


def load_profile(path: str | os.PathLike[str], target: Target) -> Profile:
    """Reads a profile that `python -m infer.tune` wrote and loads the weights it names, each once.

    Raises:
      ConfigError: the file is missing or invalid, or is for another target or dtype.
      CheckpointError: weights are missing or do not fit. ValueError: `target` is not a `Target`.

    Warns:
      UserWarning: the profile was tuned on another machine.
    """
    check_target(target)
    if not Path(path).exists():
        raise ConfigError(f"profile must be a file, got {path}, which does not exist. Write one by infer.tune --out.")
    file = load_yaml(ProfileFile, Path(path))
    tuned, found = (file.fingerprint, file.dtype), (fingerprint(target), target.dtype)
    if tuned != found:
        raise ConfigError(
            f"target must be the one that {path} was tuned for, {file.target!r} {tuned}, got {target.name!r} {found}. "
            "Load that one, with its dtype and weights=, or run python -m infer.tune for this one."
        )
    if file.machine != (here := machine()):
        warnings.warn(
            f"{path} was tuned on {file.machine!r}, and this is {here!r}: the text is the same, but another method may "
            "be faster; measure with python -m infer.tune --check, or tune again",
            stacklevel=2,
        )
    weights: dict[tuple[str, str | None], Any] = {}
    bound = {}
    for number, entry in enumerate(file.entries):
        try:
            bound[entry] = entry.bind(target, weights)
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"{path}, entries[{number}], {entry.method}: {error}") from None
    return Profile(file, bound, target.fn)


_BOUND: weakref.WeakKeyDictionary[Target, dict[Path, tuple[Any, Profile]]] = weakref.WeakKeyDictionary()


def bound_profile(profile: Profile | str | os.PathLike[str] | None, target: Target) -> Profile:
    """Returns a profile for `target`; a path is loaded once, and again when the file changes.

    Raises:
      ValueError: `profile` has another type or another target. ConfigError, CheckpointError: as `load_profile`.
    """
    if isinstance(profile, Profile):
        if profile.target_fn is not target.fn:
            raise ValueError(f"profile must be for target {target.name!r}, got one for another. Use load_profile anew.")
        return profile
    if not isinstance(profile, str | os.PathLike):
        raise ValueError(
            'profile must be given with drafter="auto": a file of python -m infer.tune or a result of load_profile, '
            f"got {profile!r}. Give one, or another drafter; None is plain decoding."
        )
    path = Path(profile).resolve()
    stamp = path.stat().st_mtime_ns if path.is_file() else None
    known = _BOUND.setdefault(target, {})
    if path not in known or known[path][0] != stamp:
        known[path] = stamp, load_profile(path, target)
    return known[path][1]


def fingerprint(target: Target) -> str:
    """Returns twelve hexadecimal digits of the sizes and a few weights of every parameter."""
    digest = hashlib.sha256()
    for place, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        few = leaf[(0,) * (leaf.ndim - 1)][:4].astype("float32")
        digest.update(f"{jax.tree_util.keystr(place)}{leaf.shape}".encode())
        digest.update(np.asarray(to_host(few)).tobytes())
    return digest.hexdigest()[:12]


def _differing(record: Any) -> dict[str, Any]:
    """Returns the fields that differ from their defaults, and the sizes of a tree."""
    kept = ("method", "depth", "top_k", "num_nodes")
    values = {field.name: (getattr(record, field.name), field.default) for field in dataclasses.fields(record)}
    found = {name: value for name, (value, default) in values.items() if value != default or name in kept}
    found |= {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return found | {name: _differing(value) for name, value in found.items() if dataclasses.is_dataclass(value)}
