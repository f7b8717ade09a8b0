"""The rule table: which factors each ATen op has.

A formula names the dims of operands and results ("... k, n k, n -> ... n"); "..." is any number of leading dims. Rules that
depend on arguments are functions of the Call. An op that is not here runs replicated; nothing is guessed. WHOLE has the ops of
which that is known, with the reason.

    rule_for(target)            the rule, or None
    register_rule(target, ...)  adds one for a user's own op
    factors_of(call)            the rule applied to a call
"""

from __future__ import annotations

from meshwright.compiler.rules import contractions, indexing, pointwise, reductions, shapes
from meshwright.compiler.rules.contractions import K, added_to, ranked
from meshwright.compiler.rules.factors import Call, Factors, Rule
from meshwright.compiler.rules.formulas import formula
from meshwright.compiler.rules.pointwise import BOTH, FIRST
from meshwright.compiler.rules.reductions import along, picked, reduced
from meshwright.compiler.rules.shapes import channel_blocks, trailing, whole_dims
from meshwright.plans.errors import InputError

ELEMENTWISE = """
abs absolute acos acosh angle arccos arcsin arctan asin asinh atan atan2 atanh bitwise_not bitwise_and.Scalar bitwise_and.Tensor
bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor
__xor__.Scalar __xor__.Tensor __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor ceil celu clamp
clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clip clip.Tensor complex copysign.Tensor copysign.Scalar cos cosh
deg2rad detach digamma dropout elu eq.Scalar eq.Tensor erf erfc erfinv exp exp2 expm1 floor floor_divide floor_divide.Scalar fmax fmin
fmod.Scalar fmod.Tensor frac ge.Scalar ge.Tensor gelu greater.Scalar greater.Tensor gt.Scalar gt.Tensor hardshrink hardsigmoid hardswish
hardtanh heaviside hypot imag isfinite isinf isnan isneginf isposinf le.Scalar le.Tensor leaky_relu less.Scalar less.Tensor lgamma log
log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt.Scalar lt.Tensor max.other
maximum min.other minimum mish nan_to_num ne.Scalar ne.Tensor not_equal.Tensor polar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
rad2deg real reciprocal relu relu6 remainder.Scalar remainder.Tensor round round.decimals rsqrt rsub.Scalar selu sgn sigmoid sign
signbit silu sin sinc sinh softplus softshrink special_expit sqrt square tan tanh threshold to.dtype trunc xlogy.Tensor
xlogy.Scalar_Other
"""

KEYWORD = 99
"""Place of an argument that is only given by name."""

