"""Axis 2, the buffer: what waits, in which order, how deep.

- none: strictly alternating, on-policy. The baseline every asynchronous setting is compared with.
- double: one version ahead, first in first out. The simplest overlap, age at most 1.
- window: bounded depth S, admission order with a look-ahead window so that one slow group does not hold up a step. The default.
- stream: order of completion, no depth; only version control (reject, mask) bounds age. For engines that cannot be paced; it
  starves slow prompts, which the others do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from corrente.config import Double, NoBuffer, Stream, Window

KINDS: Mapping[type, str] = {
    NoBuffer: "corrente.buffer.none:build",
    Double: "corrente.buffer.double:build",
    Window: "corrente.buffer.window:build",
    Stream: "corrente.buffer.stream:build",
}
"""Section of the config -> dotted path of the function that builds the buffer from a BufferSize and the first ticket."""
