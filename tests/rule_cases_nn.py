"""Sample calls of contractions, convolutions, attention, pooling, normalisation and losses."""

from __future__ import annotations

from meshwright.tests.rule_cases import Case, T, X

Q, MQA, GQA = T((2, 4, 6, 8)), T((2, 1, 6, 8)), T((2, 2, 6, 8))
SDPA = "aten.scaled_dot_product_attention.default"
CHANNELS, IMAGE, VOLUME = T((2, 6, 8)), T((2, 6, 4, 4)), T((2, 6, 2, 4, 2))
LABELS = T((6,), "ids", 4)


def einsum(equation: str, *shapes: tuple[int, ...]) -> Case:
    return Case("aten.einsum.default", (equation, [T(shape) for shape in shapes]))


CONTRACTIONS: list[Case] = [
    Case("aten.linear.default", (T((8,)), T((6, 8)), T((6,)))),
    Case("aten.addmm.default", (T((4, 6)), T((4, 8)), T((8, 6))), (("beta", 2), ("alpha", 3))),
    Case("aten.addmm.default", (T((1, 6)), T((4, 8)), T((8, 6)))),
    Case("aten.addmm.default", (T((4, 1)), T((4, 8)), T((8, 6)))),
    Case("aten.addmv.default", (T((6,)), T((6, 8)), T((8,)))),
    Case("aten.baddbmm.default", (T((2, 4, 6)), T((2, 4, 8)), T((2, 8, 6))), (("beta", 0.5),)),
    Case("aten.baddbmm.default", (T((2, 1, 6)), T((2, 4, 8)), T((2, 8, 6)))),
    Case("aten.baddbmm.default", (T((6,)), T((2, 4, 8)), T((2, 8, 6)))),
    Case("aten.addbmm.default", (T((4, 6)), T((2, 4, 8)), T((2, 8, 6)))),
    Case("aten.mv.default", (T((6, 8)), T((8,)))),
    Case("aten.dot.default", (T((8,)), T((8,)))),
    Case("aten.vdot.default", (T((8,)), T((8,)))),
    Case("aten.inner.default", (T((8,)), T((8,)))),
    Case("aten.inner.default", (T((6, 8)), T((4, 8)))),
    Case("aten.outer.default", (T((6,)), T((8,)))),
    Case("aten.matmul.default", (T((8,)), T((8,)))),
    Case("aten.matmul.default", (T((8,)), T((2, 8, 6)))),
    Case("aten.matmul.default", (T((2, 6, 8)), T((8,)))),
    Case("aten.matmul.default", (T((6, 8)), T((4, 2, 8, 6)))),
    Case("aten.matmul.default", (T((4, 1, 6, 8)), T((2, 8, 6)))),
    Case("aten.bilinear.default", (T((2, 4)), T((2, 6)), T((8, 4, 6)), T((8,)))),
    Case("aten.cdist.default", (T((2, 6, 3)), T((1, 4, 3)), 1.0)),
    einsum("bij,bjk->bik", (2, 4, 6), (2, 6, 8)),
    einsum("b h s d, b h t d -> b h s t", (2, 4, 6, 2), (2, 4, 6, 2)),
    einsum("bhsd,hde->bse", (2, 4, 6, 8), (4, 8, 2)),
    einsum("i,j->ij", (4,), (6,)),
    einsum("ij->j", (4, 6)),
    einsum("ij,ij", (4, 6), (4, 6)),
    einsum("...k,kn->...n", (2, 6, 8), (8, 4)),
    einsum("k...,...k->...", (8, 6), (1, 8)),
    einsum("ii->i", (4, 4)),
    einsum("iij,j->i", (4, 4, 6), (6,)),
    einsum("ij,jk,kl->il", (4, 6), (6, 2), (2, 8)),
    einsum("bi,bj->bij", (1, 4), (6, 4)),
    Case("aten.einsum.default", ("...,...->...", [X, T((8,))])),
    Case("transformers.grouped_mm_fallback.default", (T((6, 8)), T((2, 8, 4)), T((2,), "offsets", 6))),
]

