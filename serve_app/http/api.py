"""The routes of OpenAI's API over the models that are offered.

`create_app` makes the whole HTTP application. It knows no Ray: what generates and who may ask are
handed in.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware

from router.tenant import Tenant
from serve_app.http.answers import Answer
from serve_app.http.auth import BearerAuth, FindTenant
from serve_app.http.body import Bodies
from serve_app.http.choices import Choice
from serve_app.http.cors import cross_origin
from serve_app.http.deadline import TimeLimit, within
from serve_app.http.edge import Edge
from serve_app.http.formats import ChatFormat, CompletionFormat, Echo, EndpointFormat, ShownLogprobs
from serve_app.http.models import Offer, Offers
from serve_app.http.openapi import document
from serve_app.http.pacing import Pace
from serve_app.http.parameters import check_ids, check_prompt, check_prompt_logprobs, sampling
from serve_app.http.replies import Reply
from serve_app.http.streaming import EventStream, PlainAnswer
from serve_app.protocol import errors
from serve_app.protocol.backend import Generation, ServedModel, Unavailable
from serve_app.protocol.errors import invalid, too_long
from serve_app.protocol.fields import Prompt
from serve_app.protocol.limits import Limits
from serve_app.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from serve_app.telemetry import records
from serve_app.text.grammar_trial import GrammarTrial, Try
from serve_app.text.grammars import grammar_of
from serve_app.text.sequence_text import SequenceText
from serve_app.text.tool_calls import ToolCallReader
from serve_app.throttling.call_rate import CallRate
from serve_app.throttling.early_refusals import RefusedNow, RefuseEarly
from serve_app.throttling.fair_work import FairWork, Run
from serve_app.throttling.refusal_limit import RefusalLimit

logger = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 1000
JSON = "application/json"


def create_app(
    offers: Iterable[Offer],
    find_tenant: FindTenant,
    limits: Limits,
    tag_requests: bool = True,
    layers: Sequence[Middleware] = (),
    refused: RefusedNow = lambda tenant, queued: None,
) -> FastAPI:
    """The application. `tag_requests=False` leaves X-Request-ID to a proxy that adds it. layers:
    around all that, from the inside out. refused: asked before a body is read."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api = Api(Offers(offers), limits)
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
    app.add_middleware(RefuseEarly, refused=refused)
    refusal_limit = RefusalLimit(limits.refusals_per_minute)
    app.add_middleware(BearerAuth, find_tenant=find_tenant, refusal_limit=refusal_limit)
    app.add_middleware(Edge, tag=tag_requests)
    for layer in (*layers, *cross_origin(limits.cors_origins)):
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    return app


