import hashlib
import hmac

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router import tenant as tenant_module
from router.tenant import Tenant, Tenants, digest, load_tenants

DIGEST = digest("sk-one")


def test_a_digest_is_the_tagged_sha256_of_the_key():
    assert digest("sk-one") == "sha256:" + hashlib.sha256(b"sk-one").hexdigest()


def test_a_key_finds_its_tenant():
    tenants = Tenants(
        tenants=[
            Tenant(id="one", keys=[DIGEST, digest("sk-old")]),
            Tenant(id="two", keys=[digest("sk-two")]),
        ]
    )
    found = {key: tenants.find_by_key(key) for key in ("sk-one", "sk-old", "sk-two")}
    assert {key: tenant.id for key, tenant in found.items() if tenant} == {
        "sk-one": "one",
        "sk-old": "one",
        "sk-two": "two",
    }


@pytest.mark.parametrize("key", ["", "sk-on", "sk-one ", DIGEST, "é", "\ud83d", "x" * 100_000])
def test_an_unknown_or_malformed_key_finds_nobody(key):
    """R41: no exception tells one kind of wrong key from another."""
    assert Tenants(tenants=[Tenant(id="one", keys=[DIGEST])]).find_by_key(key) is None


def test_a_wrong_key_costs_what_an_unknown_one_does(monkeypatch):
    """R41: the same digests and one comparison in constant time, whatever was presented."""
    tenants = Tenants(
        tenants=[Tenant(id=str(i), keys=[digest(f"a{i}"), digest(f"b{i}", b"s")]) for i in range(5)]
    )
    calls = []
    compare, hashed = hmac.compare_digest, digest
    monkeypatch.setattr(
        "router.tenant.hmac.compare_digest", lambda a, b: calls.append("compare") or compare(a, b)
    )
    monkeypatch.setattr("router.tenant.digest", lambda *key: calls.append("digest") or hashed(*key))
    for key in ("a0", "b4", "a", "unknown", "\ud83d"):
        calls.clear()
        tenants.find_by_key(key, b"s")
        assert sorted(calls) == ["compare"] * 2 + ["digest"] * 2


def test_a_keyed_digest_belongs_to_its_secret():
    tenants = Tenants(tenants=[Tenant(id="one", keys=[digest("sk-one", b"secret")])])
    assert digest("sk-one", b"secret").startswith("hmac-sha256:")
    assert tenants.find_by_key("sk-one", b"secret").id == "one"
    assert tenants.find_by_key("sk-one", b"another") is None
    assert tenants.find_by_key("sk-one") is None


def test_no_key_at_all_is_the_anonymous_tenant_if_there_is_one():
    assert Tenants(tenants=[Tenant(id="one")]).find_by_key(None) is None
    tenants = Tenants(tenants=[Tenant(id="one"), Tenant(id="guest", anonymous=True)])
    assert tenants.find_by_key(None).id == "guest"
    assert tenants.find_by_key("") is None
    with pytest.raises(ValidationError, match="more than one tenant is anonymous"):
        Tenants(tenants=[Tenant(id="x", anonymous=True), Tenant(id="y", anonymous=True)])


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_salts_are_equal_only_within_a_tenant_or_a_group(one, two):
    """C37: the name of a tenant and the same name of a group are two domains."""
    tenant, grouped = Tenant(id=one), Tenant(id=two, prefix_group=one)
    assert tenant.cache_salt != grouped.cache_salt
    assert (tenant.cache_salt == Tenant(id=two).cache_salt) == (one == two)
    assert grouped.cache_salt == Tenant(id=two + "x", prefix_group=one).cache_salt


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"id": 1},
        {"keys": ["sk-plain"]},
        {"keys": [DIGEST.upper()]},
        {"keys": [DIGEST + "\n"]},
        {"weight": 0},
        {"weight": float("inf")},
        {"weight": float("nan")},
        {"max_concurrency": 0},
        {"max_concurrency": True},
        {"max_queued": -1},
        {"prefix_group": ""},
        {"band": 4},
        {"burst": -1.0},
        {"requests_per_minute": 0},
        {"tokens_per_minute": 1.5},
        {"tokens_per_minute": 10**20},
        {"requests_per_minute": 10**400},
        {"daily_budget": -0.01},
        {"monthly_budget": float("nan")},
        {"time_zone": "Mars/Olympus"},
        {"time_zone": "../../etc/passwd"},
        {"max_context": 0},
        {"models": [""]},
        {"max_wait_s": 0.0},
        {"slo": {"ttft": 1}},
        {"colour": "red"},
    ],
)
def test_a_wrong_field_is_refused_by_name(fields):
    with pytest.raises(ValidationError) as error:
        Tenant.model_validate({"id": "one", **fields})
    assert error.value.errors()[0]["loc"][0] == next(iter(fields))


def test_ids_and_digests_are_unique():
    with pytest.raises(ValidationError, match="'one' appears twice"):
        Tenants(tenants=[Tenant(id="one"), Tenant(id="one")])
    with pytest.raises(ValidationError, match=r"digest of tenant 'two' appears twice"):
        Tenants(tenants=[Tenant(id="one", keys=[DIGEST]), Tenant(id="two", keys=[DIGEST])])


def test_tenants_load_from_a_file(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text(
        f"tenants:\n- id: one\n  keys: ['{DIGEST}']\n  weight: 3\n- {{id: two, max_queued: 0}}\n"
    )
    one, two = load_tenants(path).tenants
    assert (one.weight, one.keys, two.max_queued) == (3.0, [DIGEST], 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tenants:\n- id: one\n  wieght: 2\n", "line 3: tenants.0.wieght: Extra inputs"),
        (
            "tenants:\n- id: one\n  max_queued: many\n",
            "line 3: tenants.0.max_queued: Input should be",
        ),
        ("tenants:\n- id: one\n- id: one\n", "'one' appears twice"),
        ("- id: one\n", "line 1: file: Input should be"),
        ("", "line 1: file: Input should be"),
        ("tenants: [\n", "line 2: not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_field(tmp_path, content, message):
    path = tmp_path / "tenants.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tenants\.yaml") as error:
        load_tenants(path)
    assert message in str(error.value)


def test_a_message_about_a_wrong_file_quotes_no_key(tmp_path):
    """R41"""
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n- id: one\n  keys: [sk-secret]\n")
    with pytest.raises(ValueError, match="keys") as error:
        load_tenants(path)
    assert "sk-secret" not in str(error.value)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_tenants(tmp_path / "none.yaml")


def test_a_file_is_read_by_the_parser_in_c():
    """Ten thousand tenants take seconds otherwise; nearly every build of PyYAML has it."""
    assert tenant_module._YAML is yaml.CSafeLoader
