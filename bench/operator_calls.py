"""Calls of every operator in the table, as function, method, Python operator and module: data.

Enters: nothing. Leaves: :data:`ROWS`, an operator with its calls, and :data:`RECIPES`, the tensors they are
called with. Where: beside ``bench/operators.py``, which measures, and ``tests/numerics``, which asserts.

A line of the table is ``operator | recipe | call | call ...``. A call's form follows from its text: ``nn.``
builds a module, ``torch.`` and ``F.`` are functions, ``x.`` a method, the rest a Python operator. The values
are adversarial for half, and exact in it: what an operator loses is its own doing. Small operators of torch
that have no public name are called as ``torch.ops.aten``.
"""
# ruff: noqa: E501 -- a line is a row

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
Recipe = Callable[[], Tensors]


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _steps(low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.linspace(low, high, math.prod(shape)).reshape(shape)


def _powers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Magnitudes from 2**low to 2**high, of both signs."""
    signs = torch.where(torch.arange(math.prod(shape)) % 2 == 0, 1.0, -1.0).reshape(shape)
    return torch.exp2(_steps(low, high, *shape)) * signs


def _probabilities(*shape: int) -> torch.Tensor:
    return torch.sigmoid(_steps(-11, 7, *shape))


def _near(*shape: int, size: float = 300.0) -> torch.Tensor:
    """Values of one size with a small spread: their squares leave half, their differences cancel."""
    return size + _random(*shape)


def _scores() -> Tensors:
    """Attention scores with a mask of the lowest number, one of -inf, and rows that are masked in full.

    FP16's lowest is exact in bf16 too, and masks as well there.
    """
    x = _steps(-17, 17, 8).repeat(6, 1)
    x[1, 3:] = -65504.0
    x[2, 5:] = -math.inf
    x[3] = -65504.0
    return {"x": x}


def _signal(*shape: int) -> torch.Tensor:
    return _near(*shape, size=1000.0)


def _positive_definite() -> torch.Tensor:
    a = _random(4, 4, seed=5)
    return a @ a.T + 0.5 * torch.eye(4)


RECIPES: dict[str, Recipe] = {
    # one argument
    "exponents": lambda: {"x": _steps(-80, 80, 4, 8)},
    "wide": lambda: {"x": _powers(-14, 15, 4, 8)},
    "positive": lambda: {"x": _powers(-14, 15, 4, 8).abs()},
    "unit": lambda: {"x": torch.cat([_steps(-1, 1, 3, 8), _powers(-9, -1, 1, 8)]).clamp(-0.99, 0.99)},
    "angles": lambda: {"x": _steps(1, 2, 4, 8) + 0.5},
    "near": lambda: {"x": _near(4, 64)},
    "rows": lambda: {"x": torch.cat([_near(2, 8), _powers(-14, 15, 1, 8), torch.full((1, 8), 2.0**-12)])},
    "planes": lambda: {"x": _near(2, 4, 6, 6)},
    "line": lambda: {"x": _near(2, 4, 9)},
    "sampled planes": lambda: {"x": _near(2, 4, 6, 6), "r": torch.sigmoid(_random(2, 4, 2))},
    "sampled volume": lambda: {"x": _near(2, 3, 4, 4, 4), "r": torch.sigmoid(_random(2, 3, 3))},
    "large volume": lambda: {"x": _near(1, 1, 16, 16, 8)},
    "volume": lambda: {"x": _near(2, 3, 4, 4, 4)},
    "scores": _scores,
    "matrix": lambda: {"x": _near(6, 6)},
    "few": lambda: {"x": _steps(-3, 3, 2, 4)},
    "signal": lambda: {"x": _signal(64)},
    "solvable": lambda: {"x": _positive_definite(), "y": _random(4, 2, seed=6)},
    "triangle": lambda: {"x": torch.linalg.cholesky(_positive_definite()), "y": _random(4, 2, seed=6)},
    "tensor": lambda: {"x": (_random(6, 6) + 3 * torch.eye(6)).reshape(2, 3, 6), "y": _random(2, 3)},
    # several
    "bases": lambda: {"x": _powers(-8, 8, 4, 8).abs(), "y": _steps(-3, 3, 4, 8)},
    "pairs": lambda: {"x": _near(4, 8), "y": _near(4, 8) + _random(4, 8, seed=1)},
    "parallel": lambda: {"x": _near(4, 8), "y": 2 * _near(4, 8)},
    "three": lambda: {"x": _near(4, 8), "y": _near(4, 8) + 1, "z": _near(4, 8) - 1},
    "losses": lambda: {"x": _random(64, 8, scale=8), "y": _random(64, 8, seed=1)},
    "large loss": lambda: {"x": _near(64, 8, size=600.0), "y": _random(64, 8, seed=1)},
    "signs": lambda: {
        "x": _random(64, 8, scale=8),
        "y": _random(64, 8, seed=1),
        "t": torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0),
    },
    "classes": lambda: {"x": _random(16, 5, scale=8), "t": torch.arange(16) % 5},
    "log classes": lambda: {"x": -_probabilities(16, 5), "t": torch.arange(16) % 5},
    "log planes": lambda: {"x": -_probabilities(2, 3, 4, 4), "t": torch.arange(32).reshape(2, 4, 4) % 3},
    "labels": lambda: {"x": _random(4, 5, scale=8), "t": torch.tensor([[3, 0, -1, -1, -1]] * 4)},
    "binary": lambda: {"x": _probabilities(4, 8), "y": torch.flip(_probabilities(4, 8), [0])},
    "ctc": lambda: {
        "x": -4 * _probabilities(6, 2, 5),
        "t": torch.tensor([[1, 2], [3, 3]]),
        "m": torch.tensor([6, 6]),
        "n": torch.tensor([2, 2]),
    },
    # several widths: x is half, y (and z) FP32
    "mixed": lambda: {"x": _near(4, 8), "y32": _near(4, 8) + 1e-3, "z32": _near(4, 8) + 2},
    "mixed weights": lambda: {"x": _near(4, 8), "y32": _near(4, 8) + 1e-3, "z32": _probabilities(4, 8)},
    "mixed vectors": lambda: {"x": _near(8), "y32": _near(8) + 1e-3},
    "mixed threes": lambda: {"x": _near(4, 3), "y32": _near(4, 3) + 1e-3},
    "mixed rows": lambda: {"x": _near(4, 8), "y32": _near(2, 8) + 1e-3, "i": torch.tensor([0, 2])},
    "mixed mask": lambda: {
        "x": _near(4, 8),
        "y32": _near(4, 8) + 1e-3,
        "b": torch.arange(32).reshape(4, 8) % 3 == 0,
        "i": torch.arange(32).reshape(4, 8) % 4,
    },
    "mixed grid": lambda: {"x": _random(2, 3, 5, 5), "y32": _steps(-0.9, 0.9, 2, 4, 4, 2)},
    "mixed volume grid": lambda: {"x": _random(2, 3, 4, 4, 4), "y32": _steps(-0.9, 0.9, 2, 3, 3, 3, 3)},
    "mixed bilinear": lambda: {"x": _random(4, 5), "y32": _random(4, 3), "w": _random(2, 5, 3)},
    # products
    "product": lambda: {"x": _random(4, 6), "y": _random(6, 5, seed=1), "z": _random(4, 5, seed=2)},
    "batch": lambda: {"x": _random(3, 4, 6), "y": _random(3, 6, 5, seed=1), "z": _random(3, 4, 5, seed=2)},
    "vectors": lambda: {"x": _random(6), "y": _random(5, seed=1), "z": _random(6, 5, seed=2)},
    "linear": lambda: {"x": _random(4, 6), "w": _random(5, 6, seed=1), "b": _random(5, seed=2)},
    "conv1d": lambda: {"x": _random(2, 4, 9), "w": _random(4, 4, 3, seed=1), "b": _random(4, seed=2)},
    "conv2d": lambda: {"x": _random(2, 4, 6, 6), "w": _random(4, 4, 3, 3, seed=1), "b": _random(4, seed=2)},
    "conv3d": lambda: {"x": _random(1, 4, 4, 4, 4), "w": _random(4, 4, 3, 3, 3, seed=1), "b": _random(4)},
    "time": lambda: {"x": _random(9, 2, 4), "w": _random(3, 4, 4, seed=1), "b": _random(4, seed=2)},
    "sequence": lambda: {"x": _random(5, 3, 8)},
    "heads": lambda: {"x": _random(2, 2, 4, 8), "y": _random(2, 2, 6, 8), "z": _random(2, 2, 6, 8)},
    "indices": lambda: {"x": _random(2, 3, 2, 2), "i": torch.arange(24).reshape(2, 3, 2, 2) % 4},
    "indices 3d": lambda: {"x": _random(1, 2, 1, 2, 2), "i": torch.arange(8).reshape(1, 2, 1, 2, 2) % 4},
}

_LINES = """
exp | exponents | torch.exp(x) | x.exp()
exp2 | exponents | torch.exp2(x) | x.exp2()
expm1 | exponents | torch.expm1(x) | x.expm1()
cosh | exponents | torch.cosh(x) | x.cosh()
sinh | exponents | torch.sinh(x) | x.sinh()
pow.Tensor_Scalar | wide | torch.pow(x, 3) | x.pow(3) | x ** 3
pow.Tensor_Tensor | bases | torch.pow(x, y) | x.pow(y) | x ** y
pow.Scalar | exponents | torch.pow(2.0, x) | 2.0 ** x
square | wide | torch.square(x) | x.square()
reciprocal | wide | torch.reciprocal(x) | x.reciprocal() | 1 / x
rsqrt | positive | torch.rsqrt(x) | x.rsqrt()
acos | unit | torch.acos(x) | x.acos()
asin | unit | torch.asin(x) | x.asin()
tan | angles | torch.tan(x) | x.tan()
erfinv | unit | torch.erfinv(x) | x.erfinv()
log | positive | torch.log(x) | x.log()
log10 | positive | torch.log10(x) | x.log10()
log2 | positive | torch.log2(x) | x.log2()
log1p | positive | torch.log1p(x) | x.log1p()
softplus | exponents | F.softplus(x) | nn.Softplus()(x)
xlogy.Tensor | bases | torch.xlogy(y, x) | y.xlogy(x)
xlogy.Scalar_Self | positive | torch.xlogy(2.0, x)
xlogy.Scalar_Other | wide | torch.xlogy(x, 3.0) | x.xlogy(3.0)
layer_norm | rows | F.layer_norm(x, (8,)) | nn.LayerNorm(8)(x)
native_layer_norm | rows | torch.native_layer_norm(x, (8,), None, None, 1e-5)
rms_norm | rows | F.rms_norm(x, (8,), None, 1e-5) | nn.RMSNorm(8, eps=1e-5)(x)
group_norm | planes | F.group_norm(x, 2) | nn.GroupNorm(2, 4)(x)
cosine_similarity | parallel | F.cosine_similarity(x, y) | nn.CosineSimilarity()(x, y)
renorm | rows | torch.renorm(x, 2, 0, 1.0) | x.renorm(2, 0, 1.0)
frobenius_norm.dim | matrix | torch.frobenius_norm(x, [0, 1], False)
nuclear_norm | matrix | torch.nuclear_norm(x)
nuclear_norm.dim | matrix | torch.nuclear_norm(x, [0, 1])
norm.Scalar | matrix | torch.ops.aten.norm.Scalar(x, 2)
norm.ScalarOpt_dim | matrix | torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0])
dist | pairs | torch.dist(x, y) | x.dist(y)
pdist | pairs | F.pdist(x)
cdist | pairs | torch.cdist(x, y)
avg_pool3d | volume | F.avg_pool3d(x, 2) | nn.AvgPool3d(2)(x)
mean | near | torch.mean(x) | x.mean()
mean.dim | near | torch.mean(x, 1) | x.mean(1)
var | near | torch.var(x, False) | x.var(False)
var.dim | near | torch.var(x, [1], False) | x.var([1], False)
var.correction | near | torch.var(x, 1, correction=0) | x.var(1, correction=0)
std | near | torch.std(x, False) | x.std(False)
std.dim | near | torch.std(x, [1], False) | x.std([1], False)
std.correction | near | torch.std(x, 1, correction=0) | x.std(1, correction=0)
var_mean | near | torch.var_mean(x, False)
var_mean.dim | near | torch.var_mean(x, [1], False)
var_mean.correction | near | torch.var_mean(x, 1, correction=0)
std_mean | near | torch.std_mean(x, False)
std_mean.dim | near | torch.std_mean(x, [1], False)
std_mean.correction | near | torch.std_mean(x, 1, correction=0)
cov | rows | torch.cov(x) | x.cov()
corrcoef | pairs | torch.corrcoef(x) | x.corrcoef()
logsumexp | near | torch.logsumexp(x, 1) | x.logsumexp(1)
logcumsumexp | near | torch.logcumsumexp(x, 1) | x.logcumsumexp(1)
logaddexp | pairs | torch.logaddexp(x, y) | x.logaddexp(y)
logaddexp2 | pairs | torch.logaddexp2(x, y) | x.logaddexp2(y)
trace | matrix | torch.trace(x) | x.trace()
poisson_nll_loss | losses | F.poisson_nll_loss(x, y) | nn.PoissonNLLLoss()(x, y)
cosine_embedding_loss | signs | F.cosine_embedding_loss(x, y, t) | nn.CosineEmbeddingLoss()(x, y, t)
nll_loss | log classes | torch._C._nn.nll_loss(x, t)
nll_loss2d | log planes | torch._C._nn.nll_loss2d(x, t)
nll_loss_nd | log classes | F.nll_loss(x, t) | nn.NLLLoss()(x, t)
hinge_embedding_loss | signs | F.hinge_embedding_loss(x, t[:, None]) | nn.HingeEmbeddingLoss()(x, t[:, None])
kl_div | binary | F.kl_div(x, y, reduction="batchmean") | nn.KLDivLoss(reduction="sum")(x, y)
l1_loss | large loss | F.l1_loss(x, y) | nn.L1Loss()(x, y)
smooth_l1_loss | large loss | F.smooth_l1_loss(x, y) | nn.SmoothL1Loss()(x, y)
huber_loss | large loss | F.huber_loss(x, y) | nn.HuberLoss()(x, y)
mse_loss | large loss | F.mse_loss(x, y) | nn.MSELoss()(x, y)
margin_ranking_loss | signs | F.margin_ranking_loss(x, y, t[:, None]) | nn.MarginRankingLoss()(x, y, t[:, None])
multilabel_margin_loss | labels | F.multilabel_margin_loss(x, t) | nn.MultiLabelMarginLoss()(x, t)
multilabel_margin_loss_forward | labels | torch.ops.aten.multilabel_margin_loss_forward(x, t, 1)
soft_margin_loss | signs | F.soft_margin_loss(x, t[:, None].expand(64, 8)) | nn.SoftMarginLoss()(x, t[:, None].expand(64, 8))
triplet_margin_loss | three | F.triplet_margin_loss(x, y, z) | nn.TripletMarginLoss()(x, y, z)
multi_margin_loss | classes | F.multi_margin_loss(x, t) | nn.MultiMarginLoss()(x, t)
binary_cross_entropy | binary | F.binary_cross_entropy(x, y) | nn.BCELoss()(x, y)
binary_cross_entropy_with_logits | binary | F.binary_cross_entropy_with_logits(x, y) | nn.BCEWithLogitsLoss()(x, y)
cross_entropy_loss | classes | F.cross_entropy(x, t) | nn.CrossEntropyLoss()(x, t)
ctc_loss.IntList | ctc | F.ctc_loss(x, t, (6, 6), (2, 2))
ctc_loss.Tensor | ctc | F.ctc_loss(x, t, m, n) | nn.CTCLoss()(x, t, m, n)
upsample_nearest1d | line | torch.ops.aten.upsample_nearest1d(x, [13])
upsample_nearest1d.vec | line | F.interpolate(x, scale_factor=2) | nn.Upsample(scale_factor=2)(x)
_upsample_nearest_exact1d | line | torch.ops.aten._upsample_nearest_exact1d(x, [13])
_upsample_nearest_exact1d.vec | line | F.interpolate(x, scale_factor=1.5, mode="nearest-exact")
upsample_nearest2d | planes | torch.ops.aten.upsample_nearest2d(x, [9, 9])
upsample_nearest2d.vec | planes | F.interpolate(x, scale_factor=2) | nn.UpsamplingNearest2d(scale_factor=2)(x)
_upsample_nearest_exact2d | planes | torch.ops.aten._upsample_nearest_exact2d(x, [9, 9])
_upsample_nearest_exact2d.vec | planes | F.interpolate(x, scale_factor=1.5, mode="nearest-exact")
upsample_nearest3d | volume | torch.ops.aten.upsample_nearest3d(x, [6, 6, 6])
upsample_nearest3d.vec | volume | F.interpolate(x, scale_factor=2) | nn.Upsample(scale_factor=2)(x)
_upsample_nearest_exact3d | volume | torch.ops.aten._upsample_nearest_exact3d(x, [6, 6, 6])
_upsample_nearest_exact3d.vec | volume | F.interpolate(x, scale_factor=1.5, mode="nearest-exact")
upsample_linear1d | line | torch.ops.aten.upsample_linear1d(x, [13], False)
upsample_linear1d.vec | line | F.interpolate(x, scale_factor=1.7, mode="linear") | nn.Upsample(scale_factor=1.7, mode="linear")(x)
upsample_bilinear2d | planes | torch.ops.aten.upsample_bilinear2d(x, [9, 9], False)
upsample_bilinear2d.vec | planes | F.interpolate(x, scale_factor=1.7, mode="bilinear") | nn.UpsamplingBilinear2d(scale_factor=2)(x)
_upsample_bilinear2d_aa | planes | torch.ops.aten._upsample_bilinear2d_aa(x, [9, 9], False)
_upsample_bilinear2d_aa.vec | planes | F.interpolate(x, size=4, mode="bilinear", antialias=True)
upsample_trilinear3d | volume | torch.ops.aten.upsample_trilinear3d(x, [6, 6, 6], False)
upsample_trilinear3d.vec | volume | F.interpolate(x, scale_factor=1.7, mode="trilinear") | nn.Upsample(scale_factor=1.7, mode="trilinear")(x)
upsample_bicubic2d | planes | torch.ops.aten.upsample_bicubic2d(x, [9, 9], False)
upsample_bicubic2d.vec | planes | F.interpolate(x, scale_factor=1.7, mode="bicubic") | nn.Upsample(scale_factor=1.7, mode="bicubic")(x)
_upsample_bicubic2d_aa | planes | torch.ops.aten._upsample_bicubic2d_aa(x, [9, 9], False)
_upsample_bicubic2d_aa.vec | planes | F.interpolate(x, size=4, mode="bicubic", antialias=True)
_upsample_lanczos2d_aa | planes | torch.ops.aten._upsample_lanczos2d_aa(x, [9, 9], False)
_upsample_lanczos2d_aa.vec | planes | torch.ops.aten._upsample_lanczos2d_aa.vec(x, [9, 9], False, None)
prod | few | torch.prod(x * 64) | (x * 64).prod()
prod.dim_int | near | torch.prod(x[:, :6], 1) | x[:, :6].prod(1)
cumprod | rows | torch.cumprod(x, 1) | x.cumprod(1)
cumsum | near | torch.cumsum(x, 1) | x.cumsum(1)
sum | near | torch.sum(x) | x.sum()
sum.dim_IntList | near | torch.sum(x, 1) | x.sum(1)
nansum | near | torch.nansum(x) | x.nansum()
linalg_vector_norm | near | torch.linalg.vector_norm(x) | x.norm()
linalg_matrix_norm | matrix | torch.linalg.matrix_norm(x, 1)
linalg_matrix_norm.str_ord | matrix | torch.linalg.matrix_norm(x)
norm.ScalarOpt_dtype | matrix | torch.ops.aten.norm.ScalarOpt_dtype(x, 2, dtype=D)
norm.ScalarOpt_dim_dtype | matrix | torch.ops.aten.norm.ScalarOpt_dim_dtype(x, 2, [0], True, dtype=D)
softmax.int | scores | torch.softmax(x, 1) | x.softmax(1) | nn.Softmax(1)(x)
log_softmax.int | exponents | torch.log_softmax(x, 1) | x.log_softmax(1) | nn.LogSoftmax(1)(x)
linalg_cholesky | solvable | torch.linalg.cholesky(x)
linalg_cholesky_ex | solvable | torch.linalg.cholesky_ex(x)
linalg_cond | solvable | torch.linalg.cond(x)
linalg_cond.p_str | solvable | torch.linalg.cond(x, "fro")
linalg_det | solvable | torch.linalg.det(x) | x.det()
linalg_eig | solvable | torch.linalg.eig(x)[0]
linalg_eigh | solvable | torch.linalg.eigh(x)[0]
linalg_eigvals | solvable | torch.linalg.eigvals(x)
linalg_eigvalsh | solvable | torch.linalg.eigvalsh(x)
linalg_householder_product | solvable | torch.linalg.householder_product(x, x[0])
linalg_inv | solvable | torch.linalg.inv(x)
linalg_inv_ex | solvable | torch.linalg.inv_ex(x)
linalg_ldl_factor | solvable | torch.linalg.ldl_factor(x)
linalg_lstsq | solvable | torch.linalg.lstsq(x, y)[0]
linalg_lu | solvable | torch.linalg.lu(x)
linalg_lu_factor | solvable | torch.linalg.lu_factor(x)
linalg_lu_solve | solvable | torch.linalg.lu_solve(x, torch.arange(1, 5, dtype=torch.int32), y)
linalg_matrix_exp | solvable | torch.linalg.matrix_exp(x) | x.matrix_exp()
linalg_matrix_rank | solvable | torch.linalg.matrix_rank(x)
linalg_matrix_rank.atol_rtol_float | solvable | torch.linalg.matrix_rank(x, atol=0.1)
linalg_matrix_rank.atol_rtol_tensor | solvable | torch.linalg.matrix_rank(x, atol=torch.tensor(0.1))
linalg_matrix_rank.tol_tensor | solvable | torch.linalg.matrix_rank(x, torch.tensor(0.1))
linalg_pinv | solvable | torch.linalg.pinv(x, 1e-6) | x.pinverse()
linalg_pinv.atol_rtol_float | solvable | torch.linalg.pinv(x, rtol=1e-6)
linalg_pinv.atol_rtol_tensor | solvable | torch.linalg.pinv(x, rtol=torch.tensor(1e-6))
linalg_qr | solvable | torch.linalg.qr(x)
linalg_slogdet | solvable | torch.linalg.slogdet(x)
linalg_solve | solvable | torch.linalg.solve(x, y)
linalg_solve_ex | solvable | torch.linalg.solve_ex(x, y)
linalg_solve_triangular | triangle | torch.linalg.solve_triangular(x, y, upper=False)
linalg_svd | solvable | torch.linalg.svd(x)[1]
linalg_svdvals | solvable | torch.linalg.svdvals(x)
linalg_tensorinv | tensor | torch.linalg.tensorinv(x, 2)
linalg_tensorsolve | tensor | torch.linalg.tensorsolve(x, y)
_lu_with_info | solvable | torch._lu_with_info(x)[0]
cholesky | solvable | torch.cholesky(x) | x.cholesky()
cholesky_inverse | triangle | torch.cholesky_inverse(x) | x.cholesky_inverse()
cholesky_solve | triangle | torch.cholesky_solve(y, x) | y.cholesky_solve(x)
geqrf | solvable | torch.geqrf(x) | x.geqrf()
inverse | solvable | torch.inverse(x) | x.inverse()
logdet | solvable | torch.logdet(x) | x.logdet()
lu_solve | solvable | torch.lu_solve(y, x, torch.arange(1, 5, dtype=torch.int32))
orgqr | solvable | torch.orgqr(x, x[0]) | x.orgqr(x[0])
ormqr | solvable | torch.ormqr(x, x[0], y) | x.ormqr(x[0], y)
pinverse | solvable | torch.pinverse(x, 1e-6) | x.pinverse(1e-6)
qr | solvable | torch.qr(x) | x.qr()
slogdet | solvable | torch.slogdet(x) | x.slogdet()
svd | solvable | torch.svd(x)[1] | x.svd()[1]
triangular_solve | triangle | torch.triangular_solve(y, x, upper=False)[0]
fft_fft | signal | torch.fft.fft(x)
fft_fft2 | matrix | torch.fft.fft2(x)
fft_fftn | matrix | torch.fft.fftn(x)
fft_hfft | signal | torch.fft.hfft(x)
fft_hfft2 | matrix | torch.fft.hfft2(x)
fft_hfftn | matrix | torch.fft.hfftn(x)
fft_ifft | signal | torch.fft.ifft(x)
fft_ifft2 | matrix | torch.fft.ifft2(x)
fft_ifftn | matrix | torch.fft.ifftn(x)
fft_ihfft | signal | torch.fft.ihfft(x)
fft_ihfft2 | matrix | torch.fft.ihfft2(x)
fft_ihfftn | matrix | torch.fft.ihfftn(x)
fft_irfft | signal | torch.fft.irfft(x)
fft_irfft2 | matrix | torch.fft.irfft2(x)
fft_irfftn | matrix | torch.fft.irfftn(x)
fft_rfft | signal | torch.fft.rfft(x)
fft_rfft2 | matrix | torch.fft.rfft2(x)
fft_rfftn | matrix | torch.fft.rfftn(x)
stft | signal | torch.stft(x, 16, window=torch.ones_like(x[:16]), center=False, return_complex=True) | x.stft(16, window=torch.ones_like(x[:16]), center=False, return_complex=True)
stft.center | signal | torch.ops.aten.stft.center(x, 16, window=torch.ones_like(x[:16]), center=True, return_complex=True)
polar | pairs | torch.polar(x, y)
view_as_complex | parallel | torch.view_as_complex(x.reshape(4, 4, 2))
quantile | near | torch.quantile(x, torch.tensor([0.125, 0.875]).to(x)) | x.quantile(torch.tensor([0.125, 0.875]).to(x))
quantile.scalar | near | torch.quantile(x, 0.3) | x.quantile(0.3)
nanquantile | near | torch.nanquantile(x, torch.tensor([0.125, 0.875]).to(x)) | x.nanquantile(torch.tensor([0.125, 0.875]).to(x))
nanquantile.scalar | near | torch.nanquantile(x, 0.3) | x.nanquantile(0.3)
fake_quantize_per_tensor_affine | near | torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 4095)
addcdiv | mixed | torch.addcdiv(x, y32, z32) | x.addcdiv(y32, z32)
addcmul | mixed | torch.addcmul(x, y32, z32) | x.addcmul(y32, z32)
atan2 | mixed | torch.atan2(x, y32) | x.atan2(y32)
bilinear | mixed bilinear | F.bilinear(x, y32, w) | nn.Bilinear(5, 3, 2)(x, y32)
cat | mixed | torch.cat([x, y32])
stack | mixed | torch.stack([x, y32])
cross | mixed threes | torch.cross(x, y32, dim=1) | x.cross(y32, dim=1)
dot | mixed vectors | torch.dot(x, y32) | x.dot(y32)
vdot | mixed vectors | torch.vdot(x, y32) | x.vdot(y32)
grid_sampler | mixed grid | F.grid_sample(x, y32, align_corners=False)
grid_sampler_2d | mixed grid | torch.grid_sampler_2d(x, y32, 0, 0, False)
grid_sampler_3d | mixed volume grid | torch.grid_sampler_3d(x, y32, 0, 0, False)
index_add | mixed rows | torch.index_add(x, 0, i, y32) | x.index_add(0, i, y32)
index_copy | mixed rows | torch.index_copy(x, 0, i, y32) | x.index_copy(0, i, y32)
index_put | mixed rows | torch.index_put(x, (i,), y32) | x.index_put((i,), y32)
index_reduce | mixed rows | torch.index_reduce(x, 0, i, y32, "amax") | x.index_reduce(0, i, y32, "amax")
lerp.Scalar | mixed | torch.lerp(x, y32, 0.3) | x.lerp(y32, 0.3)
lerp.Tensor | mixed weights | torch.lerp(x, y32, z32) | x.lerp(y32, z32)
masked_scatter | mixed mask | torch.masked_scatter(x, b, y32) | x.masked_scatter(b, y32)
scatter.src | mixed mask | torch.scatter(x, 1, i, y32) | x.scatter(1, i, y32)
scatter_add | mixed mask | torch.scatter_add(x, 1, i, y32) | x.scatter_add(1, i, y32)
scatter_reduce.two | mixed mask | torch.scatter_reduce(x, 1, i, y32, "sum") | x.scatter_reduce(1, i, y32, "sum")
tensordot | mixed | torch.tensordot(x, y32, 2)
adaptive_avg_pool3d | large volume | F.adaptive_avg_pool3d(x, 2) | nn.AdaptiveAvgPool3d(2)(x)
adaptive_max_pool3d | volume | F.adaptive_max_pool3d(x, 2) | nn.AdaptiveMaxPool3d(2)(x)
fractional_max_pool2d | sampled planes | F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=r) | nn.FractionalMaxPool2d(2, output_size=3, _random_samples=r)(x)
fractional_max_pool3d | sampled volume | F.fractional_max_pool3d(x, 2, output_size=2, _random_samples=r) | nn.FractionalMaxPool3d(2, output_size=2, _random_samples=r)(x)
max_pool3d | volume | F.max_pool3d(x, 2) | nn.MaxPool3d(2)(x)
max_unpool2d | indices | F.max_unpool2d(x, i, 2) | nn.MaxUnpool2d(2)(x, i)
max_unpool3d | indices 3d | F.max_unpool3d(x, i, 2) | nn.MaxUnpool3d(2)(x, i)
reflection_pad1d | line | F.pad(x, (1, 1), mode="reflect") | nn.ReflectionPad1d(1)(x)
reflection_pad2d | planes | F.pad(x, (1, 1, 1, 1), mode="reflect") | nn.ReflectionPad2d(1)(x)
replication_pad1d | line | F.pad(x, (1, 1), mode="replicate") | nn.ReplicationPad1d(1)(x)
replication_pad2d | planes | F.pad(x, (1, 1, 1, 1), mode="replicate") | nn.ReplicationPad2d(1)(x)
replication_pad3d | volume | F.pad(x, (1,) * 6, mode="replicate") | nn.ReplicationPad3d(1)(x)
_convolution.deprecated | conv2d | torch._C._VariableFunctions._convolution(x, w, b, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True)
_convolution | conv2d | torch._convolution(x, w, b, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True, True)
convolution | conv2d | torch.convolution(x, w, b, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
conv1d | conv1d | F.conv1d(x, w, b) | nn.Conv1d(4, 4, 3)(x)
conv2d | conv2d | F.conv2d(x, w, b) | nn.Conv2d(4, 4, 3)(x)
conv3d | conv3d | F.conv3d(x, w, b) | nn.Conv3d(4, 4, 3)(x)
conv1d.padding | conv1d | F.conv1d(x, w, b, padding="same") | nn.Conv1d(4, 4, 3, padding="same")(x)
conv2d.padding | conv2d | F.conv2d(x, w, b, padding="same") | nn.Conv2d(4, 4, 3, padding="same")(x)
conv3d.padding | conv3d | F.conv3d(x, w, b, padding="same") | nn.Conv3d(4, 4, 3, padding="same")(x)
conv_tbc | time | torch.conv_tbc(x, w, b)
conv_transpose1d | conv1d | F.conv_transpose1d(x, w, b) | nn.ConvTranspose1d(4, 4, 3)(x)
conv_transpose2d.input | conv2d | F.conv_transpose2d(x, w, b) | nn.ConvTranspose2d(4, 4, 3)(x)
conv_transpose3d.input | conv3d | F.conv_transpose3d(x, w, b) | nn.ConvTranspose3d(4, 4, 3)(x)
prelu | few | F.prelu(x, torch.full((4,), 0.25).to(x)) | nn.PReLU()(x)
linear | linear | F.linear(x, w, b) | nn.Linear(6, 5)(x)
addmm | product | torch.addmm(z, x, y) | z.addmm(x, y)
_addmm_activation | product | torch._addmm_activation(z[0], x, y)
addmv | vectors | torch.addmv(y, z.T, x) | y.addmv(z.T, x)
addr | vectors | torch.addr(z, x, y) | z.addr(x, y)
matmul | product | torch.matmul(x, y) | x.matmul(y) | x @ y
einsum | product | torch.einsum("ij,jk->ik", x, y)
mm | product | torch.mm(x, y) | x.mm(y)
mv | vectors | torch.mv(z.T, x) | z.T.mv(x)
linalg_vecdot | pairs | torch.linalg.vecdot(x / 64, y / 64)
addbmm | batch | torch.addbmm(z[0], x, y) | z[0].addbmm(x, y)
baddbmm | batch | torch.baddbmm(z, x, y) | z.baddbmm(x, y)
bmm | batch | torch.bmm(x, y) | x.bmm(y)
chain_matmul | product | torch.ops.aten.chain_matmul([x, y, z.T])
linalg_multi_dot | product | torch.linalg.multi_dot([x, y, z.T])
lstm.input | sequence | nn.LSTM(8, 8)(x)
gru.input | sequence | nn.GRU(8, 8)(x)
rnn_tanh.input | sequence | nn.RNN(8, 8)(x)
rnn_relu.input | sequence | nn.RNN(8, 8, nonlinearity="relu")(x)
lstm.data | sequence | nn.LSTM(8, 8)(pack(x))
gru.data | sequence | nn.GRU(8, 8)(pack(x))
rnn_tanh.data | sequence | nn.RNN(8, 8)(pack(x))
rnn_relu.data | sequence | nn.RNN(8, 8, nonlinearity="relu")(pack(x))
lstm_cell | sequence | nn.LSTMCell(8, 8)(x[0])
gru_cell | sequence | nn.GRUCell(8, 8)(x[0])
rnn_tanh_cell | sequence | nn.RNNCell(8, 8)(x[0])
rnn_relu_cell | sequence | nn.RNNCell(8, 8, nonlinearity="relu")(x[0])
scaled_dot_product_attention | heads | F.scaled_dot_product_attention(x, y, z) | nn.MultiheadAttention(8, 2)(x[0], x[1], x[1], need_weights=False)[0]
batch_norm | planes | F.batch_norm(x, None, None, training=True) | nn.BatchNorm2d(4)(x)
instance_norm | planes | F.instance_norm(x) | nn.InstanceNorm2d(4)(x) | nn.InstanceNorm2d(4, affine=True)(x)
"""

UNCALLED = {
    "cudnn_convolution": "cuDNN's own",
    "cudnn_convolution_transpose": "cuDNN's own",
    "_thnn_fused_lstm_cell": "CUDA's own part of lstm_cell",
    "_thnn_fused_gru_cell": "CUDA's own part of gru_cell",
    "_scaled_dot_product_flash_attention": "CUDA's own part of scaled_dot_product_attention",
    "_grid_sampler_2d_cpu_fallback": "CPU's own part of grid_sampler_2d",
    "mkldnn_rnn_layer": "oneDNN's own part of lstm.input",
    "_native_multi_head_attention": "evaluation alone, and not under autocast: nn.MultiheadAttention's fast way",
}
"""Operators that nobody calls on a CPU by themselves, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An operator with the calls that reach it."""

    name: str
    recipe: str
    calls: tuple[str, ...]


def form_of(call: str) -> str:
    """``function``, ``method``, ``operator`` or ``module``."""
    if call.startswith("nn."):
        return "module"
    if call.startswith(("torch.", "F.")):
        return "function"
    return "method" if call.endswith((")", "]")) else "operator"


def _parse(line: str) -> Row:
    name, recipe, *calls = line.split(" | ")
    return Row(name=name, recipe=recipe, calls=tuple(calls))


ROWS: tuple[Row, ...] = tuple(_parse(line) for line in _LINES.strip().splitlines())
"""Every operator with its calls."""
