"""Measurements and search of infer.tune."""
