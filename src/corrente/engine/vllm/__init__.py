"""A vLLM server as an engine: launched from an environment of its own, or attached to. See docs/how-to/vllm.md.

file          contents                                                            runs in
engine        Engine and Receiver over one server                                 controller
adapters      the same for a server that receives adapters only                   controller
nccl_engine   the same for a server that receives weights by vLLM's NCCL engine   controller
client        HTTP: streams, retries, errors                                      controller
answers       sampling parameters of requests, fields of answers                  controller
launcher      starts a server, notices its death, stops it                        controller
supervise     keeps the launched server's processes, and removes what they leave  supervisor
layout        vLLM's parameters as slabs                                          worker
weights       two sets of weights, and the flip                                   worker
plugin        vLLM's weight-transfer engine that receives over our transports     worker
server        middleware: the token on every path, the flip as one call           API server
"""
