"""Chat templates: rendering, the arguments they read, and which characters of a rendered chat the assistant wrote."""
