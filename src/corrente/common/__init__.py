"""Mechanisms that every layer may use.

processes            spawn (Protocols), local_spawner, worker_main, child_process, worker_log
calls between them   rpc, rpc_client, rpc_server, serialization
the rest             imports by name, waiting, threads, random state, certificates
"""
