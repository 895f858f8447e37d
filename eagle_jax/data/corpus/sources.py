"""Reads conversations from files and hub datasets: into a tokenised `Corpus`, or as prompts.

A source is written `path[#split][@weight]`: a JSONL, JSON or Parquet file (or a glob of them), or the name of a dataset
on the Hugging Face hub. `data/*.jsonl`, `chat.parquet@2`, `HuggingFaceH4/ultrachat_200k#train_sft@1`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.encoding import Encoded, encode_row, stored_text
from eagle_jax.data.chat.tokenizers import TOKENIZER_KEY, tokenizer_key, tokenizer_settings
from eagle_jax.data.corpus.documents import Corpus
from eagle_jax.data.corpus.files import ENDINGS, holds_rows, read_rows
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row

FORMAT = 4
"""Version of cached corpora. It increases when the same rows give other tokens: older caches are not read."""
DEFAULT_SPLIT = "train"
_DATASET = re.compile(r"[\w-]+(/[\w.-]+)?")  # `name` or `owner/name`


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of rows: files, or a dataset of the hub.

    Attributes:
      path: file, glob, or name of a dataset. split: of a dataset. weight: share in the mix; None is the number of rows.
    """

    path: str
    split: str = DEFAULT_SPLIT
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parses "path[#split][@weight]".

        Raises:
          ValueError: the weight is not a positive number, or files have a split.
        """
        rest, at, weight = text.rpartition("@")
        path, _, split = (rest if at else text).partition("#")
        try:
            share = float(weight) if weight and at else None
        except ValueError:
            share = 0.0
        if not path or (share is not None and share <= 0):
            raise ValueError(f"source must be path[#split][@weight] with a positive weight, got {text!r}. Correct it.")
        if split and cls(path).files:
            raise ValueError(f"source must have no #split for local files, got {text!r}. Leave #{split} out.")
        return cls(path, split or DEFAULT_SPLIT, share)

    @property
    def name(self) -> str:
        """The source's name in a corpus: `path`, or `path#split` for another split than `train`."""
        return self.path if self.split == DEFAULT_SPLIT or self.files else f"{self.path}#{self.split}"

    @property
    def files(self) -> list[Path]:
        """The local files of `path`; in a directory, the files of rows; empty for a dataset of the hub."""
        if Path(self.path).is_dir():
            return sorted(path for path in Path(self.path).iterdir() if path.is_file() and holds_rows(path))
        return sorted(Path(found) for found in glob.glob(self.path) if os.path.isfile(found))

    def check(self) -> None:
        """Checks that `path` exists or has the form of a dataset name, without downloading.

        Raises:
          ValueError: `path` has neither.
        """
        if not self.files and (Path(self.path).is_dir() or not is_dataset_name(self.path)):
            kinds = "/*.jsonl, .json or .parquet" * Path(self.path).is_dir()
            raise ValueError(f"source must be a file or a hub dataset, got no file {self.path}{kinds}. Correct it.")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields every row.

        Raises:
          ValueError: the file or dataset is missing, or a line or an element is not JSON.
        """
        self.check()
        files = self.files
        for path in files:
            yield from (row for _, row in read_rows(path))
        if not files:
            yield from hub_rows(self.path, self.split)


def is_dataset_name(text: str) -> bool:
    """Returns whether a text has the form `name` or `owner/name` and is not the name of a file of rows."""
    return _DATASET.fullmatch(text) is not None and not text.endswith(ENDINGS)


@functools.lru_cache(maxsize=16)  # `corpus_key` and `rows` load the same dataset
def hub_rows(name: str, part: str | None = None) -> Iterable[dict[str, Any]]:
    """Loads the rows of a dataset of the hub, or of a directory laid out like one.

    Args:
      part: a split, `config/split`, or a JSON, JSONL or Parquet file of the repository; None is the split "train".

    Raises:
      ValueError: the dataset or part cannot be loaded.
    """
    part = part or DEFAULT_SPLIT
    try:
        import datasets
    except ImportError:
        raise ValueError(f"datasets must be installed to read {name}:{part}. Run pip install -e '.[train]'.") from None
    config, _, split = part.rpartition("/")
    options = {"name": config or None, "split": split}
    if part.endswith(ENDINGS):
        options = {"data_files": part, "split": "train"}
    try:
        return datasets.load_dataset(name, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"source must be a local file or a dataset of the hub, got {name}:{part} ({reason}). Check the spelling "
            "and the network. Set HF_TOKEN for a restricted dataset."
        ) from error


def build_corpus(
    sources: Sequence[Source],
    tokenizer: Any,
    cache: Path | None = None,
    *,
    key: str | None = None,
    vocab_size: int = 2**31,
) -> tuple[Corpus, dict[str, int]]:
    """Tokenises every row of every source; reuses a cached result of the same inputs.

    Args:
      cache: directory of built corpora, by a key of the sources' contents, the tokenizer and its chat template.
      key: result of `corpus_key`, which reads every file; None computes it.
      vocab_size: of the target; a larger token id is an error.

    Returns:
      the corpus, with the names of the sources, and the number of rows left out per reason.

    Raises:
      ValueError: a source cannot be read, has no usable row, is given twice, or holds tokens of another model.
    """
    names = [source.name for source in sources]
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise ValueError(f"sources must be distinct, got {twice[0]} twice. Give it once; @weight sets its share.")
    path = None if cache is None else cache / f"corpus-{key or corpus_key(sources, tokenizer)}"
    if path is not None and path.is_dir():
        corpus = Corpus.load(path)
        corpus.check_vocabulary(vocab_size)
        return corpus, json.loads((path / "skipped.json").read_text(encoding="utf-8"))
    from tqdm.auto import tqdm

    documents: list[Encoded] = []
    places: list[tuple[int, int]] = []  # source and row of each document
    skipped: collections.Counter[str] = collections.Counter()
    for index, source in enumerate(sources):
        _check_tokenizer(source, tokenizer)
        before = len(documents)
        for number, row in enumerate(tqdm(source.rows(), desc=source.name, unit=" rows", disable=None)):
            try:
                documents.append(encode_row(tokenizer, row))
                places.append((index, number))
            except SkippedRow as error:
                skipped[str(error)] += 1
        if len(documents) == before:
            reasons = _listed(skipped)
            raise ValueError(f"{source.name} must have a row to learn from, got none: {reasons}. Give other rows.")
    for reason, count in skipped.most_common():
        logging.info("left out %d row%s: %s", count, "s" if count > 1 else "", reason)
    corpus = Corpus.from_documents(documents, places, names)
    corpus.check_vocabulary(vocab_size)
    if path is not None:
        corpus.save(path, {"skipped.json": json.dumps(skipped)})
    return corpus, dict(skipped)


def corpus_key(sources: Sequence[Source], tokenizer: Any) -> str:
    """Returns a hash (16 letters) of the contents of files or names of datasets, tokenizer and template."""
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for source in sources:
        source.check()
        files = source.files
        digest.update(f"{source.path}#{source.split}".encode())
        for path in files:
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        if not files:  # a dataset of the hub may change under its name
            digest.update(str(getattr(hub_rows(source.path, source.split), "_fingerprint", "")).encode())
    digest.update(json.dumps(tokenizer_settings(tokenizer), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _check_tokenizer(source: Source, tokenizer: Any) -> None:
    """Checks that the token ids in files of `train.regenerate` are from this tokenizer.

    Raises:
      ValueError: a directory holds token ids of another tokenizer.
    """
    for folder in {path.parent for path in source.files if path.name.startswith("shard-")}:
        settings = folder / "settings.json"
        key = json.loads(settings.read_text(encoding="utf-8")).get(TOKENIZER_KEY) if settings.is_file() else None
        if key not in (None, tokenizer_key(tokenizer)):
            raise ValueError(
                f"{folder} must hold token ids of this target's tokenizer, got another tokenizer's. Regenerate the "
                "replies with this target."
            )


def prompts_by_source(
    texts: Sequence[str], tokenizer: Any, count: int, longest: int, options: str = ""
) -> dict[str, list[list[int]]]:
    """Returns the first `count` prompts of every source by name; each file of a glob is one source.

    A conversation is rendered with the template's generation prompt. Rows of `train.regenerate` hold the exact prompt
    tokens of the target. Prompts of more than `longest` tokens and rows without a reply are left out.

    Args:
      options: the origin of `longest`, for the error.

    Raises:
      ValueError: no source has a prompt; the message has the reasons.
    """
    parts = [
        [dataclasses.replace(one, path=str(file)) for file in one.files] or [one] for one in map(Source.parse, texts)
    ]
    found: dict[str, list[list[int]]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for source in itertools.chain(*parts):
        prompts = found.setdefault(source.name, [])
        for row in source.rows():
            if len(prompts) == count:
                break
            try:
                prompt = _prompt(row, tokenizer)
            except SkippedRow as error:
                reasons[str(error)] += 1
                continue
            if 0 < len(prompt) <= longest:
                prompts.append(prompt)
            else:
                reasons["a longer prompt" if prompt else "plain text, which is not a prompt"] += 1
    if not any(found.values()):
        raise ValueError(
            f"{', '.join(found)} must have a prompt of at most {longest} tokens{options}, got none: "
            f"{_listed(reasons)}. Give other rows, or allow longer prompts."
        )
    return found


def _listed(reasons: collections.Counter[str]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "it is empty"


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    stored = stored_text(row)
    if stored is None:
        return Dialogue.begin(parse_row(row)).prompt(tokenizer)
    return list(stored.tokens[: stored.supervised.argmax()].tolist())
