"""Sinks for the numbers, durations, samples and warnings of a run.

- ``jsonl``: files in the run folder; every line is written whole and at once, and a resumed run appends.
- ``console``: a live table on a terminal, one line per step elsewhere.
- ``summary``: the results of the whole run, for the last lines on the screen.
- ``trackers``: TensorBoard, Weights & Biases and trackio, each in a background thread.
- ``fanout``: several sinks as one; a sink that fails is dropped and training goes on.
"""
