import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.lazy_heap import LazyHeap


def heap_over(keys):
    return LazyHeap(keys.__getitem__, lambda item: item in keys)


def test_equal_keys_come_in_the_order_of_their_arrival():
    keys = dict.fromkeys("cab", 1.0)
    heap = heap_over(keys)
    for item in keys:
        heap.touch(item)
    assert [heap.pop() for _ in keys] == ["c", "a", "b"]
    with pytest.raises(IndexError):
        heap.pop()


def test_an_item_that_falls_over_and_over_does_not_fill_the_heap():
    keys = {"a": 0.0, "b": -1e9}
    heap = heap_over(keys)
    heap.touch("b")
    for _ in range(1000):
        keys["a"] -= 1.0
        heap.touch("a")
    assert len(heap) < 30
    assert heap.pop() == "b"
    assert heap.pop() == "a"


ITEMS = st.integers(0, 5)
CHANGES = st.one_of(
    st.tuples(st.just("set"), ITEMS, st.integers(-3, 3)),
    st.tuples(st.just("remove"), ITEMS, st.just(0)),
    st.tuples(st.just("pop"), ITEMS, st.just(0)),
)


@given(st.lists(CHANGES, max_size=60))
def test_the_smallest_live_key_is_on_top_whatever_changed(changes):
    keys: dict[int, float] = {}
    heap = heap_over(keys)
    for change, item, value in changes:
        if change == "set":
            falls = value < keys.get(item, 10)
            keys[item] = value
            if falls:
                heap.touch(item)
        elif change == "remove":
            keys.pop(item, None)
        elif keys:
            top = heap.pop()
            least = min(keys.values())
            assert keys.pop(top) == least
        top = heap.peek()
        assert (top is None) == (not keys)
        assert top is None or keys[top] == min(keys.values())
