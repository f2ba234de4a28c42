"""One answer to each request, whoever else is served."""

import json

from rows import row

from .asked import asked, compared, grown, of_batch, of_processes
from .server import Server, has, say, tight


def bits(args, isa):
    """The answers on one instruction set; a process of its own for every request is the reference."""
    if not has(args.q4, isa):
        return row(f"bits-{isa}", None, "answers", "all", "this machine does not have it")
    requests = asked(args.requests)
    say(f"{isa}: reference")
    want = of_processes(args.q4, requests, isa)

    def tell(name, what, equal, made):
        row(f"bits-{isa}-{name}", equal, f"of {made} answers as a process of generate, {what}", "all")

    def served(name, what, server, **options):
        say(f"{isa}: {name}")
        tell(name, what, *compared(server, requests, want, **options))

    for parallel in (1, 32):
        have = of_batch(args.q4, requests, isa, "--parallel", parallel)[1]
        differ = [i for i, (a, b) in enumerate(zip(have, want)) if a != b]
        for i in differ:
            say("--batch differs:", json.dumps(requests[i], ensure_ascii=False), have[i], want[i])
        tell(f"batch-{parallel}", f"--batch --parallel {parallel}", len(want) - len(differ), len(want))
    with Server(args.q4, "--parallel", 32, isa=isa) as server:
        served("alone", "one after the other", server, at_once=1)
    with Server(args.q4, "--parallel", 32, isa=isa) as server:
        served("together", "32 at once, shuffled", server, seed=1)
        served("warm", "32 at once in another order, prefixes cached", server, seed=2)
        hits = server.metric("prefix_cache_hits_total")
        row(f"bits-{isa}-hits", hits, "tokens found in the cache", "> 0")
        served("cancelled", "a third of the neighbours cancelled", server, seed=3, cancel=True)
    for threads in (1, 2):
        with Server(args.q4, "--parallel", 32, isa=isa, threads=threads) as server:
            served(f"threads-{threads}", f"32 at once, --threads {threads}", server, seed=4)


def preempted(args, isa):
    """The same in a cache that is too small for all."""
    if not has(args.q4, isa):
        return row(f"bits-{isa}-preempted", None, "answers", "all", "this machine does not have it")
    requests = grown(args.requests)
    say(f"{isa}: reference of long answers")
    want = of_processes(args.q4, requests, isa)
    small = ("--parallel", 32, "--context", 512)
    with Server(args.q4, *small, isa=isa, limit=tight(args.q4, *small)) as server:
        say(f"{isa}: preempted")
        equal, made = compared(server, requests, want, seed=5)
        unit = f"of {made} answers as a process of generate, 32 at once in a cache of 512 positions"
        row(f"bits-{isa}-preempted", equal, unit, "all")
        row(f"bits-{isa}-preemptions", server.metric("num_preemptions_total"), "in that cache", "> 0")


def reproducible(args):
    """Whether the server says that it has not the property where it has not."""
    for isa, need in (("amx", "refused"), ("avx512vnni", "served")):
        name, unit = f"reproducible-{isa}", "with --reproducible"
        if not has(args.q4, isa):
            row(name, None, unit, need, "this machine does not have it")
            continue
        try:
            with Server(args.q4, "--reproducible", isa=isa):
                row(name, "served", unit, need)
        except RuntimeError as e:
            row(name, "refused" if "--reproducible" in str(e) else str(e), unit, need)
        with Server(args.q4, isa=isa) as server:
            explain = json.loads(server.ask("GET", "/v1/q4/explain")[2])
            row(f"{name}-said", explain["reproducible"], "in /v1/q4/explain", str(need == "served"))
