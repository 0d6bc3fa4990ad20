"""Advantages, losses and corrections: pure functions, one idea per file.

advantages   what an episode earned beyond its group's baseline (GRPO, Dr. GRPO, RLOO)
grouped      GroupedAlgorithm: scored groups to training rows
ratio        current over behaviour policy        clip         the clipped objective, dual clip
importance   truncated and masked weights         kl           k3
aggregate    one denominator per optimizer step   losses       PolicyObjective: all of them together
checks       combinations refused before a model is loaded
"""
