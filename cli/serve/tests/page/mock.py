"""A server that speaks as `q4 serve` does and answers from a script. A word in square brackets in the last
message picks the scene: [slow], [think], [fault], [drop], [busy], [long], [tool], [once]; "Say X" gets X,
anything else a page of Markdown. `python3 mock.py [PORT]` serves it for a browser."""
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).parents[2] / "page"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
MARKDOWN = (Path(__file__).parent / "answer.md").read_text()
THOUGHTS = (
    "The user asks for the largest lakes. By area: the Caspian Sea, Superior, Victoria.\n"
    "Is the Caspian Sea a lake? Most lists say so, with a remark. I will name it and give its area.\n"
)


def layer(i, name, n, k):
    missing = {"code": "library-missing", "need": "libNVFP4.so", "have": "no such file"}
    rejected = [{"backend": "libnvfp4", **missing}]
    if name == "mlp.down_proj":
        why = {"code": "shape-unsupported", "need": "k a multiple of 1024", "have": f"k = {k}"}
        rejected.append({"backend": "nvfp4-blocked", "path": "fused-dequant", "reasons": [why]})
    return {
        "name": f"model.layers.{i}.{name}", "schema": "nvfp4", "layout": "modelopt", "n": n, "k": k,
        "chosen": {"backend": "nvfp4-kernel", "path": "fused-dequant", "activations": "float32"},
        "rejected": rejected,
    }


SHAPES = [("self_attn.qkv_proj", 6144, 2560), ("self_attn.o_proj", 2560, 4096),
          ("mlp.gate_up_proj", 19456, 2560), ("mlp.down_proj", 2560, 9728)]
EXPLAIN = {
    "model": "Qwen3-4B-NVFP4", "isa": "avx512-vnni", "device": "CPU, 16 threads", "reproducible": True,
    "not_reproducible": [], "downgraded": 0,
    "layers": [layer(i, *shape) for i in range(36) for shape in SHAPES],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body, kind="application/json", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        error = {"message": "no valid API key", "type": "invalid_request_error", "code": "invalid_api_key"}
        self.reply(401, {"error": error})
        return False

    def do_GET(self):
        name = "index.html" if self.path == "/" else self.path.lstrip("/")
        page = PAGE / name
        if page.parent == PAGE and page.is_file():
            return self.reply(200, page.read_bytes(), TYPES[page.suffix], Content_Security_Policy=POLICY)
        if self.path == "/ready":
            error = {"message": "the model is still being loaded", "type": "server_error", "code": None}
            return self.reply(200, {}) if self.server.ready else self.reply(503, {"error": error})
        if not self.allowed():
            return None
        if self.path == "/v1/models":
            return self.reply(200, {"object": "list", "data": [{"id": "Qwen3-4B-NVFP4", "object": "model"}]})
        if self.path == "/v1/q4/explain":
            return self.reply(200, self.server.explain)
        return self.reply(404, {"error": {"message": "no such page", "type": "invalid_request_error"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.asked.append(body)
        last = body["messages"][-1]["content"]
        scene = last.partition("[")[2].partition("]")[0]
        if scene == "busy":
            error = {"message": "8 requests are waiting already", "type": "rate_limit", "code": "queue_full"}
            self.reply(429, {"error": error}, Retry_After="7")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.stream(scene, last)
        except OSError:
            self.server.hung_up += 1
            self.close_connection = True

    def send(self, line):
        data = f"{line}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def delta(self, wait=0.004, finish=None, **delta):
        time.sleep(wait)
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self.send("data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}))

    def words(self, text, wait=0.004, fields=("content",)):
        for i, word in enumerate(text.split(" ")):
            piece = f" {word}" if i else word
            self.delta(wait, **{name: piece for name in fields})
        return len(text.split(" "))

    def stream(self, scene, last):
        finish = "stop"
        if self.server.late:
            time.sleep(30)
        self.delta(role="assistant", content="")
        if scene == "slow":
            count = self.words("A slow answer counts on: " + " ".join(map(str, range(400))), 0.03)
        elif scene == "think":
            count = self.words(THOUGHTS, 0.06, ("reasoning", "reasoning_content"))
            count += self.words("The **Caspian Sea**, by far: 371 000 km².", 0.02)
        elif scene == "fault":
            self.words("This answer meets a fault in")
            error = {"message": "layer 7 gave NaN", "type": "server_error", "code": "Q4-E0211"}
            self.send("data: " + json.dumps({"error": error}))
            return self.end()
        elif scene == "drop":
            self.words("This answer is cut off in the mid")
            time.sleep(0.1)
            self.close_connection = True
            return self.connection.close()
        elif scene == "tool":
            function = {"name": "weather", "arguments": ""}
            self.delta(tool_calls=[{"index": 0, "id": "call_0", "type": "function", "function": function}])
            for piece in ['{"city": ', '"Oslo", ', '"days": 3}']:
                self.delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            count, finish = 4, "tool_calls"
        elif scene == "once":
            time.sleep(0.2)
            self.delta(content="An answer that comes in one piece")
            count = 7
        elif scene == "long":
            count, finish = self.words("An answer that has more to say than it may", 0.02), "length"
        elif last.startswith("Say "):
            count = self.words(last[4:], 0.02)
        else:
            count = self.words(MARKDOWN)
        self.delta(finish=finish)
        usage = {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}
        self.send("data: " + json.dumps({"object": "chat.completion.chunk", "choices": [], "usage": usage}))
        self.send(": a comment keeps the connection")
        self.send("data: [DONE]")
        return self.end()

    def end(self):
        self.wfile.write(b"0\r\n\r\n")


class Mock(ThreadingHTTPServer):
    """`key`, `ready`, `late` (no token for half a minute) and `explain` may be changed at any time; `asked`
    has the bodies of all requests."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.open = set()
        self.late = False
        self.key, self.ready, self.explain, self.asked, self.hung_up = None, True, EXPLAIN, [], 0
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A browser that hangs up is part of the play."""

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def stop(self):
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            self.shutdown_request(connection)


if __name__ == "__main__":
    print(Mock(int(sys.argv[1]) if len(sys.argv) > 1 else 8080).url, flush=True)
    threading.Event().wait()
