import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.lazy_sorted_list import LazySortedList


def order_over(keys):
    return LazySortedList(keys.__getitem__, lambda item: item in keys)


def test_equal_keys_come_in_the_order_of_their_arrival():
    keys = dict.fromkeys("cab", 1.0)
    order = order_over(keys)
    for item in keys:
        order.touch(item)
    assert [order.pop() for _ in keys] == ["c", "a", "b"]
    with pytest.raises(IndexError):
        order.pop()


def test_an_item_that_falls_over_and_over_has_one_place():
    keys = {"a": 0.0, "b": -1e9}
    order = order_over(keys)
    order.touch("b")
    for _ in range(1000):
        keys["a"] -= 1.0
        order.touch("a")
    assert len(order) == 2
    assert order.pop() == "b"
    assert order.pop() == "a"


ITEMS = st.integers(0, 5)
CHANGES = st.one_of(
    st.tuples(st.just("set"), ITEMS, st.integers(-3, 3)),
    st.tuples(st.just("remove"), ITEMS, st.just(0)),
    st.tuples(st.just("pop"), ITEMS, st.just(0)),
)


@given(st.lists(CHANGES, max_size=60))
def test_the_smallest_live_key_is_on_top_whatever_changed(changes):
    keys: dict[int, float] = {}
    order = order_over(keys)
    for change, item, value in changes:
        if change == "set":
            falls = value < keys.get(item, 10)
            keys[item] = value
            if falls:
                order.touch(item)
        elif change == "remove":
            keys.pop(item, None)
        elif keys:
            top = order.pop()
            least = min(keys.values())
            assert keys.pop(top) == least
        top = order.peek()
        assert (top is None) == (not keys)
        assert top is None or keys[top] == min(keys.values())
        nearest = sorted(value for value in keys.values() if value <= min(keys.values()) + 2)
        assert [keys[item] for item in order.first(3, span=2)] == nearest[:3]
        assert order.peek() == top


def test_looking_at_equals_changes_nothing_in_their_order():
    keys = dict.fromkeys("cabd", 1.0)
    order = order_over(keys)
    for item in keys:
        order.touch(item)
    assert order.first(2) == order.first(2) == ["c", "a"]
    keys["c"] = 3.0
    assert order.first(9) == ["a", "b", "d", "c"]
    assert order.first(9, span=1.5) == ["a", "b", "d"]
