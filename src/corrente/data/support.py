"""The support of each sampled token: the set of ids that top-k, top-p and min-p left to draw from.

The log-probability of a draw is renormalised over that set, so the learner must renormalise over the same set. Otherwise the
ratio of an unchanged policy is the probability mass that was kept, not 1.

A set is stored as its ids, or as a bitmap of the vocabulary V where that is smaller: 4 min(n, V / 32) bytes for n ids. Peaked
distributions leave a handful of ids, and no distribution, however flat, costs more than V / 8 bytes per token (19 KB for a
vocabulary of 150,000). A set is never shortened to save room; ``sampling.top_k`` bounds it further.

Sets are aligned token by token and stay so when completions are joined; a mismatch is an AlignmentError. numpy only.

Shapes: T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.errors import AlignmentError

Ids = NDArray[np.int32]

WORD_BITS = 32


def _word_counts(counts: Ids, vocabulary: int) -> Ids:
    """The number of int32 words that store the set of each token (T,)."""
    return np.minimum(counts, -(-vocabulary // WORD_BITS)).astype(np.int32)


class Support(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The kept token ids of T tokens out of ``vocabulary``.

    ``counts`` (T,): the size of each set; 0 stands for the whole vocabulary (nothing was cut off, or the token was not sampled).
    ``words``: the sets one after another, each as its ids in ascending order, or as a bitmap of ceil(vocabulary / 32) words,
    lowest bit first, where it has more ids than that.
    """

    vocabulary: int
    counts: Ids
    words: Ids

    def __post_init__(self) -> None:
        if len(self.counts) and not 0 <= self.counts.min() <= self.counts.max() <= self.vocabulary:
            raise AlignmentError(f"a kept set of {self.counts.max()} ids out of a vocabulary of {self.vocabulary}")
        if int(_word_counts(self.counts, self.vocabulary).sum()) != len(self.words):
            raise AlignmentError(f"{len(self.counts)} kept sets in {len(self.words)} words do not line up")

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def from_sets(cls, sets: Sequence[Ids | None], *, vocabulary: int) -> Support:
        """Build a support from the kept ids of each token, in any order; None stands for the whole vocabulary."""
        return support_of_packed([pack_ids(ids, vocabulary) for ids in sets], vocabulary=vocabulary)

    @classmethod
    def full_vocabulary(cls, tokens: int, *, vocabulary: int) -> Support:
        """The support of tokens from whose draws nothing was cut off."""
        return cls(vocabulary=vocabulary, counts=np.zeros(tokens, np.int32), words=np.empty(0, np.int32))

    def joined_with(self, rest: Support) -> Support:
        """The sets of these tokens followed by those of ``rest``. AlignmentError where the vocabularies differ."""
        if self.vocabulary != rest.vocabulary:
            raise AlignmentError(f"kept sets out of {self.vocabulary} and of {rest.vocabulary} tokens cannot be joined")
        counts, words = np.concatenate([self.counts, rest.counts]), np.concatenate([self.words, rest.words])
        return Support(vocabulary=self.vocabulary, counts=counts, words=words)

    def take(self, places: NDArray[np.int64]) -> Support:
        """The sets at ``places``, in that order."""
        stops = np.cumsum(_word_counts(self.counts, self.vocabulary), dtype=np.int64)
        sizes = _word_counts(self.counts[places], self.vocabulary).astype(np.int64)
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        words = self.words[np.repeat(stops[places] - sizes, sizes) + within]
        return Support(vocabulary=self.vocabulary, counts=self.counts[places], words=words)

    def word_offsets(self) -> NDArray[np.int64]:
        """The index into ``words`` at which each token's set begins, and the end of the last one (T + 1,)."""
        return np.concatenate([[0], np.cumsum(_word_counts(self.counts, self.vocabulary), dtype=np.int64)])

    def ids_at(self, token: int) -> Ids:
        """The kept ids of one token in ascending order; the whole vocabulary where nothing was cut off."""
        if not self.counts[token]:
            return np.arange(self.vocabulary, dtype=np.int32)
        at = self.word_offsets()
        words = self.words[at[token] : at[token + 1]]
        return words if len(words) == self.counts[token] else _unpack_bitmap(words)

    def contains(self, tokens: Ids) -> NDArray[np.bool_]:
        """A mask (T,) that is True where the token of ``tokens`` (T,) is in the set at its place."""
        sizes, at = _word_counts(self.counts, self.vocabulary), self.word_offsets()
        inside = self.counts == 0
        listed = (self.counts > 0) & (sizes == self.counts)
        row = np.repeat(np.arange(len(self)), sizes)
        hits = np.flatnonzero((self.words == tokens[row]) & listed[row])
        inside[row[hits]] = True
        mapped = np.flatnonzero(sizes != self.counts)
        word = self.words[at[mapped] + tokens[mapped] // WORD_BITS].astype(np.int64)
        inside[mapped] = (word >> (tokens[mapped] % WORD_BITS)) & 1 == 1
        return inside

    def check_aligned(self, tokens: Ids) -> None:
        """Raise AlignmentError unless there is one set for each of ``tokens`` (T,) and it contains the token."""
        if len(self) != len(tokens):
            raise AlignmentError(f"{len(tokens)} tokens but {len(self)} kept sets in one completion")
        outside = np.flatnonzero(~self.contains(tokens))
        if len(outside):
            at = int(outside[0])
            raise AlignmentError(f"token {tokens[at]} at {at} is not in the set of {self.counts[at]} it was drawn from")


PackedSet = tuple[int, Ids]
"""The set of one token: the number of ids, and the words that store them."""


def pack_ids(ids: Ids | None, vocabulary: int) -> PackedSet:
    """Pack one set as a Support stores it; None stands for the whole vocabulary. AlignmentError for ids outside it."""
    if ids is None:
        return 0, np.empty(0, np.int32)
    if not len(ids):
        raise AlignmentError("a kept set is empty, so nothing can have been drawn from it")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise AlignmentError(f"a kept id lies outside the vocabulary of {vocabulary}")
    words = -(-vocabulary // WORD_BITS)
    if len(ids) <= words:
        return len(ids), np.sort(ids).astype(np.int32)
    bits = np.zeros(words * WORD_BITS, np.bool_)
    bits[ids] = True
    return len(ids), np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def support_of_packed(sets: Sequence[PackedSet], *, vocabulary: int) -> Support:
    """Build the Support of tokens whose sets were packed one by one."""
    return Support(
        vocabulary=vocabulary,
        counts=np.array([count for count, _ in sets], np.int32),
        words=np.concatenate([np.empty(0, np.int32), *(words for _, words in sets)]),
    )


def _unpack_bitmap(words: Ids) -> Ids:
    return np.flatnonzero(np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")).astype(np.int32)


def join_supports(parts: Sequence[Support | None], lengths: Sequence[int]) -> Support | None:
    """Join the supports of consecutive parts of a sequence, of these lengths; None where nothing was cut off in any part.

    AlignmentError where their vocabularies differ.
    """
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    whole = [
        Support.full_vocabulary(length, vocabulary=known.vocabulary) if part is None else part
        for part, length in zip(parts, lengths, strict=True)
    ]
    if any(part.vocabulary != known.vocabulary for part in whole):
        raise AlignmentError(
            f"kept sets out of vocabularies {sorted({part.vocabulary for part in whole})} cannot be joined"
        )
    return Support(
        vocabulary=known.vocabulary,
        counts=np.concatenate([part.counts for part in whole]),
        words=np.concatenate([part.words for part in whole]),
    )
