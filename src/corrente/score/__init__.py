"""Scores episodes: one reward, combined from the scores of many sources.

- ``function``: a Python function, built in or yours, sync or async. Pick it for what computes and returns.
- ``process``: the same in processes that are killed when late. Pick it for verifiers that hang, use signals, fork or crash.
- ``reward_model``, ``process_reward``: classifiers, of a whole completion or of each of its steps, in a process of their own.
- ``judge``: an LLM behind an OpenAI-compatible endpoint. Pick it for what only reading can tell, and mind its price.
- ``teacher``: no reward, but another model's log-probs of what was sampled, for distillation.
"""
