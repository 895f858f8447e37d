"""Classifies and checks keys of rows: text, metadata, empty, unknown."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class SkippedRow(ValueError):  # noqa: N818 (no error: datasets have such rows)
    """A row gives no training text; equal reasons have equal messages."""


METADATA = re.compile(
    r"""_.*                                  # __index_level_0__, and whatever a user renames
    | (?!(file|tool|tools|function)_)(.*_)?(
        id|uid|uuid|hash|idx|index|identifier|key|row
        | source|sources|origin|dataset|subset|split|license|url|version|model|models|generator|engine
        | score|scores|rating|ratings|rank|reward|quality|difficulty|complexity|moderation|language|lang
        | category|categories|subcategory|domain|tag|tags|type|types
        | level|time|timestamp|date|created|created_at|metadata|meta|length|len|count|counts)
    | (num|n|min|max|avg|mean|total|is|used_in|score|metadata|meta|quality|language|license|detoxify|llama_guard)_.*
    | (dataset|source|model|subset|config)_name
    | author|turn|views|redacted|toxic|state|country|hashed_ip|temperature|top_p|top_k
    | gen_input_configs|skip_prompt_formatting|parallel_tool_calls|rejected""",
    re.VERBOSE,
)
"""Names, in snake case, of keys that hold no text of a conversation; docs/training.md describes them."""
LABELS = re.compile(r"(.*_)?(task|tasks|topic|topics|subject|title|intent|knowledge)")
"""Names of keys that describe a conversation of messages, but are part of the question in a row of question and reply.
Their numbers and booleans hold no text in any row."""
MEDIA = re.compile(r"(.*_)?(images?|img|pictures?|photos?|screenshots?|audios?|videos?|media)(_.*)?")
"""Names of keys that point to images, audio or video."""
NESTED = ("tools", "functions", "system", "system_prompt", "system_message", "messages", "conversations")
"""Keys that an object of metadata must not hide."""
REFERENCE = re.compile(
    r"(.*_)?(answers?|solutions?|references?|ground_truth|tests?|test_list|test_cases)|entry_point|highlights"
)
"""Names, in snake case, of keys that replies are checked against."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@functools.lru_cache(maxsize=4096)  # rows are many, keys few
def _matches(pattern: re.Pattern[str], key: str) -> bool:
    return pattern.fullmatch(_HUMP.sub("_", key).lower()) is not None


def is_metadata(key: str) -> bool:
    """Returns whether a key of a row or message holds no text: `score`, `conversation_id`, `modelName`."""
    return _matches(METADATA, key)


def is_reference(key: str) -> bool:
    """Returns whether replies are checked against a key: `answer`, `solution`."""
    return _matches(REFERENCE, key)


def is_absent(value: Any) -> bool:
    """Returns whether a value is null, or an empty text, list or object."""
    return value is None or (isinstance(value, Sequence | Mapping) and len(value) == 0)


def without_nulls(value: Any) -> Any:
    """Removes nulls from nested objects."""
    if isinstance(value, Mapping):
        return {str(key): without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def only(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns the value under one of several names of the same thing; None without one.

    Raises:
      SkippedRow: two of them differ.
    """
    found = [name for name in names if not is_absent(given.get(name))]
    for name in found[1:]:
        if without_nulls(given[name]) != without_nulls(given[found[0]]):
            raise SkippedRow(f"{found[0]!r} and {name!r} differ")
    return given[found[0]] if found else None


def from_json(value: Any, what: str) -> Any:
    """Parses a column that may hold JSON as text.

    Raises:
      SkippedRow: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise SkippedRow(f"{what} that is not JSON") from None


def check_unicode(*values: Any) -> None:
    """Checks that texts, also within objects, are valid Unicode: cut JSON may hold half a surrogate pair.

    Raises:
      SkippedRow: a text is not.
    """
    for value in values:
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
        except UnicodeEncodeError:
            raise SkippedRow("a message that is not valid Unicode") from None


def check_keys(given: Mapping[str, Any], read: Collection[str], where: str, *, labels: bool = False) -> None:
    """Checks that every key with a value is read or is metadata.

    Args:
      labels: whether `LABELS` are metadata, too.

    Raises:
      SkippedRow: naming the key.
    """
    for key, value in given.items():
        if key in read or is_absent(without_nulls(value)):
            continue
        if isinstance(value, Mapping) and (hidden := [name for name in NESTED if not is_absent(value.get(name))]):
            raise SkippedRow(f"{where} the key '{key}.{hidden[0]}', which is not read")
        if not _holds_no_text(key, value, labels):
            raise SkippedRow(f"{where} the key {key!r}, which is not read")


def _holds_no_text(key: str, value: Any, labels: bool) -> bool:
    if _matches(MEDIA, key):
        return value is False or value == 0
    if key == "header":  # HTTP headers of WildChat's requests, an object
        return isinstance(value, Mapping)
    if key == "custom_instruction":  # OpenHermes: whether there was one
        return isinstance(value, bool)
    return is_metadata(key) or (_matches(LABELS, key) and (labels or isinstance(value, bool | int | float)))
