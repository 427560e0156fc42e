"""The ingress as Ray sees it: HTTP on one side, Admission and the replicas on the other.

It only connects the parts: routes (`api`), accounts (`admission_client`), data plane
(`step_streams`) and the fleet that joins the two.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware

from replica.model.loading import load_tokenizer
from router.messages import ReplicaReport, Sync, SyncReply
from router.tenant import Tenant, Tenants
from serve_app import logs, ray_private
from serve_app.fleet import background
from serve_app.fleet.admission_client import AdmissionClient, Hint, Notice
from serve_app.fleet.calls import answered
from serve_app.fleet.departure import LOOK_PERIOD_S, Departure, TurnAway
from serve_app.fleet.fleet import Fleet
from serve_app.fleet.liveness import LivenessCheck
from serve_app.fleet.membership import Membership
from serve_app.fleet.replica_link import Key
from serve_app.fleet.step_streams import StepStreams
from serve_app.fleet.timelines import WRITE_S, FleetTimelines, Timeline
from serve_app.http.admin import AdminApi
from serve_app.http.api import create_app
from serve_app.http.disconnects import Disconnects
from serve_app.http.live_page import LivePage
from serve_app.http.metrics_page import MetricsPage
from serve_app.http.models import Offer
from serve_app.http.rate_headers import RateHeaders
from serve_app.protocol.backend import ShuttingDown
from serve_app.settings import AppConfig, ModelConfig, has_opentelemetry, key_secret
from serve_app.telemetry import records
from serve_app.telemetry.exposition import Source, exposition
from serve_app.telemetry.live import LiveFigures
from serve_app.telemetry.metrics import PERIOD_S, IngressMetrics
from serve_app.telemetry.recent import OwnRecent, merged
from serve_app.telemetry.records import Records, RequestRecord
from serve_app.telemetry.spans import Spans

logger = logging.getLogger(__name__)

CALL_S = 2.0


@serve.ingress()
class Ingress:
    """One HTTP front end. Everything runs on one event loop."""

    def __init__(
        self,
        config: AppConfig,
        admission: DeploymentHandle,
        replicas: dict[str, DeploymentHandle],
    ) -> None:
        """replicas: by name of the model that they serve."""
        logs.start(records.context)
        self._config = config
        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._tenants = _load(config)
        self._packed = b""
        """What Admission told last of them."""
        self._unpacking: asyncio.Task[None] | None = None
        self._key_secret = key_secret()
        self._notice_version = (0, 0)
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._admission = ray_private.unary(admission)
        self._departure = Departure(self._name, config.grace_s)
        self._membership = Membership(self._departure.learn)
        self._client = AdmissionClient(
            self._name,
            sync=self._sync,
            watch=self._watch_admission,
            on_notice=self._take,
            answers=lambda: self._departure.answers,
        )
        self._calls = {model: _Calls(handle) for model, handle in replicas.items()}
        self._streams = {
            model: StepStreams(self._name, calls, partial(self._withdraw, model), self._client)
            for model, calls in self._calls.items()
        }
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._metrics, self._recent = IngressMetrics(), OwnRecent(self._name)
        self._spans = _spans(config, self._name)
        self._watch = background.start(self._watch_departure(), "departure")
        self._telling = background.start(self._tell_metrics(), "metrics")
        self._client.start()
        LivenessCheck(self._check).start()

    async def __del__(self) -> None:
        """Serve calls this once, at an orderly end."""
        if (spans := getattr(self, "_spans", None)) is not None:
            await asyncio.to_thread(spans.close)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, after the constructor."""
        app = await self._build_api()
        # What is here now stays. To look through it again holds up every stream for 0.1 s.
        gc.collect()
        gc.freeze()
        return app

    async def _build_api(self) -> FastAPI:
        """Serve's proxy adds X-Request-ID."""
        offers = [await self._offer(model) for model in self._config.served]
        find, layers = self._find_tenant, self._layers()
        return create_app(
            offers,
            find,
            self._config.api,
            tag_requests=False,
            layers=layers,
            refused=self._client.early_refusals.refused,
        )

    def _layers(self) -> list[Middleware]:
        layers = [
            Middleware(Disconnects),
            Middleware(RateHeaders, limits_of=self._client.rate_limits),
        ]
        if self._config.admin_keys:
            figures = LiveFigures(self._sources, background.start, lambda: self._departure.leaves)
            live = Middleware(LivePage, is_admin=self._config.is_admin, figures=figures)
            layers.insert(0, live)  # where it hears of clients that hang up
            admin = Middleware(
                AdminApi,
                is_admin=self._config.is_admin,
                tenants=self._admission.tenant_states.remote,
                usage=self._admission.usage.remote,
                scaling=self._admission.scaling.remote,
                requests=self._admission.open_requests.remote,
                request=self._find_request,
                pause=self._admission.pause_tenant.remote,
                stop=self._admission.stop_request.remote,
                trace=FleetTimelines(self._streams, self._trace).record,
            )
            layers.append(admin)
        if self._config.admin_keys or self._config.metrics_from:
            page = Middleware(
                MetricsPage,
                is_admin=self._config.is_admin,
                allowed=self._config.metrics_from,
                text=self._exposition,
            )
            layers.append(page)
        recorded = Middleware(
            Records,
            refusals=self._refusals,
            request_id=ray_private.request_id,
            observe=self._take_note,
        )
        return [*layers, Middleware(TurnAway, departure=self._departure), recorded]

    async def _offer(self, model: ModelConfig) -> Offer:
        streams = self._streams[model.name]
        fleet = Fleet(model.name, self._client, streams, sleeps=model.sleeps)
        # Large tokenizers take seconds each. The loop lives meanwhile, as the self-check wants.
        return await asyncio.to_thread(_load_offer, model, fleet)

    def _check(self) -> None:
        """Raises RuntimeError when this ingress can no longer be granted anything."""
        self._client.raise_if_dead()
        self._membership.raise_if_dead()
        if self._watch.done():
            raise RuntimeError("this ingress would not end what runs when it has to go")

    async def _watch_departure(self) -> None:
        while True:
            if self._departure.late:
                self._shut_down()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _tell_metrics(self) -> None:
        while True:
            news = self._recent.news()
            try:
                call = self._admission.take_metrics.remote(self._measured(), news)
                self._recent.told(news, await answered(call, CALL_S))
            except Exception as error:
                logger.debug("Admission did not take the metrics: %r", error)
            await asyncio.sleep(PERIOD_S)

    def _take_note(self, record: RequestRecord) -> None:
        """A request is over."""
        self._recent.note(record)
        if record.sequences:
            self._metrics.observe(record)
        if self._spans is not None:
            try:
                self._spans.note(record)
            except Exception:  # of others' code, and no reason to break an answer
                logger.exception("No more spans are sent")
                self._spans = None

    async def _find_request(self, name: str) -> list[dict[str, Any]]:
        """Of this process alone while Admission is away."""
        unfinished: list[dict[str, Any]] = []
        found = self._recent.find(name)
        try:
            elsewhere, unfinished = await answered(
                self._admission.find_request.remote(name), CALL_S
            )
            found = merged(found, elsewhere)
        except Exception as error:
            logger.warning("Admission could not be asked for a request: %r", error)
        over: list[dict[str, Any]] = [msgspec.json.decode(each.told) for each in found]
        return unfinished + sorted(over, key=lambda each: -each["ended_at"])

    def _measured(self) -> Source:
        self._metrics.tell(self._refusals)
        families = self._metrics.instruments.gather()
        return Source(self._name, {"ingress": self._name}, families)

    async def _exposition(self) -> bytes:
        sources = await self._sources()
        return await asyncio.to_thread(exposition, sources, self._config.vllm_metrics)

    async def _sources(self) -> list[Source]:
        """Of this process alone while Admission is away."""
        sources = [self._measured()]
        try:
            sources += await answered(self._admission.metrics.remote(self._name), CALL_S)
        except Exception as error:
            logger.warning("Metrics are of this ingress alone, Admission did not answer: %r", error)
        return sources

    async def _trace(self, model: str, replica: str, steps: int, seconds: float) -> Timeline:
        call = self._calls[model].trace(replica, steps, seconds)
        try:
            return await answered(call, seconds + 2 * WRITE_S)
        except ReplicaUnavailableError:
            return Timeline("unknown")

    def _shut_down(self) -> None:
        """End all that waits or runs: in a moment this process is gone."""
        self._client.fail(ShuttingDown())
        for streams in self._streams.values():
            streams.fail(ShuttingDown())

    async def _sync(self, sync: Sync) -> SyncReply:
        reply = await self._admission.sync.remote(msgspec.msgpack.encode(sync))
        return msgspec.msgpack.decode(reply, type=SyncReply)

    async def _watch_admission(self) -> Hint:
        paused = self._client.orders.paused
        hint: Hint = await self._admission.watch.remote(self._name, self._notice_version, paused)
        return hint

    def _find_tenant(self, key: str | None) -> Tenant | None:
        return self._tenants.find_by_key(key, self._key_secret)

    def _take(self, notice: Notice) -> None:
        self._notice_version = notice.version
        if notice.tenants != self._packed:
            self._packed = notice.tenants
            self._unpacking = background.start(self._unpack(notice.tenants), "tenants")
        if notice.closed:
            self._departure.dismiss()
        against = self._client.obey(notice.orders)
        for streams in self._streams.values():
            streams.stop(against)
        for replica, model in notice.replicas.items():
            if model in self._streams:
                self._streams[model].connect(replica)

    async def _unpack(self, packed: bytes) -> None:
        tenants = await asyncio.to_thread(pickle.loads, packed)
        if packed is self._packed:  # no later ones have come
            self._tenants = tenants

    def _withdraw(self, model: str, replica: str) -> None:
        """Let Admission grant nothing at a replica that takes nothing. If it does, its next
        report says so."""
        report = ReplicaReport(replica=replica, slots=0, kv_tokens=0, model=model)
        task = background.start(self._report(report), f"withdraw-{replica}")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _report(self, report: ReplicaReport) -> None:
        await self._admission.report.remote(report)


