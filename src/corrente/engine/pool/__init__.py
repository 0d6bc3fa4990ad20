"""N replicas of any engine behind one: routing, health, publication as a transaction, replacement, joining and leaving.

``health`` (a replica's life) and ``routing`` (who gets a request) are pure; ``roster`` is the state they are applied to;
``publication`` brings weights to all, ``keeping`` keeps replicas alive and up to date, ``pool`` is what the pipeline sees.
"""
