"""Modules that training programs share: learners, runs, logs, options."""
