"""The page in a browser."""

import re

from rows import ROOT, row, run

from .server import Server, say

TESTS = ROOT / "cli/serve/tests/page/test_page.py"


def page(args):
    """The tests against a server that plays a script, then those that a real one can pass."""
    if not args.browser:
        for name in ("page", "page-real", "page-bytes"):
            row(name, None, "tests passed", "all", "no Python with playwright, or no Chromium")
        return
    shots = args.work / "shots"
    shots.mkdir(exist_ok=True)
    tell("page", "against answers by script", run(args.browser, TESTS, "--shots", shots)[1])
    with Server(args.q4, isa=args.isa) as server:
        done = run(args.browser, TESTS, "--url", f"{server.url}/")[1]
    tell("page-real", "against q4 serve", done)
    weight = re.search(r"^ +(\d+) bytes:", done.stdout, re.M)
    row("page-bytes", weight and int(weight[1]), "bytes of the page, heads included", "< 60000")


def tell(name, what, done):
    say(done.stdout, done.stderr)
    found = re.search(r"^(\d+) of (\d+) passed", done.stdout, re.M)
    failed = ", ".join(re.findall(r"^FAIL\w* (\S+)", done.stdout, re.M))
    bad = f"; not: {failed}" if failed else ""
    unit = f"of {found[2] if found else 'the'} tests in Chromium {what}{bad}"
    row(name, found and int(found[1]), unit, "all", f"it broke: {done.stderr[-300:]}")
