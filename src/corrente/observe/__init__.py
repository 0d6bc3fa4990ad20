"""Numbers, durations, samples and warnings of a run, and where they go.

- ``jsonl``: files in the run folder; a line is written whole and at once, a resumed run appends.
- ``console``: a live table on a terminal, one line a step elsewhere.
- ``summary``: what the whole run came to, for the last lines on the screen.
- ``fanout``: several of them as one; a sink that fails is dropped and training goes on.
"""
