"""A vLLM server as an engine: launched from an environment of its own, or attached to. See docs/how-to/vllm.md.

engine     what the pipeline talks to: Engine and Receiver over one server       controller
client     HTTP: streams, retries, errors                                         controller
launch     starts a server, notices its death, ends it                            controller
layout     vLLM's parameters as slabs                                             worker
weights    two sets of weights, and the flip                                      worker
plugin     vLLM's weight-transfer engine that receives over our transports        worker
server     middleware: the token on every path, the flip as one call              API server
"""
