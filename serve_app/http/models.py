"""The models that clients may ask for: what each is called, who generates, how its text reads.

The module knows neither routes nor requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from router.tenant import Tenant
from serve_app.protocol.backend import Backend, ServedModel
from serve_app.protocol.errors import ApiError
from serve_app.telemetry import records
from serve_app.text.chat import PromptEncoder
from serve_app.text.detokenizer import detokenizers
from serve_app.text.reasoning import ReasoningTags
from serve_app.text.token_texts import TokenTexts


class Offer:
    """One model. Raises ValueError for a tokenizer whose decoding cannot be followed token by
    token, or whose chat template cannot be used."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        tokenizer: PreTrainedTokenizerFast,
        aliases: Sequence[str] = (),
        reasoning: ReasoningTags | None = None,
    ) -> None:
        """aliases: further names. reasoning: if given, answers are split by these tags."""
        self.name, self.names = name, (name, *aliases)
        self.backend, self.reasoning = backend, reasoning
        self.encoder = PromptEncoder(tokenizer)
        marks = [token for _, token in self.encoder.call_form.special]
        self._encodes_within = self.encoder.vocab_size
        self.new_detokenizer = detokenizers(tokenizer.backend_tokenizer, marks)
        self.token_texts = TokenTexts(tokenizer.backend_tokenizer)

    async def model(self, tenant: Tenant) -> ServedModel:
        """As the tenant sees it: with its own context, and with the ids that have both logit and
        text. Raises Unavailable while no replica is ready."""
        model = await self.backend.model()
        if model.vocab_size < self.encoder.vocab_size and model.vocab_size != self._encodes_within:
            self._encodes_within = model.vocab_size
            self.encoder = await asyncio.to_thread(self.encoder.within, model.vocab_size)
        context = min(tenant.max_context or model.max_model_len, model.max_model_len)
        vocab_size = min(model.vocab_size, self.encoder.vocab_size)
        return replace(model, max_model_len=context, vocab_size=vocab_size)

    def text_of(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        detokenizer = self.new_detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def offsets(
        self, ids: Iterable[int], *, skip_special_tokens: bool
    ) -> tuple[tuple[int, int], ...]:
        """(id, characters before it)."""
        detokenizer, read, offsets = self.new_detokenizer(skip_special_tokens), 0, []
        for token in ids:
            offsets.append((token, read))
            read += len(detokenizer.push((token,)))
        return tuple(offsets)


class Offers:
    """All models by all their names, which differ."""

    def __init__(self, offers: Iterable[Offer]) -> None:
        self._by_name = {name: offer for offer in offers for name in offer.names}

    def __iter__(self) -> Iterator[Offer]:
        return iter(dict.fromkeys(self._by_name.values()))

    def of(self, tenant: Tenant) -> Iterator[Offer]:
        """The models that a tenant may use."""
        return (offer for offer in self if tenant.may_use(offer.name))

    def find(self, name: str | None, tenant: Tenant) -> Offer:
        """By name or alias. Raises ApiError for a model that does not exist; one that the tenant
        may not use looks the same."""
        offer = self._by_name.get(name) if name is not None else None
        if offer is None or not tenant.may_use(offer.name):
            raise ApiError(404, "There is no such model.", param="model", code="model_not_found")
        records.current().model = offer.name
        return offer
