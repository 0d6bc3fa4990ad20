"""Engines, which generate completions.

embedded   any Hugging Face causal LM in this process or a child: nothing to set up, the whole system on a laptop or one GPU, and
           draws that depend only on seed and position. The default.
vllm       a vLLM server, launched or attached to, for larger models and faster generation. It needs an environment of its own,
           and a resumed request draws anew. See docs/how-to/vllm.md.
pool       several engines of one kind as one engine, with routing and replacement; every run has one around its engines.
"""
