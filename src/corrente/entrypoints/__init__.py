"""One run: checked, put together, trained, evaluated, exported.

inputs       objects that a caller hands over in place of what the config says
checks       combinations that cannot work, refused before a model is loaded
assemble     a config becomes parts
train        one run from a config to its outcome
evaluate     held-out prompts, played with any weights
export       a checkpoint becomes a model directory, or an upload
"""
