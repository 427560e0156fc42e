"""The routes of OpenAI's API over a `Backend`.

`create_app` makes the whole HTTP application. It knows no Ray: what generates, who may ask and
which tokenizer fits are handed in.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from fastapi import FastAPI, Request, Response
from transformers import PreTrainedTokenizerFast

from serve_app import errors
from serve_app.answers import Answer
from serve_app.auth import BearerAuth, FindTenant
from serve_app.backend import Backend, Generation, ServedModel
from serve_app.body import read_body
from serve_app.chat import PromptEncoder
from serve_app.choices import Choice
from serve_app.detokenizer import detokenizers
from serve_app.edge import Edge
from serve_app.errors import ApiError, invalid
from serve_app.fields import Prompt
from serve_app.grammars import grammar_of
from serve_app.limits import Limits
from serve_app.openapi import document
from serve_app.parameters import check_ids, check_prompt, sampling
from serve_app.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from serve_app.reasoning import ReasoningTags
from serve_app.replies import Reply
from serve_app.sequence_text import SequenceText
from serve_app.shapes import ChatShape, CompletionShape, Echo, Shape, Telling
from serve_app.streaming import EventStream, PlainAnswer, timeout_of
from serve_app.tenant_limits import limited
from serve_app.token_texts import TokenTexts

logger = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 1000
JSON = "application/json"


def create_app(
    backend: Backend,
    tokenizer: PreTrainedTokenizerFast,
    find_tenant: FindTenant,
    limits: Limits,
    tag_requests: bool = True,
    aliases: Sequence[str] = (),
    reasoning: ReasoningTags | None = None,
) -> FastAPI:
    """The application. `tag_requests=False` leaves X-Request-ID to a proxy that adds it. aliases:
    further names of the model. reasoning: if given, answers are split by these tags.

    Raises ValueError for a tokenizer whose decoding cannot be followed token by token.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api = Api(backend, tokenizer, limits, aliases, reasoning)
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/models", api.list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.show_model, methods=["GET"])
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])
    app.add_api_route("/version", api.version, methods=["GET"])
    for path, probe in (("/health", api.health), ("/ready", api.ready)):
        app.add_api_route(path, probe, methods=["GET"])
        app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    made = msgspec.json.encode(document(app, _version()))
    app.add_api_route("/openapi.json", lambda: Response(made, media_type=JSON), methods=["GET"])
    errors.install(app)
    app.add_middleware(BearerAuth, find_tenant=find_tenant)
    app.add_middleware(Edge, tag=tag_requests)
    return app


