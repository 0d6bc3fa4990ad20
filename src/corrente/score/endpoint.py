"""One HTTP endpoint that takes JSON, with retries, for sources that score with a server.

4xx      the server refuses the request: it fails at once (408, 425 and 429 are tried again)
5xx      and lost connections: tried again, with growing waits, until the deadline is near

It opens as many connections as there are requests; the scorer's ``at_once`` bounds them.
"""

from __future__ import annotations

import math
from typing import Any

import anyio
import httpx2 as httpx

from corrente.common import tls
from corrente.errors import RewardError

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
CONNECT_S = 10.0
BUSY = (408, 425, 429)
PATIENCE_SHARE = 0.95
"""Share of the deadline after which a failing server is given up, so that the error can say how it failed."""
SHOWN_CHARACTERS = 200
"""Characters of an answer that an error message shows."""


class Endpoint:
    """Posts to ``url``. ``name`` begins its error messages; ``deadline_s`` is the scorer's. Call ``close`` when done."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        token: str = "",
        verify: bool | str = True,
        deadline_s: float = math.inf,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self._name = url, name
        self._patience_s = PATIENCE_SHARE * deadline_s
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=tls.context(verify, key="verify"),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def ask(self, body: dict[str, Any]) -> bytes:
        """Post ``body`` and return the answer. RewardError for a 4xx, and when no retry is left."""
        wait_s, trouble = FIRST_WAIT_S, "it does not answer"
        with anyio.move_on_after(self._patience_s):
            while True:
                try:
                    response = await self._http.post(self.url, json=body)
                except httpx.TransportError as error:
                    trouble = f"{type(error).__name__}: {error}"
                else:
                    if response.is_success:
                        return response.content
                    trouble = f"it answered {response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
                    if not response.is_server_error and response.status_code not in BUSY:
                        break
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise RewardError(f"{self._name}: {self.url}: {trouble}")
