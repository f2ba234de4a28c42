"""Small assertions with names, and what all clients ask."""

import contextlib
import json
import pathlib
import threading
import time
import urllib.error
import urllib.request

ANSWER = "I am the q4 demo model, made of four-bit numbers."
WHO = "Who are you?"
ASK = [{"role": "user", "content": WHO}]
CITIES = {"type": "string", "enum": ["Oslo", "Rome"]}
SCHEMA = {
    "type": "object", "properties": {"city": CITIES}, "required": ["city"], "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
# The files of the model that is served, for clients with a tokenizer of their own.
DEMO = pathlib.Path(__file__).resolve().parents[3] / "cli/demo"


class Checks:
    """The checks of one client: how many were made, and which failed and why."""

    def __init__(self, url, busy):
        self.url, self.busy, self.made, self.failed = url, busy, 0, {}
        # An answer in a form is given, or it is refused as what is not supported.
        self.forms = forms(url)

    def same(self, name, have, want=True):
        """One that two things are equal."""
        self.made += 1
        if have != want:
            self.failed[name] = f"need {want!r}, have {have!r}"[:400]

    @contextlib.contextmanager
    def part(self, name):
        """What breaks in here is one check that failed."""
        try:
            yield
        except Exception as e:  # whatever a client throws
            self.made += 1
            self.failed[name] = f"{type(e).__name__}: {e}"[:600]

    def throws(self, name, kind, act, **want):
        """That a client throws what it has for this, with these fields."""
        self.made += 1
        try:
            act()
            self.failed[name] = f"need {kind.__name__}, have no error"
        except kind as e:
            have = {field: getattr(e, field, None) for field in want}
            if have != want:
                self.failed[name] = f"need {want}, have {have}"
        except Exception as e:
            self.failed[name] = f"need {kind.__name__}, have {type(e).__name__}: {e}"[:400]


def forms(url):
    """Whether the server keeps answers to a form."""
    body = {"messages": ASK, "max_tokens": 8, "response_format": {"type": "json_object"}}
    head = {"authorization": "Bearer key", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    try:
        return urllib.request.urlopen(request).status == 200
    except urllib.error.HTTPError as e:
        if json.load(e)["error"]["code"] != "unsupported":
            raise
        return False


def occupied(ask):
    """While somebody else is answered at length, and another one is about to ask."""
    @contextlib.contextmanager
    def within():
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)
        yield
        thread.join()
    return within()
