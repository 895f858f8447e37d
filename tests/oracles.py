"""Holds slow, plain NumPy versions of the library's functions, without JAX."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def closure(parents: np.ndarray) -> np.ndarray:
    """[T, T] bool: every row reaches itself and, following `parents`, its ancestors. Negative parents end the climb."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for row in range(len(parents)):
        node = row
        while node >= 0:
            mask[row, node] = True
            node = int(parents[node])
    return mask


def best_candidates(scores: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` best scores, ties to the lower index, in ascending order."""
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return sorted(ranked[:count])


def naive_commit(rows: list[np.ndarray], new: np.ndarray, picks: list[list[int]]) -> list[np.ndarray]:
    """Appends the picked new entries [G, T, hd] of each batch row to its list of committed ones [G, length, hd]."""
    return [np.concatenate([old, new[b][:, picks[b]]], axis=1) for b, old in enumerate(rows)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-softmax over the last axis."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def processed_law(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities [V] after temperature, top-k, top-p and min-p, one token at a time, in float64."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[int(logits.argmax())]
    logits = logits / temperature
    alive = np.ones(len(logits), bool)
    if top_k:
        alive &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p < 1:
        probs = np.where(alive, np.exp(logits - logits.max()), 0)
        probs /= probs.sum()
        mass, kept = 0.0, np.zeros(len(logits), bool)
        for token in sorted(range(len(logits)), key=lambda t: (-logits[t], t)):
            if not alive[token] or (mass >= top_p and kept.any()):
                break
            kept[token] = True
            mass += probs[token]
        alive &= kept
    if min_p:
        probs = np.where(alive, np.exp(logits - logits[alive].max()), 0)
        alive &= probs >= min_p * probs.max()
    probs = np.where(alive, np.exp(logits - logits[alive].max()), 0)
    return probs / probs.sum()


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """Token path from the root of every drafted node of one row, in row order, padding left out."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return [path for path in paths[1:] if path]


def grow_eagle2(
    law: Callable[[tuple[int, ...]], dict[int, float]],
    depth: int,
    top_k: int,
    num_nodes: int,
    by_confidence: bool = False,
    rerank: bool = True,
    top_p: float = 1.0,
) -> dict[tuple[int, ...], float]:
    """EAGLE-2 (sections 4.1 and 4.2) with dictionaries: the kept paths and their cumulative log-probabilities.

    `law(path)` gives the draft log-probability of every token after a path.
    """
    frontier: list[tuple[int, ...]] = [()]
    value: dict[tuple[int, ...], float] = {(): 0.0}
    found: list[tuple[int, ...]] = []
    kept: list[tuple[int, ...]] = []
    for _ in range(depth):
        children = []
        for path in frontier:
            gains = law(path)
            mass = 0.0
            for token in sorted(gains, key=lambda token, gains=gains: -gains[token])[:top_k]:
                if mass >= top_p:
                    break
                mass += np.exp(gains[token])
                child = (*path, token)
                value[child] = value[path] + gains[token]
                children.append((gains[token] if by_confidence else value[child], child))
        found += [child for _, child in children]
        frontier = [child for _, child in sorted(children, key=lambda entry: -entry[0])[:top_k]]
        kept += frontier
    best = sorted(found, key=lambda path: -value[path]) if rerank else kept
    return {path: value[path] for path in best[:num_nodes]}
