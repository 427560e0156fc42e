from __future__ import annotations

import msgspec

from router.tenant import Tenant
from serve_app.telemetry.recent import FOUND, MOST, Ended, OwnRecent, Recent, merged
from serve_app.telemetry.records import RequestRecord


def ended(number: int, tenant: str = "a", name: str = "", source: str = "i") -> Ended:
    return Ended(source, number, tenant, (name or f"r{number}",), b"{}")


def record(name: str, tenant: str = "a", sequences: int = 1, status: int = 200) -> RequestRecord:
    scope = {"state": {"tenant": Tenant(id=tenant, keys=[])}, "method": "POST", "path": "/x"}
    made = RequestRecord(scope, name, status=status, complete=True)
    for _ in range(sequences):
        with made.sequence(prompt_tokens=1):
            pass
    return made


def test_a_flood_drives_out_its_own_requests() -> None:
    """Whoever has most loses the oldest; memory is bounded, the ids included."""
    recent = Recent(10)
    for number in range(3):
        recent.add(ended(number, "small"))
    for number in range(3, 1000):
        recent.add(ended(number, "flood"))
    assert len(recent) == 10
    assert all(recent.find(f"r{number}") for number in (0, 1, 2, *range(993, 1000)))
    assert not recent.find("r992")
    assert len(recent._of_ids) == 10
    for number in range(1000, 1100):
        recent.add(ended(number, f"t{number}"))
    assert len(recent) == len(recent._of_tenants) == len(recent._of_ids) == 10


def test_those_of_one_id_are_told_newest_first_and_not_all() -> None:
    recent = Recent(100)
    for number in range(500):
        recent.add(ended(number, name="same"))
    assert [each.number for each in recent.find("same")] == list(range(499, 499 - FOUND, -1))


def test_what_is_told_twice_is_known_once() -> None:
    recent = Recent()
    for source in ("i", "j", "i"):
        recent.add(ended(1, name="x", source=source))
    assert len(recent) == 2
    both = merged(recent.find("x"), [ended(1, name="x")], [ended(2, name="x")])
    assert [(each.source, each.number) for each in both] == [("j", 1), ("i", 1), ("i", 2)]


def test_admission_is_told_each_once_and_a_new_one_all() -> None:
    own = OwnRecent("i")
    for name in ("r1", "r2"):
        own.note(record(name))
    assert [each.ids for each in own.news()] == [("r1",), ("r2",)]
    own.told(own.news(), epoch=7)  # who had never answered before is told again
    own.told(own.news(), epoch=7)
    own.note(record("r3"))
    assert [each.ids for each in own.news()] == [("r3",)]
    assert [each.ids for each in own.news()] == [("r3",)]  # until it has answered
    own.told(own.news(), epoch=8)
    assert len(own.news()) == 3


def test_while_admission_is_away_no_more_is_kept_for_it_than_there_is_room_for() -> None:
    own = OwnRecent("i")
    for number in range(3 * MOST):
        own.note(record(f"r{number}"))
    assert len(own.news()) == MOST
    assert own.news()[-1].ids == (f"r{3 * MOST - 1}",)


def test_what_asked_for_no_tokens_and_was_answered_is_not_kept() -> None:
    own = OwnRecent("i")
    own.note(record("models", sequences=0))
    assert not own.find("models")
    own.note(record("broken", sequences=0, status=503))
    [found] = own.find("broken")
    told = msgspec.json.decode(found.told)
    assert (told["outcome"], told["status"], told["id"]) == ("refused", 503, "broken")
