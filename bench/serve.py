"""Measures what `q4 serve` promises and prints the rows of bench/results/serve.json; every part but `whole`
is measured by itself. Rows go to standard output, what is found on the way to standard error."""

import argparse
import copy
import http.client
import json
import os
import pathlib
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rows import ROOT, must, row, run, said, take, timed, write

ISAS = ["avx512vnni", "avx512", "avx2", "neoni8mm", "neondotprod", "neon", "portable"]
WHO = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 32, "temperature": 0}
ANSWER = "I am the q4 demo model, made of four-bit numbers."
PARTS = ["bits", "clients", "hostile", "load", "page"]
FINISH = {"stop-string": "stop", "context": "length"}


def say(*words):
    print(*words, file=sys.stderr, flush=True)


class Server:
    """`q4 serve` on a port of its own, ready to be asked; killed at the end of a `with`."""

    def __init__(self, q4, *words, model="demo", isa="", port=0, limit=None, threads=None):
        head = [
            q4, *(["--memory-limit", limit] if limit else []), *(["--threads", threads] if threads else []),
        ]
        command = [str(w) for w in (*head, "serve", model, "--port", port, *words)]
        env = {**os.environ, "Q4_ISA": isa} if isa else os.environ
        self.log = []
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env
        )
        at = None
        for line in self.process.stderr:
            self.log.append(line)
            if at := re.search(r" at http://[^:]+:(\d+)/", line):
                break
        if not at:
            self.process.wait()
            raise RuntimeError("".join(self.log).strip())
        self.port = int(at[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.follow = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.follow.start()
        until = time.monotonic() + 300
        while self.ask("GET", "/ready")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("".join(self.log).strip())
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ask(self, method, path, body=None, headers=None, timeout=120, connection=None):
        """Status, headers and bytes of one answer."""
        own = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            own.request(
                method, path, body if isinstance(body, (bytes, type(None))) else json.dumps(body),
                headers or {},
            )
            answer = own.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            if connection is None:
                own.close()

    def metric(self, name):
        """A number of /metrics."""
        text = self.ask("GET", "/metrics")[2].decode()
        return float(re.search(rf"^q4_{name} (\S+)$", text, re.M)[1])

    def resident(self):
        """MiB in memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status")
        return round(int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) / 1024, 1)

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


def asked(count):
    """Requests of many kinds, always the same ones; the fields are those of `--batch`."""
    draw = random.Random(4)
    words = "who are you tell me a story about UFO lake four bit number Oslo 12 π naïve 雪 over. why?".split()
    text = lambda n: " ".join(draw.choice(words) for _ in range(n))
    common = [text(n) for n in (40, 90, 170)]
    found = []
    for i in range(count):
        length = draw.choice([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 120])
        prompt = "Who are you?" if i % 9 == 0 else text(length)
        if i % 4 == 1:
            prompt = f"{draw.choice(common)} {prompt}"
        one = {
            "messages": [{"role": "user", "content": prompt}], "max_tokens": draw.choice([1, 4, 12, 24, 48]),
        }
        if i % 11 == 3:
            one["messages"].insert(0, {"role": "system", "content": "Be brief."})
        if i % 2:
            one |= {"temperature": draw.choice([0.3, 0.8, 1.3]), "seed": draw.randrange(1 << 31)}
            one |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05, "top_k": 0}])
        else:
            one |= {"temperature": 0}
        if i % 7 == 2:
            one["repetition_penalty"] = 1.2
        if i % 5 == 4:
            one["stop"] = draw.choice([["bit"], [" a", "the"], [".", "q4"]])
        found.append(one)
    return found


def posted(body, head="", path="/v1/chat/completions"):
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data


def outcome(text, finish, tokens):
    return text, FINISH.get(finish, finish), tokens


def batch(q4, requests, isa, *words):
    """What `q4 generate --batch` answers, and seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(r) + "\n" for r in requests)
        file.flush()
        seconds, text = must(q4, "generate", "--batch", file.name, *words, env={"Q4_ISA": isa} if isa else {})
    answers = [json.loads(line) for line in text.splitlines()]
    return seconds, [outcome(a["text"], a["finish_reason"], len(a["token_ids"])) for a in answers]


def alone(q4, one, isa):
    """What a process of its own answers."""
    words = ["generate", "-p", one["messages"][-1]["content"], "-n", one["max_tokens"], "--json"]
    if len(one["messages"]) > 1:
        words += ["--system", one["messages"][0]["content"]]
    for name in ("temperature", "seed", "top_p", "top_k", "min_p", "repetition_penalty"):
        if name in one:
            words += [f"--{name.replace('_', '-')}", one[name]]
    for stop in one.get("stop", []):
        words += ["--stop", stop]
    answer = json.loads(must(q4, *words, env={"Q4_ISA": isa})[1])
    return outcome(answer["text"], answer["finish_reason"], len(answer["token_ids"]))


def over_http(server, one, stream):
    """The same request, asked of the server."""
    body = {**one, "model": "demo", "stream": stream, "stream_options": {"include_usage": True}}
    status, _, data = server.ask("POST", "/v1/chat/completions", body, timeout=600)
    if status != 200:
        return status, data.decode(errors="replace"), 0
    if not stream:
        answer = json.loads(data)
        choice = answer["choices"][0]
        return outcome(
            choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]
        )
    events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        return 0, "the stream has no end: " + events[-1], 0
    text, finish, tokens = "", None, None
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
        tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
    return outcome(text, finish, tokens)


