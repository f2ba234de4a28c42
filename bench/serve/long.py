"""A prompt that is long lets others decode."""

import selectors
import statistics
import threading
import time

from rows import row

from . import model
from .crowd import IDS, Measured, User, Work, bodies, share
from .server import Server, say

OTHERS = 3
# Rows of a step; a chunk of a prompt is what the others leave of them.
ROWS = 128
# How long others decode without the long prompt, and how many chunks show what the last ones take alone.
BEFORE, CHUNKS = 8, 4
# Pages for everybody at full length are not needed.
LIMIT = "8GiB"


class Decoding:
    """Users who decode all the time; when their tokens came."""

    def __init__(self, port):
        self.port, self.is_over, self.gaps = port, False, []
        self.thread = threading.Thread(target=self.go)

    def go(self):
        poll, measured, seen = selectors.DefaultSelector(), Measured(0, 0, [], []), 0
        asked = bodies(64 * OTHERS, Work(16, 2000), seed=1)

        def begin():
            user = User(self.port, asked.pop())
            poll.register(user.socket, selectors.EVENT_READ, user)

        for _ in range(OTHERS):
            begin()
        while not self.is_over:
            for key, _ in poll.select(0.2):
                if not key.data.read(measured):
                    poll.unregister(key.fileobj)
                    begin()
            now = time.perf_counter()
            self.gaps += [(now, gap) for gap in measured.gaps[seen:]]
            seen = len(measured.gaps)
        for key in list(poll.get_map().values()):
            key.fileobj.close()

    def between(self, start, end):
        return [gap for at, gap in self.gaps if start <= at <= end]

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.thread.join()


def until_first(port, prompt):
    """When a prompt was sent, and when its first token came, which is all of the answer."""
    asked = {**bodies(1, Work(1, 1))[0], "prompt": prompt, "cache_prompt": True}
    user, measured = User(port, asked), Measured(0, 0, [], [])
    while user.read(measured):
        pass
    # A token may be no text.
    return user.at, user.last or user.end


def long(args):
    folder = model.shaped(args.q4, args.models)
    ids = [IDS[(i * 7 + i // 97) % len(IDS)] for i in range(args.long + CHUNKS * ROWS)]
    context = len(ids) + 256
    words = ("--parallel", OTHERS + 1, "--context", context)
    with Server(args.q4, *words, model=folder, isa=args.isa, limit=LIMIT) as server:
        with Decoding(server.port) as others:
            time.sleep(2)
            start = time.perf_counter()
            time.sleep(BEFORE)
            alone = others.between(start, time.perf_counter())
            begin, end = until_first(server.port, ids[: args.long])
            meanwhile = others.between(begin, end)
            # Those of its last tenth wait for the dearest chunks.
            late = others.between(end - (end - begin) / 10, end)
        server.is_idle(60)
        # What is behind the prompt that is cached now: chunks at its end, alone.
        begun, first = until_first(server.port, ids)
        chunk = (first - begun) / CHUNKS
        say(f"{args.long} tokens in {end - begin:.1f} s; {len(meanwhile)} tokens of others meanwhile")
    usual = statistics.median(alone)
    bound = 2 * usual + chunk
    unit = f"tokens of a prompt, computed in {end - begin:.0f} s beside {OTHERS} users"
    row("long-prompt", args.long, unit, ">= 30000")
    row("long-unloaded", round(1000 * usual, 1), "ms between tokens of the others without it, median", "said")
    row("long-chunk", round(1000 * chunk, 1), f"ms for a chunk of {ROWS} at its end, alone", "said")
    row("long-bound", round(1000 * bound, 1), "ms: twice the unloaded time and a chunk", "said")
    between = statistics.median(meanwhile)
    row("long-others", round(1000 * between, 1), "ms between tokens meanwhile, median", "said")
    between = statistics.median(late)
    row("long-to-bound", round(between / bound, 3), "of the bound in its last tenth, median", "< 1")
    row("long-99-to-bound", round(share(meanwhile, 0.99) / bound, 3), "of the bound, 99 of 100 below", "< 1")
    row("long-most", round(1000 * max(meanwhile), 1), "ms between tokens meanwhile, longest", "said")
