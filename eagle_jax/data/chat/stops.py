"""Finds stop tokens: the target's own, and the token that ends a turn in its chat template."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

from eagle_jax.config import DecoderConfig
from eagle_jax.data.chat.tokenize import chat_template, render
from eagle_jax.data.rows.columns import SkippedRow


def stop_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the stop tokens of replies: the target's own, and the end of the template's turn.

    Args:
      target: an `eagle_jax.Target`, or its `DecoderConfig`; one without stop tokens has those of the tokenizer.
      tokenizer: of `transformers`.

    Raises:
      ValueError: `target` is not a target, or the end of turn is outside its vocabulary.

    Warns:
      UserWarning: no single token ends a turn, or that token is not a stop token of the target.
    """
    config = getattr(target, "config", target)
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"target must be a Target or its DecoderConfig, got a {type(target).__name__}. "
            "Pass the result of eagle_jax.load_target, before the tokenizer."
        )
    found = getattr(tokenizer, "eos_token_id", None)
    own = tuple(config.eos_ids) or (() if found is None else (int(found),))
    if chat_template(tokenizer) is None:
        return own
    end, reason = turn_end(tokenizer)
    named = tokenizer.convert_ids_to_tokens(list(own)) or "no token"
    if end is None:
        warnings.warn(f"{reason}: replies stop at {named} alone, and may run on into a turn of the user", stacklevel=2)
        return own
    if end >= config.vocab_size:
        raise ValueError(
            f"the end of turn must be below the target's {config.vocab_size} tokens, got {end}. "
            "Use the tokenizer that the target was trained with."
        )
    if end in own:
        return own
    if config.eos_ids:
        ends = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(f"the target stops at {named}, its chat template at {ends!r}: replies stop at both", stacklevel=2)
    return (*own, end)


def with_stop_ids(target: Any, tokenizer: Any) -> Any:
    """Returns the target with `stop_ids` as its own stop tokens; its weights and functions are the same.

    Raises:
      ValueError: as `stop_ids`.
    """
    stops = stop_ids(target, tokenizer)
    return dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=stops))


def turn_end(tokenizer: Any) -> tuple[int | None, str]:
    """Returns the first special token that the chat template writes after a reply, or None and the reason."""
    talk = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "REPLYMARK"}]
    try:
        closing, prompted = (_after_reply(tokenizer, talk, add_generation_prompt=flag) for flag in (False, True))
        if closing == prompted:  # the template always adds its prompt: only tokens before any next turn end this one
            pairs = zip(closing, _after_reply(tokenizer, [*talk, *talk[:1]]), strict=False)
            closing = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    except SkippedRow as error:
        return None, str(error)
    for token in closing:
        added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
        if token in getattr(tokenizer, "all_special_ids", ()) or (added is not None and str(added).strip()):
            return token, ""
    text = tokenizer.decode(closing)
    how = f"the text {text!r:.60}, no single token" if text.strip() else "nothing"
    return None, f"the chat template ends an assistant's turn with {how}"


def _after_reply(tokenizer: Any, talk: list[dict[str, str]], **options: bool) -> list[int]:
    _, found, after = render(tokenizer, talk, tokenize=False, **options).partition("REPLYMARK")
    if not found:
        raise SkippedRow("the chat template shows no assistant's turn")
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])
