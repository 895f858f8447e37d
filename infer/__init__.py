"""Programs that run models. Not installed; run them with `python -m infer.<name> [--config FILE] ...`."""
