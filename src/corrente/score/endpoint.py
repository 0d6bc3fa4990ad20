"""One HTTP endpoint that is asked with JSON, by whoever scores with a server: what is tried again, and for how long.

4xx      the server has looked at the question and refuses it: it fails at once (408, 425 and 429 ask for patience, and get it)
5xx      and lost connections: asked again, waiting longer each time, until ``patience_s`` is over

It opens as many connections as there are questions; the scorer's ``at_once`` bounds them.
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
PATIENT = 0.95
"""Part of the deadline after which a server that fails is given up: so that the message can say how it failed."""
SHOWN = 200
"""Characters of an answer that a message shows."""


class Endpoint:
    """``url`` is posted to; ``name`` begins its messages; ``deadline_s`` is the scorer's. ``close`` when done."""

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
        self._patience_s = PATIENT * deadline_s
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
        """What it answers. RewardError for a 4xx, and when patience is at its end."""
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
                    trouble = f"it answered {response.status_code}: {response.text[:SHOWN]}"
                    if not response.is_server_error and response.status_code not in BUSY:
                        break
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise RewardError(f"{self._name}: {self.url}: {trouble}")
