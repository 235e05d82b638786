"""What this machine can do, for the tests that need it."""

from __future__ import annotations

import pytest
import torch

BF16_LSTM: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether torch runs LSTMs under autocast on this CPU, whoever trains them."""

needs_bf16_lstm = pytest.mark.skipif(
    not BF16_LSTM, reason="torch has no LSTM in bfloat16 on a CPU without AVX-512"
)
