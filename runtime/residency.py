"""Which buckets are whole at a time, under ZeRO-1 to 3: parameters as programs see them.

A program asks for parameters by name; that waits for the bucket, and gathers it first if need be. A segment of a program
(rt.layer, rt.segment) tells when it begins and ends, so that

    forward    while a segment runs, the buckets of the next one are gathered; at its end its own are freed
    backward   when the first gradient of a segment's outputs is there, its buckets are gathered (before any of its saved
               tensors is used, recomputation included), and gathering those of the segment before it starts

What a program asks for outside of segments stays whole until the end of that forward, and again for the whole backward.
A bucket is freed in the backward when all its gradients are complete (runtime.gradients), else at its end. The order of
segments is learned in a stage's first forward. It is the same on all replicas, and so is that of collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from meshwright.runtime.flat_bucket import Amount, FlatBucket

Buckets = tuple[FlatBucket, ...]


class Residency(Mapping[str, Tensor]):
    """Parameters by name; see the module. `others` are never sharded. `in_order`: buckets in the order of a forward."""

    def __init__(self, in_order: Sequence[FlatBucket], others: Mapping[str, Tensor], gradient_bytes: Amount) -> None:
        self._others = others
        self._bucket_of = {name: bucket for bucket in in_order for name in bucket.leaves}
        self._gradient_bytes = gradient_bytes
        self._stale: list[FlatBucket] = []
        self._segments: dict[int, list[Buckets]] = {}
        self._outside: dict[int, dict[FlatBucket, None]] = {}
        self._stage = 0
        self._position = -1
        self._forward = self._inside = False
        self._asked: dict[FlatBucket, None] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._bucket_of:
            return self._others[name]
        bucket = self._bucket_of[name]
        self._require(bucket)
        if self._forward:
            (self._asked if self._inside else self._outside.setdefault(self._stage, {}))[bucket] = None
        return bucket.leaves[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._bucket_of
        yield from self._others

    def __len__(self) -> int:
        return len(self._bucket_of) + len(self._others)

    def __contains__(self, name: object) -> bool:
        return name in self._bucket_of or name in self._others

    def refresh(self, buckets: Sequence[FlatBucket]) -> None:
        """The own parts were updated: gathers what is kept whole, in order, while the next forward runs."""
        self._stale = [bucket for bucket in buckets if bucket.zero in (1, 2)]
        self._start_next()

    def settle(self) -> None:
        """Waits for all that refresh gathers."""
        while self._stale:
            self._require(self._stale[0])

    def before_forward(self, stage: int) -> None:
        """A forward of a stage begins."""
        self._stage, self._position, self._forward, self._inside = stage, -1, True, False

    def enter(self) -> None:
        """A segment begins."""
        self._position += 1
        self._inside = True
        self._asked = {}
        known = self._segments.get(self._stage, [])
        if self._position < len(known):
            self._prefetch(known[self._position], self._position + 1)

    def leave(self, outputs: object) -> None:
        """A segment ends."""
        self._inside = False
        stage, place, asked = self._stage, self._position, tuple(self._asked)
        known = self._segments.setdefault(stage, [])
        known[place : place + 1] = [asked]
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _: self._before_segment(stage, place, asked))
        for bucket in asked:
            if bucket not in self._outside.get(stage, {}):
                bucket.release()

    def after_forward(self) -> None:
        """A forward ends."""
        self._forward = False
        for bucket in self._outside.get(self._stage, {}):
            bucket.release()

    def before_backward(self, stage: int) -> None:
        """A backward of a stage begins."""
        self._prepare(tuple(self._outside.get(stage, {})))

    def _before_segment(self, stage: int, place: int, asked: Buckets) -> None:
        """A backward comes to a segment; told once for each of its outputs."""
        self._prepare(tuple(bucket for bucket in asked if not bucket.is_done))
        if place:
            for bucket in self._segments[stage][place - 1]:
                if bucket.zero == 3 and not bucket.resident and not bucket.is_done:
                    bucket.start_gather()

    def _prepare(self, buckets: Buckets) -> None:
        for bucket in buckets:
            self._require(bucket)
            if bucket.zero >= 2 and not bucket.is_done:
                bucket.allocate_gradients(self._gradient_bytes)

    def _prefetch(self, now: Buckets, place: int) -> None:
        """Gathers a segment's own buckets, then starts to gather those of the segment at `place`."""
        for bucket in now:
            self._require(bucket)
        following = self._segments[self._stage][place] if place < len(self._segments[self._stage]) else ()
        for bucket in following:
            if bucket.zero == 3 and not bucket.resident:
                bucket.start_gather()

    def _require(self, bucket: FlatBucket) -> None:
        while bucket in self._stale:
            self._stale.pop(0).require()
            self._start_next()
        bucket.require()

    def _start_next(self) -> None:
        """Two gathers at a time are under way: each may need room of its own."""
        for bucket in self._stale[:2]:
            bucket.start_gather()
