"""Batches that follow each other without a flush, on two versions of the weights: PipeDream-2BW (runtime.endless has its rule and actions).

A version has values, and gradients of the batch that runs on it. Batch t is on version t mod 2, which holds W(t-1) then; its UPDATE
copies W(t) from the other version and makes W(t+1) of it there, where nobody reads any more. A batch's last backwards, its sums over
ranks and its update happen in the next call, or in `flush`.

    loss of a batch          known on all ranks when the last stage has run all of it: asking for it waits for that (LateMetrics)
    gradient norm            of the update that a call made, so of the batch before
    a batch of another size  ends what is under way first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from torch import Tensor

from meshwright.runtime.actions import Action, Actions, Kind
from meshwright.runtime.axes import Axis
from meshwright.runtime.endless import VERSIONS, call, last, turned
from meshwright.runtime.execution import StepExecution, StepRecord, Turn
from meshwright.runtime.gradients import FlatParameters, Tied
from meshwright.runtime.metrics import Sums
from meshwright.runtime.stages import RankStages

WATCHED = 2
"""Calls in which what autograd keeps is counted: from then on all are alike."""


class StaleSteps:
    """A rank's batches under way.

    start_sums   (parameters, loss) starts the sums of loss and squared gradients over all ranks
    update       (version, step, loss, squared norm) makes the next weights
    """

    def __init__(
        self,
        stages: RankStages,
        pipeline: Axis,
        tied: Tied,
        start_sums: Callable[[FlatParameters, Tensor], Sums],
        update: Callable[[int, int, float, float], None],
    ) -> None:
        self._stages, self._tied, self._start_sums, self._update = stages, tied, start_sums, update
        self._ranks, self._rank = pipeline.size, pipeline.index
        self._execution: StepExecution | None = None
        self._num_micro_batches = self._num_batches = self._num_calls = 0
        self._reduced: dict[int, Callable[[], None]] = {}
        self._sums: dict[int, Sums] = {}
        self.peak_in_flight = self.peak_saved_bytes = 0
        self._actions = cache(self._build_actions)

    @property
    def version(self) -> int:
        """The version that the next batch runs on."""
        return self._num_batches % VERSIONS

    def step(
        self, batch: Mapping[str, Tensor], num_micro_batches: int, step: int, own_rows: bool = False, record: StepRecord | None = None
    ) -> Turn:
        """Runs a batch as far as a call does."""
        if num_micro_batches != self._num_micro_batches:
            self.flush()
        turn = self._stages.turn(batch, num_micro_batches, step, self.version, own_rows)
        turn.flat.begin(num_micro_batches, overlap=False)
        pending = self._execution is not None
        if self._execution is None:
            self._num_micro_batches, self._num_calls = num_micro_batches, 0
            self._execution = self._stages.endless_execution([turn] * VERSIONS, num_micro_batches, self._on_batch)
            self._execution.watch(self._stages.saved_bytes(num_micro_batches))
        elif self._num_calls == WATCHED:
            self._execution.watch(None)
        self._execution.turns[self.version] = turn
        self._execution.run(self._actions(num_micro_batches, self.version, pending), record, to_the_end=False)
        self._num_batches, self._num_calls = self._num_batches + 1, self._num_calls + 1
        self._note(self._execution)
        return turn

    def flush(self) -> None:
        """Ends what is under way."""
        if self._execution is None:
            return
        version = (self._num_batches - 1) % VERSIONS
        actions = last(self._ranks, self._rank, self._num_micro_batches, version)
        self._execution.run(tuple(turned(a, self._num_micro_batches) for a in actions))
        self._note(self._execution)
        self._execution.watch(None)
        self._execution = None

    @property
    def action(self) -> Action | None:
        """What the rank does."""
        return None if self._execution is None else self._execution.action

    def _build_actions(self, num_micro_batches: int, version: int, pending: bool) -> Actions:
        """Of a call: as of batch 2 or 3, which have batches before them."""
        actions = call(self._ranks, self._rank, num_micro_batches, VERSIONS + version, pending)
        return tuple(turned(action, num_micro_batches) for action in actions)

    def _on_batch(self, action: Action) -> None:
        assert self._execution is not None
        version = action.micro_batch
        turn = self._execution.turns[version]
        match action.kind:
            case Kind.REDUCE:
                self._reduced[version] = turn.flat.start_finish(self._tied)
            case Kind.NORM:
                self._reduced.pop(version)()
                self._sums[version] = self._start_sums(turn.flat, turn.loss)
            case _:
                self._update(version, turn.step, *self._sums.pop(version)())

    def _note(self, execution: StepExecution) -> None:
        self.peak_in_flight = max(self.peak_in_flight, execution.peak_in_flight)
        self.peak_saved_bytes = max(self.peak_saved_bytes, execution.peak_saved_bytes)
