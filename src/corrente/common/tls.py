"""Turns a setting ``verify`` into what an HTTP client takes."""

from __future__ import annotations

import ssl

from corrente.errors import ConfigError


def ssl_context(verify: bool | str, *, key: str) -> ssl.SSLContext | bool:
    """Return true, false, or a context that trusts the certificates in the file ``verify``.

    ConfigError, which names ``key``, when the file holds no certificates.
    """
    if isinstance(verify, bool):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{key} = {verify!r}: true, false or a file of certificates is allowed ({error})") from error
