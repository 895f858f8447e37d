"""Reads and writes draft heads: `load` EAGLE heads, `medusa` Medusa and Hydra heads, `export` for other engines."""