ATTENTION: list[Case] = [
    Case(SDPA, (Q, MQA, MQA), (("enable_gqa", True),)),
    Case(SDPA, (T((2, 6, 4, 8)), T((2, 3, 4, 8)), T((2, 3, 4, 8))), (("enable_gqa", True), ("is_causal", True))),
    Case(SDPA, (T((2, 12, 4, 2)), T((2, 3, 4, 2)), T((2, 3, 4, 2)), T((1, 12, 4, 4))), (("enable_gqa", True),)),
    Case(SDPA, (T((2, 12, 4, 2)), T((2, 3, 4, 2)), T((2, 3, 4, 2)), T((4, 4), "bool")), (("enable_gqa", True),)),
    Case(SDPA, (T((4, 6, 8)), T((4, 6, 8)), T((4, 6, 8)))),
    Case(SDPA, (T((4, 6, 8)), T((4, 6, 8)), T((4, 6, 8)), T((6, 6)))),
    Case(SDPA, (T((6, 8)), T((4, 8)), T((4, 8)))),
    Case(SDPA, (T((2, 2, 4, 6, 2)), T((2, 2, 4, 6, 2)), T((2, 2, 4, 6, 4)))),
    Case(SDPA, (Q, Q, T((2, 4, 6, 4)), T((6, 6)))),
    Case(SDPA, (Q, T((1, 4, 6, 8)), T((1, 4, 6, 8)))),
]

