"""One text of what many processes tell; and the names that other tools know."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from replica.messages import Stats
from router.latencies import Latency
from router.ledger import Usage
from router.messages import GpuTime, Outcome
from router.snapshot import ReplicaSnapshot, Snapshot, TenantSnapshot
from router.tenant import Tenant
from serve_app.checks.metrics_reference import READY
from serve_app.telemetry.exposition import STALE_S, Source, Sources, exposition
from serve_app.telemetry.instruments import MAX_TENANTS, OTHER, Instruments
from serve_app.telemetry.metrics import AdmissionMetrics, IngressMetrics, ReplicaMetrics
from serve_app.telemetry.records import RequestRecord, SequenceRecord
from tests.router.world import Clock

VLLM_DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
]
"""What the queries of vLLM's example dashboard for Grafana ask for, each by `model_name`."""


def samples(*sources: Source, vllm_names: bool = False) -> list[Sample]:
    text = exposition(sources, vllm_names).decode()
    return [each for family in text_string_to_metric_families(text) for each in family.samples]


def values(found: list[Sample], name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {tuple(sorted(each.labels.items())): each.value for each in found if each.name == name}


def served(model: str = "m", tenant: str = "acme") -> RequestRecord:
    """Two sequences, of two and of three tokens."""
    record = RequestRecord({"state": {"tenant": Tenant(id=tenant, keys=[])}}, model=model)
    for tokens in (2, 3):
        with record.sequence(prompt_tokens=7) as sequence:
            for token in range(1, tokens + 1):
                sequence.tell(token, token * 0.04)
    return record


def admission(tenants: int = 1) -> AdmissionMetrics:
    shown = AdmissionMetrics()
    names = [f"t{number}" for number in range(tenants)]
    shown.observe(Latency("m", name, 0.2, 0.01) for name in names)
    usage = Usage(prompt_tokens=10, output_tokens=7)
    usage.outcomes[Outcome.SUCCEEDED] = 2
    one = TenantSnapshot(
        queued=1,
        running=1,
        virtual_times={"m": 5.0},
        held_back={"m": "fair_share"},
        rates_left={"tokens": 9},
        unspent_micro_dollars={"day": 2_000_000},
    )
    state = Snapshot(
        epoch=1,
        virtual_times={"m": 3.0},
        tenants=dict.fromkeys(names, one),
        replicas={"r": ReplicaSnapshot(model="m", slots=4, leases=1, kv_tokens=64, kv_held=16)},
        ingresses={},
        usage=dict.fromkeys(names, usage),
        waiting={"m": tenants},
    )
    for _ in range(2):
        shown.tell(state)
    return shown


def engine(name: str = "r") -> Source:
    shown = ReplicaMetrics(READY)
    stats = Stats(
        running=2, waiting=1, steps=5, prompt_tokens=3, output_tokens=4, finished={"stop": 1}
    )
    shown.tell(stats, GpuTime(requests=1.5))
    return Source(name, {"replica": name, "model": "m"}, shown.instruments.gather())


def ingress(name: str = "i", *records: RequestRecord) -> Source:
    shown = IngressMetrics()
    for record in records:
        shown.observe(record)
    shown.tell({("acme", "rate_limit_exceeded"): 3, ("", "invalid_api_key"): 2})
    return Source(name, {"ingress": name}, shown.instruments.gather())


def test_each_process_has_its_label_and_each_metric_one_head() -> None:
    text = exposition([ingress("i1"), ingress("i2"), engine()]).decode()
    assert text.count("# TYPE fairstream_refusals_total counter") == 1
    found = values(samples(ingress("i1"), ingress("i2")), "fairstream_refusals_total")
    assert {dict(key)["ingress"] for key in found} == {"i1", "i2"}
    assert sum(found.values()) == 10
    assert "_created" not in text


def test_what_a_tenant_has_left_and_why_it_waits() -> None:
    found = samples(Source("", {}, admission().instruments.gather()))
    tenant, of_m = ("tenant", "t0"), ("model", "m")
    assert values(found, "fairstream_rate_left") == {(("limit", "tokens"), tenant): 9}
    budgets = values(found, "fairstream_budget_left_dollars")
    assert budgets == {(("period", "day"), tenant): 2.0}
    held = values(found, "fairstream_held_back")
    assert {dict(key)["reason"]: value for key, value in held.items()} == {
        "concurrency": 0.0,
        "fair_share": 1.0,
        "capacity": 0.0,
        "no_replica": 0.0,
    }
    assert values(found, "fairstream_service_ahead") == {(of_m, tenant): 2.0}
    assert values(found, "fairstream_credits") == {(of_m,): 3.0}


def test_a_histogram_counts_each_gap_and_the_longest_answer() -> None:
    found = samples(ingress("i", served()))
    assert values(found, "fairstream_gap_seconds_count") == {
        (("ingress", "i"), ("model", "m")): 3.0
    }
    short = (("ingress", "i"), ("le", "0.05"), ("model", "m"))
    assert values(found, "fairstream_gap_seconds_bucket")[short] == 3.0
    sums = values(found, "fairstream_request_tokens_sum")
    assert {dict(key)["kind"]: value for key, value in sums.items()} == {
        "prompt": 14.0,
        "output": 5.0,
        "longest": 3.0,
    }


def test_ten_thousand_names_make_a_bounded_number_of_series() -> None:
    """And nothing that is counted is lost."""
    shown = IngressMetrics()
    for number in range(10_000):
        shown.observe(served(tenant=f"junk{number}"))
    shown.tell({(f"junk{number}", "x"): 1 for number in range(10_000)})
    many = samples(Source("i", {"ingress": "i"}, shown.instruments.gather()))
    few = samples(Source("", {}, admission(10_000).instruments.gather()))
    assert len(many) < 50 * (MAX_TENANTS + 1)
    assert len(few) < 60 * (MAX_TENANTS + 1)
    refusals = values(many, "fairstream_refusals_total")
    assert sum(refusals.values()) == 10_000
    assert refusals[("ingress", "i"), ("reason", "x"), ("tenant", OTHER)] == 10_000 - MAX_TENANTS
    requests = values(few, "fairstream_requests_total")
    assert sum(requests.values()) == 20_000
    assert OTHER not in {dict(key)["tenant"] for key in values(few, "fairstream_requests_waiting")}


def test_a_dashboard_of_vllm_finds_what_it_asks_for() -> None:
    sources = [Source("", {}, admission().instruments.gather()), engine(), ingress("i", served())]
    found = samples(*sources, vllm_names=True)
    for name in VLLM_DASHBOARD:
        assert {dict(key).get("model_name") for key in values(found, f"vllm:{name}")} == {"m"}, name
    assert not [each for each in samples(*sources) if each.name.startswith("vllm:")]


def test_an_endpoint_picker_finds_each_engine() -> None:
    """https://gateway-api-inference-extension.sigs.k8s.io, its model server protocol."""
    found = samples(engine("a"), engine("b"), vllm_names=True)
    for name, value in (("num_requests_waiting", 1), ("num_requests_running", 2)):
        assert values(found, f"vllm:{name}") == {
            (("engine", one), ("model_name", "m")): value for one in "ab"
        }
    [(config, one), _] = values(found, "vllm:cache_config_info").items()
    assert one == 1
    assert dict(config) == {
        "engine": "a",
        "model_name": "m",
        "block_size": "1",
        "num_gpu_blocks": "1",
    }


def test_series_that_differ_in_a_label_that_goes_are_one() -> None:
    found = samples(ingress("i", served(tenant="a"), served(tenant="b")), vllm_names=True)
    counts = values(found, "vllm:e2e_request_latency_seconds_count")
    assert counts == {(("model_name", "m"),): 2.0}


def test_who_has_said_nothing_for_a_while_is_left_out() -> None:
    clock = Clock()
    told = Sources(clock)
    for name in ("a", "b"):
        told.take(Source(name, {}, b""))
    assert [each.name for each in told.others("a")] == ["b"]
    clock.now += STALE_S - 1
    told.take(Source("a", {}, b""))
    clock.now += 2
    assert [each.name for each in told.others("c")] == ["a"]


def test_sums_of_many_under_one_label_do_not_hide_each_other() -> None:
    made = Instruments()
    counted = made.sum("fairstream_x", "x", "tenant")
    for total in (1, 2):
        counted.tell(total, "a", tenant=OTHER)
        counted.tell(total, "b", tenant=OTHER)
    found = samples(Source("", {}, made.gather()))
    assert values(found, "fairstream_x_total") == {(("tenant", OTHER),): 4.0}


def test_tokens_that_come_together_are_one_gap() -> None:
    record = RequestRecord()
    sequence = SequenceRecord(record, 1)
    sequence.tell(1, 10.0)
    sequence.tell(1, 11.0)
    sequence.tell(5, 12.0)
    assert sum(record.gaps.counts) == 1
    assert record.gaps.seconds == 2.0
    assert sequence.output_tokens == 5
