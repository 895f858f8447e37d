"""Programs that train the bundled pair. Not installed; run them with `python -m train.<name> [--config FILE] ...`."""