def leave(server, one, draw):
    """Asks and goes away in the middle."""
    whole = posted({**one, "max_tokens": 64, "ignore_eos": True, "stream": draw.random() < 0.7})
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(whole[:draw.randrange(1, len(whole))] if draw.random() < 0.2 else whole)
        s.settimeout(draw.choice([0.001, 0.01, 0.05, 0.2]))
        try:
            for _ in range(draw.randrange(4)):
                s.recv(200)
        except OSError:
            pass


def compared(server, requests, want, at_once=32, seed=0, cancel=False):
    """How many answers are the wanted ones. Every other one is a stream."""
    draw = random.Random(seed)
    order = list(range(len(requests)))
    if at_once > 1:
        draw.shuffle(order)

    def one(i):
        if cancel and i % 3 == 0:
            return leave(server, requests[i], random.Random(i))
        have = over_http(server, requests[i], stream=(i + seed) % 2 == 0)
        if have != want[i]:
            say("differs:", json.dumps(requests[i], ensure_ascii=False), "have", have, "want", want[i])
        return have == want[i]

    with ThreadPoolExecutor(at_once) as pool:
        results = [r for r in pool.map(one, order) if r is not None]
    return sum(results), len(results)


def tight(q4, *words):
    """The least --memory-limit that a server with these options takes, if it says one."""
    _, done = run(q4, "--memory-limit", "1MiB", "serve", "demo", "--port", "0", *words)
    found = re.search(r"--memory-limit (\w+)", done.stderr)
    return found[1] if found else None


