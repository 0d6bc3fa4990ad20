"""Sources of prompts.

- ``arithmetic``: sums drawn without end from a seed, with a part of all pairs held out. Pick it to see a run work, to compare
  settings, and for demos: the answer is exact and the task is learnable in minutes.
- ``jsonl``, ``parquet``: your own files; shuffled anew each epoch.
- ``dataset``: a dataset of the Hugging Face hub, or one on disk in its layout; downloaded or streamed.
- ``given``: an object that the program passes when it starts the run: a dataset, a list, an iterable.
- ``seeds``: numbers, for environments that make a task of their own out of one.
- ``reasoning_gym``: tasks of the package of that name, drawn without end and judged by the reward function of that name.
- ``mixture``: several of these at once, drawn from by weights that may move over the run: a curriculum.

Rows are text or conversations; ``chat`` renders the latter with the model's template.
"""
