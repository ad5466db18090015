"""Which operators stay in FP32 under half, the same on every device: the table, as data.

Enters: nothing. Leaves: a row for each operator that autocast treats in its own way, by torch's schema name.
Where: read when kernels are installed (``step/operators.py``). No torch is needed here.

Source: the lists of torch 2.13 for CUDA and for CPU (``aten/src/ATen/autocast_mode.h`` and ``.cpp``), every
operator of both; beyond them mean, var, std, square, exp2, logaddexp, covariance, statistics of batch and
instance norm, RNN operators, linear algebra and transforms without half kernels, and more to promote. What a
result in half would lose is measured in docs/operators.md.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = {
    "fp32": "half inputs are widened, the result is FP32",
    "fp32_out": "the result is FP32 unless the call names a dtype",
    "softmax": "as the first two, and a score that half made -inf counts as half's lowest number",
    "cross_entropy": "FP32, and under FP16 a logit that became -inf counts as FP16's lowest number",
    "promote": "inputs of several widths are brought to the widest",
    "follow": "as promote, where torch's own list for a device widens it without need",
    "half": "computed in the policy's half format",
    "inside": "statistics in FP32 inside the kernel, the result follows the input",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row: what happens to an operator under half."""

    name: str
    """Schema name without ``aten::``, such as ``softmax.int``."""
    kind: str
    """A key of :data:`KINDS`."""
    reason: str
    """Why, in one line."""
    unlike: tuple[str, ...] = ()
    """Device types whose own autocast kernel for it does something else."""
    by_torch: bool = False
    """Whether it is torch's where torch lists it, and elsewhere made of other rows or absent."""
    unit: bool = False
    """Whether the result lies between -1 and 1, and is held there: rounding gives 1.0000002 in FP32 too."""


def _rows() -> Iterator[Operator]:
    for kind, reason, names in _TABLE:
        for name in names.split():
            unit = name == "cosine_similarity"
            own = _EVERYWHERE if unit or kind == "softmax" else _UNLIKE.get(name, ())
            yield Operator(
                name=name,
                kind=kind,
                reason=reason,
                unlike=("cpu",) if kind == "follow" else own,
                by_torch=name in _BY_TORCH,
                unit=unit,
            )


_EVERYWHERE = ("cpu", "cuda", "xpu", "mps")

_UNLIKE = {
    # FP32 there, promoted elsewhere
    "grid_sampler": ("cpu",),
    "grid_sampler_2d": ("cpu",),
    "grid_sampler_3d": ("cpu",),
    "_grid_sampler_2d_cpu_fallback": ("cpu",),
    "binary_cross_entropy": ("cuda", "xpu", "mps"),  # refused there
}

_BY_TORCH = frozenset(
    "cat stack conv1d.padding conv2d.padding conv3d.padding _addmm_activation _native_multi_head_attention "
    "mkldnn_rnn_layer cudnn_convolution cudnn_convolution_transpose _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell _scaled_dot_product_flash_attention".split()
)

