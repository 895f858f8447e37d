"""Chat templates: which one of a tokenizer is in force, what it reads, and rendering messages with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT, TOOLS = "default", "tool_use"
"""Names of the templates that `transformers` takes where a tokenizer has several: without tools, and with them."""


class SkippedRow(ValueError):  # noqa: N818 (no error: datasets have such rows)
    """A row that no training text can be made of; the message is the reason, the same for rows of the same kind."""


def chat_template(tokenizer: Any, *, tools: bool = False) -> str | None:
    """Returns the text of the chat template in force, or None where the tokenizer has none.

    Of several named templates it is the one that `transformers` takes: "tool_use" with `tools` where there is one, else
    "default".

    Raises:
      ValueError: the tokenizer has several templates and none of these names.
    """
    found = getattr(tokenizer, "chat_template", None)
    if not isinstance(found, Mapping):
        return found or None
    if not found:
        return None
    name = TOOLS if tools and TOOLS in found else DEFAULT
    if name not in found:
        raise ValueError(
            f"chat_template must be one of the tokenizer's templates, {', '.join(sorted(found))}, none of which is "
            f"named {DEFAULT}. Name one, as --chat-template NAME or load_tokenizer(..., chat_template=NAME)"
        )
    return found[name] or None


def render(tokenizer: Any, messages: Sequence[Any], *, tools: Any = None, **options: Any) -> Any:
    """Renders a conversation with the template in force.

    Args:
      tokenizer: of `transformers`. messages: as the template reads them. tools: JSON schemas, for a template of tools.
      options: of `apply_chat_template`, and the template's own arguments.

    Raises:
      SkippedRow: the template refuses the conversation.
      ValueError: as `chat_template`.
    """
    text = options.pop("chat_template", None) or chat_template(tokenizer, tools=tools is not None)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=text, **options)
    except Exception as error:  # jinja2's TemplateError and its kin; transformers re-raises them as they are
        raise SkippedRow(f"the chat template refuses the conversation ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
