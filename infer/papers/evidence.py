"""What `infer.papers.report` reads: results of infer.bench, of infer.acceptance and of train.demo.study, merged by kind."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from eagle_jax.config import Verification
from infer.common import recorded, results
from infer.common.reading import read_object, schema_of

ORDER = ("vanilla", "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3", "transformers")
"""Methods in the order of the papers' tables; others come last, as the files have them."""
NAMES = {
    "vanilla": "plain decoding",
    "sps": "SpS",
    "pld": "PLD",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "eagle1": "EAGLE",
    "hass": "HASS",
    "eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "transformers": "transformers",
}
ABLATED = ("confidence", "norerank")
"""Settings of a label that switch off a part of EAGLE-2."""
BASELINES = ("vanilla", "transformers")
"""Methods that every run times anew, to compare the others with."""
RULES = get_args(Verification)
"""Settings of a label that choose an acceptance rule."""
SAME = ("target", "dtype", "max_new_tokens", "seed")
"""Settings that results in one table share. Trees and weights are compared label by label, and questions by name."""
STATIC = {"eagle2@static": "eagle1"}
"""Labels that are a method of the papers by another name: EAGLE is an EAGLE-2 head with the static tree."""


class Source(NamedTuple):
    """A file as it was given. kind: "bench", "acceptance" or "study". machine, revision: where it was measured.

    shared: questions had the same noise above temperature 0 (files of before keys were per question).
    """

    path: str
    kind: str
    machine: str
    revision: str | None
    shared: bool = False


class Section(NamedTuple):
    """A part of the page.

    Attributes:
      title: its heading. text: Markdown, or the one line that says which command gives what is missing.
      pictures: figures by file name, that `text` shows. there: whether the files had anything for it.
    """

    title: str
    text: str
    pictures: Mapping[str, Any] = MappingProxyType({})
    there: bool = True


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that was read.

    Attributes:
      sources: the files, in the order given. bench, cells: of infer.bench and infer.acceptance, in the papers' order
        of methods. study: the object of train.demo.study; None without such a file.
    """

    sources: list[Source]
    bench: list[results.Cell]
    cells: list[recorded.Cell]
    study: dict[str, Any] | None


def gather(paths: Sequence[Path]) -> Evidence:
    """Reads files of all kinds and merges those of one kind. What is in two files alike is taken once.

    Every file of infer.bench has plain decoding of its own, which its ratios are to. Here it is only shown: that of the
    file which timed it at the most batch sizes, of several the first.

    Raises:
      ValueError: a file that is of none of the kinds, or broken; bench results of several machines; results of
        different models or settings; the same cell in two files with other numbers; a label that stands for another
        tree or other weights in one file than in another.
    """
    sources, bench, cells = [], _Merger(), _Merger()
    baselines: dict[Any, dict[Path, list[results.Cell]]] = {}
    studies: list[tuple[Path, dict[str, Any]]] = []
    settings: dict[str, tuple[Path, Any]] = {}
    drafts: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in paths:
        kind = _kind(path)
        found: Any
        if kind == "study":
            studies.append((path, found := json.loads(path.read_text(encoding="utf-8"))))
            sources.append(Source(str(path), kind, str(found.get("machine")), None))
            continue
        found = (results if kind == "bench" else recorded).read(path)
        _same_settings(path, found.settings, settings)
        _same_drafts(path, found.cells, drafts)
        if kind == "bench":
            _one_machine(path, found.machine, sources)
            for cell in found.cells:
                if cell.label in BASELINES:
                    baselines.setdefault((cell.label, cell.task, cell.temperature), {}).setdefault(path, []).append(
                        cell
                    )
                else:
                    bench.add((cell.label, cell.group), cell, path, f"{cell.label}, {results.describe(cell.group)}")
        else:
            for entry in found.cells:
                cells.add(entry.key, entry, path, recorded.describe(entry), same_but_for_chains)
        own = "draws" in (found.more if kind == "bench" else found.settings)
        shared = not own and any(cell.temperature > 0 for cell in found.cells)
        sources.append(Source(str(path), kind, found.machine, found.revision, shared))
    if len(studies) > 1:
        raise ValueError(f"{studies[0][0]} and {studies[1][0]} are both results of train.demo.study: give one of them")
    study = studies[0][1] if studies else None
    plain = [cell for files in baselines.values() for cell in max(files.values(), key=len)]
    return Evidence(sources, in_order([*plain, *bench.values()]), in_order(cells.values()), study)


def shared_noise(sources: Sequence[Source]) -> str:
    """What intervals of files do not tell in which questions shared their noise; nothing if there are none."""
    files = [Path(source.path).name for source in sources if source.shared]
    if not files:
        return ""
    return (
        f" Of {', '.join(files)} the draws above temperature 0 were not apart: questions had the same noise (in "
        "recordings those of one number in several tasks), so that intervals there are over questions, given the noise."
    )


def in_order(cells: Iterable[Any]) -> list[Any]:
    """Cells by the papers' order of methods, those of one method by label: whatever the order of the files."""
    place = {method: number for number, method in enumerate(ORDER)}
    return sorted(cells, key=lambda cell: (place.get(cell.method, len(ORDER)), cell.label))


def title(label: str) -> str:
    """A label in the papers' words: `eagle3@6x10x59` is EAGLE-3, 6x10x59."""
    name, _, setting = label.partition("@")
    return NAMES.get(name, name) + (f", {setting.replace('/', ' ')}" if setting else "")


def unablated(label: str) -> tuple[str, frozenset[str]]:
    """A label without the settings of EAGLE-2's ablation, and which of them it had."""
    name, _, setting = label.partition("@")
    parts = setting.split("/") if setting else []
    rest = "/".join(part for part in parts if part not in ABLATED)
    return name + (f"@{rest}" if rest else ""), frozenset(part for part in parts if part in ABLATED)


