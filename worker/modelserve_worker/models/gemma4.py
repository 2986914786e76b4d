"""The Gemma 4 text decoder, every variant: dense, K = V on global layers, per-layer embeddings with KV sharing, MoE.

The model computes projections, norms and rotations of the step's tokens; what a token attends to is decided by the
AttentionBackend handed to `forward`. Elementwise work goes through the backend that is chosen for the device. Rounding
follows the reference implementation: norms in float32, cos and sin cast to the activations' dtype, the embedding's
scale rounded to the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.weight_format import StoredType, TextLinear
from modelserve.sizing.backends.table import HEAD
from modelserve.sizing.weights.dequantisation import workspace_bytes
from modelserve.sizing.weights.text import tensor_parallel_problem
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.attention.row_codec import v_only_columns
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend
from modelserve_worker.kernels.experts.experts import Routed
from modelserve_worker.kernels.step import EmbeddedRows, Step
from modelserve_worker.layers.adapter_rows import Read
from modelserve_worker.layers.attention import Attention, AttentionBackend
from modelserve_worker.layers.embedding import OutputHead, PerLayerEmbedding, VocabParallelEmbedding
from modelserve_worker.layers.linear import ReplicatedLinear
from modelserve_worker.layers.mlp import GatedMLP
from modelserve_worker.layers.moe import MixtureOfExperts
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.partial_sums import PartialSums
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.rotary import RotaryEmbedding
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.layers.taps import LayerTaps
from modelserve_worker.models.audio_tower import AudioEmbedder, AudioTower
from modelserve_worker.models.image_embedder import ImageEmbedder
from modelserve_worker.models.image_tower import ImageTower


class PerLayerInput(nn.Module):
    """What a PLE layer adds last, before its norm: W_p(gelu(W_g x) * ple)."""

    def __init__(self, architecture: ModelArchitecture, placement: Placement) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        hidden, width = architecture.hidden_size, architecture.hidden_size_per_layer_input
        self.gate = ReplicatedLinear(TextLinear.LAYER_INPUT_GATE, hidden, width, placement)
        self.projection = ReplicatedLinear(TextLinear.LAYER_PROJECTION, width, hidden, placement)
        self.norm = RMSNorm(hidden, placement, eps=architecture.rms_norm_eps)

    def forward(self, x: Tensor, per_layer: Tensor) -> tuple[Tensor, RowTerm | None]:
        """x [T, H], per_layer [T, P] -> [T, H], to be normed with `norm` and added to x, and a term that is still to be
        added to it, `StoredMatrix.apart`."""
        gate, term = self.gate.apart(x, Read.BY_ELEMENT)
        return self.projection.apart(self.elementwise.per_layer_gate(gate, per_layer, term), Read.NORMED)


class DecoderLayer(nn.Module):
    """Attention, feed-forward, the per-layer input where the model has one, then the layer's scalar.

    A layer takes its input normed and norms its result for the next one: each sum and the norm after it are one
    operation.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kind = architecture.kind(layer)
        self.elementwise = placement.operations.elementwise
        self.sums = PartialSums(placement.parallel, self.elementwise)
        self.eps = architecture.rms_norm_eps
        hidden, eps = architecture.hidden_size, self.eps
        self.attention = Attention(architecture, placement, layer=layer)
        width = architecture.layer_intermediate_size(layer)
        in_parts = placement.parallel.size == 1 and not architecture.num_experts  # `sums` adds parts up
        self.mlp = GatedMLP(hidden, width, placement, down_in_parts=in_parts)
        self.input_norm = RMSNorm(hidden, placement, eps=eps)
        self.post_attention_norm = RMSNorm(hidden, placement, eps=eps)
        self.pre_feedforward_norm = RMSNorm(hidden, placement, eps=eps)
        self.post_feedforward_norm = RMSNorm(hidden, placement, eps=eps)
        self.moe = MixtureOfExperts(architecture, placement) if architecture.num_experts else None
        self.per_layer_input = (
            PerLayerInput(architecture, placement) if architecture.hidden_size_per_layer_input else None
        )
        self.scalar = placement.parameter(1)

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        *,
        next_norm: RMSNorm,
        rotation: tuple[Tensor, Tensor],
        per_layer: Tensor | None,
        num_rows: Tensor | None,
        attention: AttentionBackend,
        narrowed: Step | None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], given up: the result may take its place; normed is its `input_norm`; per_layer [T, P] with PLE.

        Returns the layer's result and the result's `next_norm`, both [T, H]. With `narrowed` all rows are stored in its
        cache, and its R rows alone go on: per_layer is [R, P], num_rows counts those, results are [R, H].
        """
        attended, term = self.attention(normed, rotation, attention, narrowed)
        if narrowed is not None and narrowed.kept is not None:
            x = self.sums.rows_of(x, narrowed.kept)
        norms, routed = (self.post_attention_norm, self.pre_feedforward_norm), None
        if self.moe is None or self.moe.parallel.size > 1:
            x, normed = self._add_and_norm(x, attended, term, *norms, self.sums)
            routed = None if self.moe is None else self.moe.route(x, num_rows)
        else:
            x, normed, routed = self.moe.add_and_route(x, attended, *norms, num_rows)
        if self.per_layer_input is None:
            return _normed(self._add_feedforward(x, normed, routed, scalar=self.scalar, next_norm=next_norm))
        x, _ = self._add_feedforward(x, normed, routed, scalar=None, next_norm=None)
        added, term = self.per_layer_input(x, per_layer)
        norms = (self.per_layer_input.norm, next_norm)
        return self._add_and_norm(x, added, term, *norms, self.elementwise, scalar=self.scalar)

    def whole(self, x: Tensor) -> Tensor:
        """What `forward` returned, [T, H], right in all rows: a rank of several may hold a share of them alone, but for
        models with per-layer inputs."""
        return x if self.per_layer_input is not None else self.sums.whole(x)

    def _add_feedforward(
        self,
        x: Tensor,
        normed: Tensor,
        routed: Routed | None,
        *,
        scalar: Tensor | None,
        next_norm: RMSNorm | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x plus what the dense MLP makes of normed, and experts where the model has some."""
        next_weight, added_norm = None if next_norm is None else next_norm.weight, self.post_feedforward_norm
        if self.moe is None or routed is None:
            added, term = self.mlp(normed)
            return self.sums.residual_norm(
                x, added, added_norm.weight, scalar=scalar, next_weight=next_weight, eps=self.eps, term=term
            )
        result: tuple[Tensor, Tensor | None] = self.moe(
            x, normed, routed, self.mlp, added_norm=added_norm, scalar=scalar, next_weight=next_weight
        )
        return result

    def _add_and_norm(
        self,
        x: Tensor,
        added: Tensor,
        term: RowTerm | None,
        added_norm: RMSNorm,
        next_norm: RMSNorm,
        sums: PartialSums | ElementwiseBackend,
        scalar: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`sums`: `self.sums` where `added` is still to be added over ranks."""
        return _normed(
            sums.residual_norm(
                x, added, added_norm.weight, scalar=scalar, next_weight=next_norm.weight, eps=self.eps, term=term
            )
        )


def image_embedder(images: ImageArchitecture, hidden_size: int, placement: Placement) -> ImageTower | ImageEmbedder:
    """What makes rows of images of a model that sees so."""
    made = ImageEmbedder if images.tower is None else ImageTower
    return made(images, hidden_size, placement)


def audio_embedder(audio: AudioArchitecture, hidden_size: int, placement: Placement) -> AudioTower | AudioEmbedder:
    """What makes rows of sounds of a model that hears so."""
    made = AudioEmbedder if audio.tower is None else AudioTower
    return made(audio, hidden_size, placement)


def _normed(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Of an operation that was given the next norm's weight."""
    summed, normed = result
    assert normed is not None
    return summed, normed


class Gemma4ForCausalLM(nn.Module):
    """One rank's share of the decoder. Parameters are allocated, not initialised: a loader fills them.

    Raises InvalidInput when the tensor-parallel size does not fit the geometry, or cuts what one scale of a quantised
    matrix spans.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        placement: Placement,
        *,
        images: ImageArchitecture | None = None,
        audio: AudioArchitecture | None = None,
    ) -> None:
        """`images` and `audio`: what patches of images and frames of sounds become rows by; None: it has no embedder,
        and takes none."""
        super().__init__()
        parallel, operations, weight_format = placement.parallel, placement.operations, placement.weight_format
        if problem := tensor_parallel_problem(architecture, parallel.size, weight_format=weight_format):
            raise InvalidInput(problem, field="tensorParallelSize")
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self.architecture = architecture
        self.placement = placement
        self.weight_format = weight_format
        self.parallel = parallel
        self.dtype = placement.dtype
        self.operations = operations
        self.elementwise = operations.elementwise
        self.rope = RotaryEmbedding(architecture, device=placement.device, backend=operations.step)
        self._head = operations.products(HEAD, (vocab // parallel.size, hidden), StoredType.BFLOAT16)
        self.embedding = VocabParallelEmbedding(vocab, hidden, placement, scale_of=hidden, what="vocab_size")
        self.per_layer_embedding = (
            PerLayerEmbedding(architecture, placement) if architecture.hidden_size_per_layer_input else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(architecture, placement, layer=layer) for layer in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, placement, eps=architecture.rms_norm_eps)
        self.output_head = None if architecture.tie_word_embeddings else OutputHead(vocab, hidden, placement)
        self.image_embedder = None if images is None else image_embedder(images, hidden, placement)
        self.audio_embedder = None if audio is None else audio_embedder(audio, hidden, placement)
        self.taps: LayerTaps | None = None
        self._narrows_at = architecture.last_owning_layer

    def tap(self, layers: Sequence[int], *, rows: int) -> LayerTaps:
        """Keep what these layers leave of each step's rows, of which there are at most `rows`. Rows are left out behind
        the last of them only. Raises InvalidInput for layers that the model does not have."""
        if not layers or not 0 <= min(layers) <= max(layers) < len(self.layers):
            raise InvalidInput(
                f"the drafter reads what layers {list(layers)} leave; the model has layers 0 to {len(self.layers) - 1}",
                field="drafter",
            )
        device, hidden = self.norm.weight.device, self.architecture.hidden_size
        self.taps = LayerTaps(layers, rows=rows, hidden=hidden, dtype=self.dtype, device=device)
        self._narrows_at = max(self.architecture.last_owning_layer, self.taps.after)
        return self.taps

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        *,
        num_rows: Tensor | None = None,
        narrowed: Step | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Tensor:
        """input_ids and positions int32 or int64 [T], requests back to back -> hidden [T, H] after the final norm.

        With `narrowed` only its R rows, hidden [R, H]: once the last layer with a cache of its own has stored all rows,
        and the last one that is tapped has left them, nobody needs the others.
        With `num_rows` (int32 [1], on the device) the rows from there on only pad the step: they may hold any id and
        position, take no expert's time, and what comes out of them is finite where their attention is.
        Ids of `embedded` rows stand for nothing. Where layers take something from the token itself, theirs is the
        padding token, as in the reference implementation.
        """
        # Before the embedding, after whose kernel they are as constant as weights are.
        rotations = self.rope.rotations(positions)
        kept_rotations = rotations if narrowed is None else self.rope.rotations(narrowed.positions)
        if embedded is not None:
            input_ids = input_ids.index_fill(0, embedded.rows, self.architecture.pad_token_id)
        x = self.embedding(input_ids)
        if embedded is not None:
            x.index_copy_(0, embedded.rows, embedded.values)
        per_layer = None if self.per_layer_embedding is None else self.per_layer_embedding(input_ids, x)
        layers = self.decoder_layers()
        normed = self.elementwise.rms_norm(x, layers[0].input_norm.weight, eps=layers[0].eps)
        for index, layer in enumerate(layers):
            narrowing = narrowed if index == self._narrows_at else None
            if narrowing is not None and narrowing.kept is not None:
                per_layer = None if per_layer is None else per_layer.index_select(0, narrowing.kept)
                num_rows = narrowing.num_rows
            x, normed = layer(
                x,
                normed,
                next_norm=layers[index + 1].input_norm if index + 1 < len(layers) else self.norm,
                rotation=rotations[layer.kind],
                per_layer=None if per_layer is None else per_layer[:, index],
                num_rows=num_rows,
                attention=attention,
                narrowed=narrowing,
            )
            if self.taps is not None and index in self.taps.layers:
                self.taps.put(index, layer.whole(x))
            if narrowing is not None:
                rotations = kept_rotations
        if narrowed is not None and narrowed.kept is not None and self._narrows_at >= len(layers):
            return normed.index_select(0, narrowed.kept)
        return normed

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] after the final norm -> raw logits of this rank's tokens, [N, vocab / size] in its dtype."""
        weight = self.embedding.weight if self.output_head is None else self.output_head.weight
        return self._head.dense(hidden, weight)

    def k_norm_weight(self, layer: int) -> Tensor:
        """Weight [D] that normed the keys which `layer` reads (its producer's, on a KV-shared layer)."""
        norm = self.decoder_layer(self.architecture.producer(layer)).attention.k_norm
        assert norm is not None  # a producer owns its cache
        return norm.weight

    def stored_k_norm_weight(self, layer: int) -> Tensor:
        """`k_norm_weight` of a global layer in float32 and in the order of V-only rows."""
        columns = v_only_columns(
            self.architecture.global_head_dim,
            pairs=self.architecture.global_rotary_pairs,
            device=self.norm.weight.device,
        )
        return self.k_norm_weight(layer).float()[columns]

    def decoder_layer(self, layer: int) -> DecoderLayer:
        module = self.layers[layer]
        assert isinstance(module, DecoderLayer)
        return module

    def decoder_layers(self) -> list[DecoderLayer]:
        return [self.decoder_layer(layer) for layer in range(len(self.layers))]

    def stored_matrices(self) -> Iterator[tuple[str, StoredMatrix]]:
        """Every matrix that a format may store otherwise, with its name in this model."""
        for name, module in self.named_modules():
            if isinstance(module, StoredMatrix):
                yield name, module

    def share_workspace(self) -> None:
        """Give all matrices that are dequantised for each product one buffer. Until then each product makes its own."""
        matrices = [matrix for _, matrix in self.stored_matrices() if matrix.dequantises]
        if not matrices:
            return
        computed = self.architecture.model_copy(update={"dtype": str(self.dtype).removeprefix("torch.")})
        size = workspace_bytes(
            computed,
            tensor_parallel_size=self.parallel.size,
            weight_format=self.weight_format,
            on_kernels=self.placement.operations.table.on_kernels,
        )
        workspace = torch.empty(size, dtype=torch.uint8, device=self.norm.weight.device)
        for matrix in matrices:
            matrix.workspace = workspace

    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())
