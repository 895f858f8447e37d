"""Reads and writes the sliding windows of config.json."""

from __future__ import annotations

from typing import Any, Literal

from eagle_jax.checkpoints.files.fields import LARGEST, Fields
from eagle_jax.config import DecoderConfig

WindowKind = Literal["never", "always", "switched", "nope", "alternating", "pattern"]
"""Which layers attend within `sliding_window`.

"never": none. "always": all. The others follow `layer_types`, or else "switched": those from `max_window_layers` on;
"nope": those without rotary embedding; "alternating": the first and every second; "pattern": all but every
`sliding_window_pattern`-th. `use_sliding_window` turns "switched" and "nope" on.
"""
FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(fields: Fields, kind: WindowKind, config: DecoderConfig) -> tuple[int, ...]:
    """Returns `windows` of a `DecoderConfig` that lacks them; () if no window hides a token of the context.

    Raises:
      CheckpointError: the layers' types are unknown, or contradict the family, a switch or the lack of a window; or a
        value breaks its rule.

    Warns:
      UserWarning: the types contradict `sliding_window_pattern`, or the family has no window.
    """
    types, layers, max_position = fields.names_of("layer_types"), config.num_layers, config.max_position
    if not set(types) <= {FULL, SLIDING} or len(types) not in (0, layers):
        fields.fail("layer_types", f"a list of {FULL} or {SLIDING} for each of the {layers} layers")
    window = fields.integer("sliding_window", LARGEST, null=True, least=int(kind != "never"))
    if SLIDING in types and kind == "never":
        fields.fail("layer_types", f"without {SLIDING} where a {config.architecture} has no window")
    if SLIDING in types and not fields.given("sliding_window"):
        fields.fail("sliding_window", f"a size where layer_types has {SLIDING}", "Write the model's window.")
    if FULL in types and kind == "always" and window < max_position:
        fields.fail("layer_types", f"without {FULL} in a {config.architecture}, whose sliding_window is of all layers")
    if kind == "never":
        if 0 < window < max_position and fields.flag("use_sliding_window", True, null=True):
            fields.contradict("sliding_window", f"{config.architecture} has", "no window", window)
        return ()
    if kind in ("switched", "nope"):
        switched = fields.flag("use_sliding_window")
        if SLIDING in types and not switched:
            fields.fail("layer_types", f"without {SLIDING} where use_sliding_window is false")
        first = fields.integer("max_window_layers", 28, least=0) if kind == "switched" else 0
        others = config.nope_layers if kind == "nope" else range(first, layers)
        slides = [own == SLIDING for own in types] or [switched and index in others for index in range(layers)]
    elif kind == "pattern":
        period = fields.integer("sliding_window_pattern", 6)
        regular = [(index + 1) % period > 0 for index in range(layers)]
        slides = [own == SLIDING for own in types] or regular
        if slides != regular:
            fields.contradict("sliding_window_pattern", "layer_types is", types)
        if not types:  # `transformers` writes this name beside layer_types, and does not read it
            fields.contradict("_sliding_window_pattern", "the period of windows is", period)
        return tuple(window * slide for slide in slides)  # these layers may have a rotary embedding of their own
    elif kind == "alternating":
        slides = [own == SLIDING for own in types] or [index % 2 == 0 for index in range(layers)]
    else:
        slides = [True] * layers
    return tuple(window * slide for slide in slides) if window < max_position and any(slides) else ()


def window_keys(config: DecoderConfig, kind: WindowKind) -> dict[str, Any]:
    """Returns the keys of a config.json that state `config.windows`, as far as the kind can."""
    window = max(config.windows, default=0)
    keys: dict[str, Any] = {} if kind == "never" else {"sliding_window": window or None}
    types = [SLIDING if own else FULL for own in config.windows or (0,) * config.num_layers]
    if kind in ("alternating", "pattern"):
        keys |= {"layer_types": types}
    if kind in ("switched", "nope"):
        keys |= {"use_sliding_window": window > 0}
        if window:
            keys |= {"layer_types": types}
        if window and kind == "switched":
            keys |= {"max_window_layers": types.index(SLIDING)}  # for versions that read no types
    return keys