ATEN: tuple[tuple[Rule, str], ...] = (
    (pointwise.pointwise(), ELEMENTWISE),
    (pointwise.pointwise(FIRST), "neg negative clone contiguous alias positive"),
    (pointwise.added, "add.Tensor add.Scalar sub.Tensor sub.Scalar subtract.Tensor rsub.Tensor"),
    (pointwise.multiplied, "mul.Tensor mul.Scalar multiply.Tensor multiply.Scalar"),
    (pointwise.divided, "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode divide.Tensor true_divide.Tensor"),
    (pointwise.pointwise(BOTH), "lerp.Scalar lerp.Tensor addcdiv"),
    (pointwise.pointwise(BOTH, frozenset({0, 2})), "addcmul"),
    (pointwise.where, "where.self where.ScalarOther where.ScalarSelf where.Scalar"),
    (pointwise.masked_fill, "masked_fill.Scalar masked_fill.Tensor"),
    (pointwise.filled, "fill.Scalar fill.Tensor copy"),
    (pointwise.prelu, "prelu"),
    (pointwise.bucketize, "bucketize.Tensor"),
    (pointwise.loss(2), "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div"),
    (pointwise.loss(3), "binary_cross_entropy"),
    (pointwise.loss(4), "binary_cross_entropy_with_logits"),
    # shapes
    (
        shapes.view,
        """view reshape flatten.using_ints unflatten.int unsqueeze squeeze squeeze.dim squeeze.dims _unsafe_view view_as reshape_as
        ravel""",
    ),
    (shapes.permute, "permute transpose.int t numpy_T mT adjoint movedim.int movedim.intlist swapaxes swapdims"),
    (shapes.expand, "expand expand_as broadcast_to"),
    (shapes.broadcast_tensors, "broadcast_tensors"),
    (shapes.meshgrid, "meshgrid meshgrid.indexing"),
    (shapes.slice_dim, "slice.Tensor narrow"),
    (shapes.slice_scatter, "slice_scatter"),
    (shapes.select, "select.int unbind.int"),
    (shapes.select_scatter, "select_scatter"),
    (shapes.diagonal, "diagonal diagonal_scatter"),
    (shapes.diag_embed, "diag_embed"),
    (
        shapes.split,
        "split.Tensor split.sizes split_with_sizes chunk unsafe_split.Tensor unsafe_chunk tensor_split.sections tensor_split.indices",
    ),
    (shapes.cat, "cat concat concatenate"),
    (shapes.stack, "stack"),
    (shapes.pad, "pad constant_pad_nd"),
    (shapes.repeat, "repeat tile"),
    (shapes.repeat_interleave, "repeat_interleave.self_int"),
    (whole_dims(1, "dims"), "flip"),
    (whole_dims(2, "dims", every=True), "roll"),
    (along(2), "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"),
    (whole_dims(2, "dim", every=True, linear=False), "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift"),
    (
        trailing(2, linear=True),
        """tril triu avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest2d.vec
        upsample_bilinear2d.vec upsample_bicubic2d.vec""",
    ),
    (
        trailing(1, linear=True),
        "avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d upsample_nearest1d.vec upsample_linear1d.vec",
    ),
    (
        trailing(3, linear=True),
        "avg_pool3d adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d upsample_nearest3d.vec upsample_trilinear3d.vec",
    ),
    (trailing(1), "max_pool1d adaptive_max_pool1d max_pool1d_with_indices"),
    (
        trailing(2),
        """max_pool2d max_pool2d_with_indices adaptive_max_pool2d linalg_inv inverse linalg_det det linalg_cholesky cholesky
        linalg_matrix_exp matrix_exp linalg_pinv linalg_matrix_power matrix_power logdet linalg_slogdet""",
    ),
    (trailing(3), "max_pool3d max_pool3d_with_indices adaptive_max_pool3d"),
    (shapes.unfold, "unfold"),
    (shapes.diff, "diff"),
    (channel_blocks(-3), "pixel_shuffle pixel_unshuffle im2col"),
    (channel_blocks(-2), "col2im"),
    (shapes.complex_pair, "view_as_complex view_as_real"),
    (shapes.gated, "glu"),
    (shapes.one_hot, "one_hot"),
    # contractions
    (formula("... k, n k, n -> ... n", summed=K, additive=frozenset({2})), "linear"),
    (ranked(formula("m k, k n -> m n", summed=K), 2, 2), "mm"),
    (ranked(formula("b m k, b k n -> b m n", summed=K), 3, 3), "bmm"),
    (ranked(formula("m k, k -> m", summed=K), 2, 1), "mv"),
    (ranked(formula("k, k ->", summed=K), 1, 1), "dot vdot inner"),
    (ranked(formula("m, n -> m n"), 1, 1), "outer ger"),
    (added_to(formula("m k, k n -> m n", summed=K)), "addmm"),
    (added_to(formula("m k, k -> m", summed=K)), "addmv"),
    (added_to(formula("b m k, b k n -> b m n", summed=K)), "baddbmm"),
    (added_to(formula("b m k, b k n -> m n", summed=K | {"b"})), "addbmm"),
    (contractions.matmul, "matmul"),
    (contractions.einsum, "einsum"),
    (contractions.bilinear, "bilinear"),
    (contractions.cdist, "cdist"),
    (contractions.convolution(False, 6), "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"),
    (contractions.convolution(True, 6), "conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
    (contractions.convolution(False, 8), "convolution"),
    (contractions.attention, "scaled_dot_product_attention"),
    # reductions, scans, normalisation
    (reductions.summed(), "sum.dim_IntList"),
    (reductions.summed(lowering="mean"), "mean.dim"),
    (reductions.summed(-1), "sum"),
    (reductions.summed(-1, lowering="mean"), "mean"),
    (
        reduced(),
        """amax amin max.dim min.dim argmax argmin any.dim any.dims all.dim all.dims prod.dim_int logsumexp var.dim std.dim
        var.correction std.correction var_mean.correction std_mean.correction nansum count_nonzero count_nonzero.dim_IntList""",
    ),
    (reduced(-1), "max min any all prod var std median nanmedian"),
    (reduced(KEYWORD), "aminmax"),
    (reduced(2), "linalg_vector_norm norm.ScalarOpt_dim"),
    (picked(1), "median.dim nanmedian.dim mode"),
    (picked(2), "kthvalue"),
    (along(1), "softmax.int log_softmax.int sort argsort cummax cummin cumprod logcumsumexp"),
    (along(1, linear=True), "cumsum"),
    (along(KEYWORD, default=0), "msort"),
    (along(2), "topk"),
    (along(KEYWORD), "sort.stable argsort.stable"),
    (reductions.histogram, "histc"),
    (reductions.normalized, "layer_norm rms_norm"),
    (reductions.group_norm, "group_norm"),
    (reductions.batch_norm, "batch_norm"),
    (reductions.instance_norm, "instance_norm"),
    (reductions.weight_norm, "_weight_norm"),
    (reductions.distance, "cosine_similarity pairwise_distance"),
    (reductions.class_loss(3), "nll_loss nll_loss_nd nll_loss2d cross_entropy_loss"),
    # indices
    (indexing.embedding, "embedding"),
    (indexing.index, "index.Tensor"),
    (indexing.index_put, "index_put"),
    (indexing.gather, "gather"),
    (indexing.take_along_dim, "take_along_dim"),
    (indexing.take, "take"),
    (indexing.scatter, "scatter.src scatter.value"),
    (indexing.scatter_add, "scatter_add"),
    (indexing.index_select, "index_select"),
    (indexing.index_add, "index_add"),
    (indexing.index_copy, "index_copy"),
    (indexing.index_fill, "index_fill.int_Scalar index_fill.int_Tensor"),
    (indexing.searchsorted, "searchsorted.Tensor"),
    (indexing.masked_scatter, "masked_scatter"),
)
"""Rules, each with the ATen ops that have it; an op without an overload is the default one."""

RULES: dict[str, Rule] = {
    **{f"aten.{name}" if "." in name else f"aten.{name}.default": rule for rule, names in ATEN for name in names.split()},
    "transformers.grouped_mm_fallback.default": contractions.grouped,
    "mw.cross_entropy_sum": reductions.cross_entropy_sum,
    "mw.token_mean": reductions.token_mean,
    "mw.batch_mean": pointwise.pointwise(FIRST),
}


def rule_for(target: str) -> Rule | None:
    """The rule of an op, or None: the op then runs replicated."""
    return RULES.get(target)


def register_rule(target: str, rule: Rule | str, **options: object) -> None:
    """Teach a custom op ("mylib.myop.default"): a formula such as "... k, n k -> ... n" or a function of the Call.

    `options` of a formula are fields of Factors, e.g. summed={"k"}. Raises ValueError for an op that has a rule already and for a text that
    is no formula, TypeError for an unknown option. docs/rules.md has examples.
    """
    if target in RULES:
        raise ValueError(f"op {target} has a rule already")
    if not isinstance(rule, str) and options:
        raise TypeError(f"op {target}: options {', '.join(options)} go with a formula; a function returns them in its Factors")
    if not isinstance(rule, str) and not callable(rule):
        raise TypeError(f"op {target}: the rule is a {type(rule).__name__}, expected a formula or a function of the Call")
    RULES[target] = formula(rule, **options) if isinstance(rule, str) else rule


def factors_of(call: Call) -> Factors | None:
    """The factors of a call, or None when its op has no rule. InputError for a rule that does not fit the call."""
    rule = rule_for(call.op.target)
    if rule is None:
        return None
    found = rule(call)
    if not isinstance(found, Factors):
        raise InputError(f"the rule of {call.op.target} gave {type(found).__name__}, expected Factors")
    named, ranks = tuple(map(len, found.dims)), tuple(len(v.shape) for v in call.values)
    if named != ranks or len(found.operands) != len(call.operands):
        raise InputError(
            f"{call.op.module or 'model'}: the rule of {call.op.target} names {list(named)} dims of its operands and results; "
            f"they have {list(ranks)}"
        )
    return found
