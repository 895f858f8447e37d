"""Holds what training programs share: learners, runs, logs, options."""
