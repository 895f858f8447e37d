"""Finds stop tokens: the target's own, and the token that ends an assistant's turn in its chat template."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any, NamedTuple

from eagle_jax.config import DecoderConfig
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.templates.render import chat_template, render

MARKS = ("TURN00000MARK", "TURN00001MARK", "TURN00002MARK", "TURN00003MARK")
SHOWN = 4
"""Stop tokens that a warning names."""


class TurnEnd(NamedTuple):
    """How a chat template ends an assistant's turn.

    Attributes:
      token: the first special token of its text; None where it has none. reason: why there is none.
    """

    token: int | None
    reason: str = ""


def stop_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the stop tokens of replies by a chat template: the target's own, and the end of the template's turn.

    Args:
      target: an `eagle_jax.Target`, or its `DecoderConfig`; one without stop tokens has those of the tokenizer.
      tokenizer: of `transformers`.

    Raises:
      ValueError: `target` is no target, or the end of turn lies outside its vocabulary.

    Warns:
      UserWarning: the end of turn is none of the target's stop tokens, or no single token.
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
    end = turn_end(tokenizer)
    named = ", ".join(_named(tokenizer, token) for token in own[:SHOWN]) or "no token"
    named += f" and {len(own) - SHOWN} more" * (len(own) > SHOWN)
    if end.token is None:
        warnings.warn(
            f"{end.reason}: replies stop at {named} alone, and may run on into a turn of the user", stacklevel=2
        )
        return own
    if end.token >= config.vocab_size:
        raise ValueError(
            f"the tokenizer's end of turn {_named(tokenizer, end.token)} must lie inside the target's vocabulary of "
            f"{config.vocab_size} tokens. Use the tokenizer that the target was trained with"
        )
    if end.token in own:
        return own
    if config.eos_ids:
        warnings.warn(
            f"the target's configuration stops at {named}, and the chat template ends a turn with "
            f"{_named(tokenizer, end.token)}: replies stop at either",
            stacklevel=2,
        )
    return (*own, end.token)


def with_stop_ids(target: Any, tokenizer: Any) -> Any:
    """Returns the target with `stop_ids` as its own stop tokens; its weights and functions are the same.

    Raises:
      ValueError: as `stop_ids`.
    """
    stops = stop_ids(target, tokenizer)
    return dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=stops))


def turn_end(tokenizer: Any) -> TurnEnd:
    """Returns how the chat template in force ends an assistant's turn."""
    talk = [{"role": "user" if at % 2 == 0 else "assistant", "content": mark} for at, mark in enumerate(MARKS)]
    try:
        closing = _behind_reply(tokenizer, talk[:2])
        if closing == _behind_reply(tokenizer, talk[:2], add_generation_prompt=True):
            # Some templates ask for the next reply always: what is behind every reply alike ends it.
            pairs = zip(closing, _behind_reply(tokenizer, talk), strict=False)
            closing = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    except SkippedRow as error:
        return TurnEnd(None, str(error))
    for token in closing:
        if _is_unit(tokenizer, token):
            return TurnEnd(token)
    text = tokenizer.decode(closing)
    how = f"the text {text!r:.60}, no single token" if text.strip() else "nothing"
    return TurnEnd(None, f"the chat template ends an assistant's turn with {how}")


def _behind_reply(tokenizer: Any, talk: list[dict[str, str]], **options: bool) -> list[int]:
    _, found, behind = render(tokenizer, talk, tokenize=False, **options).partition(MARKS[1])
    if not found:
        raise SkippedRow("the chat template shows no assistant's turn")
    return list(tokenizer(behind, add_special_tokens=False)["input_ids"])


def _is_unit(tokenizer: Any, token: int) -> bool:
    """Returns whether a token is a marker of the template, not text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    return token in getattr(tokenizer, "all_special_ids", ()) or (added is not None and bool(str(added).strip()))


def _named(tokenizer: Any, token: int) -> str:
    return f"{token} ({tokenizer.decode([token])!r})"
