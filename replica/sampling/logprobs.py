"""Log probabilities of sampled tokens and of the most likely ones, on the device."""

from __future__ import annotations

from torch import Tensor


def write_logprobs(
    logits: Tensor, token_ids: Tensor, chosen: Tensor, top_ids: Tensor, top: Tensor
) -> None:
    """Write into the first S places: chosen [S'], the log probability of each token; top_ids and
    top [S', K], the most likely tokens and theirs, best first.

    logits: float32 [S, V], the model's own. token_ids: int64 [S]. No sort of the vocabulary.
    """
    if logits.is_cuda:
        # Triton is installed where there is a GPU only.
        from replica.sampling.gpu import logprobs as kernel

        kernel.write_logprobs(logits, token_ids, chosen, top_ids, top)
        return
    count, total = len(logits), logits.logsumexp(-1)
    best, ids = logits.topk(top.shape[1], dim=-1)
    chosen[:count] = logits.gather(1, token_ids[:, None])[:, 0] - total
    top_ids[:count] = ids
    top[:count] = best - total[:, None]
