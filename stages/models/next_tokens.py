"""A language model of one process that returns a row's likeliest next tokens with their log-probs. It is built by the
same code as a reference model.

    NextTokens(model, joined, max_tokens).likeliest(rows, number)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.models import parallel
from stages.models.build import DTYPES, Blueprint, build_role, output_weight
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.forward import MicroBatch, run_forward
from stages.models.hf_weights import read_weights
from stages.models.kernels.native import choose_kernels
from stages.models.numerics import choose_products, set_numerics
from stages.models.protocol import Role
from stages.models.reward_model import TokenRows, score_micro_batches
from stages.models.spec import read_spec


class NextTokens:
    """Owns a resident language model."""

    def __init__(self, model: ModelConfig, joined: parallel.ParallelRank, max_tokens: int) -> None:
        """Build the model of `model.path` for a gang of one rank, which the caller has joined and leaves itself.
        `max_tokens`: most tokens of a forward pass, unless one row is longer."""
        spec = read_spec(model.path)
        set_numerics(model)
        device, dtype = joined.device, DTYPES[model.dtype]
        products = choose_products(model.products, dtype, device).products
        kernels = choose_kernels(model.kernels, dtype, device)
        self._blueprint = Blueprint(model, spec, LayoutConfig(), joined, kernels, products)
        self._max_tokens = max_tokens
        self._model = build_role(self._blueprint, Role.REFERENCE, read_weights(model.path))

    def likeliest(self, rows: TokenRows, number: int) -> list[list[tuple[int, float]]]:
        """Return each row's `number` likeliest next tokens as (token, log-prob), the likeliest first."""
        batches = score_micro_batches(rows, self._blueprint, self._max_tokens)
        number = min(number, self._blueprint.spec.vocab_size)
        found: list[list[tuple[int, float]]] = [[] for _ in rows.lengths]
        weight_VH = output_weight(self._model, None)[: self._blueprint.spec.vocab_size]

        def read(batch: MicroBatch, hidden_NH: Tensor) -> tuple[np.ndarray, np.ndarray]:
            last = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(hidden_NH.device)
            logits_BV = F.linear(hidden_NH[last].to(weight_VH.dtype), weight_VH).float()
            top = torch.log_softmax(logits_BV, dim=-1).topk(number)
            return top.indices.cpu().numpy(), top.values.cpu().numpy()

        for batch, (tokens, log_probs) in zip(batches, run_forward(self._model, None, batches, read), strict=True):
            for row, of_row, values in zip(batch.rows, tokens.tolist(), log_probs.tolist(), strict=True):
                found[row] = list(zip(of_row, values, strict=True))
        return found

    def close(self) -> None:
        """Free the model. The caller's membership of the gang stays."""
        del self._model