class Api:
    """The handlers of the routes."""

    def __init__(self, offers: Offers, limits: Limits) -> None:
        self._offers = offers
        self._limits = limits
        self._work = FairWork("long texts and log probabilities", threads=2, max_waiting=256)
        self._bodies = Bodies(limits.max_body_bytes)
        self._trial = GrammarTrial()
        self._calls = CallRate()
        self._pace = Pace(limits.max_chunk_delay_ms / 1000)
        self._names_logged: set[str] = set()

    async def health(self) -> Response:
        """The process answers; it says nothing of the models."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """200 while every model can serve, else 503."""
        for offer in self._offers:
            await offer.backend.check_ready()
        return _json({"status": "ready"})

    async def list_models(self, request: Request) -> Response:
        """The models that the tenant may use and that can serve now; 503 if none of them can."""
        tenant = request.state.tenant

        async def cards(offer: Offer) -> list[dict[str, object]] | Unavailable:
            try:
                model = await offer.model(tenant)
            except Unavailable as unavailable:
                return unavailable
            return [_card(model, name) for name in offer.names]

        # At once: each waits for seconds for a model that nobody has seen yet.
        found = await asyncio.gather(*map(cards, self._offers.of(tenant)))
        there = [card for each in found if isinstance(each, list) for card in each]
        missing = next((each for each in found if isinstance(each, Unavailable)), None)
        if missing is not None and not there:
            raise missing
        return _json({"object": "list", "data": there})

    async def show_model(self, request: Request, name: str) -> Response:
        tenant = request.state.tenant
        return _json(_card(await self._offers.find(name, tenant).model(tenant), name))

    async def version(self) -> Response:
        return _json({"version": _version()})

    async def tokenize(self, request: Request) -> Response:
        tenant = request.state.tenant
        self._calls.take(tenant)
        body = await self._bodies.read(request, TokenizeRequest)
        offer = self._offers.find(body.model, tenant)
        model = await offer.model(tenant)
        run, param = self._run(request), "messages"
        if body.messages is not None:
            _, ids = await offer.encoder.chat(body.messages, model.max_model_len, run=run)
        else:
            param = "prompt"
            ids = await offer.encoder.text(
                body.prompt or "",
                model.max_model_len,
                add_special_tokens=body.add_special_tokens is not False,
                run=run,
            )
        if len(ids) > model.max_model_len:
            raise too_long(len(ids), model.max_model_len, param)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        tenant = request.state.tenant
        self._calls.take(tenant)
        body = await self._bodies.read(request, DetokenizeRequest)
        offer = self._offers.find(body.model, tenant)
        model = await offer.model(tenant)
        if len(body.tokens) > model.max_model_len:
            raise invalid(f"tokens must be at most {model.max_model_len}", "tokens")
        check_ids(body.tokens, model, "tokens")
        read = partial(_detokenized, offer, body.tokens, self._limits.max_body_bytes)
        return Response(await self._work.ask(tenant.id, read), media_type=JSON)

    async def chat_completions(self, request: Request) -> Response:
        limit = TimeLimit(request.headers)
        with within(limit.left_s):
            answer, body = await self._chat(request)
        return self._respond(answer, body, limit)

    async def completions(self, request: Request) -> Response:
        limit = TimeLimit(request.headers)
        with within(limit.left_s):
            answer, body = await self._completion(request)
        return self._respond(answer, body, limit)

    def _respond(self, answer: Answer, body: GenerationRequest, limit: TimeLimit) -> Response:
        if body.stream:
            return EventStream(answer.events(body.include_usage, self._pace, limit.left_s))
        return PlainAnswer(answer.whole, limit.left_s)

    async def _chat(self, request: Request) -> tuple[Answer, ChatRequest]:
        body = await self._bodies.read(request, ChatRequest)
        offer = self._offer_for(body, request, prompts=1)
        model = await offer.model(request.state.tenant)
        tools = body.offered_tools
        tags = None if body.is_bound else offer.reasoning
        form = offer.encoder.call_form
        if tags or body.structure:
            form = form.marked()
        # Before large tools are written down.
        run = self._run(request)
        grammar = await grammar_of(body, model, self._try(request), run, form)
        text, prompt_ids = await offer.encoder.chat(
            body.messages, model.max_model_len, tools, body.chat_template_kwargs, run
        )
        prompts = [check_prompt(prompt_ids, model, "messages")]
        names = [tool.name for tool in tools]
        new_caller = partial(
            ToolCallReader,
            form,
            names,
            only_calls=body.tool_mode != "auto",
            only_first=body.structure is not None,
        )
        endpoint = ChatFormat(
            _shown_logprobs(offer, body),
            new_caller=new_caller if tools else None,
            reasoning=tags,
            thinking=tags is not None and tags.is_open(text),
        )
        return self._answer(request, body, offer, model, prompts, endpoint, grammar), body

    async def _completion(self, request: Request) -> tuple[Answer, CompletionRequest]:
        body = await self._bodies.read(request, CompletionRequest)
        offer = self._offer_for(body, request, len(body.prompt))
        model = await offer.model(request.state.tenant)
        run = self._run(request)
        prompts = [await _prompt_ids(prompt, offer, model, run) for prompt in body.prompt]
        grammar = await grammar_of(body, model, self._try(request), run)
        echoes = await run(partial(_echoes, offer, body, prompts)) if body.echo else ()
        endpoint = CompletionFormat(_shown_logprobs(offer, body), echoes)
        return self._answer(request, body, offer, model, prompts, endpoint, grammar), body

    def _run(self, request: Request) -> Run:
        """Does what takes long, in the tenant's turn."""
        return partial(self._work.ask, request.state.tenant.id)

    def _try(self, request: Request) -> Try:
        return partial(self._trial.error, request.state.tenant.id)

    def _offer_for(self, body: GenerationRequest, request: Request, prompts: int) -> Offer:
        """The model that the request names.

        Raises ApiError if there is no such model, or for more sequences than are allowed.
        """
        self._log_unknown(body)
        tenant: Tenant = request.state.tenant
        offer = self._offers.find(body.model, tenant)
        if body.choices_per_prompt > self._limits.max_choices:
            name = "n" if body.shown_per_prompt > self._limits.max_choices else "best_of"
            raise invalid(f"{name} must be at most {self._limits.max_choices}", name)
        if prompts * body.choices_per_prompt > self._limits.max_sequences:
            message = f"prompts times n must be at most {self._limits.max_sequences}"
            raise invalid(message, "prompt")
        places = tenant.max_concurrency + tenant.max_queued
        if prompts * body.choices_per_prompt > places:
            message = f"prompts times n is more than the {places} that may run and wait at once"
            raise invalid(message, "prompt" if prompts > 1 else "n")
        return offer

    def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        offer: Offer,
        model: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        endpoint: EndpointFormat,
        grammar: str,
    ) -> Answer:
        """n choices for each prompt. What can be refused has been when this returns."""
        check_prompt_logprobs(body, prompts)
        reply = Reply(endpoint, model.name)
        record = records.current()
        record.answer_id, record.stream = reply.id, bool(body.stream)
        record.choices = body.choices_per_prompt
        choices: list[Choice] = []
        bad = offer.encoder.bad_tokens(body.bad_words)
        alone = len(prompts) * body.choices_per_prompt == 1
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
                    group="" if alone else reply.id,
                )
                text = _new_text(offer, body)
                choices.append(Choice(index, generation, text, silent=body.no_output))
        request.state.checked = True  # see `serve_app.throttling.refusal_limit`
        run = partial(self._work.run, request.state.tenant.id)
        return Answer(offer.backend, choices, len(prompts), body.shown_per_prompt, reply, run)

    def _log_unknown(self, body: GenerationRequest) -> None:
        """Tell of a field that is ignored, once per name: it may be a typing error."""
        names = {name[:64] for name in body.unknown_fields()[:MAX_NAMES_LOGGED]}
        room = MAX_NAMES_LOGGED - len(self._names_logged)
        for name in sorted(names - self._names_logged)[:room]:
            self._names_logged.add(name)
            logger.warning("ignored the unknown request field %r", name)


