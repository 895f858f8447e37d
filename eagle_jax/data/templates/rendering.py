"""Finds the chat template in force and its arguments, and renders messages with it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from eagle_jax.data.rows.columns import SkippedRow

DEFAULT, TOOLS = "default", "tool_use"
"""Names of the templates that `transformers` uses if a tokenizer has several: without tools, and with them."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that `apply_chat_template` gives every template."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of `transformers` around the assistant's text in a template."""
ARGUMENTS = "_chat_template_arguments"
"""Attribute of a tokenizer with arguments of its template, which `set_template_args` sets."""


def chat_template(tokenizer: Any, *, tools: bool = False) -> str | None:
    """Returns the text of the chat template in force, or None if the tokenizer has none.

    Of several named templates it is the one that `transformers` takes: with `tools` "tool_use" if it exists, else
    "default".

    Raises:
      ValueError: the tokenizer has several templates and none of these names.
    """
    found = getattr(tokenizer, "chat_template", None)
    if not isinstance(found, Mapping) or not found:
        return found or None
    name = TOOLS if tools and TOOLS in found else DEFAULT
    if name not in found:
        raise ValueError(
            f"chat_template must be named, got a tokenizer with the templates {', '.join(sorted(found))} and none "
            f"named {DEFAULT}. Choose one with --chat-template NAME or load_tokenizer(..., chat_template=NAME)."
        )
    return found[name] or None


def render(tokenizer: Any, messages: Sequence[Any], *, tools: Any = None, **options: Any) -> Any:
    """Renders a conversation with the template in force.

    Args:
      tokenizer: of `transformers`. messages: as the template reads them. tools: JSON schemas, for a template of tools.
      options: of `apply_chat_template`, and the template's own arguments.

    Raises:
      SkippedRow: the template raises an error.
      ValueError: as `chat_template`.
    """
    options = {**default_arguments(tokenizer), **options}
    if tools is not None:
        options["tools"] = tools
    if isinstance(getattr(tokenizer, "chat_template", None), Mapping):
        options.setdefault("chat_template", chat_template(tokenizer, tools=tools is not None))
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # jinja2's TemplateError and its kin; transformers re-raises them as they are
        raise SkippedRow(f"the chat template raises an error for the conversation ({_first_line(error)})") from error


def template_arguments(tokenizer: Any) -> tuple[str, ...]:
    """Returns the names of the arguments that the chat template in force reads, such as `enable_thinking`.

    Raises:
      ValueError: as `chat_template`, or the template is not valid Jinja.
    """
    text = chat_template(tokenizer)
    special = getattr(tokenizer, "special_tokens_map", {})
    return () if text is None else tuple(sorted(variables(text) - GIVEN - set(special)))


def check_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that the chat template in force reads every argument.

    Raises:
      ValueError: the template does not read an argument; the message lists the arguments that it reads.
    """
    known = template_arguments(tokenizer) if arguments else ()
    if unknown := [name for name in arguments if name not in known]:
        reads = ", ".join(known) or "none"
        raise ValueError(
            f"template arguments must be ones that the tokenizer's chat template reads ({reads}), got {unknown[0]}. "
            "Leave it out, or choose another chat template."
        )


def default_arguments(tokenizer: Any) -> dict[str, Any]:
    """Returns the arguments that `set_template_args` set."""
    return dict(getattr(tokenizer, ARGUMENTS, {}))


@functools.lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str]:
    """Returns the names that a template reads and does not set, except as defaults of undefined names.

    Raises:
      ValueError: the template is not valid Jinja.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))
    try:
        parsed = environment.parse(GENERATION.sub("", template))
        own = {node.name for node in parsed.find_all(jinja2.nodes.Name) if node.ctx == "store"}
        tests = (test for test in parsed.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined"))
        tested = {test.node.name for test in tests if isinstance(test.node, jinja2.nodes.Name)}
        return frozenset(jinja2.meta.find_undeclared_variables(parsed) - (own - tested))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template must be valid Jinja ({_first_line(error)}). Use another one.") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
