"""What every layer may use: imports by name, waiting, threads, child processes, serialization, random state, certificates."""
