"""Sends a call to the replica that its first argument names.

Serve picks the replica of a call by load. Here the router has already picked it: a grant
names it, and so does every later message about that request. This module knows how Serve
routes a call; it knows neither grants nor what the calls mean.
"""

from __future__ import annotations

import anyio
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

NEW_WORK = "submit"
"""The method that only a member takes. The others also reach a replica that Serve no longer
routes to and that finishes what it has."""

MEMBERSHIP_GRACE_S = 0.2
"""How long a call may wait for a name that is not known yet: processes learn of a new replica
at slightly different times."""

MAX_DEPARTED = 64


class Placement(RequestRouter):
    """Runs inside every handle of the replica deployment, one instance per process.

    It replaces the choice itself and leaves out the machinery around it, which confuses two
    concurrent calls made within one request.
    """

    def initialize_state(self) -> None:
        """Called by Serve once, with the router's keyword arguments: there are none."""
        self._departed: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with every change of membership."""
        before = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
        super().update_replicas(replicas)
        members = {replica.replica_id.unique_id for replica in replicas}
        departed = {**self._departed, **before}
        recent = [name for name in departed if name not in members][-MAX_DEPARTED:]
        self._departed = {name: departed[name] for name in recent}

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Raises ReplicaUnavailableError when the replica cannot be called, or not any more.

        A retry means that the replica turned the call away or could not be reached: no other
        one will do.
        """
        name = pending_request.args[0]
        if is_retry:
            raise ReplicaUnavailableError(name)
        if pending_request.metadata.call_method != NEW_WORK and name in self._departed:
            return self._departed[name]
        return await self._member(name)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve's own search for a replica, which nothing here reaches."""
        raise NotImplementedError("a call to a replica names it in its first argument")

    async def _member(self, name: str) -> RunningReplica:
        with anyio.move_on_after(MEMBERSHIP_GRACE_S):
            while (replica := self._find(name)) is None:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            return replica
        raise ReplicaUnavailableError(name)

    def _find(self, name: str) -> RunningReplica | None:
        members = self.curr_replicas.items()
        return next((replica for key, replica in members if key.unique_id == name), None)
