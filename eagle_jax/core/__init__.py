"""The engine: pure functions over explicit parameter trees. No Flax, no files, no host code."""
