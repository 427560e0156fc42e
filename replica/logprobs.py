"""Log probabilities of sampled tokens and of the most likely ones, on the device."""

from __future__ import annotations

from torch import Tensor

from replica.messages import MAX_LOGPROBS


def token_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen [S], top ids [S, K], top [S, K]), most likely first; K is at most MAX_LOGPROBS.

    logits: float32 [S, V], the model's own. token_ids: int64 [S]. No sort of the vocabulary.
    """
    total = logits.logsumexp(-1)
    chosen = logits.gather(1, token_ids[:, None])[:, 0] - total
    top, top_ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    return chosen, top_ids, top - total[:, None]
