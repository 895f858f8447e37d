"""Renders conversations by the chat template of a tokenizer, and tokenises them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import numpy as np

from eagle_jax.data.rows.columns import SkippedRow

DEFAULT, TOOLS = "default", "tool_use"
"""Names of the templates that `transformers` uses if a tokenizer has several: without tools, and with them."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that `apply_chat_template` gives every template."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of `transformers` around the assistant's text in a template."""
ARGUMENTS = "_chat_template_arguments"
"""Attribute of a tokenizer with arguments of its template, which `set_template_args` sets."""
Render = Callable[..., Any]
"""`render` with the tokenizer, the tools and the arguments of the template bound."""


def chat_ids(tokenizer: Any, messages: Sequence[Any], **template_args: Any) -> list[int]:
    """Returns token ids of a conversation up to the assistant's next turn; plain text without a template.

    Args:
      tokenizer: of `transformers`. messages: with "role" and "content" each.
      template_args: of the chat template, such as `enable_thinking=False`; `tools` is a list of JSON schemas.

    Raises:
      ValueError: `messages` has another form, the template raises an error, or it does not read an argument.
    """
    return encode_chat(tokenizer, chat_text(tokenizer, messages, **template_args))


def chat_text(tokenizer: Any, messages: Sequence[Any], **template_args: Any) -> str:
    """Returns the text that `chat_ids` tokenises.

    Raises:
      ValueError: `messages` has another form, the template raises an error (some do for a system message), or it does
        not read an argument.
    """
    if not isinstance(messages, list | tuple) or not all(
        isinstance(one, Mapping) and "role" in one and ("content" in one or "tool_calls" in one) for one in messages
    ):
        raise ValueError(
            "messages must be a list of dicts, each with a role (user, assistant, system) and content, got "
            f'{messages!r:.80}. Pass [{{"role": "user", "content": "Hello"}}].'
        )
    given = {name: template_args.pop(name) for name in ("tools", "documents") if name in template_args}
    check_template_arguments(tokenizer, template_args)
    if chat_template(tokenizer, tools=given.get("tools") is not None) is None:
        if given:
            raise ValueError(f"{min(given)} must come with a chat template, got a tokenizer without. Load it with one.")
        return "\n\n".join(message["content"] for message in messages)
    return str(render(tokenizer, list(messages), tokenize=False, add_generation_prompt=True, **given, **template_args))


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Tokenises a result of `chat_text`, which already holds the special tokens of a template.

    The caller checks the length, with the reply's; `verbose` would warn about the prompt alone.
    """
    special = {} if chat_template(tokenizer) is None else {"add_special_tokens": False}
    return list(tokenizer.encode(text, verbose=False, **special))


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


def generation_mask(draw: Render, messages: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, their [start, end) in the text, and the mask of `generation` spans."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    out = draw(messages, tokenize=True, tokenizer_kwargs={"return_offsets_mapping": True}, **options)
    offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
    # The mask ends at the first token of a span's last character; a character of several bytes has several tokens.
    letters = np.cumsum(np.append(True, offsets[1:, 0] >= offsets[:-1, 1]))[: len(offsets)]
    mask = np.isin(letters, letters[np.asarray(out["assistant_masks"], bool)])
    return np.asarray(out["input_ids"], np.int32), offsets, mask


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
