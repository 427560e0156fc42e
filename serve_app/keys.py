"""`fairstream-keys new TENANT`: makes an API key, shows it once, and the digest to write down.

With FAIRSTREAM_KEY_SECRET in the environment the digest is keyed, and the server needs the same
secret. Nothing is stored.
"""

from __future__ import annotations

import argparse
import secrets

from pydantic import ValidationError

from router.tenant import Tenant, digest
from serve_app.settings import key_secret

RANDOM_BYTES = 32


def new_key() -> str:
    return "fs-" + secrets.token_urlsafe(RANDOM_BYTES)


def tenant_name(text: str) -> str:
    """Raises argparse.ArgumentTypeError for what no file of tenants can have as an id."""
    try:
        return Tenant(id=text).id
    except ValidationError:
        reason = "no tenant can be called so: a name has 1 to 128 characters of Unicode"
        raise argparse.ArgumentTypeError(reason) from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fairstream-keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a key for a tenant, or for an administrator")
    new.add_argument("tenant", metavar="TENANT", type=tenant_name)
    chosen = parser.parse_args(arguments)
    key, secret = new_key(), key_secret()
    print(f"key for {chosen.tenant}, shown only now:\n  {key}")
    print(
        f"write this under its keys ({'keyed' if secret else 'no FAIRSTREAM_KEY_SECRET is set'}):"
    )
    print(f'  - "{digest(key, secret)}"')


if __name__ == "__main__":
    main()
