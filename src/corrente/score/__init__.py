"""What an episode earned.

- ``functions``: Python functions, built in or yours, synchronous or async; weighted and summed.
"""
