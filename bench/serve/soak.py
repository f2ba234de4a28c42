"""Users of all kinds, and what is resident at the end."""

import random
import statistics
import threading
import time

from rows import row

from .asked import asked, of_processes, over_http
from .hostile import thrown
from .mutations import malformed
from .server import Server, filled, leave, say

USERS = 12
# Of these shares of the time, the first warms up, the second is compared with the last.
WARM = 0.15


def soak(args):
    """Users who ask, who leave, and who send what is malformed."""
    requests = asked(300)
    want = of_processes(args.q4, requests, args.isa)
    right, wrong, others = [], [], []
    with Server(args.q4, isa=args.isa) as server:
        filled(server)
        until = time.monotonic() + args.soak

        def user(number):
            draw = random.Random(number)
            while time.monotonic() < until:
                i, kind = draw.randrange(len(requests)), draw.random()
                if kind < 0.1:
                    leave(server, requests[i], draw)
                    others.append(0)
                elif kind < 0.2:
                    status = thrown(server.port, *malformed(draw))
                    others.append(status or 0)
                else:
                    have = over_http(server, requests[i], stream=draw.random() < 0.5)
                    (right if have == want[i] else wrong).append(i)

        threads = [threading.Thread(target=user, args=(n,)) for n in range(USERS)]
        for thread in threads:
            thread.start()
        samples = []
        while time.monotonic() < until:
            time.sleep(min(2, args.soak / 100))
            samples.append(server.memory())
        for thread in threads:
            thread.join()
        idle = server.is_idle(30)
    part = max(1, int(len(samples) * WARM))
    before, after = statistics.median(samples[part : 2 * part]), statistics.median(samples[-part:])
    say("resident:", samples[:: max(1, len(samples) // 40)])
    count = len(right) + len(wrong)
    row("soak-seconds", args.soak, f"s of {USERS} users", ">= 3600")
    row("soak-answers", len(right), f"of {count} answers as a process of generate", "all")
    row("soak-others", len(others), "requests that left or were malformed", "said")
    row("soak-5xx", sum(status >= 500 for status in others), "of them answered with 5xx", "0")
    growth = round(100 * (after / before - 1), 2)
    unit = f"% more MiB resident at the end than the {before} after {round(WARM * args.soak)} s"
    row("soak-memory", growth, unit, "<= 1")
    row("soak-idle", int(idle), "whether nothing runs on afterwards", "1")
