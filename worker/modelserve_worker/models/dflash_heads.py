"""What makes tokens of the rows of a block: the head's best, or a walk over the block's rows, and how sure each is.

    DFlash   token_s = argmax of scores_s
    DSpark   token_s = argmax of scores_s + W2 W1[token_{s-1}], token_{-1} the anchor; sure_s = sigmoid(w.[y_s, W1[..]])
    DFlash2  token_s = argmax over the best candidates c of scores_s of scores_s,c + <A[token_{s-1}] * W y_s, B[c]>

A walk is as many launches as it has tokens, one behind the other; no shape depends on a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.table import HEAD
from modelserve_worker.layers.embedding import OutputHead
from modelserve_worker.layers.likeliest import likeliest
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.placement import Placement

HEAD_ROWS = 256  # rows whose scores are there at a time: 128 MiB of 262,144 tokens in bfloat16


class DraftHead(nn.Module):
    """Scores of rows: by the target's head, or by one of its own, which may score some of the target's tokens alone."""

    def __init__(
        self, architecture: DFlashArchitecture, placement: Placement, target_head: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        vocab, self.parallel, self.softcap = architecture.vocab_size, placement.parallel, architecture.softcap
        self._target_head = target_head
        own = architecture.draft_vocab_size
        self.own = None if own is None else OutputHead(own, architecture.hidden_size, placement)
        self.shard: Shard = self.parallel.shard(vocab, what="vocab_size") if self.own is None else self.own.shard
        if self.own is not None:
            shape = self.own.weight.shape[0], self.own.weight.shape[1]
            self._products = placement.operations.products(HEAD, shape, StoredType.BFLOAT16)
        # int32 [own tokens]: which of the target's each is
        self.tokens = placement.parameter(own or 0, dtype=torch.int32) if architecture.has_token_map else None

    def scores(self, y: Tensor) -> Tensor:
        """y [N, H] after the final norm -> [N, tokens of this rank], before any soft cap, which keeps their order."""
        if self.own is None:
            return self._target_head(y)
        return self._products.dense(y, self.own.weight)

    def capped(self, scores: Tensor) -> Tensor:
        """float32, as something can be added to."""
        scores = scores.float()
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def best(self, scores: Tensor) -> Tensor:
        """scores [N, tokens of this rank] -> int64 [N], the target's tokens."""
        found = likeliest(scores, self.shard, self.parallel)
        return found if self.tokens is None else self.tokens[found].long()

    def forward(self, y: Tensor) -> Tensor:
        """y [N, H] -> int64 [N]: the best token of each row, some rows at a time."""
        return torch.cat([self.best(self.scores(rows)) for rows in torch.split(y, HEAD_ROWS)])


class MarkovHead(nn.Module):
    """What the token before adds to scores. W1 [V, r] is whole on every rank, W2 [tokens of the head / ranks, r]."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        super().__init__()
        rank, tokens = architecture.markov_rank, architecture.draft_vocab_size or architecture.vocab_size
        self.before = placement.parameter(architecture.vocab_size, rank)
        self.added = OutputHead(tokens, rank, placement)
        shape = self.added.weight.shape[0], rank
        self._products = placement.operations.products(HEAD, shape, StoredType.BFLOAT16)

    def forward(self, y: Tensor, anchors: Tensor, head: DraftHead) -> tuple[Tensor, Tensor]:
        """y [S, k, H] and anchors int64 [S] -> tokens int64 [S, k], and W1 of the token before each, [S, k, r]."""
        walked = [self._walk(*part, head) for part in _few_blocks(y, anchors)]
        return torch.cat([tokens for tokens, _ in walked]), torch.cat([rows for _, rows in walked])

    def _walk(self, y: Tensor, anchors: Tensor, head: DraftHead) -> tuple[Tensor, Tensor]:
        scores = head.scores(y.flatten(0, 1)).view(*y.shape[:2], -1)
        token, tokens, looked_up = anchors, [], []
        for place in range(y.shape[1]):
            before = self.before[token]
            token = head.best(head.capped(scores[:, place]) + self._products.dense(before, self.added.weight).float())
            tokens.append(token)
            looked_up.append(before)
        return torch.stack(tokens, dim=1), torch.stack(looked_up, dim=1)


class ConfidenceHead(nn.Module):
    """How likely it is that a draft is right, if all before it are."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        super().__init__()
        self.hidden = architecture.hidden_size
        self.with_markov = architecture.confidence_with_markov
        self.weight = placement.parameter(1, self.hidden + architecture.markov_rank * self.with_markov)
        self.bias = placement.parameter(1)

    def forward(self, y: Tensor, before: Tensor | None) -> Tensor:
        """y [S, k, H], before [S, k, r] -> float32 [S, k], 0 to 1."""
        weight = self.weight[0].float()
        logits = y.float() @ weight[: self.hidden] + self.bias.float()
        if self.with_markov and before is not None:
            logits = logits + before.float() @ weight[self.hidden :]
        return logits.sigmoid()


class CandidateSelector(nn.Module):
    """A walk over the best candidates of each row. Codebooks [V, r] are whole on every rank."""

    def __init__(self, architecture: DFlashArchitecture, placement: Placement) -> None:
        super().__init__()
        rank, vocab, hidden = architecture.selector_rank, architecture.vocab_size, architecture.hidden_size
        self.top_k = architecture.selector_top_k
        self.before, self.candidates = placement.parameter(vocab, rank), placement.parameter(vocab, rank)
        self.projection = placement.parameter(rank, hidden)
        self._products = placement.operations.products(HEAD, (rank, hidden), StoredType.BFLOAT16)

    def forward(self, y: Tensor, anchors: Tensor, head: DraftHead) -> Tensor:
        """y [S, k, H] and anchors int64 [S] -> tokens int64 [S, k]."""
        return torch.cat([self._walk(*part, head) for part in _few_blocks(y, anchors)])

    def _walk(self, y: Tensor, anchors: Tensor, head: DraftHead) -> Tensor:
        blocks, places = y.shape[:2]
        rows = y.flatten(0, 1)
        scores, tokens = (t.view(blocks, places, -1) for t in self._best(head.capped(head.scores(rows)), head))
        projected = self._products.dense(rows, self.projection).view(blocks, places, -1)
        token, chosen = anchors, []
        for place in range(places):
            query = (self.before[token] * projected[:, place]).float()
            added = torch.bmm(self.candidates[tokens[:, place]].float(), query[:, :, None])[..., 0]
            best = (scores[:, place] + added).argmax(-1, keepdim=True)
            token = tokens[:, place].gather(1, best)[:, 0]
            chosen.append(token)
        return torch.stack(chosen, dim=1)

    def _best(self, scores: Tensor, head: DraftHead) -> tuple[Tensor, Tensor]:
        """scores [N, tokens of this rank] -> the best of all ranks, float32 and int64 [N, top_k]."""
        parallel = head.parallel
        best, tokens = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1)
        if parallel.size == 1:
            return best, tokens
        pairs = torch.cat((best.double(), (tokens + head.shard.start).double()), dim=-1)
        found = parallel.all_gather(pairs).view(len(scores), parallel.size, 2, -1).transpose(1, 2).flatten(2)
        best, at = found[:, 0].topk(self.top_k, dim=-1)
        return best.float(), found[:, 1].gather(1, at).long()


def _few_blocks(y: Tensor, anchors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Blocks at a time whose scores are there together."""
    step = max(1, HEAD_ROWS // y.shape[1])
    return list(zip(torch.split(y, step), torch.split(anchors, step), strict=True))
