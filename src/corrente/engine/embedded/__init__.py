"""The embedded engine: any Hugging Face causal LM in this process or a child, continuous batching, in-flight weight updates.

    driver -> core -> prefill, sampling, rows -> sequence, stop, weights
                 \\-> model: hf (any architecture) | lean (the Llama family, fused)  -> kv

``core.EmbeddedCore`` is synchronous and knows nothing of event loops; ``driver.EmbeddedEngine`` makes it an ``Engine``. Use it
on a laptop, in tests and on one GPU; it does not shard a model and does not page its cache.
"""