def unruled(label: str) -> tuple[str, str | None]:
    """A label without its acceptance rule, and that rule; None where it names none."""
    name, _, setting = label.partition("@")
    parts = setting.split("/") if setting else []
    rest = "/".join(part for part in parts if part not in RULES)
    return name + (f"@{rest}" if rest else ""), next((part for part in parts if part in RULES), None)


TREE = re.compile(r"static|choices|best\d+|chain\d+|\d+(x\d+)*")
"""A setting that is a tree, or the numbers of a lookup."""


def foremost(labels: Iterable[str]) -> set[str]:
    """What figures draw: methods with no setting but their tree, or all where there are none. Tables have them all."""
    labels = set(labels)
    bare = {label for label in labels if not (at := label.partition("@")[2]) or TREE.fullmatch(at)}
    return bare or labels


def missing(heading: str, what: str, command: str) -> Section:
    """A section whose data no file has."""
    return Section(heading, f"Not in these files: {what}. `{command}` gives it.", there=False)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each once, in order of first appearance."""
    return list(dict.fromkeys(values))


def same(old: Any, new: Any) -> Any:
    """The first of two equal cells; None if they differ."""
    return old if old == new else None


def same_but_for_chains(old: recorded.Cell, new: recorded.Cell) -> recorded.Cell | None:
    """Of two equal recordings, of which one may have followed no chains, the fuller; None if they differ."""
    if old.chains and new.chains:
        return same(old, new)
    alike = dataclasses.replace(old, chains=[]) == dataclasses.replace(new, chains=[])
    return (new if new.chains else old) if alike else None


class _Merger:
    def __init__(self) -> None:
        self.found: dict[Any, tuple[Any, Path]] = {}

    def add(self, key: Any, cell: Any, path: Path, words: str, fuller: Callable[..., Any] = same) -> None:
        old, at = self.found.setdefault(key, (cell, path))
        one = fuller(old, cell)
        if one is None:
            raise ValueError(f"{at} and {path} both have {words}, with other numbers: leave one of them out")
        if one is not old:
            self.found[key] = one, path

    def values(self) -> list[Any]:
        return [cell for cell, _ in self.found.values()]


def _kind(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is no file: give a result.json that infer.bench or infer.acceptance wrote, or a "
                         "study.json of train.demo.study")  # fmt: skip
    content = read_object(path)
    kinds = {results.SCHEMA: "bench", recorded.SCHEMA: "acceptance"}
    if content.get("schema") in kinds:
        return kinds[content["schema"]]
    if "schema" not in content and _is_study(content):
        return "study"
    raise ValueError(
        f"{path} is {schema_of(content)}, expected {results.SCHEMA!r} (infer.bench), {recorded.SCHEMA!r} "
        "(infer.acceptance) or a study.json of train.demo.study: measure anew what an older version wrote, or leave the "
        "file out"
    )


def _is_study(content: dict[str, Any]) -> bool:
    runs = content.get("runs")
    if not isinstance(runs, dict) or "replies" not in content:
        return False
    return all(isinstance(run, dict) and {"run", "title", "measured"} <= set(run) for run in runs.values())


def _one_machine(path: Path, machine: str, sources: Sequence[Source]) -> None:
    for source in sources:
        if source.kind == "bench" and source.machine != machine:
            raise ValueError(
                f"{source.path} was measured on {source.machine}, {path} on {machine}: speeds of several machines do "
                "not belong in one table; write a report of each (--out)"
            )


def _same_settings(path: Path, settings: dict[str, Any], seen: dict[str, tuple[Path, Any]]) -> None:
    for name in SAME:
        if name not in settings:
            continue
        at, value = seen.setdefault(name, (path, settings[name]))
        if value != settings[name]:
            raise ValueError(
                f"{at} was measured with {name} {value!r}, {path} with {settings[name]!r}: write a report of each "
                "(--out)"
            )


def _same_drafts(path: Path, cells: Iterable[Any], seen: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    for cell in cells:
        at, draft = seen.setdefault(cell.label, (path, cell.draft))
        if draft != cell.draft:
            names = sorted(name for name in {*draft, *cell.draft} if draft.get(name) != cell.draft.get(name))
            was, now = (", ".join(f"{name} {of.get(name)!r}" for name in names) for of in (draft, cell.draft))
            raise ValueError(
                f"{cell.label} is not the same in {at} ({was}) and {path} ({now}): name the setting in the label, or "
                "leave one of the files out"
            )


def one_row(cells: Iterable[Any]) -> list[Any]:
    """Cells in which labels of one method with equal drafts are one, the shortest: `eagle2` and `eagle2@4x2x7`, say.

    Where both were measured on the same, the cell of the shortest label is kept.
    """
    cells = list(cells)
    found: dict[Any, Any] = {}
    names: dict[str, list[str]] = {}
    for cell in cells:
        names.setdefault(_what(cell), []).append(cell.label)
    for cell in cells:
        label = min(names[_what(cell)], key=lambda name: (len(name), name))
        place = (label, cell.task, cell.temperature, getattr(cell, "batch", None))
        if cell.label == label or place not in found:
            found[place] = dataclasses.replace(cell, label=label)
    return list(found.values())


def _what(cell: Any) -> str:
    return json.dumps([cell.method, cell.draft], sort_keys=True)


def published_as(cell: Any) -> str:
    """The name under which the papers print a method."""
    return STATIC.get(cell.label, cell.method)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    lines = [head, *rows]
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    written = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([written[0], rule, *written[1:]])
