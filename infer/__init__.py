"""Programs that run models: `python -m infer.demo`, `python -m infer.bench`."""
