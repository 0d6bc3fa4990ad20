"""The controller: the one loop and its pieces.

pipeline   the loop: feed, generate, score, buffer, learn, publish
rollout    one group from its prompt to its rewards; request_gate holds requests while weights change
ledger     the account of every admitted prompt; failure_budget and watchdog end a run that cannot go on

It owns no wall clock and no thread, and knows the stages by their Protocols alone.
"""
