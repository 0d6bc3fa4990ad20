"""Axis 4, staleness: what may be trained on, and at what weight. Any combination of

- gate (``staleness.max``): admission control. The bound is true by construction and nothing finished is thrown away. Start here.
- reject (``staleness.reject``): drop groups by version when they are taken. Needed by ``buffer.kind = "stream"``; costs samples.
- mask (``staleness.mask``): withhold single tokens that are too old and keep the reward in the baseline. For long generations
  that cross several versions, where only the beginning is old.
- correct (``staleness.correct``): importance weights in the loss, see ``algo``.
"""
