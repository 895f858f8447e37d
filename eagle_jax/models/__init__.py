"""Flax Linen modules: layers, one decoder for all families, the EAGLE, Medusa and Hydra heads."""
