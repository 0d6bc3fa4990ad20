"""N replicas of any engine behind one: routing, health, publication as a transaction, replacement, joining and leaving.

``health`` (the states of a replica) and ``routing`` (the choice of a replica for a request) are pure; ``roster`` is the state
they work on; ``publication`` brings weights to all replicas, ``supervisor`` keeps them alive and up to date, ``pool`` is the
Engine and Receiver that the pipeline gets.
"""
