from hypothesis import given
from hypothesis import strategies as st

from router.prefixes import FIRST, PrefixCache, PrefixIndex, longest_of


def cache() -> PrefixCache:
    return PrefixCache(PrefixIndex(), 1)


def test_the_longest_known_prefix_counts():
    known = cache()
    known.add((1, 2, 3), capacity=1000)
    assert known.match((1, 2, 3, 4)) == 256
    assert known.match((1, 2, 9)) == 128
    assert known.match((7,)) == 0
    assert known.match(()) == 0


def test_the_least_recently_used_is_forgotten_longest_first():
    known = cache()
    known.add((1, 2, 3), capacity=512)
    known.add((10, 20, 30), capacity=512)
    assert known.match((1, 2, 3)) == known.match((10, 20, 30)) == 256
    known.add((100,), capacity=512)
    assert known.match((1, 2, 3)) == 128
    assert known.match((10, 20, 30)) == 256


def test_a_shared_beginning_takes_room_once():
    known = cache()
    known.add((1, 2), capacity=192)
    known.add((1, 3), capacity=192)
    assert known.match((1, 2)) == known.match((1, 3)) == 128
    known.add((1, 4), capacity=192)
    assert [known.match((1, last)) for last in (2, 3, 4)] == [64, 128, 128]


def test_the_index_names_the_longest_first_and_nothing_that_is_not_longer():
    index = PrefixIndex()
    PrefixCache(index, 1).add((1, 2, 3), capacity=1000)
    PrefixCache(index, 4).add((1, 2), capacity=1000)
    assert index.matches((1, 2, 3, 4), among=7) == [(256, 1), (128, 5), (64, 5)]
    assert index.matches((1, 2, 3), among=6) == [(128, 4), (64, 4)]
    assert index.matches((1, 2, 3), among=7, beyond=64) == [(256, 1), (128, 5)]
    assert index.matches((1, 2, 3), among=7, beyond=256) == []
    assert index.matches((), 7) == index.matches((9,), 7) == index.matches((1,), 2) == []


def test_each_prefix_is_twice_as_long_as_the_one_before():
    assert [longest_of(range(count)) for count in range(4)] == [0, 64, 128, 256]


PROMPTS = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True).map(tuple)
USES = st.lists(st.tuples(st.integers(0, 2), PROMPTS, st.integers(0, 1000)), max_size=30)


@given(USES, PROMPTS)
def test_the_index_knows_what_the_caches_know_and_no_more(uses, prompt):
    index = PrefixIndex()
    caches = [PrefixCache(index, 1 << number) for number in range(3)]
    for number, prefixes, capacity in uses:
        caches[number].add(prefixes, capacity)
    found = index.matches(prompt, among=7)
    for number, known in enumerate(caches):
        longest = next((tokens for tokens, holders in found if holders >> number & 1), 0)
        assert longest == known.match(prompt)
    assert all(holders and tokens % FIRST == 0 for tokens, holders in found)
    for known in caches:
        known.shrink(0)
    assert len(index) == 0