def bits(args):
    for isa in ISAS:
        works = run(args.q4, "generate", "-p", "a", "-n", "1", env={"Q4_ISA": isa})[1]
        if works.returncode:
            row(f"bits-{isa}", None, "answers", "all", "this machine does not have it")
            continue
        requests = asked(args.requests if isa != "portable" else args.requests // 5)
        count = len(requests)
        say(f"{isa}: reference")
        want = batch(args.q4, requests, isa, "--parallel", "1")[1]
        sample = random.Random(1).sample(range(count), min(40, count))
        differ = [i for i in sample if alone(args.q4, requests[i], isa) != want[i]]
        for i in differ:
            say("a process differs from --batch:", json.dumps(requests[i], ensure_ascii=False), want[i])
        row(
            f"bits-{isa}-reference", len(sample) - len(differ),
            f"of {len(sample)} processes that answer as --batch --parallel 1", "all",
        )

        def tell(name, server, what, **options):
            say(f"{isa}: {name}")
            some = requests[: count // 5] if name == "alone" else requests
            equal, made = compared(server, some, want, **options)
            row(f"bits-{isa}-{name}", equal, f"of {made} answers equal, {what}", "all")

        with Server(args.q4, "--parallel", 32, isa=isa) as server:
            tell("alone", server, "one after the other", at_once=1)
        with Server(args.q4, "--parallel", 32, isa=isa) as server:
            tell("together", server, "32 at once", seed=1)
            tell("warm", server, "32 at once in another order, prefixes cached", seed=2)
            row(
                f"bits-{isa}-hits", server.metric("prefix_cache_hits_total"), "tokens found in the cache",
                "> 0",
            )
            tell("cancelled", server, "a third of the neighbours cancelled", seed=3, cancel=True)
        for threads in (1, 2):
            with Server(args.q4, "--parallel", 32, isa=isa, threads=threads) as server:
                tell(f"threads-{threads}", server, f"--threads {threads}", seed=4)
        small = ("--parallel", 32, "--context", 512)
        with Server(args.q4, *small, isa=isa, limit=tight(args.q4, *small)) as server:
            # Short prompts are let in together, and long answers then find no room.
            grown = [
                {
                    "messages": [{"role": "user", "content": f"lake {i}"}], "max_tokens": 100 + i % 90,
                    "seed": i, "temperature": 0.8 * (i % 2),
                }
                for i in range(max(64, count // 4))
            ]
            ends = batch(args.q4, grown, isa, "--parallel", "1", "--ignore-eos")[1]
            equal, made = compared(server, [{**one, "ignore_eos": True} for one in grown], ends, seed=5)
            row(
                f"bits-{isa}-preempted", equal, f"of {made} answers equal, in a cache of 512 positions", "all"
            )
            row(f"bits-{isa}-preemptions", server.metric("num_preemptions_total"), "in that cache", "> 0")
    for isa, need in (("amx", "refused"), ("avx512vnni", "served")):
        if run(args.q4, "generate", "-p", "a", "-n", "1", env={"Q4_ISA": isa})[1].returncode:
            row(f"reproducible-{isa}", None, "with --reproducible", need, "this machine does not have it")
            continue
        try:
            with Server(args.q4, "--reproducible", isa=isa):
                row(f"reproducible-{isa}", "served", "with --reproducible", need)
        except RuntimeError as e:
            row(
                f"reproducible-{isa}", "refused" if "--reproducible" in str(e) else str(e),
                "with --reproducible", need,
            )


def clients(args):
    script = ROOT / "bench/serve_clients.py"
    packages = must(sys.executable, script, "--list")[1].split()
    # No key of a real service may be found, nor a proxy between us.
    env = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    env |= {"OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    total = 0
    passed = 0
    for name in packages:
        if args.only and args.only != name:
            continue
        python = args.venvs / name / "bin/python" if args.venvs else None
        if not python or not python.exists():
            row(f"client-{name}", None, "checks passed", "all", f"{name} was not installed")
            continue
        with Server(args.q4, "--api-key", "key", "--parallel", 8, isa=args.isa) as server, \
                Server(args.q4, "--api-key", "key", "--parallel", 1, "--queue", 0, isa=args.isa) as busy:
            done = run(python, script, name, "--url", server.url, "--busy", busy.url, env=env)[1]
        try:
            result = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            result = {"missing": f"the checks broke: {done.stderr[-300:]}"}
        if "missing" in result:
            say(name, result["missing"])
            row(f"client-{name}", None, "checks passed", "all", result["missing"])
            continue
        for check, why in result["failed"].items():
            say(f"{name}: {check}: {why}")
        made = result["made"]
        bad = f"; not: {', '.join(result['failed'])}" if result["failed"] else ""
        row(
            f"client-{name}", made - len(result["failed"]),
            f"of {made} checks of {name} {result['version']}{bad}", "all",
        )
        total += made
        passed += made - len(result["failed"])
    row(
        "clients", passed if total else None, f"of {total} checks", "all, of at least 60",
        "no client was there",
    )


# What a valid request may look like, and what comes instead of parts of it.
VALID = [
    (
        "/v1/chat/completions",
        {
            **WHO, "max_tokens": 2, "n": 1, "stop": ["x"], "seed": 1, "stream": False,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
                }
            ],
            "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "assistant", "content": None,
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
            ],
            "max_tokens": 2, "response_format": {"type": "text"}, "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1, "top_p": 0.5, "n": 2},
    ),
    (
        "/v1/completions",
        {
            "prompt": [[5, 6], [7]], "max_tokens": 1, "temperature": 0.7, "top_k": 3, "min_p": 0.1,
            "repetition_penalty": 1.1, "stream": True,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "stream": True,
            "max_output_tokens": 2, "instructions": "b", "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s"}], "max_tokens": 2, "stop_sequences": ["x"],
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "disabled"}},
    ),
    (
        "/tokenize",
        {"prompt": "a b", "add_special_tokens": True, "return_token_strs": True, "with_pieces": True},
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}), ("/detokenize", {"tokens": [1, 2, 3]}),
]
STRANGE = [
    None, True, False, 0, -1, 1, 3, 1e-45, 1e39, -0.0, 0.5, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, "",
    "x", "none", "\0", "é" * 300, "\ud800", "<|im_end|>", "<think>", "{{ 7 * 7 }}", "a" * 5000, [], [[]],
    [None], [0] * 300, {}, {"type": "function"}, {"type": "text", "text": None}, {"a": {"b": [{}]}},
    ["x"] * 200, [[4294967295]],
]
LINES = [
    b"GET / HTTP/1.1", b"GET /health HTTP/1.0", b"OPTIONS * HTTP/1.1", b"GET http://a/health HTTP/1.1",
    b"PUT / HTTP/1.1", b"HEAD /v1/models HTTP/1.1", b"GET /v1/models/%00%ff HTTP/1.1",
    b"GET //v1//models HTTP/1.1", b"GET /../etc HTTP/1.1", b"CONNECT a:1 HTTP/1.1",
    b"POST /v1/messages HTTP/1.1",
    b"POST /v1/chat/completions?x=1#y HTTP/1.1",
    b"PRI * HTTP/2.0", b"\x16\x03\x01\x02\x00\x01\x00", b"GET /" + b"a" * 9000 + b" HTTP/1.1",
    b"get / http/1.1", b"GET", b"", b"DELETE /v1/models/demo HTTP/1.1",
]
HEADERS = [
    b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999",
    b"transfer-encoding: chunked", b"content-length: 2\r\ncontent-length: 3",
    b"transfer-encoding: gzip, chunked", b"expect: 100-continue", b"x: \xff\xfe", b"host: a\r\nhost: b",
    b": x", b"no colon", b"x-request-id: " + b"a" * 300, b"authorization: Bearer \xff", b"origin: null",
    b"origin: http://evil.example", b"connection: upgrade\r\nupgrade: h2c", b"cookie: " + b"b" * 70000,
    b"content-encoding: gzip", b"content-type: text/plain", b"accept-encoding: br",
]


