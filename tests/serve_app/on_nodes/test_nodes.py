"""A cluster of several nodes, on this machine: a head with the front ends, and nodes of engines."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_tiny
from tests.serve_app.on_ray.conftest import ENVIRONMENT, REPLICAS, configuration
from tests.serve_app.on_ray.flood import Flood, bodies, texts_of
from tests.serve_app.on_ray.site import APP, Site, actors, until

TOKENS = 200
PLACED: dict[str, Any] = {
    "Replica": {"ray_actor_options": {"num_cpus": 0, "resources": {"engines": 1}}},
    "Ingress": {"ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}},
    "Admission": {"ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}},
}


class Nodes:
    """Either node has room for all engines: that each gets one is placement's doing."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "resources": {"front": 8}, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.cluster.add_node(num_cpus=1, resources={"engines": REPLICAS})

    def lose(self, node_id: str) -> None:
        """Its raylet dies, and all of its processes with it."""
        [node] = [one for one in self.cluster.worker_nodes if one.node_id == node_id]
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Nodes, Site]]:
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
        await site.deploy(**PLACED)
        yield made, site
        serve.shutdown()
        ray.shutdown()
        made.cluster.shutdown()


def places() -> list[str]:
    """The node of each replica that runs."""
    from ray import serve

    details = serve.context._get_global_client().get_serve_details()
    replicas = details["applications"][APP]["deployments"]["Replica"]["replicas"]
    return [replica["node_id"] for replica in replicas if replica["state"] == "RUNNING"]


async def test_replicas_are_spread_and_a_lost_node_costs_its_replicas_only(
    nodes: tuple[Nodes, Site],
) -> None:
    """Streams of its replica go on at the other one; nothing else notices."""
    cluster, site = nodes

    async def all_offer() -> bool:
        return len(await site.offering()) == REPLICAS

    await until(all_offer, 30)
    assert len(set(places())) == REPLICAS
    streams = bodies(20, 20, TOKENS)
    expected = await texts_of(site, streams)
    front = actors("Ingress") + actors("Admission")
    lost = places()[0]
    async with Flood(site, streams) as flood:
        cluster.lose(lost)
        assert await flood.texts() == expected
    assert actors("Ingress") + actors("Admission") == front
    await until(all_offer, 60)
    assert lost not in places()
    await until(site.at_rest)
