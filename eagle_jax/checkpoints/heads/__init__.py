"""Reads and writes draft heads: `load` and `save` EAGLE heads, `medusa` Medusa and Hydra heads."""
