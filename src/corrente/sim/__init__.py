"""A run without a model: virtual engine, learner, sync and the rest, for tests under a virtual clock and for the planner.

- ``distributions``: how long things take and how long completions are.
- ``faults``: what goes wrong, as data.
- ``engine``: continuous batching as arithmetic, and a pool of such engines.
- ``parts``: everything else the pipeline needs.

The pipeline they run is the one that trains. Imports no torch.
"""
