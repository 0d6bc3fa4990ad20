"""Advantages, objectives and corrections: pure functions, one idea per file.

kinds        the one table of objectives and estimators: section of the config -> function and traits
bind         from a section to its function, with the section's keys as keyword arguments; the user's functions
advantages   what an estimator takes and returns      grpo rloo reinforce_pp maxrl opo gdpo
policy       what an objective takes and returns      clip gspo gmpo cispo sapo vespo topr kimi dppo dro reinforce
grouped      GroupedAlgorithm: scored groups to training rows      filters shaping credit agents graph score_table
losses       PolicyObjective: all of them together                 ratio corrections (reject, importance) kl entropy aggregate
checks       combinations refused before a model is loaded
"""
