"""Reads and writes the sliding windows of config.json."""

from __future__ import annotations

from typing import Any, Literal

from eagle_jax.checkpoints.files.fields import LARGEST, Fields
from eagle_jax.config import DecoderConfig

WindowKind = Literal["never", "always", "switched", "alternating", "pattern"]
"""Which layers attend within `sliding_window`.

"never": none. "always": all. "switched": by `use_sliding_window`. "alternating": by `layer_types`, or else the first
and every second layer. "pattern": by `layer_types`, or else all but every `sliding_window_pattern`-th.
"""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(
    fields: Fields, kind: WindowKind, architecture: str, layers: int, max_position: int
) -> tuple[int, ...]:
    """Returns `DecoderConfig.windows`; () if no window hides a token of the context.

    Raises:
      CheckpointError: the layers' types are unknown or contradict a switch, or a value breaks its rule.
    """
    types = fields.names_of("layer_types")
    if not set(types) <= {_FULL, _SLIDING} or len(types) not in (0, layers):
        fields.fail("layer_types", f"a list of {_FULL} or {_SLIDING} for each of the {layers} layers")
    window = fields.integer("sliding_window", LARGEST, null=True, least=int(kind != "never"))
    if kind == "never":
        if window < max_position and fields.flag("use_sliding_window", True, null=True):
            fields.contradict("sliding_window", f"{architecture} has", "no window", window)
        return ()
    if kind == "switched":
        switched = fields.flag("use_sliding_window")
        if _SLIDING in types and not switched:
            fields.fail("layer_types", f"without {_SLIDING} where use_sliding_window is false")
        full = fields.integer("max_window_layers", 28, least=0) if switched else layers
        slides = [kind == _SLIDING for kind in types] or [index >= full for index in range(layers)]
    elif kind == "pattern":
        period = fields.integer("sliding_window_pattern")
        slides = [kind == _SLIDING for kind in types] or [(index + 1) % period > 0 for index in range(layers)]
        return tuple(window * slide for slide in slides)  # these layers may have a rotary embedding of their own
    elif kind == "alternating":
        slides = [own == _SLIDING for own in types] or [index % 2 == 0 for index in range(layers)]
    else:
        slides = [True] * layers
    return tuple(window * slide for slide in slides) if window < max_position and any(slides) else ()


def window_keys(config: DecoderConfig, kind: WindowKind) -> dict[str, Any]:
    """Returns the keys of a config.json that state `config.windows`, as far as the kind can."""
    window = max(config.windows, default=0)
    keys: dict[str, Any] = {} if kind == "never" else {"sliding_window": window or None}
    types = [_SLIDING if own else _FULL for own in config.windows or (0,) * config.num_layers]
    if kind in ("alternating", "pattern"):
        keys |= {"layer_types": types}
    if kind == "switched":
        keys |= {"use_sliding_window": window > 0}
        if window:
            keys |= {"layer_types": types, "max_window_layers": types.index(_SLIDING)}  # the latter for old versions
    return keys
