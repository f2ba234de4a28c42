"""Runs the checks of every client that is installed."""

import json
import shutil
import sys

from rows import ROOT, must, row, run

from ..server import Server, say

HERE = ROOT / "bench/serve/clients"
# No key of a real service may be found, nor a proxy between us.
ENV = {
    "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "bench"),
}


def python(args, name):
    """The command that checks a package of PyPI, if it is installed."""
    program = args.venvs / name / "bin/python"
    return [program, "-m", "serve.clients", name] if program.exists() else None


def node(args, script):
    """The command that checks a package of npm, if it is installed."""
    folder = args.venvs / "node/node_modules"
    there = (folder / script).exists() or (folder / f"@{script}-ai/sdk").exists()
    return ["node", HERE / f"{script}.mjs"] if there and shutil.which("node") else None


def clients(args):
    names = must(sys.executable, "-m", "serve.clients", "--list", env={"PYTHONPATH": str(ROOT / "bench")})[1]
    found = {name: args.venvs and python(args, name) for name in names.split()}
    found |= {f"npm-{name}": args.venvs and node(args, name) for name in ("openai", "anthropic")}
    total = passed = 0
    for name, command in found.items():
        if args.only and args.only != name:
            continue
        if not command:
            row(f"client-{name}", None, "checks passed", "all", f"{name} was not installed")
            continue
        own = {**ENV, "Q4_NODE": str(args.venvs / "node")}
        with Server(args.q4, "--api-key", "key", "--parallel", 8, isa=args.isa) as server, \
                Server(args.q4, "--api-key", "key", "--parallel", 1, "--queue", 0, isa=args.isa) as busy:
            done = run(*command, "--url", server.url, "--busy", busy.url, env=own)[1]
        try:
            result = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            result = {"missing": f"the checks broke: {done.stderr[-300:]}"}
        if "missing" in result:
            say(name, result["missing"])
            row(f"client-{name}", None, "checks passed", "all", result["missing"])
            continue
        for check, why in result["failed"].items():
            say(f"{name}: {check}: {why}")
        made = result["made"]
        bad = f"; not: {', '.join(result['failed'])}" if result["failed"] else ""
        good = made - len(result["failed"])
        row(f"client-{name}", good, f"of {made} checks of {name} {result['version']}{bad}", "all")
        total += made
        passed += good
    unit = f"of {total} checks of all clients"
    row("clients", passed if total else None, unit, "all, of at least 60", "no client was there")
