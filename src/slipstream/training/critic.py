"""The critic: a value for every sampled token, from a head on a transformer's last hidden state.

Owns: the value head, the backbone under it (its own model, or the policy's), values of a layout.
Refuses: advantages, returns, the value loss (``algorithms`` has them), optimisation.

The value of a token is that of the state *before* it: it is read at the position that predicts the token, so that no
value has seen the action it judges.  The head is float32 and starts at zero, so every value is exactly 0 before the
first step, whatever the backbone.

* ``backbone="own"``: ``path`` (or the policy's first weights) again, all of it trained by an optimiser of its own.
* ``backbone="shared"``: the head reads the policy's hidden states.  Its gradient joins the policy's pending one, and
  ``optim_step("policy")`` moves both.

Shape legend: ``N`` trained tokens of a layout, ``D`` hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.training.layout import Layout
from slipstream.training.model import PolicyModel

HEAD = "value_head"


class Critic:
    """A value head over a backbone; ``shared`` says that the backbone is the policy's."""

    def __init__(self, backbone: PolicyModel, *, shared: bool) -> None:
        self.backbone, self.shared = backbone, shared
        width = int(backbone.hf.get_input_embeddings().weight.shape[1])
        width = int(getattr(backbone.hf.config.get_text_config(), "hidden_size", width))
        self.head = torch.nn.Linear(width, 1, device=backbone.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        if not shared and not backbone.tied:
            # Nothing reads the vocabulary projection of a value model: no gradient, no moments, no decay.
            backbone.hf.get_output_embeddings().requires_grad_(False)

    def head_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The head's parameters under their checkpoint names."""
        return {f"{HEAD}.{name}": parameter for name, parameter in self.head.named_parameters()}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the critic's own optimiser moves: backbone and head (``own`` only)."""
        return {**self.backbone.trainable(), **self.head_parameters()}

    def values(self, layout: Layout) -> Tensor:
        """``(N,)`` float32 values of the layout's trained tokens.  Call inside ``attention.active_layout``."""
        at_N = torch.as_tensor(layout.at_N, device=self.backbone.device)
        hidden_ND = self.backbone.hidden(layout).index_select(0, at_N)
        values: Tensor = self.head(hidden_ND.float())[:, 0]
        return values
