"""Users who ask again as soon as they have an answer, of any server of OpenAI's completions."""

import dataclasses
import json
import random
import selectors
import socket
import statistics
import time

from .server import posted

# Ids of the random prompts: those of the demo's tokenizer, which every model here has.
IDS = range(3, 1440)


@dataclasses.dataclass
class Measured:
    """What users saw: tokens and seconds of all, seconds to first tokens and from event to event."""

    tokens: int
    seconds: float
    firsts: list
    gaps: list

    @property
    def rate(self):
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Work:
    """What a request asks for: a prompt of random tokens, of which so many begin every prompt, and an answer
    of exactly so many."""

    prompt: int
    answer: int
    shared: int = 0

    def __str__(self):
        own = f"prompts of {self.prompt} random tokens, answers of {self.answer}"
        return own + f"; all begin with the same {self.shared}" * (self.shared > 0)


def bodies(count, work, seed=8):
    """Requests of that work. No server may know any of a prompt already, unless prompts begin alike: then it
    may know that."""
    draw, begin = random.Random(seed), random.Random(work.shared)
    shared = [begin.choice(IDS) for _ in range(work.shared)]
    return [
        {
            "prompt": shared + [draw.choice(IDS) for _ in range(work.prompt - work.shared)],
            "max_tokens": work.answer, "temperature": 0, "ignore_eos": True,
            "cache_prompt": work.shared > 0, "stream": True, "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


class User:
    """One request at a time, on a connection of its own."""

    def __init__(self, port, body):
        self.data, self.last, self.tokens = b"", None, None
        self.at = self.end = time.perf_counter()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(posted(body, "connection: close\r\n", "/v1/completions"))

    def read(self, measured):
        """Takes what has come; false where that is all."""
        piece, now = self.socket.recv(65536), time.perf_counter()
        self.end = now
        if not piece:
            if self.tokens is None:
                raise RuntimeError(f"no usage: {self.data[-300:]}")
            measured.tokens += self.tokens
            self.socket.close()
            return False
        *lines, self.data = (self.data + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                self.tokens = event["usage"]["completion_tokens"]
            if any(choice.get("text") for choice in event.get("choices", ())):
                if self.last is None:
                    measured.firsts.append(now - self.at)
                else:
                    measured.gaps.append(now - self.last)
                self.last = now
        return True


def crowd(port, users, each, asked):
    """`users` at once who ask `each` time in turn; user u asks `asked[u * each]` and on."""
    poll, left, measured = selectors.DefaultSelector(), [each] * users, Measured(0, 0, [], [])

    def begin(number):
        user = User(port, asked[(number * each + each - left[number]) % len(asked)])
        left[number] -= 1
        poll.register(user.socket, selectors.EVENT_READ, (number, user))

    start = time.perf_counter()
    for number in range(users):
        begin(number)
    open_ones = users
    while open_ones:
        for key, _ in poll.select():
            number, user = key.data
            if user.read(measured):
                continue
            poll.unregister(key.fileobj)
            if left[number]:
                begin(number)
            else:
                open_ones -= 1
    measured.seconds = time.perf_counter() - start
    return measured


def share(values, part):
    """The value that this part of the values is below."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def together(runs):
    """Times of several runs."""
    return [x for run in runs for x in run.firsts], [x for run in runs for x in run.gaps]


def middle(runs):
    """The median rate."""
    return statistics.median(run.rate for run in runs)
