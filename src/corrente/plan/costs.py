"""Seconds and bytes of each part of a run, by published formulas.

P parameters, L layers, h hidden size, t tensor-parallel devices, b bytes of a weight, F and BW of a device, N ranks. What the
formulas leave out is in the efficiencies below, of the size that benchmarks of well-kept software report.

Sources: roofline models, Williams et al. 2009, doi:10.1145/1498765.1498785; decode and prefill, Pope et al. 2022,
arXiv:2211.05102; training FLOPs 6 P T, Kaplan et al. 2020, arXiv:2001.08361; 8 P T with recomputation, Narayanan et al. 2021,
arXiv:2104.04473.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from corrente.data.types import Batch
from corrente.plan.devices import Device
from corrente.plan.models import ModelShape
from corrente.plan.setting import Setting, Split

READ_EFFICIENCY = 0.7
"""Share of the memory bandwidth that decoding reaches."""
DECODE_EFFICIENCY = 0.5
"""Share of the FLOP/s that the products of a decode step reach where they are the limit."""
PREFILL_EFFICIENCY = 0.5
TRAIN_EFFICIENCY = 0.4
"""Share of the FLOP/s of forward and backward passes of long packs, without communication."""
MOE_TRAIN_EFFICIENCY = 0.13
"""The same of a mixture of experts, whose products are small and uneven."""
ALL_REDUCE_S = 12e-6
"""Least time of an all-reduce between devices of a host; of one between hosts, three times that."""
MEMORY_USED = 0.9
"""Share of a device's memory that an engine may fill."""
RESERVED_BYTES = 4e9
"""Bytes of a device that libraries and fragmentation take."""
PACK_TOKENS = 16384
"""Tokens of a micro-batch of the learner on one rank, where one sequence is not longer."""
PUBLISH_FIXED_S = 0.5
FLIP_S = 0.05
OPTIMIZER_BYTES = 16.0
"""Bytes of a parameter's float32 master, gradient and two moments, of which each rank holds its shard."""


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Implements sim.speed.SpeedModel for one engine of ``parallel`` devices."""

    model: ModelShape
    device: Device
    parallel: int = 1

    def decode_s(self, sequences: int) -> float:
        """Seconds of a decode step of n sequences, without the context's share.

        max(P_read b / (t BW e), 2 P n / (t F e)) + start + 2 L all-reduce(n h b): weights are read once a step, or their products
        are the limit; every layer sums over the devices twice.
        """
        device, model, ways = self.device, self.model, self.parallel
        read_s = (
            model.read_parameters(sequences) * device.weight_bytes / (ways * device.memory_bytes_s * READ_EFFICIENCY)
        )
        multiply_s = 2.0 * model.active_parameters * sequences / (ways * device.flops * DECODE_EFFICIENCY)
        return max(read_s, multiply_s) + device.start_s + self._reduce_s(sequences)

    @property
    def context_token_s(self) -> float:
        """Seconds that a token of context adds to a decode step: its keys and values are read."""
        device = self.device
        return self.model.kv_numbers * device.weight_bytes / (self.parallel * device.memory_bytes_s * READ_EFFICIENCY)

    @property
    def prefill_token_s(self) -> float:
        """Seconds of a prompt's token: 2 P / (t F e)."""
        return 2.0 * self.model.active_parameters / (self.parallel * self.device.flops * PREFILL_EFFICIENCY)

    @property
    def flip_s(self) -> float:
        return FLIP_S

    def _reduce_s(self, sequences: float) -> float:
        """Seconds of the all-reduces of a step: 2 (t - 1) / t bytes cross each device's link, twice a layer."""
        ways, device = self.parallel, self.device
        if ways == 1:
            return 0.0
        inside = ways <= device.node
        rate = device.link_bytes_s if inside else device.network_bytes_s
        nbytes = sequences * self.model.hidden * device.weight_bytes
        each_s = ALL_REDUCE_S * (1 if inside else 3) + 2 * (ways - 1) / ways * nbytes / rate
        return 2 * self.model.layers * each_s


class LearnerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of optimizer steps of a learner whose weights are sharded over ``ranks`` devices (FSDP, arXiv:2304.11277).

    A batch that is a part of a step's is dealt to as large a part of the ranks, ``simulated_ranks``.
    """

    model: ModelShape
    device: Device
    ranks: int
    simulated_ranks: int
    prompt_tokens: int = 0
    minibatches: int = 1
    logprob_passes: int = 0
    recompute: bool = True

    def step_s(self, batch: Batch) -> float:
        """Seconds of a step on a batch: those of the slowest rank, for sequences are dealt whole."""
        return self.seconds([self.prompt_tokens + len(row.tokens) for row in batch.rows])

    def seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of a step on sequences of these lengths, in tokens, prompts included."""
        if not lengths:
            return 0.0
        size = -(-len(lengths) // self.minibatches)
        total = 0.0
        for start in range(0, len(lengths), size):
            shares = deal(lengths[start : start + size], self.simulated_ranks)
            total += max(self._rank_s(share) for share in shares) + self._optimizer_s()
        return total

    def _rank_s(self, share: Sequence[int]) -> float:
        """Seconds of one rank: its FLOPs, and what of the gathering and reducing of weights they do not hide."""
        packs = max(1, -(-sum(share) // PACK_TOKENS))
        compute_s = self._flops(share) / (self.device.flops * self._efficiency)
        return max(compute_s, packs * self._communication_s) + packs * 2 * self.model.layers * 20e-6

    @property
    def _efficiency(self) -> float:
        return MOE_TRAIN_EFFICIENCY if self.model.experts else TRAIN_EFFICIENCY

    def _flops(self, share: Sequence[int]) -> float:
        """(6 or 8) P T and attention, 2 P T for each pass of log-probs alone."""
        forward = 2.0 * self.model.active_parameters * sum(share) + sum(map(self.model.attention_flops, share))
        return forward * ((4 if self.recompute else 3) + self.logprob_passes)

    @property
    def _communication_s(self) -> float:
        """Seconds in which the weights are gathered twice and gradients reduced once: 3 P b (N - 1) / N / rate."""
        if self.ranks == 1:
            return 0.0
        device = self.device
        rate = device.link_bytes_s if self.ranks <= device.node else device.network_bytes_s
        return 3 * self.model.parameters * device.weight_bytes * (self.ranks - 1) / self.ranks / rate

    def _optimizer_s(self) -> float:
        """Seconds in which every rank reads and writes its shard of masters, gradients and moments."""
        return 2 * OPTIMIZER_BYTES * self.model.parameters / self.ranks / self.device.memory_bytes_s


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequences dealt to ranks, the longest first, each to the rank with the fewest tokens so far (LPT, Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for length in sorted(lengths, reverse=True):
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(length)
        heapq.heappush(heap, (tokens + length, rank))
    return shares


def export_s(setting: Setting, split: Split) -> float:
    """Seconds in which each rank copies its shard of the weights."""
    device = setting.device
    return 2 * setting.model.parameters * device.weight_bytes / split.training / device.memory_bytes_s


def deliver_s(setting: Setting, split: Split) -> float:
    """Seconds until every engine has the weights: each of its devices takes in P b / t, all engines at once."""
    device = setting.device
    whole = setting.model.parameters * device.weight_bytes
    rate = device.link_bytes_s if setting.devices <= device.node else device.network_bytes_s
    return PUBLISH_FIXED_S + max(whole / (split.tensor_parallel * rate), whole / (split.training * rate))


def switch_s(setting: Setting) -> float:
    """Seconds in which shared devices turn from training to generation and back: the optimizer's state leaves and returns."""
    device = setting.device
    state = (OPTIMIZER_BYTES + device.weight_bytes) * setting.model.parameters / setting.devices
    return 2 * state / device.host_bytes_s + 1.0


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one device. ``sequences``: how many of mean length an engine holds at once."""

    engine: float
    learner: float
    capacity: float
    sequences: int

    @property
    def fits(self) -> bool:
        return self.sequences >= 1 and self.learner <= self.capacity


def memory_use(setting: Setting, split: Split) -> MemoryUse:
    """Bytes of a generating and of a training device.

    An engine holds its share of ``slots`` versions of the weights, one of which is sampled (a shared device: one), and keys and
    values in what is left. A rank of the learner holds b + 16 bytes for each parameter of its shard, two gathered layers, the
    hidden states of a pack at every layer (recomputed inside), and the working memory of one layer.
    """
    model, device = setting.model, setting.device
    slots = 1 if split.colocated else setting.slots
    weights = slots * model.parameters * device.weight_bytes / split.tensor_parallel
    free = device.memory_bytes * MEMORY_USED - RESERVED_BYTES * (device.name != "CPU") - weights
    context = setting.prompt_tokens / setting.group + 0.75 * setting.lengths.mean * setting.turns
    per_sequence = context * model.kv_numbers * device.weight_bytes / split.tensor_parallel
    sequences = max(0, int(free / per_sequence))
    longest = setting.prompt_tokens + (setting.lengths.maximum or 2 * setting.lengths.mean) * setting.turns
    pack = max(PACK_TOKENS, longest)
    kept = model.layers if setting.recompute else 12 * model.layers
    learner = (
        (device.weight_bytes + OPTIMIZER_BYTES) * model.parameters / split.training
        + 2 * model.largest_layer_parameters * device.weight_bytes * (split.training > 1)
        + pack * model.hidden * device.weight_bytes * (kept + 24)
        + RESERVED_BYTES * (device.name != "CPU")
    )
    held = min(sequences, setting.max_sequences) * per_sequence
    engine = weights + held + RESERVED_BYTES * (device.name != "CPU")
    return MemoryUse(engine=engine, learner=learner, capacity=device.memory_bytes, sequences=sequences)
