"""Draft heads: `load` reads EAGLE heads, `medusa` Medusa and Hydra heads, `save` and `export` write them."""
