"""Axis 5, partial rollouts: what happens to a live generation when version v + 1 lands.

- swap: goes on at once with the cache it has. No token lost, shortest pause; later tokens attend to keys of older weights.
- recompute: goes on with a cache rebuilt under the new weights. No token lost; costs one forward of every live prefix.
- drain: requests finish first. No sequence mixes versions; the engine waits for the longest.
- barrier: groups finish first. No group mixes versions; the wait includes turns and tools.
"""
