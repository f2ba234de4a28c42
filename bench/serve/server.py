"""A server that is measured: started, asked, looked at from outside, killed."""

import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rows import run

# What the demo model is known to answer.
WHO = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 32, "temperature": 0}
ANSWER = "I am the q4 demo model, made of four-bit numbers."
CHAT = "/v1/chat/completions"


def say(*words):
    print(*words, file=sys.stderr, flush=True)


class Program:
    """A server in a process of its own, killed at the end of a `with`."""

    process = None
    port = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ask(self, method, path, body=None, headers=None, timeout=120):
        """Status, headers and bytes of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        try:
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def memory(self, what="VmRSS"):
        """MiB that are resident, or were at most (VmHWM)."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return round(int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024, 1)


class Server(Program):
    """`q4 serve`, ready to be asked, on a free port unless one is named."""

    def __init__(self, q4, *words, model="demo", isa="", port=0, limit=None, threads=None):
        head = [
            q4, *(["--memory-limit", limit] if limit else []), *(["--threads", threads] if threads else []),
        ]
        command = [str(w) for w in (*head, "serve", model, "--port", port, *words)]
        env = {**os.environ, "Q4_ISA": isa} if isa else os.environ
        self.log = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        at = None
        for line in self.process.stdout:
            self.log.append(line)
            if at := re.search(r" at http://[^:]+:(\d+)/", line):
                break
        if not at:
            self.process.wait()
            raise RuntimeError("".join(self.log).strip())
        self.port = int(at[1])
        self.follow = threading.Thread(target=lambda: self.log.extend(self.process.stdout), daemon=True)
        self.follow.start()
        until = time.monotonic() + 300
        while self.ask("GET", "/ready")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError("".join(self.log).strip())
            time.sleep(0.05)

    def metric(self, name):
        """A number of /metrics."""
        text = self.ask("GET", "/metrics")[2].decode()
        return float(re.search(rf"^q4_{name} (\S+)$", text, re.M)[1])

    def holds(self, port):
        """Whether a client's port is still connected to this server."""
        ends = rf": \w+:{self.port:04X} \w+:{port:04X} 01 "
        return re.search(ends, pathlib.Path("/proc/net/tcp").read_text()) is not None

    def is_idle(self, seconds):
        """Whether nothing runs or waits within a time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0:
                return True
            time.sleep(0.2)
        return False


class Control:
    """Asks the same again and again, and counts the answers that are not the same."""

    def __init__(self, server):
        self.server, self.asked, self.wrong, self.is_over = server, 0, 0, False
        self.thread = threading.Thread(target=self.go)

    def same(self):
        status, _, data = self.server.ask("POST", CHAT, WHO)
        answer = json.loads(data)
        if status != 200 or answer["choices"][0]["message"]["content"] != ANSWER:
            say("control:", status, data)
            return False
        return answer["usage"]["completion_tokens"] == 15 and answer["choices"][0]["finish_reason"] == "stop"

    def go(self):
        while not self.is_over:
            try:
                self.wrong += not self.same()
            except (OSError, ValueError, LookupError, http.client.HTTPException) as e:
                say("control:", repr(e))
                self.wrong += 1
            self.asked += 1
            time.sleep(0.05)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.thread.join()


def posted(body, head="", path=CHAT, length=None):
    """A request as bytes; `length` is what it claims, where that is not so."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(data) if length is None else length
    return f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{head}content-length: {length}\r\n\r\n".encode() + data


def leave(server, one, draw):
    """Asks and goes away in the middle."""
    whole = posted({**one, "max_tokens": 64, "ignore_eos": True, "stream": draw.random() < 0.7})
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(whole[:draw.randrange(1, len(whole))] if draw.random() < 0.2 else whole)
            s.settimeout(draw.choice([0.001, 0.01, 0.05, 0.2]))
            for _ in range(draw.randrange(4)):
                s.recv(200)
    except OSError:
        pass


def many(count, what, at_once=16):
    """What happens for each number."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(what, range(count)))


def filled(server, parallel=16):
    """Touches every page of the cache, so that what grows later is something else; MiB then."""
    long = [
        {"messages": [{"role": "user", "content": f"{i} lakes"}], "ignore_eos": True, "temperature": 0}
        for i in range(parallel)
    ]
    many(parallel, lambda i: server.ask("POST", CHAT, long[i]), parallel)
    return server.memory()


def tight(q4, *words, model="demo"):
    """The least --memory-limit that a server with these options takes, if it says one."""
    _, done = run(q4, "--memory-limit", "1MiB", "serve", model, "--port", "0", *words)
    found = re.search(r"--memory-limit (\w+)", done.stderr)
    return found[1] if found else None


def instruction_sets(q4):
    """All that q4 knows, as it says where it is asked for another."""
    done = run(q4, "--json", "generate", "-p", "a", "-n", "1", env={"Q4_ISA": "none"})[1]
    return re.search(r'"need":"one of ([^"]+)"', done.stdout)[1].split(", ")


def has(q4, isa):
    """Whether this machine has an instruction set."""
    return not run(q4, "generate", "-p", "a", "-n", "1", env={"Q4_ISA": isa})[1].returncode