def _load(config: AppConfig) -> Tenants:
    """The tenants in the file; none if it cannot be read: Admission sends the valid ones soon."""
    try:
        return config.tenants_source.load()
    except (OSError, ValueError) as error:
        logger.error("The tenants cannot be read; Admission's are waited for: %s", error)
        return Tenants(tenants=[])


def _spans(config: AppConfig, process: str) -> Spans | None:
    """None where nobody wants spans, or none can be sent: a variable of the whole cluster is no
    reason not to start."""
    if (url := config.spans_url) is None:
        return None
    if not has_opentelemetry():
        logger.warning("No spans are sent: pip install 'fairstream[otel]'")
        return None
    try:
        return Spans(url, process)
    except Exception:
        logger.exception("No spans are sent")
        return None


def _load_offer(model: ModelConfig, fleet: Fleet) -> Offer:
    tokenizer = load_tokenizer(model.engine.model, model.engine.revision)
    return Offer(model.name, fleet, tokenizer, model.aliases, model.reasoning)


class _Calls:
    """`ReplicaCalls` over a Serve handle; `Placement` finds the replica by its name."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._unary = ray_private.unary(replicas)
        self._stream = self._unary.options(stream=True)

    async def submit(self, replica: str, ingress: str, submits: list[bytes]) -> None:
        await self._unary.submit.remote(replica, ingress, submits)

    async def abort(self, replica: str, ingress: str, keys: list[Key]) -> None:
        await self._unary.abort.remote(replica, ingress, keys)

    async def trace(self, replica: str, steps: int, seconds: float) -> Timeline:
        found: Timeline = await self._unary.trace.remote(replica, steps, seconds)
        return found

    async def steps(
        self, replica: str, ingress: str, offsets: dict[Key, int]
    ) -> AsyncGenerator[bytes, None]:
        response = self._stream.steps.remote(replica, ingress, offsets)
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()
