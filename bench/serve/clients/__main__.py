"""Asks `q4 serve` as a client does: python -m serve.clients PACKAGE --url URL --busy URL, in a Python that
has the package. The last line is JSON: how many checks were made, and which failed and why. The server asks
for the key `key`; the one at --busy takes one request at a time."""

import argparse
import importlib.metadata
import json

from . import anthropic_messages, frameworks, measurements, openai_chat, openai_others
from .checks import Checks

CLIENTS = {
    "openai": [openai_chat.checks, openai_others.checks],
    "anthropic": [anthropic_messages.checks],
    "litellm": [frameworks.through_litellm],
    "langchain-openai": [frameworks.through_langchain],
    "openai-agents": [frameworks.through_agents],
    "pydantic-ai-slim": [frameworks.through_pydantic],
    "instructor": [frameworks.through_instructor],
    "lm_eval": [measurements.checks],
}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("client", nargs="?", choices=CLIENTS)
    p.add_argument("--list", action="store_true", help="print the packages")
    p.add_argument("--url")
    p.add_argument("--busy")
    args = p.parse_args()
    if args.list:
        return print("\n".join(CLIENTS))
    try:
        version = importlib.metadata.version(args.client)
    except importlib.metadata.PackageNotFoundError:
        return print(json.dumps({"missing": f"{args.client} is not installed"}))
    checks = Checks(args.url, args.busy)
    for part in CLIENTS[args.client]:
        with checks.part(f"all of {part.__name__}"):
            part(checks)
    print(json.dumps({"version": version, "made": checks.made, "failed": checks.failed}))


main()
