"""How the bundled weights were made."""
