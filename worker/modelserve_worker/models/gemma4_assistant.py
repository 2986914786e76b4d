"""The MTP assistant: decoder layers with queries only, over a target's caches, from the target's own hidden state.

    x  = pre_projection([E_target[token] * sqrt(H_target), state])
    x  = layers(x), then the final norm
    token' = argmax over E x, or over the tokens of the centroids nearest to x;  state' = post_projection(x)

The first state is the target's, after its final norm, of the row that `token` was drawn from. All drafts of a step are
made at one position, that of `token`, over the rows before it. (transformers 5.23, gemma4_assistant; vLLM 0.33 rotates
by the position before.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.model.assistant import AssistantArchitecture, pair_problem
from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.table import HEAD
from modelserve.sizing.weights.assistant import ROWS_PER_SELECTION
from modelserve_worker.kernels.step_start import Rotation
from modelserve_worker.layers.attention import AttentionBackend
from modelserve_worker.layers.embedding import OutputHead
from modelserve_worker.layers.likeliest import likeliest
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.rotary import RotaryEmbedding
from modelserve_worker.models.gemma4 import DecoderLayer, Gemma4ForCausalLM


class CentroidHead(nn.Module):
    """Which tokens a row's head scores: those of the centroids that are nearest to it. Whole on every rank."""

    def __init__(self, architecture: AssistantArchitecture, placement: Placement) -> None:
        super().__init__()
        self.top_k = architecture.centroid_top_k
        shape = (architecture.num_centroids, architecture.hidden_size)
        self.weight = placement.parameter(*shape)
        self._products = placement.operations.products(HEAD, shape, StoredType.BFLOAT16)
        # int32 [V]: the tokens of the first centroid, those of the second, ...
        self.ordering = placement.parameter(architecture.vocab_size, dtype=torch.int32)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [S, h] after the final norm, table [V, h] -> int64 [S]: the token with the largest score of those scored.

        A few rows at a time, since each gathers the scored rows of the table.
        """
        tokens_of = self.ordering.view(self.weight.shape[0], -1)
        found = []
        for rows in torch.split(x, ROWS_PER_SELECTION):
            nearest = self._products.dense(rows, self.weight).topk(self.top_k, dim=-1).indices
            tokens = tokens_of[nearest].flatten(1)
            scores = torch.bmm(table[tokens], rows[:, :, None])[..., 0]
            found.append(tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
        return torch.cat(found).long()


class Gemma4Assistant(nn.Module):
    """One rank's share, of the same group as `target`'s. Parameters are allocated, not initialised.

    Raises InvalidInput when it is the assistant of another model, or the tensor-parallel size does not fit it.
    """

    def __init__(self, architecture: AssistantArchitecture, target: Gemma4ForCausalLM) -> None:
        super().__init__()
        if problem := pair_problem(target.architecture, architecture):
            raise InvalidInput(problem, field="drafter")
        parallel = target.parallel
        if architecture.num_attention_heads % parallel.size:
            raise InvalidInput(
                f"tensor parallel size {parallel.size} does not divide the drafter's "
                f"{architecture.num_attention_heads} query heads: use fewer GPUs for a replica, or no drafter",
                field="drafter",
            )
        self.architecture = architecture
        self.parallel = parallel
        operations = target.operations.drafting(architecture, ranks=parallel.size)
        placement = replace(target.placement, weight_format=None, operations=operations)
        self.elementwise = operations.elementwise
        self.rope = RotaryEmbedding(architecture, device=placement.device, backend=operations.step)
        self._embed = target.embedding.forward  # the target's, which is no part of this one
        hidden, backbone, eps = architecture.hidden_size, architecture.backbone_hidden_size, architecture.rms_norm_eps
        self.pre_projection = placement.parameter(hidden, 2 * backbone)
        self.post_projection = placement.parameter(backbone, hidden)
        self.centroids = CentroidHead(architecture, placement) if architecture.num_centroids else None
        group = parallel if self.centroids is None else TensorParallel()
        self.head = OutputHead(architecture.vocab_size, hidden, replace(placement, parallel=group))
        self._into, self._out, self._scores = (
            operations.products(HEAD, (matrix.shape[0], matrix.shape[1]), StoredType.BFLOAT16)
            for matrix in (self.pre_projection, self.post_projection, self.head.weight)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(architecture, placement, layer=layer) for layer in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, placement, eps=eps)

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, state: Tensor, rotations: Mapping[LayerKind, Rotation], attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """One draft: the tokens int32 [S] that may follow `tokens`, int32 [S], drawn from `state` [S, H_target]; and
        x [S, h] after the final norm. `attention` reads the rows before the position of the `rotations`."""
        layers = self.decoder_layers()
        x = self._into.dense(torch.cat((self._embed(tokens), state), dim=-1), self.pre_projection)
        normed = self.elementwise.rms_norm(x, layers[0].input_norm.weight, eps=layers[0].eps)
        for layer, following in zip(layers, (*layers[1:], None), strict=True):
            x, normed = layer(
                x, normed, next_norm=self.norm if following is None else following.input_norm,
                rotation=rotations[layer.kind], per_layer=None, num_rows=None, attention=attention, narrowed=None,
            )  # fmt: skip
        return self._likeliest(normed).int(), normed

    @torch.no_grad()
    def next_state(self, x: Tensor) -> Tensor:
        """[S, H_target] that the draft behind another one is made from: of x [S, h] that this one left."""
        return self._out.dense(x, self.post_projection)

    def _likeliest(self, x: Tensor) -> Tensor:
        """x [S, h] after the final norm -> int64 [S]; of equals the lowest, the same on every rank."""
        if self.centroids is not None:
            nearest: Tensor = self.centroids(x, self.head.weight)
            return nearest
        scores = self._scores.dense(x, self.head.weight)
        return likeliest(scores, self.head.shard, self.parallel)