_TABLE = (
    (
        "fp32",
        "grows or shrinks its input by powers or exponentials: half overflows or flushes",
        "cosh sinh exp exp2 expm1 pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar square reciprocal rsqrt",
    ),
    (
        "fp32",
        "steep or of narrow range where half's few digits are lost",
        "acos asin tan erfinv log log10 log2 log1p softplus xlogy.Tensor xlogy.Scalar_Self "
        "xlogy.Scalar_Other",
    ),
    (
        "fp32",
        "squares or sums many values before it normalises by them",
        "layer_norm native_layer_norm rms_norm group_norm cosine_similarity renorm frobenius_norm.dim "
        "nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim dist pdist cdist",
    ),
    (
        "fp32",
        "a mean or a spread of many values: their sum leaves half's range or digits",
        "avg_pool3d adaptive_avg_pool3d mean mean.dim var var.dim var.correction std std.dim std.correction "
        "var_mean var_mean.dim var_mean.correction std_mean std_mean.dim std_mean.correction cov corrcoef "
        "logsumexp logcumsumexp logaddexp logaddexp2 trace",
    ),
    (
        "fp32",
        "a loss: one number that every gradient starts from",
        "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
        "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
        "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits binary_cross_entropy "
        "nll_loss_nd multilabel_margin_loss_forward ctc_loss.IntList ctc_loss.Tensor",
    ),
    (
        "fp32",
        "solving and factoring lose what half's few digits keep, and mostly have no half kernel",
        "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_det linalg_eig linalg_eigh "
        "linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex "
        "linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp "
        "linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor "
        "linalg_matrix_rank.tol_tensor linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor "
        "linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd "
        "linalg_svdvals linalg_tensorinv linalg_tensorsolve _lu_with_info cholesky cholesky_inverse "
        "cholesky_solve geqrf inverse logdet lu_solve orgqr ormqr pinverse qr slogdet svd triangular_solve",
    ),
    (
        "fp32",
        "transforms and order statistics of whole signals: half has no kernel for them",
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft "
        "fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft "
        "stft.center polar view_as_complex quantile quantile.scalar nanquantile nanquantile.scalar "
        "fake_quantize_per_tensor_affine",
    ),
    (
        # The .vec too: torch.compile takes them apart before the others are reached.
        "fp32",
        "weights and coordinates of an interpolation need more digits than half has",
        "upsample_nearest1d upsample_nearest1d.vec _upsample_nearest_exact1d _upsample_nearest_exact1d.vec "
        "upsample_nearest2d upsample_nearest2d.vec _upsample_nearest_exact2d _upsample_nearest_exact2d.vec "
        "upsample_nearest3d upsample_nearest3d.vec _upsample_nearest_exact3d _upsample_nearest_exact3d.vec "
        "upsample_linear1d upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec "
        "_upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec upsample_trilinear3d upsample_trilinear3d.vec "
        "upsample_bicubic2d upsample_bicubic2d.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec "
        "_upsample_lanczos2d_aa _upsample_lanczos2d_aa.vec",
    ),
    (
        "fp32_out",
        "adds or multiplies many values: the result leaves half's range or digits",
        "prod prod.dim_int cumprod cumsum sum sum.dim_IntList nansum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype",
    ),
    ("softmax", "exponentials and their sum; small probabilities flush in half", "softmax.int"),
    ("softmax", "logarithms of small probabilities lose digits in half", "log_softmax.int"),
    ("cross_entropy", "logarithms of small probabilities lose digits in half", "cross_entropy_loss"),
    (
        "promote",
        "takes inputs of several widths and would refuse them or drop digits",
        "addcdiv addcmul atan2 bilinear cat cross dot vdot grid_sampler grid_sampler_2d grid_sampler_3d "
        "_grid_sampler_2d_cpu_fallback index_add index_copy index_put index_reduce lerp.Scalar lerp.Tensor "
        "masked_scatter scatter.src scatter_add scatter_reduce.two stack tensordot",
    ),
    (
        "follow",
        "picks or repeats values: exact in half",
        "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d max_unpool2d "
        "max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    (
        "half",
        "products: matrix units sum them in FP32",
        "_convolution.deprecated _convolution conv1d conv1d.padding conv2d conv2d.padding conv3d "
        "conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
        "cudnn_convolution cudnn_convolution_transpose prelu addmm _addmm_activation addmv addr matmul "
        "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot",
    ),
    (
        "half",
        "recurrent products and their gates",
        "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell",
    ),
    (
        "half",
        "attention: softmax and sums are FP32 inside its fused kernels",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention",
    ),
    ("inside", "its kernels keep mean and variance in FP32", "batch_norm instance_norm"),
)

OPERATORS: tuple[Operator, ...] = tuple(_rows())
"""Every row."""


def table_hash() -> str:
    """A short name of the table's content: the same table, the same name."""
    text = repr([(row.name, row.kind, row.unlike, row.by_torch, row.unit) for row in OPERATORS])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
