"""Flax Linen modules: layers, one decoder for all Llama-like families, the EAGLE heads."""
