"""Holds what several programs share: arguments, tasks, methods by name, timing, result files."""
