from hypothesis import given
from hypothesis import strategies as st

from router.loads import LoadOrder

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "move"]),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    ),
    max_size=40,
)


@given(CHANGES, st.integers(0, 2**10 - 1))
def test_a_set_comes_in_the_order_of_load_whatever_changed(changes, members):
    order, loads = LoadOrder(), {}
    for change, place, load in changes:
        if change == "add":
            loads[order.add()] = 0.0
        elif loads:
            bit = sorted(loads)[place % len(loads)]
            if change == "remove":
                order.remove(bit)
                del loads[bit]
            else:
                order.move(bit, load)
                loads[bit] = load
    expected = sorted((load, bit) for bit, load in loads.items() if bit & members)
    assert list(order.sort(members & sum(loads))) == [bit for _, bit in expected]


def test_the_bit_of_a_replica_that_is_gone_is_given_again():
    """Replicas come and go for months: sets stay as short as there are replicas at once."""
    order = LoadOrder()
    bits = [order.add() for _ in range(3)]
    assert bits == [1, 2, 4]
    for _ in range(100):
        order.remove(2)
        assert order.add() == 2
    assert order.add() == 8
