"""A run without a model: virtual engine, learner, sync and the rest, for tests under a virtual clock and for the planner.

- ``distributions``: how long things take and how long completions are.
- ``faults``: what goes wrong, as data.
- ``engine``: continuous batching as arithmetic. ``pool``: several such engines behind one.
- ``parts``: everything else the pipeline needs.

The pipeline they run is the one that trains. Imports no torch.
"""
