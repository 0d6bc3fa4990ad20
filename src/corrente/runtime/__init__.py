"""Runtimes decide which process everything runs in. Whichever is chosen, the pipeline sees the same handles (base.Workers).

``inline``  everything in this process, nothing overlaps. For debugging, for tests, and as the synchronous baseline that an
            asynchronous run is compared with.
``procs``   a controller here, engine and learner in child processes of one host. The default: both sides work at the same
            time, a crash of either is a clear error, and weights cross without a copy on the engine's side.
"""
