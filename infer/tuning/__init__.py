"""Measures and searches for infer.tune."""
