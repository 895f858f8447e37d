"""Renders conversations by a chat template and tokenises them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_jax.data.templates.rendering import chat_template, check_template_arguments, render


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
            raise ValueError(f"{min(given)} must be left out for a tokenizer without chat template. Load it with one.")
        return "\n\n".join(message["content"] for message in messages)
    return str(render(tokenizer, list(messages), tokenize=False, add_generation_prompt=True, **given, **template_args))


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Tokenises a result of `chat_text`, which already holds the special tokens of a template.

    The caller checks the length, with the reply's; `verbose` would warn about the prompt alone.
    """
    special = {} if chat_template(tokenizer) is None else {"add_special_tokens": False}
    return list(tokenizer.encode(text, verbose=False, **special))
