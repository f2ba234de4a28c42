"""Measures a part of what `q4 serve` promises: python -m serve PART --q4 Q4 --work FOLDER. Rows go to
standard output, what is found on the way to standard error. `list` names the parts, `whole` puts together
what was kept of them in the work folder. Run by bench/serve.sh."""

import argparse
import pathlib

from rows import row, said, take, timed, write

from . import bits, ends, hostile, load, long, openapi, page, peer, schemas, soak
from .clients import part as clients
from .server import instruction_sets


def parts(q4):
    """Name and function of every part, in order."""
    each = instruction_sets(q4)
    sets = [isa for isa in each if isa != "amx"]
    return {
        **{f"bits-{isa}": lambda args, isa=isa: bits.bits(args, isa) for isa in sets},
        **{f"preempted-{isa}": lambda args, isa=isa: bits.preempted(args, isa) for isa in sets},
        "reproducible": bits.reproducible,
        "clients": clients.clients,
        "openapi": openapi.openapi,
        "schemas": schemas.schemas,
        "mask": schemas.mask,
        "load": load.load,
        "shared": load.shared,
        "cost-step": load.cost_step,
        "cost-all": load.cost_all,
        "peer": peer.peer,
        "guidellm": peer.guided,
        "hostile": hostile.hostile,
        "disconnects": hostile.disconnects,
        "ends": ends.ends,
        "soak": soak.soak,
        "long": long.long,
        "page": page.page,
    }


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", help="a part, `list` or `whole`")
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, help="what serve.sh kept")
    p.add_argument("--models", type=pathlib.Path, help="where models of the parts about speed are kept")
    p.add_argument("--isa", default="", help="instruction set of all parts but bits")
    p.add_argument("--requests", type=int, default=1000, help="of bits")
    p.add_argument("--malformed", type=int, default=1_000_000, help="requests of hostile")
    p.add_argument("--disconnects", type=int, default=10_000)
    p.add_argument("--openapi", type=int, default=540, help="seconds of schemathesis")
    p.add_argument("--soak", type=int, default=480, help="seconds")
    p.add_argument("--long", type=int, default=30_016, help="tokens of the long prompt, a multiple of 64")
    p.add_argument("--answers", type=int, default=2, help="of each user of load")
    p.add_argument("--rounds", type=int, default=3, help="of load, cost and peer")
    p.add_argument("--venvs", type=pathlib.Path, help="an environment for each client")
    p.add_argument("--only", help="one client")
    p.add_argument("--llama", type=pathlib.Path, help="llama-server")
    p.add_argument("--llama-python", type=pathlib.Path, help="a Python with gguf and numpy")
    p.add_argument("--gguf", default="Q4_0", help="what llama-server computes with")
    p.add_argument("--browser", type=pathlib.Path, help="a Python with playwright")
    args = p.parse_args()
    if args.models:
        args.models.mkdir(parents=True, exist_ok=True)
    if args.part == "list":
        return print("\n".join(parts(args.q4)))
    if args.part != "whole":
        parts(args.q4)[args.part](args)
        return timed()
    for name in parts(args.q4):
        if (kept := args.work / f"{name}.json").exists():
            take(kept)
        else:
            row(name, None, "rows", "measured", "this part was not measured")
    write(q4=said(args.q4, "--version"))


main()
