"""Language models: `load` reads one, `save` writes one, `config` and `gpt2` translate config.json."""
