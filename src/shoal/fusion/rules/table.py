"""Which operation has which rule.

A rule is ``(slots, *args, **kwargs) -> result`` with the operation's own parameters, or
``NotImplemented``. Each has a row in tests/equivalence/test_fusion_rules.py, which also breaks
it on purpose and sees that it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal.fusion.passes.slots import Rule
from shoal.fusion.rules.activation import where_it_lies
from shoal.fusion.rules.attention import attention
from shoal.fusion.rules.convolution import conv, conv_transpose
from shoal.fusion.rules.drawing import DRAWING
from shoal.fusion.rules.dropout import dropout, dropout_, feature_dropout, feature_dropout_
from shoal.fusion.rules.embedding import embedding
from shoal.fusion.rules.gradient import grad
from shoal.fusion.rules.linear import linear
from shoal.fusion.rules.loss import cross_entropy, nll_loss
from shoal.fusion.rules.memory import data, requires_grad
from shoal.fusion.rules.misbatched import roll, select_scatter
from shoal.fusion.rules.norm import batch_norm, weight_norm
from shoal.fusion.rules.pooling import adaptive_avg_pool2d
from shoal.fusion.rules.recurrent import gru, lstm
from shoal.fusion.rules.shaping import as_it_lies_alone

SHAPES = (
    *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten),
    *(torch.reshape, torch.flatten, torch.unflatten),
)

WRITTEN_OVER = (
    *(torch.relu_, Tensor.relu_, torch.selu_, torch.celu_, torch.sigmoid_, torch.tanh_),
    *(Tensor.sigmoid_, Tensor.tanh_, torch._C._nn.elu_, torch._C._nn.leaky_relu_),
    *(torch._C._nn.hardtanh_, torch._C._nn.hardswish_, torch._C._nn.hardsigmoid_),
    *(torch._C._nn.silu_, torch._C._nn.mish_, torch._C._nn.relu6_, torch.threshold_),
)

RULES: dict[Callable[..., Any], Rule] = {
    functional.linear: linear,
    torch.autograd.grad: grad,
    Tensor.data.__get__: data,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: requires_grad,  # type: ignore[attr-defined]
    torch.conv1d: conv,
    torch.conv2d: conv,
    torch.conv3d: conv,
    torch.conv_transpose1d: conv_transpose,
    torch.conv_transpose2d: conv_transpose,
    torch.conv_transpose3d: conv_transpose,
    torch.batch_norm: batch_norm,
    torch._weight_norm: weight_norm,
    torch._C._nn.adaptive_avg_pool2d: adaptive_avg_pool2d,
    torch.dropout: dropout,
    torch.dropout_: dropout_,
    torch.feature_dropout: feature_dropout,
    torch.feature_dropout_: feature_dropout_,
    functional.scaled_dot_product_attention: attention,
    torch.embedding: embedding,
    torch.lstm: lstm,
    torch.gru: gru,
    torch._C._nn.cross_entropy_loss: cross_entropy,
    torch._C._nn.nll_loss_nd: nll_loss,
    torch.roll: roll,
    Tensor.roll: roll,
    torch.select_scatter: select_scatter,
    Tensor.select_scatter: select_scatter,
    **{activation: where_it_lies(activation) for activation in WRITTEN_OVER},
    **{shape: as_it_lies_alone(shape) for shape in SHAPES},
    **DRAWING,
}
