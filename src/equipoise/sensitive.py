"""Which operators stay in FP32 under half, the same on every device: the table, as data.

Enters: nothing. Leaves: a row for each operator that autocast treats in its own way, by torch's schema name.
Where: read when kernels are installed (``step/operators.py``). No torch is needed here.

Source: the lists of torch 2.13 for CUDA (``aten/src/ATen/autocast_mode.h``); beyond them mean, var, std,
square, the statistics of batch and instance norm, RNN operators, and more to promote. What a result in half
would lose is measured in docs/operators.md.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = {
    "fp32": "half inputs are widened, the result is FP32",
    "fp32_out": "the result is FP32 unless the call names a dtype",
    "softmax": "as fp32_out, and a score that half made -inf counts as half's lowest number",
    "promote": "inputs of several widths are brought to the widest",
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


def _rows() -> Iterator[Operator]:
    for kind, reason, names in _TABLE:
        for name in names.split():
            yield Operator(name=name, kind=kind, reason=reason, unlike=_UNLIKE.get(name, ()))


_UNLIKE = {
    "grid_sampler": ("cpu",),  # FP32 there, promoted elsewhere
    "binary_cross_entropy": ("cuda", "xpu", "mps"),  # refused there
}

_TABLE = (
    (
        "fp32",
        "grows or shrinks its input by powers or exponentials: half overflows or flushes",
        "cosh sinh exp expm1 pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar square reciprocal rsqrt",
    ),
    (
        "fp32",
        "steep or of narrow range where half's few digits are lost",
        "acos asin tan erfinv log log10 log2 log1p softplus",
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
        "mean mean.dim var var.dim var.correction std std.dim std.correction var_mean var_mean.dim "
        "var_mean.correction std_mean std_mean.dim std_mean.correction logsumexp",
    ),
    (
        "fp32",
        "a loss: one number that every gradient starts from",
        "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
        "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
        "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits binary_cross_entropy "
        "cross_entropy_loss nll_loss_nd",
    ),
    (
        "fp32",
        "weights and coordinates of an interpolation need more digits than half has",
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
        "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    (
        "fp32_out",
        "adds or multiplies many values: the result leaves half's range or digits",
        "prod prod.dim_int cumprod cumsum sum sum.dim_IntList linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype",
    ),
    ("softmax", "exponentials and their sum; small probabilities flush in half", "softmax.int"),
    ("fp32_out", "logarithms of small probabilities lose digits in half", "log_softmax.int"),
    (
        "promote",
        "takes inputs of several widths and would refuse them or drop digits",
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add "
        "index_add masked_scatter",
    ),
    (
        "half",
        "products: matrix units sum them in FP32",
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm "
        "mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot",
    ),
    (
        "half",
        "recurrent products and their gates",
        "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    (
        "half",
        "attention: softmax and sums are FP32 inside its fused kernels",
        "scaled_dot_product_attention",
    ),
    ("inside", "its kernels keep mean and variance in FP32", "batch_norm instance_norm"),
)

OPERATORS: tuple[Operator, ...] = tuple(_rows())
"""Every row."""


def table_hash() -> str:
    """A short name of the table's content: the same table, the same name."""
    text = repr([(row.name, row.kind, row.unlike) for row in OPERATORS])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
