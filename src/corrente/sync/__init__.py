"""How the bytes of a new version reach the engine: exported, delivered while it goes on generating, then flipped to.

``inproc``      two plain buffers in one process. Goes with the ``inline`` runtime.
``shm``         two buffers in anonymous memory that learner and engines share: one copy, made by the learner; the flip copies
                nothing. The fastest on one host; the default of the ``procs`` runtime.
``disk``        a folder of safetensors with a commit marker. Needs nothing but a folder that both sides see, and leaves versions
                behind that can be looked at; costs a write and a read.
``http``        engines fetch from a server in the learner, behind a token. For engines elsewhere, behind whatever network.
``collective``  a broadcast by torch.distributed in packed buckets: one sending serves many engines. gloo, or NCCL between GPUs.
``vllm_nccl``   NCCL's broadcast to vLLM servers, whose own code receives, in place.
``cuda_ipc``    the engine maps the learner's device memory: GPUs of one host.

``disk`` and ``http`` can ship what changed instead of everything (``payload = "delta"``), bit for bit. The transaction is the
same for all (slot_sync.py); a transport is a sender in the learner (sender.py), a receiver in the engine (receiver.py) and an
entry of the table in kinds.py. Slots for weights are made and looked into in weight_slots.py alone.
"""
