"""Batches from a stream of token ids; what batch `step` holds depends on the seed and the step alone.

The stream is cut into N sequences of equal length one after the other (documents packed, the tail that does not fill a
sequence dropped). Epoch e visits them in a permutation drawn from (seed, e); global batch k holds sequences kG to kG+G-1 of
that endless order, G being the global batch size. The mesh has no part in it. A place in the permutation is computed alone (a Feistel
network, Black and Rogaway, CT-RSA 2002, section 4), so a rank keeps no order, and reads the rows that it asks for.

    causal-lm    input_ids (G, S) = labels (G, S); the model itself shifts
    masked-lm    15% of the positions are targets (labels elsewhere -100); of these 80% are shown as the mask token, 10% as a
                 random token, 10% as they are (Devlin et al., arXiv 1810.04805, section 3.1); drawn from (seed, step, row)
    seq2seq-lm   a sequence of S + T ids: input_ids (G, S) the first S, labels (G, T) the rest

A model input named attention_mask is all ones, token_type_ids all zeros. All tensors are int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from meshwright.plans.errors import InputError
from meshwright.tokens import Tokens

IGNORED = -100
TASKS = ("causal-lm", "masked-lm", "seq2seq-lm")
MASKED_SHARE = 0.15
SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1
ORDER, MASKING = 0, 1
ROUNDS = 6


@dataclass(frozen=True)
class Batches:
    """Global batches over `tokens`.

    inputs        model input name -> shape of one micro-batch on one rank; dim 0 is not used
    global_batch  sequences in a batch
    mask_token    for masked-lm; the tokenizer's own when None
    offset        sequences that step 0 starts after: not 0 for a run that goes on with another global batch
    """

    tokens: Tokens
    task: str
    inputs: Mapping[str, tuple[int, ...]]
    global_batch: int
    seed: int
    vocab_size: int | None = None
    mask_token: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InputError(f"--data gives text for the tasks {', '.join(TASKS)}; the plan's task is {self.task}")
        known = {"input_ids", "labels", "attention_mask", "token_type_ids"}
        if unknown := sorted(set(self.inputs) - known):
            raise InputError(f"the model takes {', '.join(unknown)}; text gives {', '.join(sorted(known))}")
        if not {"input_ids", "labels"} <= set(self.inputs):
            raise InputError(f"the model takes {', '.join(self.inputs)}; training on text needs input_ids and labels")
        if self.task == "masked-lm" and self.mask is None:
            raise InputError("masked-lm on token ids needs the mask token's id: --mask-token N")
        if len(self.tokens.ids) < self.length:
            raise InputError(
                f"--data has {len(self.tokens.ids)} tokens; one sequence of this plan needs {self.length}: "
                "give more text, or compile with a smaller --seq"
            )

    @property
    def mask(self) -> int | None:
        """Id of the mask token."""
        return self.mask_token if self.mask_token is not None else self.tokens.mask

    @property
    def length(self) -> int:
        """Tokens in one sequence."""
        extra = self.inputs["labels"][1] if self.task == "seq2seq-lm" else 0
        return self.inputs["input_ids"][1] + extra

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch."""
        return len(self.tokens.ids) // self.length

    def position(self, step: int) -> int:
        """Sequences that come before a step's."""
        return self.offset + step * self.global_batch

    def batch(self, step: int, rows: range | None = None) -> dict[str, torch.Tensor]:
        """The global batch of a step (from 0), or only these rows of it."""
        numbers = range(self.global_batch) if rows is None else rows
        first = self.position(step)
        found = np.stack([self._sequence(first + row) for row in numbers])
        ids, labels = self._masked(found, step, numbers) if self.task == "masked-lm" else self._plain(found)
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if "attention_mask" in self.inputs:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if "token_type_ids" in self.inputs:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        return batch

    def _sequence(self, number: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(number, self.num_sequences)
        start = permuted(place, self.num_sequences, (self.seed, ORDER, epoch)) * self.length
        return np.asarray(self.tokens.ids[start : start + self.length], dtype=np.int64)

    def _plain(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self.task == "causal-lm":
            return rows, rows.copy()
        middle = self.inputs["input_ids"][1]
        return rows[:, :middle].copy(), rows[:, middle:].copy()

    def _masked(
        self, rows: npt.NDArray[np.int64], step: int, numbers: range
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids as shown, and labels: every row has one target at least."""
        pairs = [self._masked_row(row, np.random.default_rng((self.seed, MASKING, step, n))) for row, n in zip(rows, numbers, strict=True)]
        shown, labels = zip(*pairs, strict=True)
        return np.stack(shown), np.stack(labels)

    def _masked_row(
        self, row: npt.NDArray[np.int64], random: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        chosen = random.random(row.shape) < MASKED_SHARE
        if self.tokens.eos is not None:
            chosen &= row != self.tokens.eos
        if not chosen.any():
            chosen[0] = True
        way = random.random(row.shape)
        words = random.integers(0, self.vocab_size or int(row.max()) + 1, row.shape)
        shown = np.where(chosen & (way < SHOWN_AS_MASK), np.int64(self.mask or 0), row)
        replaced = chosen & (way >= SHOWN_AS_MASK) & (way < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
        return np.where(replaced, words, shown), np.where(chosen, row, np.int64(IGNORED))


def permuted(place: int, length: int, key: tuple[int, ...]) -> int:
    """Where `place` goes in a permutation of range(length) that the key draws: a Feistel network on as many bits as the length has, again
    until it falls within (4 times on average at most)."""
    half = max(1, (max(1, length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (mixed((*key, turn, right)) & low)
        place = left << half | right
        if place < length:
            return place


def mixed(numbers: tuple[int, ...]) -> int:
    """64 bits that depend on all of the numbers: SplitMix64's finisher (Steele, Lea, Flood, OOPSLA 2014) after each."""
    found = 0
    for number in numbers:
        found = (found + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        found = ((found ^ found >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        found = ((found ^ found >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        found ^= found >> 31
    return found
