from hypothesis import given
from hypothesis import strategies as st

from serve_app.fleet.prefix_hashes import MOST, prefix_hashes


def test_each_doubling_of_the_prompt_has_a_name_but_for_its_last_id():
    ids = tuple(range(1000))
    assert len(prefix_hashes(ids[:64], "t")) == 0
    assert len(prefix_hashes(ids[:65], "t")) == 1
    assert len(prefix_hashes(ids[:513], "t")) == 4
    assert len(prefix_hashes(range(10**6), "t")) == MOST


@given(st.integers(0, 400), st.lists(st.integers(0, 10**5), min_size=400, max_size=400))
def test_two_prompts_share_the_names_of_what_they_share(common, ids):
    one, two = prefix_hashes(ids, "t"), prefix_hashes([*ids[:common], -1, *ids], "t")
    equal = [first == second for first, second in zip(one, two, strict=False)]
    assert equal == [64 << index <= common for index in range(len(equal))]


def test_tenants_that_share_nothing_have_nothing_in_common():
    ids = range(200)
    assert not set(prefix_hashes(ids, "tenant:a")) & set(prefix_hashes(ids, "tenant:b"))
    assert all(0 <= name < 2**63 for name in prefix_hashes(ids, "tenant:a"))
