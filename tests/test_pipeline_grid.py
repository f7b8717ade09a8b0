"""A few groups of the grid in tests/pipeline_grid.py: all schedules but those that tests/test_parity.py has on the same mesh."""

from __future__ import annotations

import pytest

from meshwright.tests.pipeline_grid import run_group

GROUPS = [
    ("edge-tied", "pp=4", ("1f1b", "pipedream-2bw"), (1, 7)),
    ("edge", "pp=2", ("interleaved", "zb-v"), (3,)),
    ("t5-5", "pp=2,dp=2", ("zb-v", "pipedream-2bw"), (3,)),
]
"""Model, mesh, schedules, micro-batches."""


@pytest.mark.parametrize(("model", "mesh", "schedules", "micro_batches"), GROUPS, ids=["-".join(g[:2]) for g in GROUPS])
def test_parity_and_activations_in_flight(model: str, mesh: str, schedules: tuple[str, ...], micro_batches: tuple[int, ...]) -> None:
    ranks, refused = run_group(model, mesh, schedules, micro_batches)
    assert not refused and {found.schedule for found in ranks[0]} == set(schedules)
    assert not [found for rank in ranks for found in rank if found.num_bad]
