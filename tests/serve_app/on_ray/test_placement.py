from __future__ import annotations

import time

import pytest
from ray import serve
from ray.serve.exceptions import ReplicaUnavailableError

from replica.messages import Sampling, Submit, encode
from tests.serve_app.on_ray.site import APP, Site, until


async def test_a_call_reaches_the_replica_that_it_names(site: Site) -> None:
    handle = serve.get_deployment_handle("Replica", APP)
    names = await site.offering()

    async def produced() -> list[int]:
        return [(await handle.stats.remote(name)).output_tokens for name in names]

    for index, name in enumerate(names):
        before = await produced()
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        submit = Submit(request_id=f"to-{name}", prompt_ids=(1, 2, 3), sampling=sampling)
        await handle.submit.remote(name, "test", [encode(submit)])
        expected = [count + 3 * (place == index) for place, count in enumerate(before)]

        async def arrived(expected: list[int] = expected) -> bool:
            return await produced() == expected

        await until(arrived, 5)


@pytest.mark.parametrize(("method", "arguments"), [("submit", ["test", []]), ("stats", [])])
async def test_a_name_that_nobody_has_is_an_error_soon(
    site: Site, method: str, arguments: list[object]
) -> None:
    handle = serve.get_deployment_handle("Replica", APP)
    started = time.monotonic()
    with pytest.raises(ReplicaUnavailableError):
        await getattr(handle, method).remote("nobody", *arguments)
    assert time.monotonic() - started < 3
