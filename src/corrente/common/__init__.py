"""Helpers for every layer: imports by name, waiting, threads, child processes, serialization, random state, certificates."""
