"""Defines Flax Linen modules: layers, one decoder for all families, EAGLE, Medusa and Hydra heads."""