class Api:
    """The handlers."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerFast,
        limits: Limits,
        aliases: Sequence[str] = (),
        reasoning: ReasoningTags | None = None,
    ) -> None:
        self._backend = backend
        self._encoder = PromptEncoder(tokenizer)
        self._new_detokenizer = detokenizers(tokenizer.backend_tokenizer)
        self._token_texts = TokenTexts(tokenizer.backend_tokenizer)
        self._limits = limits
        self._aliases = aliases
        self._reasoning = reasoning
        self._names_logged: set[str] = set()

    async def health(self) -> Response:
        """The process answers; it says nothing of the model."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """200 while the model can serve, else 503."""
        await self._backend.model()
        return _json({"status": "ready"})

    async def list_models(self) -> Response:
        model = await self._backend.model()
        names = (model.name, *self._aliases)
        return _json({"object": "list", "data": [_card(model, name) for name in names]})

    async def show_model(self, name: str) -> Response:
        return _json(_card(await self._model(name), name))

    async def version(self) -> Response:
        return _json({"version": _version()})

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, self._limits.max_body_bytes)
        model = await self._model(body.model)
        if body.messages is not None:
            _, ids = await self._encoder.chat(body.messages, model.max_model_len)
        else:
            ids = await self._encoder.text(
                body.prompt or "",
                model.max_model_len,
                add_special_tokens=body.add_special_tokens,
            )
        return _json({"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, self._limits.max_body_bytes)
        model = self._with_texts(await self._model(body.model))
        check_ids(body.tokens, model, "tokens")
        return _json({"prompt": self._text_of_ids(body.tokens, skip_special_tokens=False)})

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest, self._limits.max_body_bytes)
        model = limited(await self._model_for(body, prompts=1), request.state.tenant)
        tools = body.offered_tools
        text, prompt_ids = await self._encoder.chat(
            body.messages, model.max_model_len, tools, body.chat_template_kwargs
        )
        prompts = [check_prompt(prompt_ids, model, "messages")]
        shape = ChatShape(
            self._telling(body),
            reads_calls=bool(tools),
            reasoning=self._reasoning,
            thinking=self._reasoning is not None and self._reasoning.is_open(text),
        )
        return await self._answer(request, body, model, prompts, shape)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._limits.max_body_bytes)
        model = limited(await self._model_for(body, len(body.prompt)), request.state.tenant)
        prompts = [await self._prompt_ids(prompt, model) for prompt in body.prompt]
        echoes = self._echoes(body, prompts) if body.echo else []
        shape = CompletionShape(self._telling(body), echoes)
        return await self._answer(request, body, model, prompts, shape)

    async def _model_for(self, body: GenerationRequest, prompts: int) -> ServedModel:
        """The model that the request names, with the ids that have both logit and text.

        Raises ApiError if there is no such model, or for more sequences than are allowed.
        """
        self._log_unknown(body)
        model = await self._model(body.model)
        if body.choices_per_prompt > self._limits.max_choices:
            name = "n" if body.shown_per_prompt > self._limits.max_choices else "best_of"
            raise invalid(f"{name} must be at most {self._limits.max_choices}", name)
        if prompts * body.choices_per_prompt > self._limits.max_sequences:
            message = f"prompts times n must be at most {self._limits.max_sequences}"
            raise invalid(message, "prompt")
        return self._with_texts(model)

    def _with_texts(self, model: ServedModel) -> ServedModel:
        """With the ids that have both logit and text."""
        return replace(model, vocab_size=min(model.vocab_size, self._encoder.vocab_size))

    async def _model(self, name: str | None) -> ServedModel:
        model = await self._backend.model()
        if name != model.name and name not in self._aliases:
            raise ApiError(404, "There is no such model.", param="model", code="model_not_found")
        return model

    async def _prompt_ids(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        """Raises ApiError for a prompt that cannot be run."""
        if isinstance(prompt, str):
            ids = await self._encoder.text(prompt, model.max_model_len)
            return check_prompt(ids, model, "prompt")
        return check_prompt(prompt, model, "prompt")

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        model: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        shape: Shape,
    ) -> Response:
        """n choices for each prompt. What can be refused has been when this returns."""
        timeout_s = timeout_of(request.headers)
        reply = Reply(shape, model.name)
        choices: list[Choice] = []
        bad = self._encoder.bad_tokens(body.bad_words)
        grammar = await grammar_of(body, model)
        for prompt_ids in prompts:
            first = sampling(body, len(prompt_ids), model, self._limits, bad, grammar)
            for number in range(body.choices_per_prompt):
                index = len(choices)
                generation = Generation(
                    request_id=f"{reply.id}-{index}",
                    tenant=request.state.tenant,
                    prompt_ids=prompt_ids,
                    sampling=msgspec.structs.replace(first, choice=number),
                    open_ended=body.asked_limit[1] is None,
                    priority=body.priority or 0,
                )
                text = self._new_text(body)
                choices.append(Choice(index, generation, text, silent=body.no_output))
        answer = Answer(self._backend, choices, len(prompts), body.shown_per_prompt, reply)
        if body.stream:
            return EventStream(answer.events(body.include_usage), timeout_s)
        return PlainAnswer(answer.whole, timeout_s)

    def _new_text(self, body: GenerationRequest) -> SequenceText:
        return SequenceText(
            self._new_detokenizer(body.skip_special_tokens is not False),
            stops=body.stop,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
        )

    def _telling(self, body: GenerationRequest) -> Telling:
        return Telling(
            self._token_texts,
            sampled=body.alternatives is not None,
            prompt=body.prompt_logprobs is not None,
        )

    def _echoes(self, body: CompletionRequest, prompts: Sequence[tuple[int, ...]]) -> list[Echo]:
        """What each choice that is shown begins with: its prompt."""
        skip = body.skip_special_tokens is not False
        echoes = []
        for prompt, ids in zip(body.prompt, prompts, strict=True):
            text = prompt if isinstance(prompt, str) else self._text_of_ids(ids, skip)
            echo = Echo(text, self._offsets(ids, skip) if body.logprobs is not None else ())
            echoes += [echo] * body.shown_per_prompt
        return echoes

    def _text_of_ids(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        detokenizer = self._new_detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def _offsets(self, ids: Sequence[int], skip: bool) -> tuple[tuple[int, int], ...]:
        """(id, characters before it)."""
        detokenizer, read, offsets = self._new_detokenizer(skip), 0, []
        for token in ids:
            offsets.append((token, read))
            read += len(detokenizer.push((token,)))
        return tuple(offsets)

    def _log_unknown(self, body: GenerationRequest) -> None:
        """Tell of a field that is ignored, once per name: it may be a typing error."""
        names = {name[:64] for name in body.unknown_fields()} - self._names_logged
        for name in sorted(names)[: MAX_NAMES_LOGGED - len(self._names_logged)]:
            self._names_logged.add(name)
            logger.warning("ignored the unknown request field %r", name)


def _card(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "fairstream",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }


def _version() -> str:
    try:
        return importlib.metadata.version("fairstream")
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        return "unknown"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