CONVOLUTIONS: list[Case] = [
    Case("aten.conv1d.default", (CHANNELS, T((4, 6, 3)), T((4,)), [1], [1])),
    Case("aten.conv1d.default", (CHANNELS, T((4, 6, 3)))),
    Case("aten.conv1d.default", (CHANNELS, T((6, 1, 4)), T((6,)), [1], [3], [1], 6)),
    Case("aten.conv1d.default", (CHANNELS, T((12, 1, 4)), None, [1], [3], [1], 6)),
    Case("aten.conv1d.default", (T((2, 12, 8)), T((6, 2, 3)), T((6,)), [1], [1], [1], 6)),
    Case("aten.conv1d.default", (T((2, 12, 8)), T((12, 6, 3)), T((12,)), [1], [1], [1], 2)),
    Case("aten.conv1d.default", (CHANNELS, T((4, 6, 1)), T((4,)))),
    Case("aten.conv1d.default", (T((6, 8)), T((4, 6, 3)))),
    Case("aten.conv1d.padding", (CHANNELS, T((6, 1, 3)), T((6,)), [1], "same", [1], 6)),
    Case("aten.conv2d.default", (IMAGE, T((4, 6, 2, 2)), T((4,)), [2, 2])),
    Case("aten.conv2d.default", (IMAGE, T((6, 1, 3, 3)), None, [1, 1], [1, 1], [1, 1], 6)),
    Case("aten.conv2d.padding", (IMAGE, T((4, 6, 3, 3)), None, [1, 1], "same")),
    Case("aten.conv3d.default", (VOLUME, T((4, 6, 2, 2, 2)), T((4,)))),
    Case("aten.conv_transpose1d.default", (CHANNELS, T((6, 4, 2)), T((4,)), [2])),
    Case("aten.conv_transpose1d.default", (CHANNELS, T((6, 2, 2)), T((12,)), [2], [0], [0], 6)),
    Case("aten.conv_transpose2d.input", (IMAGE, T((6, 4, 1, 1)))),
    Case("aten.convolution.default", (IMAGE, T((4, 6, 2, 2)), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    Case("aten.convolution.default", (IMAGE, T((6, 4, 2, 2)), T((4,)), [1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
    Case("aten.convolution.default", (IMAGE, T((6, 1, 2, 2)), T((6,)), [1, 1], [0, 0], [1, 1], False, [0, 0], 6)),
]

POOLING: list[Case] = [
    Case("aten.max_pool1d.default", (CHANNELS, [2])),
    Case("aten.max_pool2d.default", (IMAGE, [2, 2])),
    Case("aten.max_pool2d.default", (T((6, 4, 4)), [2, 2])),
    Case("aten.max_pool3d.default", (VOLUME, [2, 2, 2])),
    Case("aten.max_pool1d_with_indices.default", (CHANNELS, [2])),
    Case("aten.max_pool2d_with_indices.default", (IMAGE, [2, 2])),
    Case("aten.max_pool3d_with_indices.default", (VOLUME, [2, 2, 2])),
    Case("aten.adaptive_max_pool1d.default", (CHANNELS, [2])),
    Case("aten.adaptive_max_pool2d.default", (IMAGE, [2, 2])),
    Case("aten.adaptive_max_pool3d.default", (VOLUME, [1, 2, 1])),
    Case("aten.avg_pool1d.default", (CHANNELS, [2])),
    Case("aten.avg_pool2d.default", (IMAGE, [2, 2])),
    Case("aten.adaptive_avg_pool1d.default", (CHANNELS, [2])),
    Case("aten.adaptive_avg_pool2d.default", (IMAGE, [1, 1])),
    Case("aten.upsample_nearest1d.default", (CHANNELS, [16])),
    Case("aten.upsample_linear1d.default", (CHANNELS, [16], False)),
    Case("aten.upsample_nearest2d.default", (IMAGE, [8, 8])),
    Case("aten.upsample_bilinear2d.default", (IMAGE, [8, 8], False)),
    Case("aten.upsample_bicubic2d.default", (IMAGE, [8, 8], False)),
    Case("aten.upsample_nearest3d.default", (VOLUME, [4, 4, 4])),
    Case("aten.upsample_trilinear3d.default", (VOLUME, [4, 4, 4], False)),
    Case("aten.upsample_nearest1d.vec", (CHANNELS, [16], None)),
    Case("aten.upsample_linear1d.vec", (CHANNELS, [16], False, None)),
    Case("aten.upsample_nearest2d.vec", (IMAGE, None, [2.0, 2.0])),
    Case("aten.upsample_bilinear2d.vec", (IMAGE, [8, 8], False, None)),
    Case("aten.upsample_bicubic2d.vec", (IMAGE, [8, 8], False, None)),
    Case("aten.upsample_nearest3d.vec", (VOLUME, [4, 4, 4], None)),
    Case("aten.upsample_trilinear3d.vec", (VOLUME, [4, 4, 4], False, None)),
    Case("aten.linalg_matrix_exp.default", (T((6, 2, 2)),)),
    Case("aten.linalg_pinv.default", (T((6, 2, 2)), 1e-15)),
]

NORMS: list[Case] = [
    Case("aten.layer_norm.default", (X, [6, 8], T((6, 8)), T((6, 8)))),
    Case("aten.layer_norm.default", (X, [8], T((8,)))),
    Case("aten.rms_norm.default", (X, [8])),
    Case("aten.group_norm.default", (T((2, 12, 4)), 6, T((12,)), T((12,)))),
    Case("aten.group_norm.default", (T((2, 12, 4)), 4)),
    Case("aten.group_norm.default", (T((2, 12, 4)), 1, T((12,)), T((12,)))),
    Case("aten.batch_norm.default", (IMAGE, T((6,)), T((6,)), None, None, True, 0.1, 1e-5, False)),
    Case("aten.batch_norm.default", (IMAGE, T((6,)), T((6,)), T((6,)), T((6,), "positive"), False, 0.1, 1e-5, False)),
    Case("aten.instance_norm.default", (CHANNELS, T((6,)), T((6,)), None, None, True, 0.1, 1e-5, False)),
    Case("aten._weight_norm.default", (T((6, 4, 2)), T((6, 1, 1), "positive"))),
    Case("aten._weight_norm.default", (T((6, 4, 2)), T((1, 1, 2), "positive"), 2)),
    Case("aten.cosine_similarity.default", (X, T((6, 8)), 1)),
    Case("aten.cosine_similarity.default", (X, X, -1)),
    Case("aten.pairwise_distance.default", (T((6, 4)), T((6, 4)))),
]

LOSSES: list[Case] = [
    *(Case(f"aten.{name}.default", (X, X, kind)) for name in "mse_loss l1_loss smooth_l1_loss huber_loss".split() for kind in (0, 1, 2)),
    Case("aten.mse_loss.default", (X, X)),
    Case("aten.mse_loss.default", (X, T((6, 1)))),
    Case("aten.kl_div.default", (X, T((2, 6, 8), "unit"))),
    Case("aten.kl_div.default", (X, X, 2), (("log_target", True),)),
    Case("aten.binary_cross_entropy.default", (T((6, 4), "unit"), T((6, 4), "unit"), T((4,), "positive"))),
    Case("aten.binary_cross_entropy_with_logits.default", (X, T((2, 6, 8), "unit"), None, T((8,), "positive"))),
    Case("aten.binary_cross_entropy_with_logits.default", (X, T((2, 6, 8), "unit"), None, None, 2)),
    *(
        Case(f"aten.{name}.default", (T((6, 4)), LABELS, None, kind))
        for name in ("nll_loss", "nll_loss_nd", "cross_entropy_loss")
        for kind in (0, 1, 2)
    ),
    Case("aten.nll_loss2d.default", (T((2, 4, 6, 2)), T((2, 6, 2), "ids", 4), T((4,), "positive"), 2)),
    Case("aten.nll_loss_nd.default", (T((2, 4, 6)), T((2, 6), "ids", 4), None, 0)),
    Case("aten.cross_entropy_loss.default", (T((2, 4, 6)), T((2, 6), "ids", 4), None, 2, 1, 0.1)),
    Case("aten.cross_entropy_loss.default", (T((6, 4)), T((6, 4), "unit"), None, 0)),
    Case("aten.cross_entropy_loss.default", (T((4,)), T((), "ids", 4), None, 2)),
]
