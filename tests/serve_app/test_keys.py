from __future__ import annotations

import pytest

from router.tenant import Tenant, Tenants, digest
from serve_app.keys import main


@pytest.mark.parametrize("secret", ["", "pepper"])
def test_a_new_key_is_shown_with_the_digest_that_knows_it(
    secret: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRSTREAM_KEY_SECRET", secret)
    keys = []
    for _ in range(2):
        main(["new", "acme"])
        lines = capsys.readouterr().out.splitlines()
        assert "acme" in lines[0]
        key, written = lines[1].strip(), lines[3].strip(' -"')
        keys.append(key)
        tenants = Tenants(tenants=[Tenant(id="acme", keys=[written])])
        assert tenants.find_by_key(key, secret.encode()) is not None
        assert written == digest(key, secret.encode())
    assert keys[0] != keys[1]
    assert min(map(len, keys)) >= 40


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["delete", "acme"])
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "x" * 129, "\udcff"])
def test_a_name_that_no_tenant_can_have_gets_no_key(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["new", name])
    told = capsys.readouterr()
    assert "a name has 1 to 128 characters" in told.err
    assert told.out == ""
