"""Who generates.

embedded   any Hugging Face causal LM in this process or a child: nothing to set up, the whole system on a laptop or one GPU, and
           draws that depend on seed and position alone. The default.
vllm       a vLLM server, launched or attached to: for models and machines that want it. It needs an environment of its own, and a
           resumed request draws anew. See docs/how-to/vllm.md.
pool       several of one kind behind one engine, with routing and replacement; every run has one around its engines.
"""
