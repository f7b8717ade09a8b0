"""Batches from a stream of token ids; what batch `step` holds depends on the seed and the step alone.

The stream is cut into N sequences of equal length one after the other (documents packed, the tail that does not fill a
sequence dropped). Epoch e visits them in a permutation drawn from (seed, e); global batch k holds sequences kG to kG+G-1 of
that endless order, G being the global batch size. The mesh has no part in it: every rank has the whole global batch.

    causal-lm    input_ids (G, S) = labels (G, S); the model itself shifts
    masked-lm    15% of the positions are targets (labels elsewhere -100); of these 80% are shown as the mask token, 10% as a
                 random token, 10% as they are (Devlin et al., arXiv 1810.04805, section 3.1); drawn from (seed, step)
    seq2seq-lm   a sequence of S + T ids: input_ids (G, S) the first S, labels (G, T) the rest

A model input named attention_mask is all ones, token_type_ids all zeros. All tensors are int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

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

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The global batch of a step (from 0)."""
        first = self.position(step)
        numbers = range(first, first + self.global_batch)
        rows = np.stack([self._sequence(number) for number in numbers])
        ids, labels = self._masked(rows, step) if self.task == "masked-lm" else self._plain(rows)
        found = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if "attention_mask" in self.inputs:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        if "token_type_ids" in self.inputs:
            found["token_type_ids"] = torch.zeros_like(found["input_ids"])
        return found

    def _sequence(self, number: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(number, self.num_sequences)
        start = int(_permutation(self.seed, epoch, self.num_sequences)[place]) * self.length
        return np.asarray(self.tokens.ids[start : start + self.length], dtype=np.int64)

    def _plain(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self.task == "causal-lm":
            return rows, rows.copy()
        middle = self.inputs["input_ids"][1]
        return rows[:, :middle].copy(), rows[:, middle:].copy()

    def _masked(self, rows: npt.NDArray[np.int64], step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        random = np.random.default_rng((self.seed, MASKING, step))
        chosen = random.random(rows.shape) < MASKED_SHARE
        if self.tokens.eos is not None:
            chosen &= rows != self.tokens.eos
        if not chosen.any():
            chosen[0, 0] = True
        way = random.random(rows.shape)
        words = random.integers(0, self.vocab_size or int(rows.max()) + 1, rows.shape)
        shown = np.where(chosen & (way < SHOWN_AS_MASK), np.int64(self.mask or 0), rows)
        replaced = chosen & (way >= SHOWN_AS_MASK) & (way < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
        return np.where(replaced, words, shown), np.where(chosen, rows, np.int64(IGNORED))


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, ORDER, epoch)).permutation(length)
