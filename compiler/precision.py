"""In what type each op computes when parameters and activations are 16-bit: one table, with reasons.

Policies
    compute   operands in the compute type (bf16, fp16): products, which accumulate in FP32 inside on every device
    fp32      operands cast to FP32, results stay FP32 until something computes in the compute type again
    inside    operands as they are: the op's own kernels widen each element, accumulate in FP32 and round the result once
    widest    operands as they are, promoted to the widest of them as torch does: what is safe in any type
    given     operands in the types that the model calls it with: ops that are not torch's

A plan's `precision_ops` has entries of text, "POLICY - reason", by

    an op's short name              pow: fp32 - ...
    a module, and all below it      model.layers.*.mlp: fp32        (* is any text, {0..3} an index)
    an op of a module               model.layers.*.mlp.gate:linear: fp32

of which a module's counts before an op's, and the last of several before the others.

The table starts from torch's CUDA autocast lists (torch/csrc, autocast_mode.h); docs/precision.md has every difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase

from meshwright.compiler.graph import Graph, Op
from meshwright.compiler.kinds import short_name
from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all
from meshwright.plans.precision import DTYPES

__all__ = ["DTYPES", "HALVES", "PROMOTES", "ROUTER", "TABLE", "Policy", "default_policy", "entry", "matches", "policies", "read_policy"]

HALVES = ("bfloat16", "float16")


class Policy(Enum):
    COMPUTE = "compute"
    FP32 = "fp32"
    INSIDE = "inside"
    WIDEST = "widest"
    GIVEN = "given"


LISTS: tuple[tuple[Policy, str, str], ...] = (
    (
        Policy.COMPUTE,
        "a product, accumulated in FP32",
        """linear addmm mm bmm mv matmul addmv baddbmm addbmm addr einsum bilinear outer ger dot vdot inner conv1d conv2d conv3d convolution
        conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc grouped_mm _grouped_mm grouped_mm_fallback chain_matmul
        linalg_multi_dot linalg_vecdot""",
    ),
    (Policy.COMPUTE, "scores and their softmax stay in FP32 inside the kernel", "scaled_dot_product_attention"),
    (Policy.COMPUTE, "a slope per channel, no sum", "prelu"),
    (Policy.INSIDE, "statistics in FP32 inside the kernel", "layer_norm rms_norm group_norm batch_norm instance_norm native_layer_norm"),
    (Policy.INSIDE, "maximum and sum in FP32 inside the kernel; results are in [0, 1]", "softmax _softmax safe_softmax"),
    (Policy.INSIDE, "blocks of rows widened to FP32, the loss is FP32; FP32 logits are never whole", "cross_entropy_sum"),
    (Policy.FP32, "log-probabilities reach the loss", "log_softmax _log_softmax logsumexp logcumsumexp log_sigmoid"),
    (Policy.FP32, "leaves the range of FP16, or loses its digits to BF16", "exp exp2 expm1 log log1p log2 log10 logit xlogy logaddexp "
     "logaddexp2 softplus pow square rsqrt reciprocal sinh cosh tan acos asin acosh atanh erfinv lgamma digamma"),
    (Policy.FP32, "a large sum", "sum nansum mean prod var std var_mean std_mean cumsum cumprod"),
    (Policy.FP32, "a sum of squares", "norm linalg_vector_norm cosine_similarity pairwise_distance cdist dist pdist renorm _weight_norm"),
    (Policy.FP32, "a loss", "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss "
     "soft_margin_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss cosine_embedding_loss "
     "hinge_embedding_loss margin_ranking_loss triplet_margin_loss multilabel_margin_loss multi_margin_loss"),
    (Policy.FP32, "ill-conditioned in 16 bits", "linalg_inv inverse linalg_det det linalg_cholesky cholesky linalg_matrix_exp matrix_exp "
     "linalg_pinv linalg_matrix_power matrix_power logdet linalg_slogdet"),
    (Policy.FP32, "transforms of 16-bit numbers are not there on every device", "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft "
     "fft_fftn fft_ifftn fft_rfftn fft_irfftn complex polar"),
    (Policy.FP32, "the loss", "token_mean"),
)  # fmt: skip
TABLE: Mapping[str, tuple[Policy, str]] = {name: (policy, why) for policy, why, names in LISTS for name in names.split()}
"""Policy and reason by short name. What is not here is `widest` when it is torch's, else `given`."""
ROUTER = "router logits: which expert is taken hangs on their last digits"
PROMOTES = frozenset("add sub rsub mul div where cat maximum minimum max min lerp addcmul addcdiv fmax fmin atan2 fmod remainder hypot "
                     "masked_fill token_mean cross_entropy_sum".split())
"""Ops that promote operands of several types by themselves, without a copy."""
OURS = ("aten", "mw", "transformers")


def default_policy(op: Op) -> tuple[Policy, str]:
    """What the table says of an op."""
    if op.target.split(".")[0] not in OURS:
        return Policy.GIVEN, "not an op of torch"
    return TABLE.get(short_name(op.target), (Policy.WIDEST, ""))


def read_policy(where: str, text: str) -> Policy:
    """The policy that an entry's first word is."""
    word = (text.split() or [""])[0]
    try:
        return Policy(word)
    except ValueError:
        raise InputError(f"{where}: found {word!r}, expected {', '.join(p.value for p in Policy)}, and perhaps a reason") from None


def entry(policy: Policy, why: str) -> str:
    """An entry's text."""
    return f"{policy.value} - {why}" if why else policy.value


def policies(graph: Graph, entries: Mapping[str, str]) -> dict[int, Policy]:
    """Policy of every op by its index, under a plan's entries."""
    names = {short_name(op.target) for op in graph.ops}
    by_op = {key: text for key, text in entries.items() if key in names}
    by_module = [(key, text) for key, text in entries.items() if key not in names]
    found = {}
    for i, op in enumerate(graph.ops):
        policy = default_policy(op)[0]
        if short_name(op.target) in by_op:
            policy = read_policy(f"precision_ops.{short_name(op.target)}", by_op[short_name(op.target)])
        for key, text in by_module:
            if matches(key, op):
                policy = read_policy(f"precision_ops.{key}", text)
        found[i] = policy
    return found


def matches(key: str, op: Op) -> bool:
    """Whether an op is one of those that an entry by module names."""
    pattern, colon, name = key.partition(":")
    if colon and name != short_name(op.target):
        return False
    paths = expand_all([pattern]) if "{" in pattern else (pattern,)
    return any(fnmatchcase(op.module, path) or fnmatchcase(op.module, f"{path}.*") for path in paths)
