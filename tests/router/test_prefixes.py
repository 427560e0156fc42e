from router.prefixes import PrefixIndex


def test_the_longest_known_prefix_counts():
    index = PrefixIndex()
    index.add((1, 2, 3), capacity=1000)
    assert index.match((1, 2, 3, 4)) == 256
    assert index.match((1, 2, 9)) == 128
    assert index.match((7,)) == 0
    assert index.match(()) == 0


def test_the_least_recently_used_is_forgotten_longest_first():
    index = PrefixIndex()
    index.add((1, 2, 3), capacity=512)
    index.add((10, 20, 30), capacity=512)
    assert index.match((1, 2, 3)) == index.match((10, 20, 30)) == 256
    index.add((100,), capacity=512)
    assert index.match((1, 2, 3)) == 128
    assert index.match((10, 20, 30)) == 256


def test_a_shared_beginning_takes_room_once():
    index = PrefixIndex()
    index.add((1, 2), capacity=192)
    index.add((1, 3), capacity=192)
    assert index.match((1, 2)) == index.match((1, 3)) == 128
    index.add((1, 4), capacity=192)
    assert [index.match((1, last)) for last in (2, 3, 4)] == [64, 128, 128]
