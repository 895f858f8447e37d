"""Makes the papers' tables and figures from result files."""
