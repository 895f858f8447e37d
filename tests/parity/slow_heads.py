"""Computes EAGLE heads in NumPy, a row at a time, from the description of the formats and raw tensors.

Written for being obviously right: float64, no batch, no cache, every row attends to a Python list of earlier rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """One head's vector [hd], turned pair by pair: element i with element i + hd / 2."""
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        turned[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return turned


class SlowHead:
    """A head as stored: `tensors` under their official names, `layer` the prefix of its one layer."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any], layer: str) -> None:
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.config = config
        self.layer = layer
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self.tensors[name + ".weight"] @ x
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.tensors[name + ".weight"], self.config["rms_norm_eps"])

    def attention(self, x: np.ndarray, position: int) -> np.ndarray:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        at = self.layer + "self_attn."
        query = self.linear(at + "q_proj", x).reshape(heads, -1)
        key = self.linear(at + "k_proj", x).reshape(groups, -1)
        if at + "q_norm.weight" in self.tensors:
            query = np.stack([self.norm(at + "q_norm", row) for row in query])
            key = np.stack([self.norm(at + "k_norm", row) for row in key])
        theta = self.config.get("rope_theta", 10000.0)
        query = np.stack([rotate(row, position, theta) for row in query])
        self.keys.append(np.stack([rotate(row, position, theta) for row in key]))
        self.values.append(self.linear(at + "v_proj", x).reshape(groups, -1))
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = np.array([query[head] @ key[group] for key in self.keys]) / np.sqrt(query.shape[1])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * value[group] for w, value in zip(weights, self.values, strict=True)))
        return self.linear(at + "o_proj", np.concatenate(mixed))

    def mlp(self, x: np.ndarray) -> np.ndarray:
        at = self.layer + "mlp."
        return self.linear(at + "down_proj", silu(self.linear(at + "gate_proj", x)) * self.linear(at + "up_proj", x))


class SlowEagle1(SlowHead):
    """EAGLE-1/2: the raw layer output is the recurrent state and what the target's lm_head reads."""

    def fuse(self, feature: np.ndarray) -> np.ndarray:
        return feature

    def row(self, embedding: np.ndarray, state: np.ndarray, position: int) -> np.ndarray:
        x = self.linear("fc", np.concatenate([embedding, state]))
        x = x + self.attention(x, position)
        return x + self.mlp(self.norm(self.layer + "post_attention_layernorm", x))


class SlowEagle3(SlowHead):
    """EAGLE-3 with its variants."""

    def fuse(self, feature: np.ndarray) -> np.ndarray:
        if self.config.get("fc_norm"):
            parts = np.split(feature, len(feature) // self.tensors["fc_norm.0.weight"].shape[0])
            feature = np.concatenate([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        if self.config.get("norm_before_fc"):
            feature = self.norm("input_norm", feature)
        return self.linear("fc", feature)

    def row(self, embedding: np.ndarray, state: np.ndarray, position: int) -> np.ndarray:
        normed = self.norm(self.layer + "hidden_norm", state)
        x = np.concatenate([self.norm(self.layer + "input_layernorm", embedding), normed])
        x = (normed if self.config.get("norm_before_residual") else state) + self.attention(x, position)
        x = x + self.mlp(self.norm(self.layer + "post_attention_layernorm", x))
        return self.norm("norm", x) if self.config.get("norm_output") else x

    def logits(self, state: np.ndarray) -> np.ndarray:
        return self.linear("lm_head", state if self.config.get("norm_output") else self.norm("norm", state))
