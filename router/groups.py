"""What a client asked for at once, as choices or several prompts: one group of requests, admitted
or refused as a whole. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from router.messages import Refusal, RequestInfo


def groups(infos: Iterable[RequestInfo]) -> Iterable[list[RequestInfo]]:
    """Neighbours that share a group, together; a request without a group is alone."""
    return (list(group) for _, group in groupby(infos, lambda info: info.group or info.request_id))


def for_all(group: Iterable[RequestInfo], refusal: Refusal) -> list[Refusal]:
    """The same for each."""
    return [replace(refusal, request_id=info.request_id) for info in group]
