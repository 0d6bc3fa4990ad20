"""Mechanisms that every layer may use.

Processes: ``spawn`` (Protocols), ``local_spawner``, ``worker_main``, ``child_process``, ``worker_log``. Calls between them:
``rpc``, ``rpc_client``, ``rpc_server``, ``serialization``. The rest: imports by name, waiting, threads, random state,
certificates.
"""
