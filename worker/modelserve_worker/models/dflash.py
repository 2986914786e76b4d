"""A drafter of the DFlash family: a block of tokens in one pass, from the target's hidden states of all before it.

    c        = RMS(fc(concatenated taps))                       once for each token of the target
    K_l, V_l = rope(RMS(W_k,l c)), W_v,l c                       kept in layer l's cache at the token's position
    x        = E[anchor, mask, mask, ...]                        at the anchor's position and those behind it
    x        = layers(x), over the cache and the block's own K, V
    tokens   = what the head, and a walk over the rows, make of RMS(x)

Nothing of a block is kept: its tokens' K and V come of the target's hidden states, once the target has computed them.
(z-lab/dflash model.py; speculators 0.9.0; DeepSpec; docs/decisions.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelserve.errors import InvalidInput
from modelserve.model.drafters.dflash import DFlashArchitecture, dflash_pair_problem
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.weights.dflash import dflash_ranks_problem
from modelserve_worker.kernels.step_start import Rotation
from modelserve_worker.layers.embedding import VocabParallelEmbedding
from modelserve_worker.layers.linear import ReplicatedLinear
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.rotary import inverse_frequencies
from modelserve_worker.models.dflash_heads import CandidateSelector, ConfidenceHead, DraftHead, MarkovHead
from modelserve_worker.models.dflash_layer import DFlashLayer, DraftAttention, KeysValues
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM


class Drafted(NamedTuple):
    """What S blocks propose."""

    tokens: Tensor  # int32 [S, k], ids of the target's vocabulary
    confidence: Tensor | None  # float32 [S, k]: how likely each is right if those before it are; None: nobody says


class DFlash(nn.Module):
    """One rank's share, of the same group as `target`'s. Parameters are allocated, not initialised.

    Raises InvalidInput when it is the drafter of another model, or the tensor-parallel size does not fit it.
    """

    def __init__(self, architecture: DFlashArchitecture, target: Gemma4ForCausalLM) -> None:
        super().__init__()
        if problem := dflash_pair_problem(target.architecture, architecture):
            raise InvalidInput(problem, field="drafter")
        self.parallel = target.parallel
        if problem := dflash_ranks_problem(architecture, self.parallel.size):
            raise InvalidInput(
                f"the drafter does not run on these GPUs: {problem}; use fewer for a replica, or no drafter",
                field="drafter",
            )
        self.architecture = architecture
        operations = target.operations.drafting(architecture, ranks=self.parallel.size)
        placement = replace(target.placement, weight_format=None, operations=operations)
        self._elementwise, self._step = operations.elementwise, operations.step
        hidden, eps, device = architecture.hidden_size, architecture.rms_norm_eps, placement.device
        self.fc = ReplicatedLinear(TextLinear.OUTPUT, len(architecture.taps) * hidden, hidden, placement)
        self.hidden_norm = RMSNorm(hidden, placement, eps=eps)
        self._keys_values = KeysValues(architecture, placement)
        self.keys_values = self._keys_values.linear
        self.layers = nn.ModuleList(
            DFlashLayer(architecture, placement, layer=layer) for layer in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, placement, eps=eps)
        self.embedding = None
        if architecture.own_embedding:
            self.embedding = VocabParallelEmbedding(
                architecture.vocab_size, hidden, placement, scale_of=hidden, what="the drafter's vocab_size"
            )
        self._embed = target.embedding.forward if self.embedding is None else self.embedding.forward
        self.head = DraftHead(architecture, placement, target.head)
        self.markov = MarkovHead(architecture, placement) if architecture.markov_rank else None
        self.confidence = ConfidenceHead(architecture, placement) if architecture.has_confidence_head else None
        self.selector = CandidateSelector(architecture, placement) if architecture.selector_rank else None
        self._mask = torch.full((1,), architecture.mask_token_id, dtype=torch.int32, device=device)
        self._behind = torch.arange(architecture.block_rows, dtype=torch.int32, device=device)
        self._frequencies = inverse_frequencies(
            architecture.head_dim, theta=architecture.rope_theta, rotated_pairs=architecture.rotary_pairs
        ).to(device)

    def drafting_layers(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @torch.no_grad()
    def context(self, tapped: Tensor) -> Tensor:
        """tapped [T, taps * H], the target's outputs of its tapped layers behind one another -> c [T, H], which the
        keys and values of all layers are made of."""
        return self._elementwise.rms_norm(self.fc(tapped), self.hidden_norm.weight, eps=self.architecture.rms_norm_eps)

    @torch.no_grad()
    def context_rows(self, c: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """c [T, H] of `context` and positions [T] of any integer dtype -> of each layer K, normed and rotated, and V,
        both [T, KV heads of this rank, D]. Rows of V may lie apart; all of them are one product's result,
        [T, layers * rows]."""
        keys_values, rotation = self._keys_values, self._rotation(positions)
        projected = keys_values.split(keys_values.linear.stacked(c))
        layers = self.drafting_layers()
        return [
            keys_values.finished(rows, layer.k_norm, rotation) for rows, layer in zip(projected, layers, strict=True)
        ]

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, attention: DraftAttention, *, asked: int | None = None
    ) -> Drafted:
        """tokens int32 [S] and positions int32 [S] of the anchors, whose own context is not there yet -> what follows
        each: its first `asked` tokens, left out all `num_drafts`. The whole block is computed in any case."""
        first, asked = self.architecture.first_draft_row, self.architecture.num_drafts if asked is None else asked
        y = self.rows(tokens, positions, attention)[:, first : first + asked].contiguous()
        before, anchors = None, tokens.long()
        if self.markov is not None:
            drafted, before = self.markov(y, anchors, self.head)
        elif self.selector is not None:
            drafted = self.selector(y, anchors, self.head)
        else:
            drafted = self.head(y.flatten(0, 1)).view(-1, asked)
        return Drafted(drafted.int(), None if self.confidence is None else self.confidence(y, before))

    @torch.no_grad()
    def rows(self, tokens: Tensor, positions: Tensor, attention: DraftAttention) -> Tensor:
        """Anchors as `forward` takes them -> [S, B, H] of all rows of their blocks, after the final norm."""
        layers = self.drafting_layers()
        rotation = self._rotation((positions[:, None] + self._behind).flatten())
        x = self._block(tokens)
        normed = self._elementwise.rms_norm(x, layers[0].input_norm.weight, eps=layers[0].eps)
        for layer, following in zip(layers, (*layers[1:], None), strict=True):
            x, normed = layer(
                x, normed, keys_values=self._keys_values, rotation=rotation, attention=attention,
                next_norm=self.norm if following is None else following.input_norm,
            )  # fmt: skip
        return normed.view(len(tokens), self.architecture.block_rows, -1)

    def _block(self, tokens: Tensor) -> Tensor:
        """[S] -> [S * B, H]: each anchor's embedding, and that of the mask behind it. The mask is looked up once."""
        scale = None if self.architecture.scaled_embedding else self.architecture.embedding_scale
        rows = self._embed(torch.cat((tokens.int(), self._mask)), scale=scale)
        masks = rows[-1].expand(len(tokens), self.architecture.block_rows - 1, -1)
        return torch.cat((rows[:-1, None], masks), dim=1).flatten(0, 1)

    def _rotation(self, positions: Tensor) -> Rotation:
        rotation, _ = self._step.rotations(positions, self._frequencies, self._frequencies)
        return rotation
