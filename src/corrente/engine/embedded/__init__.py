"""The embedded engine: any Hugging Face causal LM in this process or a child, continuous batching, in-flight weight updates.

    async_engine -> core -> prefill, sampling, live_rows -> sequence, stop_conditions, weights
                       \\-> model: hf (any architecture) | lean (the Llama family, fused)  -> kv

``core.EmbeddedCore`` is synchronous and knows nothing of event loops; ``async_engine.EmbeddedEngine`` makes it an ``Engine``.
Use it on a laptop, in tests and on one GPU; it does not shard a model and does not page its cache.
"""
