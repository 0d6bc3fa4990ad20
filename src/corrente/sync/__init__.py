"""How the bytes of a new version reach the engine: staged while it goes on generating, then flipped between two decode steps.

``inproc``  two plain buffers in one process. Goes with the ``inline`` runtime.
``shm``     two buffers in anonymous memory that learner and engine share: one copy, made by the learner; the flip copies
            nothing. Goes with the ``procs`` runtime, on one host, for engines on the CPU.
"""
