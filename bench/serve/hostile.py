"""Requests that are wrong, and clients that leave or do not read."""

import contextlib
import random
import re
import socket
import time
from concurrent.futures import ProcessPoolExecutor

from rows import row

from .asked import asked
from .mutations import kept, malformed
from .server import WHO, Control, Server, filled, leave, many, posted, say

# Requests that follow each other on one connection.
TRAIN = 64
# A stream may fail after its status.
FAULTS = (b'"type":"server_error"', b'"type":"api_error"', b"a bug in q4")
PATIENCE = 60


def thrown(port, data, is_whole):
    """Status of what comes back, 0 where the connection ends without one, None where nothing ends."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as s:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # What is too long is answered before all of it is there.
                s.sendall(data)
            # Whoever closes his half at once is taken for gone.
            s.settimeout(PATIENCE if is_whole else 0.05)
            while True:
                try:
                    piece = s.recv(65536)
                except TimeoutError:
                    if s.gettimeout() == PATIENCE:
                        return None
                    s.shutdown(socket.SHUT_WR)
                    s.settimeout(PATIENCE)
                    continue
                if not piece:
                    break
                answer += piece
    except OSError:
        pass
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", answer) if status != b"100"]
    return max([500] * any(fault in answer for fault in FAULTS) + statuses, default=0)


class Answers:
    """What comes back on a connection, answer by answer."""

    def __init__(self, stream):
        self.stream, self.is_over = stream, False

    def next(self):
        """Status and body of one; none where the connection ends."""
        head = {}
        line = self.stream.readline()
        if not line.endswith(b"\r\n"):
            self.is_over = True
            return None
        status = int(line.split()[1])
        while (field := self.stream.readline()) not in (b"\r\n", b""):
            name, _, value = field.partition(b":")
            head[name.lower()] = value.strip().lower()
        self.is_over = head.get(b"connection") == b"close"
        if head.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self.stream.readline() or b"0", 16):
                body += self.stream.read(size)
                self.stream.readline()
            self.stream.readline()
            return status, body
        return status, self.stream.read(int(head.get(b"content-length", 0)))


def flooded(port, first, count):
    """Sends requests `first` and on, as many at once as a connection takes; how often which status came (0:
    none came), and the requests with a status from 500."""
    requests = [kept(random.Random(i)) for i in range(first, first + count)]
    tally, bad, done = {}, [], 0
    while done < count:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as s:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    s.sendall(b"".join(requests[done:]))
                answers, begun = Answers(s.makefile("rb")), done
                while done < count and not answers.is_over:
                    if (answer := answers.next()) is None:
                        break
                    status, body = answer
                    status = max(status, 500 * any(fault in body for fault in FAULTS))
                    tally[status] = tally.get(status, 0) + 1
                    if status >= 500:
                        bad.append((first + done, status, requests[done][:1500], body[:300]))
                    done += 1
        except (OSError, ValueError) as e:
            say(f"request {first + done}: {e!r}")
            begun = done
        if done < count and done == begun:
            # Nothing came back for the first that was sent.
            tally[0] = tally.get(0, 0) + 1
            bad.append((first + done, 0, requests[done][:1500], b""))
            done += 1
    return tally, bad


def flood(server, first, end):
    """Many requests that are wrong but whole; how often which status came, and seconds."""
    start, tally = time.perf_counter(), {}
    trains = range(first, end, TRAIN)
    with ProcessPoolExecutor(4) as pool:
        work = pool.map(flooded, [server.port] * len(trains), trains, [TRAIN] * len(trains), chunksize=4)
        for statuses, bad in work:
            for status, times in statuses.items():
                tally[status] = tally.get(status, 0) + times
            for number, status, request, body in bad:
                say(f"kept({number}): {status}: {request} -> {body}")
    return tally, time.perf_counter() - start


def hostile(args):
    """Requests that are malformed: nineteen of twenty on connections that are kept, the others on one of
    their own, cut or no HTTP."""
    apart, half = args.malformed // 20, args.malformed // 2
    # What is answered after all is answered briefly.
    with Server(args.q4, "--context", 128, isa=args.isa) as server, Control(server) as control:
        many(300, lambda i: thrown(server.port, *malformed(random.Random(-1 - i))))
        tally, seconds = flood(server, 0, half)
        say(f"kept: {round(sum(tally.values()) / seconds)} a second: {tally}")
        before = filled(server)
        for status, times in flood(server, half, args.malformed - apart)[0].items():
            tally[status] = tally.get(status, 0) + times
        found = many(apart, lambda i: thrown(server.port, *malformed(random.Random(i))), 32)
        for i, status in enumerate(found):
            data, is_whole = malformed(random.Random(i))
            # Who says something else than HTTP, or too little, needs no answer.
            status = "cut" if status == 0 and not is_whole else status
            tally[status] = tally.get(status, 0) + 1
            if status in (None, 0) or status != "cut" and status >= 500:
                say(f"malformed({i}): {status}: {data[:1500]}")
        say("statuses:", tally)
        count = sum(tally.values())
        row("hostile-requests", count, "malformed requests and bytes", ">= 1000000")
        row("hostile-5xx", sum(n for s, n in tally.items() if type(s) is int and s >= 500), "answers", "0")
        row("hostile-unanswered", tally.get(0, 0), "of those that are whole without an answer", "0")
        row("hostile-hanging", tally.get(None, 0), f"of them without an end within {PATIENCE} s", "0")
        more = round(server.memory() / before, 3)
        row("hostile-memory", more, f"of the {before} MiB after half of them", "<= 1.05")
    right = control.asked - control.wrong
    row("hostile-control", right, f"of {control.asked} neighbours answered right", "all")


def disconnects(args):
    """Clients that go away at random moments, that read slowly, or not at all."""
    requests = asked(args.disconnects)
    with Server(args.q4, isa=args.isa) as server, Control(server) as control:
        many(300, lambda i: leave(server, requests[i % len(requests)], random.Random(-1 - i)), 32)
        before = filled(server)
        many(args.disconnects, lambda i: leave(server, requests[i], random.Random(i)), 32)
        row("disconnects", args.disconnects, "at random moments", ">= 10000")
        left = 0 if server.is_idle(30) else server.metric("num_requests_running")
        row("disconnects-left", left, "sequences that run on", "0")
        memory = round(server.memory() / before, 3)
        row("disconnects-memory", memory, f"of the {before} MiB before", "<= 1.05")
        slow(server)
    right = control.asked - control.wrong
    row("disconnects-control", right, f"of {control.asked} neighbours answered right", "all")


def slow(server):
    """Clients that take little of their answers, and one that takes nothing."""
    sockets = []
    long = {
        **WHO, "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20,
    }
    for _ in range(9):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", server.port))
        s.sendall(posted(long))
        sockets.append(s)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        for s in sockets[1:]:
            s.recv(64)
        time.sleep(0.02)
    served = sum(Control(server).same() for _ in range(10))
    row("slow-readers", served, "of 10 answered right beside 8 slow readers and one that never reads", "all")
    # Who takes nothing for a minute is cut.
    for s in sockets[1:]:
        s.close()
    ended = 0
    until = time.monotonic() + 100
    port = sockets[0].getsockname()[1]
    while time.monotonic() < until and not ended:
        ended = not server.holds(port)
        time.sleep(1)
    row("never-reads", int(ended), "whether a client that never reads is cut within 100 s", "1")
    sockets[0].close()
