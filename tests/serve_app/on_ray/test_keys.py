"""What a running cluster tells of API keys: nothing. For metrics see test_metrics.py."""

from __future__ import annotations

from pathlib import Path

from ray._private import worker

from router.tenant import digest
from tests.serve_app.on_ray.site import ADMIN_KEY, KEY, MODEL, Site, until

WRONG_KEY = "key-of-nobody"
PATHS = ("/v1/models", "/nowhere", "/admin/tenants", "/admin/usage")


def logs() -> str:
    """Of all processes of the cluster."""
    files = Path(worker._global_node.get_logs_dir_path()).rglob("*")
    return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


async def test_no_key_is_in_an_answer_or_a_log(site: Site) -> None:
    """R41. Digests of the configuration are in a log of Serve's, and nowhere else."""
    told, refused = [], logs().count(" 401 ")
    for key in (KEY, ADMIN_KEY, WRONG_KEY):
        async with site.http(key) as client:
            answers = [await client.get(path) for path in PATHS]
            answers.append(await client.post("/v1/completions", json={"model": MODEL, "n": 0}))
            told += [f"{answer.headers}\n{answer.text}" for answer in answers]

    async def are_logged() -> bool:
        return logs().count(" 401 ") >= refused + 10

    await until(are_logged)
    logged = logs()
    for key in (KEY, ADMIN_KEY, WRONG_KEY):
        assert key not in logged
        assert not any(trace in text for trace in (key, digest(key)[7:]) for text in told)