async def _prompt_ids(
    prompt: Prompt, offer: Offer, model: ServedModel, run: Run
) -> tuple[int, ...]:
    """Raises ApiError for a prompt that cannot be run."""
    if isinstance(prompt, str):
        ids = await offer.encoder.text(prompt, model.max_model_len, run=run)
        return check_prompt(ids, model, "prompt")
    return check_prompt(prompt, model, "prompt")


def _detokenized(offer: Offer, ids: Sequence[int], max_bytes: int) -> bytes:
    """The answer. Raises ApiError for one of more bytes."""
    text = offer.text_of(ids, skip_special_tokens=False)
    if len(text) <= max_bytes and len(answer := msgspec.json.encode({"prompt": text})) <= max_bytes:
        return answer
    raise invalid(f"tokens stand for more than {max_bytes} bytes of text", "tokens")


def _new_text(offer: Offer, body: GenerationRequest) -> SequenceText:
    calls = isinstance(body, ChatRequest) and bool(body.offered_tools)
    return SequenceText(
        offer.new_detokenizer(body.skip_special_tokens is not False, marks=calls),
        stops=body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
    )


def _shown_logprobs(offer: Offer, body: GenerationRequest) -> ShownLogprobs:
    return ShownLogprobs(
        offer.token_texts,
        sampled=body.alternatives is not None,
        prompt=body.prompt_logprobs is not None,
    )


def _echoes(
    offer: Offer, body: CompletionRequest, prompts: Sequence[tuple[int, ...]]
) -> list[Echo]:
    """What each choice that is shown begins with: its prompt."""
    echoes: list[Echo] = []
    skip = body.skip_special_tokens is not False
    for prompt, ids in zip(body.prompt, prompts, strict=True):
        text = prompt if isinstance(prompt, str) else offer.text_of(ids, skip_special_tokens=skip)
        told = body.logprobs is not None
        offsets = offer.offsets(ids, skip_special_tokens=skip) if told else ()
        echoes += [Echo(text, offsets)] * body.shown_per_prompt
    return echoes


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
