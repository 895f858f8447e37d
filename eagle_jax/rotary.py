"""Defines the configuration of rotary position embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) and its long-context scalings.

    Attributes:
      theta: base of the geometric sequence of frequencies.
      kind: "default", "linear" (divides positions by `factor`), "dynamic" (NTK: the base grows with the context),
        "llama3" (divides by frequency), "yarn" (arXiv:2309.00071), "longrope" (arXiv:2402.13753) or "none" (no
        rotation).
      factor: ratio of the extended to the original context length.
      original_max_position: context length before scaling, in tokens.
      low_freq_factor, high_freq_factor: llama3 only, original context length divided by a wavelength.
      beta_fast, beta_slow: yarn only, rotations at which interpolation starts and ends.
      attention_factor: yarn and longrope, multiplies cos and sin; None takes the paper's value for `factor`.
      mscale, mscale_all_dim: yarn only, DeepSeek's parameters of the attention factor.
      truncate: yarn only, rounds the correction range to whole dimensions.
      short_factor, long_factor: longrope only, one divisor per frequency.
      is_long: longrope only, every position takes `long_factor`. The loaded context length decides, not the text: a key
        keeps its angle while the text grows.
      partial: share of each head's dimensions that rotates, the first ones (Phi-4-mini: 0.75).
    """

    theta: float = 10000.0
    kind: Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False
    partial: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Returns the number of rotated dimensions of a head, as `transformers` rounds it."""
        return int(head_dim * self.partial)
