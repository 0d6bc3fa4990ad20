"""Environments of other packages, each as an Environment: ``env.factory`` names one, ``env.options`` are its arguments.

- ``textarena:TextArena``: text games for one or several players, all played by the policy unless opponents are named.
- ``gymnasium:Gymnasium``: environments whose actions are text, or a few that can be named.
- ``openenv:OpenEnv``: a session on an OpenEnv server, over its own client.
- ``verifiers:Verifiers``: tasks of verifiers, answered once and scored by their own rewards.
- ``against:Against``: any of these, with some of its agents played by a Python function or a chat endpoint.

Each imports its package when the first instance is made, and says what to install where it is missing.
"""