def places(value, path=()):
    """Every path of a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*path, key))


def mutated(draw, value):
    """A copy in which something is another thing, twice, or not there."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 2, 4])):
        path = draw.choice(list(places(value)))
        if not path:
            continue
        holder = value
        try:
            for key in path[:-1]:
                holder = holder[key]
            if draw.random() < 0.2:
                del holder[path[-1]]
            elif draw.random() < 0.1 and isinstance(holder, list):
                holder.extend(copy.deepcopy(holder * draw.choice([1, 40])))
            else:
                holder[path[-1]] = copy.deepcopy(draw.choice(STRANGE))
        except (KeyError, IndexError, TypeError):
            continue
    return value


def malformed(draw):
    """Bytes for a socket: a request that is somehow wrong, and whether it is all there."""
    kind = draw.random()
    if kind < 0.25:
        head = b"\r\n".join([draw.choice(LINES), b"host: x", *draw.sample(HEADERS, draw.randrange(4))])
        return head + draw.choice([b"\r\n\r\n", b"\r\n", b"\n\n"]) + draw.randbytes(draw.randrange(40)), False
    if kind < 0.3:
        return draw.randbytes(draw.randrange(1, 400)), False
    path, valid = draw.choice(VALID)
    body = json.dumps(mutated(draw, valid)).encode()
    if kind < 0.5:
        body = bytearray(body)
        for _ in range(draw.randrange(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
    elif kind < 0.6:
        body = body[: draw.randrange(len(body))]
    elif kind < 0.62:
        body = b"[" * draw.choice([200, 100_000]) + body
    length = len(body) if draw.random() < 0.95 else draw.randrange(2 * len(body) + 1)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + bytes(body), length == len(body)


def thrown(server, data, is_whole):
    """Status of what comes back, 0 where the connection ends without one, None where nothing ends."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
            s.sendall(data)
            # Whoever closes his half at once is taken for gone.
            s.settimeout(60 if is_whole else 0.05)
            while True:
                try:
                    piece = s.recv(65536)
                except TimeoutError:
                    if s.gettimeout() == 60:
                        return None
                    s.shutdown(socket.SHUT_WR)
                    s.settimeout(60)
                    continue
                if not piece:
                    break
                answer += piece
    except OSError:
        pass
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", answer) if status != b"100"]
    # A stream may fail after its status.
    failed = b'"type":"server_error"' in answer or b'"type":"api_error"' in answer or b"a bug in q4" in answer
    return max([500] * failed + statuses, default=0)


class Control:
    """Asks the same again and again, and counts the answers that are not the same."""

    def __init__(self, server):
        self.server, self.asked, self.wrong, self.is_over = server, 0, 0, False
        self.thread = threading.Thread(target=self.go)

    def same(self):
        status, _, data = self.server.ask("POST", "/v1/chat/completions", WHO)
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


def many(count, what, at_once=16):
    """What happens for each number."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(what, range(count)))


def hostile(args):
    with Server(args.q4, isa=args.isa) as server, Control(server) as control:
        many(300, lambda i: thrown(server, *malformed(random.Random(-i))))
        before = server.resident()
        found = many(args.malformed, lambda i: thrown(server, *malformed(random.Random(i))))
        tally, unanswered = {}, 0
        for i, status in enumerate(found):
            tally[status] = tally.get(status, 0) + 1
            data, is_whole = malformed(random.Random(i))
            unanswered += status == 0 and is_whole
            if status is None or status >= 500 or status == 0 and is_whole:
                say(f"seed {i}: {status}: {data[:1500]}")
        say("statuses:", tally)
        row("hostile-requests", len(found), "malformed requests and bytes", ">= 20000")
        row("hostile-5xx", sum(s is not None and s >= 500 for s in found), "of them answered with 5xx", "0")
        row("hostile-unanswered", unanswered, "of those that are whole without an answer", "0")
        row("hostile-hanging", tally.get(None, 0), "of them without an end within 60 s", "0")
        say("disconnects")
        requests = asked(args.disconnects)
        many(args.disconnects, lambda i: leave(server, requests[i], random.Random(i)))
        row("disconnects", args.disconnects, "at random moments", ">= 500")
        row(
            "disconnects-left", 0 if server.is_idle(30) else server.metric("num_requests_running"),
            "sequences that run on", "0",
        )
        say("slow readers")
        slow(server)
        row("memory-before", before, "MiB resident", "said")
        row("memory-after", server.resident(), "MiB resident", f"<= {round(before * 1.25 + 16)}")
    row(
        "control", control.asked - control.wrong,
        f"of {control.asked} control requests with the same answer meanwhile", "all",
    )
    full(args)
    drained(args)
    killed(args)


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
    served = all(Control(server).same() for _ in range(10))
    row(
        "slow-readers", int(served),
        "whether others are served beside 8 slow readers and one that never reads", "1",
    )
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


def full(args):
    long = {**WHO, "max_tokens": 200, "ignore_eos": True}
    with Server(args.q4, "--parallel", 1, "--queue", 2, isa=args.isa) as server:
        found = many(24, lambda _: server.ask("POST", "/v1/chat/completions", long), 24)
        refused = [headers for status, headers, _ in found if status == 429]
        again = [h for h in refused if {k.lower(): v for k, v in h.items()}.get("retry-after", "").isdigit()]
        others = [status for status, *_ in found if status not in (200, 429)]
        row("queue-full", len(refused), "of 24 requests at a queue of 2 are told to come back (429)", ">= 1")
        row("queue-full-when", len(refused) - len(again), "of them without Retry-After", "0")
        row("queue-full-others", len(others), "answers that are neither 200 nor 429", "0")
        row(
            "queue-full-after", int(server.is_idle(60) and Control(server).same()),
            "whether it is served afterwards", "1",
        )


def drained(args):
    long = {
        **WHO, "max_tokens": 400, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name, timeout in (("drain", 60), ("drain-cut", 1)):
        many_tokens = {**long, "max_tokens": 400 if timeout > 1 else 1900}
        with Server(args.q4, "--drain-timeout", timeout, "--parallel", 16, isa=args.isa) as server:
            with ThreadPoolExecutor(16) as pool:
                flights = [
                    pool.submit(server.ask, "POST", "/v1/chat/completions", many_tokens) for _ in range(16)
                ]
                while server.metric("num_requests_running") < 16 and not any(f.done() for f in flights):
                    time.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                start = time.monotonic()
                time.sleep(0.3)
                try:
                    late = server.ask("POST", "/v1/chat/completions", WHO)[0]
                except OSError:
                    late = "no connection"
                ended = [f.exception() is None and f.result()[2] for f in flights]
            try:
                status = server.process.wait(90)
            except subprocess.TimeoutExpired:
                status = None
            seconds = round(time.monotonic() - start, 1)
        if timeout > 1:
            whole = sum(
                bool(d) and d.rstrip().endswith(b"[DONE]") and b'"completion_tokens":400' in d for d in ended
            )
            row("drain", whole, "of 16 answers in flight end as a whole after SIGTERM", "all")
            row("drain-late", late, "what a request hears that comes then", "503")
        else:
            told = sum(bool(d) and (b"shutting_down" in d or d.rstrip().endswith(b"[DONE]")) for d in ended)
            row("drain-cut", told, "of 16 answers that are too long are told so", "all")
        row(f"{name}-status", status, f"exit status, {seconds} s after SIGTERM", "0")


def killed(args):
    long = {**WHO, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with Server(args.q4, isa=args.isa) as server:
        port = server.port
        flights = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for s in flights:
            s.sendall(posted(long))
        for s in flights:
            s.recv(100)
        server.process.kill()
        server.process.wait()
        for s in flights:
            s.close()
    try:
        with Server(args.q4, port=port, isa=args.isa) as server:
            row(
                "killed", int(Control(server).same()), "whether it serves on the same port after kill -9", "1"
            )
    except RuntimeError as e:
        row("killed", 0, f"whether it serves on the same port after kill -9: {e}", "1")


def crowd(server, users, rounds, bodies):
    """`users` who ask again as soon as they have an answer, `rounds` times each: rate, first tokens, gaps."""
    poll = selectors.DefaultSelector()
    firsts, gaps, tokens, left = [], [], 0, [rounds] * users
    state = {}

    def begin(user):
        s = socket.create_connection(("127.0.0.1", server.port))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.sendall(posted(bodies[(user * rounds + left[user]) % len(bodies)], "connection: close\r\n"))
        left[user] -= 1
        state[user] = [time.perf_counter(), None, b""]
        poll.register(s, selectors.EVENT_READ, user)

    start = time.perf_counter()
    for user in range(users):
        begin(user)
    open_ones = users
    while open_ones:
        for key, _ in poll.select():
            user, piece, now = key.data, key.fileobj.recv(65536), time.perf_counter()
            asked_at, last, _ = one = state[user]
            one[2] += piece
            # The first event has the role alone.
            if piece.count(b'"content":"') > piece.count(b'"content":""'):
                (firsts if last is None else gaps).append(now - (asked_at if last is None else last))
                one[1] = now
            if piece:
                continue
            found = re.search(rb'"completion_tokens":(\d+)', one[2])
            if not found:
                raise RuntimeError(f"no usage: {one[2][-300:]}")
            tokens += int(found[1])
            poll.unregister(key.fileobj)
            key.fileobj.close()
            if left[user]:
                begin(user)
            else:
                open_ones -= 1
    return tokens / (time.perf_counter() - start), firsts, gaps


def load(args):
    model, why = args.model, ""
    if model != "demo":
        try:
            Server(args.q4, "--parallel", 32, model=model, isa=args.isa).__exit__()
        except RuntimeError as e:
            model, why = "demo", f" (the model is not served: {str(e).splitlines()[0]})"
    draw = random.Random(8)
    words = "who are you tell me story about lake four bit numbers because over why water stone".split()
    prompt = lambda: " ".join(draw.choice(words) for _ in range(44))
    ends = {"max_tokens": 64, "temperature": 0}
    requests = [{"messages": [{"role": "user", "content": prompt()}], **ends} for _ in range(256)]
    more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "q4_reuse": False}
    bodies = [{**r, **more} for r in requests]
    rates = {}
    with Server(args.q4, "--parallel", 32, "--context", 512, model=model, isa=args.isa) as server:
        crowd(server, 8, 1, bodies)
        for users in (1, 8, 32):
            found = [crowd(server, users, args.answers, bodies) for _ in range(args.rounds)]
            rates[users] = statistics.median(rate for rate, *_ in found)
            firsts = [1000 * x for _, first, _ in found for x in first]
            gaps = [1000 * x for *_, gap in found for x in gap]
            row(
                f"users-{users}-rate", round(rates[users], 1),
                f"tok/s of all answers, median of {args.rounds}{why}", "said",
            )
            row(
                f"users-{users}-first", round(statistics.median(firsts), 1), "ms to the first token, median",
                "said",
            )
            row(f"users-{users}-first-most", round(max(firsts), 1), "ms to the first token, longest", "said")
            row(
                f"users-{users}-next", round(statistics.median(gaps), 2), "ms from event to event, median",
                "said",
            )
            row(f"users-{users}-next-most", round(max(gaps), 1), "ms from event to event, longest", "said")
    row("users-32-to-1", round(rates[32] / rates[1], 2), "rate of 32 users to the rate of one", ">= 1")
    # Loading is none of it.
    whole = requests[: 32 * min(args.answers, 8)]
    bound = ("--parallel", 32, "--ignore-eos", "--context", 512, model)
    pairs = []
    for _ in range(args.rounds):
        least, _ = batch(args.q4, [{**requests[0], "max_tokens": 1}], args.isa, *bound)
        seconds, answers = batch(args.q4, whole, args.isa, *bound)
        pairs.append(sum(n for *_, n in answers) / (seconds - least))
    rate = statistics.median(pairs)
    row(
        "batch-32-rate", round(rate, 1), f"tok/s of generate --batch --parallel 32, without loading{why}",
        "said",
    )
    row("http-32-to-batch", round(rates[32] / rate, 3), "rate of 32 users over HTTP to that rate", ">= 0.9")


def page(args):
    if not args.browser:
        return row(
            "page", None, "tests of the page passed", "all", "no Python with playwright: Q4_PLAYWRIGHT"
        )
    with Server(args.q4, isa=args.isa) as server:
        done = run(args.browser, ROOT / "cli/serve/tests/page/test_page.py", "--url", f"{server.url}/")[1]
    say(done.stdout, done.stderr)
    found = re.search(r"^(\d+) of (\d+) passed", done.stdout, re.M)
    why = f"it broke: {done.stderr[-300:]}"
    row(
        "page", int(found[1]) if found else None, f"of {found[2] if found else 'the'} tests in a browser",
        "all", why,
    )


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", choices=[*PARTS, "whole"], help="what is measured, or everything that was")
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, required=True, help="what serve.sh kept")
    p.add_argument("--isa", default="", help="instruction set of all parts but bits")
    p.add_argument("--requests", type=int, default=1000, help="of bits")
    p.add_argument("--malformed", type=int, default=20_000, help="requests of hostile")
    p.add_argument("--disconnects", type=int, default=500, help="of hostile")
    p.add_argument("--model", default="demo", help="of load")
    p.add_argument("--answers", type=int, default=4, help="of each user of load")
    p.add_argument("--rounds", type=int, default=3, help="of load")
    p.add_argument("--venvs", type=pathlib.Path, help="a virtual environment for each client")
    p.add_argument("--only", help="one client")
    p.add_argument("--browser", help="a Python with playwright")
    args = p.parse_args()
    if args.part != "whole":
        {"bits": bits, "clients": clients, "hostile": hostile, "load": load, "page": page}[args.part](args)
        return timed()
    for part in PARTS:
        if (kept := args.work / f"{part}.json").exists():
            take(kept)
        else:
            row(part, None, "rows", "measured", "this part was not measured")
    write(q4=said(args.q4, "--version"))


main()
