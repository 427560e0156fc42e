"""What `GET /metrics` answers: the metrics of all processes as one text for Prometheus.

Each process tells its own; a label says whose they are. With vLLM's names, the same figures stand
there once more as dashboards and endpoint pickers look for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from serve_app.telemetry.instruments import Family

STALE_S = 15.0
"""Whoever has told nothing for so long is gone."""

_decoder = msgspec.msgpack.Decoder(list[Family])


class Source(NamedTuple):
    """A process, and what it has gathered (`Instruments.gather`)."""

    name: str
    labels: dict[str, str]
    """Of all its series, such as whose they are."""
    families: bytes


class Sources:
    """What processes have told last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, Source]] = {}

    def take(self, source: Source) -> None:
        self._told[source.name] = self._clock(), source
        oldest = self._clock() - STALE_S
        self._told = {name: told for name, told in self._told.items() if told[0] >= oldest}

    def others(self, name: str) -> list[Source]:
        """Of all that live but this one."""
        oldest = self._clock() - STALE_S
        return [one for at, one in self._told.values() if at >= oldest and one.name != name]


class Alias(NamedTuple):
    """A metric of ours under a name of vLLM's."""

    name: str
    only: Mapping[str, str] = {}
    """Of its series, those with these labels; which are left out."""
    labels: Mapping[str, str] = {}
    """Labels of ours that have another name there; all others go."""


OF_ENGINE = {"model": "model_name", "replica": "engine"}
OF_MODEL = {"model": "model_name"}
ALIASES: dict[str, list[Alias]] = {
    "fairstream_engine_requests": [
        Alias("vllm:num_requests_running", {"state": "running"}, OF_ENGINE),
        Alias("vllm:num_requests_waiting", {"state": "waiting"}, OF_ENGINE),
    ],
    "fairstream_kv_usage_ratio": [Alias("vllm:kv_cache_usage_perc", {}, OF_ENGINE)],
    "fairstream_cache_config_info": [
        Alias(
            "vllm:cache_config_info",
            {},
            OF_ENGINE | {"block_size": "block_size", "num_blocks": "num_gpu_blocks"},
        )
    ],
    "fairstream_preemptions": [Alias("vllm:num_preemptions", {}, OF_ENGINE)],
    "fairstream_engine_tokens": [
        Alias("vllm:prompt_tokens", {"kind": "prompt"}, OF_ENGINE),
        Alias("vllm:generation_tokens", {"kind": "output"}, OF_ENGINE),
        Alias("vllm:prefix_cache_hits", {"kind": "cached"}, OF_ENGINE),
        Alias("vllm:prefix_cache_queries", {"kind": "asked"}, OF_ENGINE),
    ],
    "fairstream_finished": [
        Alias("vllm:request_success", {}, OF_ENGINE | {"reason": "finished_reason"})
    ],
    "fairstream_first_token_seconds": [Alias("vllm:time_to_first_token_seconds", {}, OF_MODEL)],
    "fairstream_token_seconds": [
        Alias("vllm:request_time_per_output_token_seconds", {}, OF_MODEL),
        Alias("vllm:time_per_output_token_seconds", {}, OF_MODEL),
    ],
    "fairstream_gap_seconds": [Alias("vllm:inter_token_latency_seconds", {}, OF_MODEL)],
    "fairstream_request_seconds": [Alias("vllm:e2e_request_latency_seconds", {}, OF_MODEL)],
    "fairstream_phase_seconds": [
        Alias("vllm:request_queue_time_seconds", {"phase": "admission"}, OF_MODEL),
        Alias("vllm:request_prefill_time_seconds", {"phase": "prefill"}, OF_MODEL),
        Alias("vllm:request_decode_time_seconds", {"phase": "decode"}, OF_MODEL),
    ],
    "fairstream_request_tokens": [
        Alias("vllm:request_prompt_tokens", {"kind": "prompt"}, OF_MODEL),
        Alias("vllm:request_generation_tokens", {"kind": "output"}, OF_MODEL),
        Alias("vllm:request_max_num_generation_tokens", {"kind": "longest"}, OF_MODEL),
    ],
}
"""By our names; counters and histograms without what Prometheus puts behind them."""


def exposition(sources: Iterable[Source], vllm_names: bool = False) -> bytes:
    """The text, in UTF-8. Raises msgspec.MsgspecError for a source that cannot be read."""
    families = merged(sources)
    if vllm_names:
        families |= {each.name: each for each in _renamed(families)}
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    return generate_latest(registry)


def merged(sources: Iterable[Source]) -> dict[str, Metric]:
    """Families by name, of all sources. Raises msgspec.MsgspecError."""
    families: dict[str, Metric] = {}
    for source in sources:
        for name, kind, meaning, samples in _decoder.decode(source.families):
            family = families.setdefault(name, Metric(name, meaning, kind))
            for sample, labels, value in samples:
                # When a series began is of no use beside so many.
                if not sample.endswith("_created"):
                    family.add_sample(sample, labels | source.labels, value)
    return families


def _renamed(families: Mapping[str, Metric]) -> Iterator[Metric]:
    for name, aliases in ALIASES.items():
        if (ours := families.get(name)) is not None:
            for alias in aliases:
                yield _as(alias, ours)


def _as(alias: Alias, ours: Metric) -> Metric:
    """Series that are the same but for labels that go are summed."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in ours.samples:
        labels = dict(sample.labels)
        if all(labels.pop(key, None) == value for key, value in alias.only.items()):
            theirs = {new: labels[old] for old, new in alias.labels.items() if old in labels}
            theirs |= {"le": labels["le"]} if "le" in labels else {}
            key = alias.name + sample.name.removeprefix(ours.name), tuple(theirs.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    family = Metric(alias.name, ours.documentation, ours.type)
    for (name, pairs), value in sums.items():
        family.add_sample(name, dict(pairs), value)
    return family


class _Collected:
    """Families as prometheus_client collects them."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families.values()
