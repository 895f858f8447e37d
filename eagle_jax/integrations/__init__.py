"""Connects the library to others; each module needs its own extra, and no other module imports these."""
