"""The papers' tables and figures from result files."""
