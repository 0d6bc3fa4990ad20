"""Where prompts come from.

- ``arithmetic``: sums drawn without end from a seed, with a part of all pairs held out. Pick it to see a run work, to compare
  settings, and for demos: the answer is exact and the task is learnable in minutes.
- ``jsonl``: a file of yours, one JSON object a line; shuffled anew each epoch, read row by row.
"""
