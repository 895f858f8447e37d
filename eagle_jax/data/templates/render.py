"""Finds the chat template in force and its arguments, and renders messages with it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle_jax.data.rows.columns import SkippedRow

DEFAULT, TOOLS = "default", "tool_use"
"""Names of the templates that `transformers` takes where a tokenizer has several: without tools, and with them."""


GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that `apply_chat_template` gives every template."""


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
      SkippedRow: the template raises an error.
      ValueError: as `chat_template`.
    """
    if tools is not None:
        options["tools"] = tools
    if isinstance(getattr(tokenizer, "chat_template", None), Mapping):
        options.setdefault("chat_template", chat_template(tokenizer, tools=tools is not None))
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # jinja2's TemplateError and its kin; transformers re-raises them as they are
        raise SkippedRow(f"the chat template refuses the conversation ({_first_line(error)})") from error


def template_arguments(tokenizer: Any) -> tuple[str, ...]:
    """Returns the names of the arguments that the chat template in force reads, such as `enable_thinking`.

    Raises:
      ValueError: as `chat_template`, or a template that is no Jinja.
    """
    text = chat_template(tokenizer)
    special = getattr(tokenizer, "special_tokens_map", {})
    return () if text is None else tuple(sorted(_variables(text) - GIVEN - set(special)))


def check_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that the chat template in force reads every argument.

    Raises:
      ValueError: naming the first that it does not read, and those that it does.
    """
    known = template_arguments(tokenizer) if arguments else ()
    if unknown := [name for name in arguments if name not in known]:
        reads = ", ".join(known) or "none"
        raise ValueError(
            f"template arguments must be ones that the tokenizer's chat template reads ({reads}), got {unknown[0]}. "
            "Leave it out, or choose another chat template"
        )


def set_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Sets new defaults for arguments of the tokenizer's chat template; a call of `chat_ids` may override them.

    They are written into the template's text, so that whatever is rendered or keyed by the template depends on them.

    Args:
      arguments: values are what JSON has.

    Raises:
      ValueError: the template does not read an argument, or a value is not JSON.
    """
    check_template_arguments(tokenizer, arguments)
    found = tokenizer.chat_template
    if isinstance(found, Mapping):
        tokenizer.chat_template = {name: _with_defaults(text, arguments) for name, text in found.items()}
    elif arguments:
        tokenizer.chat_template = _with_defaults(found, arguments)


def _with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    read = {name: value for name, value in arguments.items() if name in _variables(template)}
    # The line end behind a block is no text (trim_blocks), so that the template begins as it did.
    lines = [
        f"{{% set {name} = {name} if {name} is defined else {_literal(value)} %}}\n" for name, value in read.items()
    ]
    return "".join(lines) + template


def _literal(value: Any) -> str:
    """Writes a JSON value as Jinja."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(str(key))}: {_literal(item)}' for key, item in value.items())}}}"
    raise ValueError(
        f"template arguments must be strings, numbers, booleans, null, lists or objects, got {type(value).__name__} "
        f"{value!r:.40}. Give one of these"
    )


def check_syntax(template: str) -> None:
    """Checks that a chat template is Jinja.

    Raises:
      ValueError: naming what is wrong.
    """
    _variables(template)


class _Generation(jinja2.ext.Extension):
    """The `generation` blocks that `transformers` adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """Returns the names that a template reads and that are no variables of its own.

    Jinja calls a name undeclared that a template sets in one branch. Such a name is an argument where the template asks
    whether it is defined.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))
    try:
        parsed = environment.parse(template)
        own = {node.name for node in parsed.find_all(jinja2.nodes.Name) if node.ctx == "store"}
        tested = {
            node.node.name
            for node in parsed.find_all(jinja2.nodes.Test)
            if node.name in ("defined", "undefined") and isinstance(node.node, jinja2.nodes.Name)
        }
        return frozenset(jinja2.meta.find_undeclared_variables(parsed) - (own - tested))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is no Jinja ({_first_line(error)}): give another one") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
