"""corrente post-trains language models with reinforcement learning while generation never stops and training never waits."""

__version__ = "0.1.0"
