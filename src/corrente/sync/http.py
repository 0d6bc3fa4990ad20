"""Weights over HTTP, the engine's half: a version is streamed straight into its slot and checked there.

The learner's half is in http_server.py: engines need no server. Needs ``corrente[http]``.
"""

from __future__ import annotations

import httpx2 as httpx
from safetensors.torch import load

from corrente.errors import SyncError
from corrente.sync import delta, digest
from corrente.sync.offers import HttpOffer
from corrente.sync.receiver import ReceiveTarget

SILENCE_S = 10.0
"""An engine gives up when it hears nothing for this long."""


class HttpReceiver:
    """The engine's half."""

    on_host = True

    def __init__(self) -> None:
        self._client = httpx.Client(trust_env=False)

    def fetch(self, offer: HttpOffer, into: ReceiveTarget) -> None:
        if into.base is None:
            if offer.nbytes != into.layout.nbytes:
                raise SyncError(f"{offer.nbytes} bytes are offered; the engine's weights are {into.layout.nbytes}")
            self._download(offer, into.target.numpy().data, into)
        else:
            body = bytearray(offer.nbytes)
            self._download(offer, memoryview(body), into)
            delta.apply(into.layout, load(bytes(body)), into.base, into.target)
        into.remaining_s()
        if digest.of(into.layout, into.target) != offer.digest:
            raise SyncError(f"version {offer.version} is not what the learner sent: the checksum is another")

    def close(self) -> None:
        self._client.close()

    def _download(self, offer: HttpOffer, body: memoryview, into: ReceiveTarget) -> None:
        """Stream the offer's bytes to where they belong. SyncError when they are fewer or more, or not to be had."""
        wait_s = min(SILENCE_S, into.remaining_s())
        headers = {"authorization": f"Bearer {offer.token}"}
        at = 0
        with self._client.stream("GET", offer.url, headers=headers, timeout=wait_s) as response:
            if response.status_code != 200:
                said = response.read()[:200].decode(errors="replace")
                raise SyncError(f"the learner answered {response.status_code}: {said}")
            for chunk in response.iter_raw():
                into.remaining_s()
                if at + len(chunk) > len(body):
                    raise SyncError(f"more than the {len(body)} bytes that were offered arrived")
                body[at : at + len(chunk)] = chunk
                at += len(chunk)
        if at != len(body):
            raise SyncError(f"{at} of {len(body)} bytes arrived")
