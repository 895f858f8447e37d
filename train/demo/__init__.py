"""Programs that made the bundled weights."""
