"""A cluster of several nodes, on this machine: a head and two workers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_tiny
from tests.serve_app.on_ray.conftest import ENVIRONMENT, REPLICAS, configuration
from tests.serve_app.on_ray.flood import Flood, bodies, texts_of
from tests.serve_app.on_ray.site import APP, Site, actors, ask_all_the_while, until

TOKENS = 200
STREAMS = bodies(20, 20, TOKENS)


def placed(front: str) -> dict[str, Any]:
    """Options by deployment: front ends and Admission run on the head or on workers."""

    def on(kind: str) -> dict[str, Any]:
        return {"ray_actor_options": {"num_cpus": 0, "resources": {kind: 1}}}

    return {"Replica": on("worker"), "Ingress": on(front), "Admission": on(front)}


class Nodes:
    """Either worker has room for everything: that each gets a part is placement's doing."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "resources": {"head": 8}, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.cluster.add_node(num_cpus=1, resources={"worker": 2 * REPLICAS + 1})

    def lose(self, node_id: str) -> None:
        """Its raylet dies, and all of its processes with it."""
        [node] = [one for one in self.cluster.worker_nodes if one.node_id == node_id]
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
async def nodes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Nodes, Site]]:
    """Its parameter: where the front ends run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray
        from ray import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made = Nodes()
        ray.init(address=made.cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        model = save_tiny(tmp_path / "tiny", max_position_embeddings=4096)
        site = Site(port, configuration(model, str(tmp_path / "usage.db")))
        await site.deploy(**placed(request.param))

        async def all_offer() -> bool:
            return len(await site.offering()) == REPLICAS

        await until(all_offer, 30)
        yield made, site
        await until(all_offer, 60)
        await until(site.at_rest)
        serve.shutdown()
        ray.shutdown()
        made.cluster.shutdown()


def places(deployment: str) -> list[str]:
    """The node of each replica of it that runs."""
    from ray import serve

    details = serve.context._get_global_client().get_serve_details()
    replicas = details["applications"][APP]["deployments"][deployment]["replicas"]
    return [replica["node_id"] for replica in replicas if replica["state"] == "RUNNING"]


@pytest.mark.parametrize("nodes", ["head"], indirect=True)
async def test_replicas_are_spread_and_a_lost_node_costs_its_replicas_only(
    nodes: tuple[Nodes, Site],
) -> None:
    """Streams of its replica go on at the other one; nothing else notices."""
    cluster, site = nodes
    assert len(set(places("Replica"))) == REPLICAS
    expected = await texts_of(site, STREAMS)
    front = actors("Ingress") + actors("Admission")
    lost = places("Replica")[0]
    async with Flood(site, STREAMS) as flood:
        cluster.lose(lost)
        assert await flood.texts() == expected
    assert actors("Ingress") + actors("Admission") == front

    async def is_made_up_for() -> bool:
        return len(places("Replica")) == REPLICAS and lost not in places("Replica")

    await until(is_made_up_for, 60)


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["worker"], indirect=True)
async def test_a_node_that_is_left_before_it_goes_costs_nothing(nodes: tuple[Nodes, Site]) -> None:
    """As when Kubernetes stops a pod: streams and requests all end well, those of its ingress,
    too, Admission moves, and after that nothing is left to be lost."""
    cluster, site = nodes
    expected = await texts_of(site, STREAMS)
    [left] = places("Admission")
    assert left in places("Replica")
    assert left in places("Ingress")
    done = asyncio.Event()

    asking = asyncio.create_task(ask_all_the_while(site, done))
    command = ("-m", "serve_app.leave_node", "--node", left, "--seconds", "200")
    leaving = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=os.environ | {"RAY_ADDRESS": cluster.cluster.address}
    )
    while leaving.returncode is None:
        assert await texts_of(site, STREAMS) == expected
    assert leaving.returncode == 0
    assert left not in places("Ingress") + places("Replica") + places("Admission")
    cluster.lose(left)
    assert await texts_of(site, STREAMS) == expected
    done.set()
    assert await asking > 0
