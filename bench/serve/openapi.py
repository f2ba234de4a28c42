"""The document of all routes: schemathesis makes requests of it, and looks whether the answers are those that
it says."""

import json
import os

from rows import row, run

from .server import Server, many, say

CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance",
]
# What is answered is answered briefly, so that the time goes into questions.
SMALL = ("--context", 256, "--parallel", 8)
# Making requests takes about as long as answering them: for every two processors a server that uses both, and
# two processes that ask it.
SERVERS = max(1, os.cpu_count() // 2)
THREADS = AT_ONCE = 2


def openapi(args):
    names = ("openapi-cases", "openapi-failures")
    st = args.venvs / "schemathesis/bin/st" if args.venvs else None
    if not st or not st.exists():
        for name in names:
            row(name, None, "cases", "said", "schemathesis was not installed")
        return

    def tested(server, number):
        report = args.work / f"openapi-{number}-report.json"
        report.unlink(missing_ok=True)
        words = [
            "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS), "--workers", 2,
            "--seed", number + 1, "--phases", "examples,coverage,fuzzing", "--max-time", args.openapi,
            "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--request-timeout", 60,
            "--report-json-path", report,
        ]
        done = run(st, *words, cwd=args.work)[1]
        say(done.stdout[-8000:], done.stderr[-2000:])
        return json.loads(report.read_text()) if report.exists() else None

    def served(place):
        with Server(args.q4, *SMALL, isa=args.isa, threads=THREADS) as server:
            document = json.loads(server.ask("GET", "/openapi.json")[2])
            reports = many(AT_ONCE, lambda i: tested(server, place * AT_ONCE + i), AT_ONCE)
            return document, reports, server.is_idle(30)

    of_servers = many(SERVERS, served, SERVERS)
    document = of_servers[0][0]
    reports = [report for _, reports, _ in of_servers for report in reports]
    idle = all(idle for *_, idle in of_servers)
    operations = sum(len(methods) for methods in document["paths"].values())
    if not all(reports) or any(report["errors"] for report in reports):
        for name in names:
            row(name, None, "cases", "said", "schemathesis broke")
        return
    cases = [report["test_cases"]["generated"] for report in reports]
    kinds = {
        f"{failure['title']}: {operation}"
        for report in reports for failure in report["failures"] for operation in failure["operations"]
    }
    bad = f"; {', '.join(sorted(kinds))}" if kinds else ""
    version = reports[0]["schemathesis_version"]
    unit = f"cases of schemathesis {version} in {args.openapi} s, {len(reports)} at once, of {operations} operations"
    row("openapi-cases", sum(cases), unit, ">= 100000")
    unit = f"kinds of answers with 5xx or not as documented ({', '.join(CHECKS)}){bad}"
    row("openapi-failures", len(kinds), unit, "0")
    row("openapi-idle", int(idle), "whether nothing runs on afterwards", "1")
