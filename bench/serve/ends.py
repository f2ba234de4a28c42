"""Where the server comes to its bounds or its end: queue, memory, SIGTERM, kill -9."""

import http.client
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rows import row

from .asked import compared, grown, of_processes, over_http, streamed
from .server import CHAT, WHO, Control, Server, many, say, tight

USERS = 16


def ends(args):
    full(args)
    limited(args)
    drained(args)
    killed(args)


def full(args):
    """More requests than the queue takes."""
    long = {**WHO, "max_tokens": 200, "ignore_eos": True}
    with Server(args.q4, "--parallel", 1, "--queue", 2, isa=args.isa) as server:
        found = many(24, lambda _: server.ask("POST", CHAT, long), 24)
        refused = [headers for status, headers, _ in found if status == 429]
        again = [h for h in refused if {k.lower(): v for k, v in h.items()}.get("retry-after", "").isdigit()]
        others = [status for status, *_ in found if status not in (200, 429)]
        row("queue-full", len(refused), "of 24 requests at a queue of 2 are told to come back (429)", ">= 1")
        row("queue-full-when", len(refused) - len(again), "of them without Retry-After", "0")
        row("queue-full-others", len(others), "answers that are neither 200 nor 429", "0")
        bodies = {data for status, _, data in found if status == 200}
        texts = {body.split(b'"content":')[1].split(b'"finish')[0] for body in bodies}
        row("queue-full-same", len(texts), "different answers to those that were served", "1")
        row(
            "queue-full-after", int(server.is_idle(60) and Control(server).same()),
            "whether it is served afterwards", "1",
        )


def limited(args):
    """Answers that need more memory than there is, at the least limit that a server takes."""
    requests = grown(200)
    want = of_processes(args.q4, requests, args.isa)
    small = ("--parallel", 32, "--context", 512)
    limit = tight(args.q4, *small)
    with Server(args.q4, *small, isa=args.isa, limit=limit) as server, Control(server) as control:
        equal, made = compared(server, requests, want, seed=6)
        row("memory-limit-equal", equal, f"of {made} answers right at --memory-limit {limit}", "all")
        row("memory-limit-preemptions", server.metric("num_preemptions_total"), "there", "> 0")
        most = server.memory("VmHWM")
        row("memory-limit-most", most, f"MiB resident at most, of a limit of {limit}", "said")
    row("memory-limit-control", control.asked - control.wrong, f"of {control.asked} neighbours right", "all")


def drained(args):
    """SIGTERM while answers are on their way, that have time to end, and that have not."""
    for name, timeout, tokens in (("drain", 60, 400), ("drain-cut", 1, 1900)):
        requests = [
            {
                "messages": [{"role": "user", "content": f"Who are you? {i}"}], "max_tokens": tokens,
                "temperature": 0.8 * (i % 2), "seed": i, "ignore_eos": True,
            }
            for i in range(USERS)
        ]
        want = of_processes(args.q4, requests, args.isa)
        words = ("--drain-timeout", timeout, "--parallel", USERS)
        with Server(args.q4, *words, isa=args.isa) as server, ThreadPoolExecutor(USERS) as pool:
            body = {"stream": True, "stream_options": {"include_usage": True}}
            flights = [pool.submit(server.ask, "POST", CHAT, {**one, **body}) for one in requests]
            while server.metric("num_requests_running") < USERS and not any(f.done() for f in flights):
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            time.sleep(0.3)
            try:
                late = server.ask("POST", CHAT, WHO)[0]
            except OSError:
                late = "no connection"
            ended = [f.result()[2] if f.exception() is None else b"" for f in flights]
            try:
                status = server.process.wait(90)
            except subprocess.TimeoutExpired:
                status = None
            seconds = round(time.monotonic() - start, 1)
        whole = sum(streamed(data) == one for data, one in zip(ended, want))
        if name == "drain":
            row("drain", whole, f"of {USERS} answers in flight end as a whole and right after SIGTERM", "all")
            row("drain-late", late, "what a request hears that comes then", "503")
        else:
            told = [(data, one) for data, one in zip(ended, want) if b"shutting_down" in data]
            unit = f"of {USERS} answers that are too long end or are told so"
            row("drain-cut", whole + len(told), unit, "all")
            right = whole + sum(one[0].startswith(said(data)) for data, one in told)
            row("drain-cut-right", right, f"of {USERS} have no wrong byte until then", "all")
        row(f"{name}-status", status, f"exit status, {seconds} s after SIGTERM", "0")


def said(data):
    """The text of a stream that was cut, as far as it came."""
    events = [event for event in data.split(b"\n\n")[:-1] if b'"error"' not in event]
    return streamed(b"\n\n".join([*events, b"data: cut"]))[0]


def killed(args):
    """kill -9 while users ask, twice; the server comes back on the same port, and they ask again."""
    requests = grown(60)
    want = of_processes(args.q4, requests, args.isa)
    right, wrong, broken, is_over = [], [], [], False

    def user(number):
        at = number
        while not is_over:
            i = at % len(requests)
            try:
                have = over_http(server, requests[i], stream=at % 2 == 0)
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                have = None
            # A stream that breaks off has no finish, and what came is the beginning of the answer; who comes
            # before a new process has checked itself is told so.
            if have and (have[0] == 503 or have[1] is None and want[i][0].startswith(have[0])):
                have = None
            if have is None:
                broken.append(i)
                time.sleep(0.1)
            else:
                (right if have == want[i] else wrong).append((i, have))
            at += 7

    server = Server(args.q4, isa=args.isa)
    port = server.port
    threads = [threading.Thread(target=user, args=(n,)) for n in range(USERS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            time.sleep(3)
            server.process.kill()
            server.process.wait()
            time.sleep(0.5)
            server = Server(args.q4, port=port, isa=args.isa)
        before = len(right)
        time.sleep(3)
        after = len(right) - before
    except RuntimeError as e:
        say("it does not come back:", e)
        after = 0
    is_over = True
    for thread in threads:
        thread.join()
    server.__exit__()
    for i, have in wrong:
        say("differs:", requests[i], "have", have, "want", want[i])
    row("killed", after, "answers within 3 s after the second kill -9 and start on the same port", ">= 1")
    unit = f"of {len(right) + len(wrong)} answers; {len(broken)} others broke off or were told to come back"
    row("killed-wrong", len(wrong), unit, "0")
