"""Requests that are somehow wrong."""

import copy
import json

from .server import CHAT, WHO, posted

# What a valid request may look like, and what comes instead of parts of it.
VALID = [
    (
        CHAT,
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
        CHAT,
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


def spoiled(draw, most):
    """A path and the body of a request of it, at most about `most` bytes, in which something is wrong."""
    path, valid = draw.choice(VALID)
    body = json.dumps(mutated(draw, valid)).encode()
    kind = draw.random()
    if kind < 0.28:
        body = bytearray(body)
        for _ in range(draw.randrange(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
    elif kind < 0.43:
        body = body[: draw.randrange(len(body))]
    elif kind < 0.46:
        body = b"[" * draw.choice([200, most]) + body
    return path, bytes(body)


def malformed(draw):
    """Bytes for a socket: a request that is somehow wrong, and whether it is all there."""
    kind = draw.random()
    if kind < 0.25:
        head = b"\r\n".join([draw.choice(LINES), b"host: 127.0.0.1", *draw.sample(HEADERS, draw.randrange(4))])
        return head + draw.choice([b"\r\n\r\n", b"\r\n", b"\n\n"]) + draw.randbytes(draw.randrange(40)), False
    if kind < 0.3:
        return draw.randbytes(draw.randrange(1, 400)), False
    path, body = spoiled(draw, 100_000)
    length = len(body) if draw.random() < 0.95 else draw.randrange(2 * len(body) + 1)
    return posted(body, "connection: close\r\n", path, length), length == len(body)


def kept(draw):
    """A request that is wrong, but ends where it says, so that others may follow on its connection."""
    if draw.random() < 0.05:
        line = draw.choice([line for line in LINES if line.startswith((b"POST /", b"PUT /", b"DELETE /"))])
        return line + b"\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}"
    path, body = spoiled(draw, 3000)
    return posted(body, path=path)
