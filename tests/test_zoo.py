"""Some of the zoo, one of each sort, on real ranks. All of it: `python -m meshwright.tests.zoo`."""

from __future__ import annotations

import warnings

import pytest

from meshwright.tests.zoo.models import absent
from meshwright.tests.zoo.sweep import MATCHES, PER_MICRO_BATCH, Report, sweep_arch

STEPS = 8
SUBSET = [
    ("causal:deepseek_v3", "tp=2", MATCHES),  # latent attention, experts
    ("causal:deepseek_v2", "dp=2,ep=2", MATCHES),  # whole experts on ranks
    ("causal:bamba", "tp=2", MATCHES),  # state space and attention
    ("causal:recurrent_gemma", "pp=2", MATCHES),  # recurrent, and a custom autograd.Function
    ("imgcls:vit", "tp=2", MATCHES),  # pixels
    ("imgcls:resnet", "dp=2", PER_MICRO_BATCH),  # batch norms
    ("speech:whisper", "pp=2", MATCHES),  # convolutions over audio features, an encoder and a decoder
    ("base:clip", "tp=2", PER_MICRO_BATCH),  # two towers and a contrastive loss
]  # fmt: skip


@pytest.mark.skipif(bool(absent()), reason=absent() or "the zoo is there")
@pytest.mark.parametrize(("arch", "mesh", "verdict"), SUBSET, ids=[f"{arch}-{mesh}" for arch, mesh, _ in SUBSET])
def test_architecture_on_mesh(arch: str, mesh: str, verdict: str) -> None:
    def ignore(report: Report) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = sweep_arch(arch, [mesh], STEPS, ignore).outcomes[mesh]
    assert outcome.verdict == verdict, outcome.reason
