"""The data plane of one ingress: runs sequences on replicas named by the router's grants.

One link per replica carries the outputs of all its sequences; here each request gets its own.
The module knows neither HTTP nor the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from replica.messages import Output, Ready, Submit
from serve_app.fleet.replica_link import Aborts, ReplicaCalls, ReplicaLink


class StepStreams:
    """The links of one ingress. Used from one event loop."""

    def __init__(
        self,
        ingress: str,
        calls: ReplicaCalls,
        on_unavailable: Callable[[str], None] = lambda replica: None,
        aborts: Aborts | None = None,
    ) -> None:
        """`on_unavailable` hears of each replica that takes no new work or is gone."""
        self._ingress, self._calls, self._on_unavailable = ingress, calls, on_unavailable
        self._aborts = aborts
        self._links: dict[str, ReplicaLink] = {}

    @property
    def ready(self) -> dict[str, Ready]:
        """By name, what each replica that is up said about itself."""
        return {name: link.ready for name, link in self._links.items() if link.ready}

    @property
    def num_sequences(self) -> dict[str, int]:
        """By name of each replica that is up, how many of this ingress run there."""
        return {name: len(link.sequences) for name, link in self._links.items() if link.ready}

    @property
    def idle(self) -> bool:
        """No sequence runs on any replica."""
        return not any(link.sequences for link in self._links.values())

    def connect(self, replica: str) -> ReplicaLink:
        """The link to a replica, opened if there is none."""
        if replica not in self._links:
            self._links[replica] = ReplicaLink(
                replica,
                self._ingress,
                self._calls,
                self._forget,
                self._on_unavailable,
                self._aborts,
            )
        return self._links[replica]

    async def run(self, replica: str, submit: Submit) -> AsyncGenerator[Output, None]:
        """Run a sequence: its outputs in order, without gaps or repeats, the last one with a
        finish reason. What comes while the consumer is busy arrives as one output.

        Raises ReplicaLost, or what `fail` is given. Closing it early aborts the sequence.
        """
        link = self.connect(replica)
        mailbox = link.add(submit)
        try:
            while True:
                output = await mailbox.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            link.remove((submit.request_id, submit.attempt))

    def fail(self, error: Exception) -> None:
        """Raise `error` in all that run; the sequences are aborted."""
        for link in self._links.values():
            for mailbox in link.sequences.values():
                mailbox.fail(error)

    def stop(self, errors: Mapping[str, Exception]) -> None:
        """Raise these in what runs, by request id; the sequences are aborted."""
        for link in self._links.values():
            for mailbox in link.sequences.values():
                if (error := errors.get(mailbox.submit.request_id)) is not None:
                    mailbox.fail(error)

    async def close(self) -> None:
        """Close every link."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _forget(self, link: ReplicaLink) -> None:
        del self._links[link.replica]
        self._on_unavailable(link.replica)
