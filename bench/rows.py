"""What the measuring scripts share: rows of a result file, commands, and what tests printed."""

import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = []


def row(name, value, unit, need, why="the tests did not run, or one of them failed"):
    """A number, or no number and the reason."""
    missing = {"not_measured": why} if value is None else {}
    ROWS.append({"name": name, "value": value, "unit": unit, "need": need, **missing})


def run(*command, env=None, cwd=None):
    """Seconds, and how it ended."""
    start = time.perf_counter()
    words = [str(c) for c in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(env or {})}, cwd=cwd)
    return time.perf_counter() - start, done


def must(*command, **kwargs):
    """Seconds and standard output of what may not fail."""
    seconds, done = run(*command, **kwargs)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds, done.stdout


class Tests:
    """What the tests printed, and which of them passed."""

    def __init__(self, path):
        self.text = path.read_text(errors="replace") if path.exists() else ""
        # With --nocapture the verdict may follow what the test printed.
        self.names = set(re.findall(r"^test (\S+) \.\.\.", self.text, re.M))
        lists = "".join(re.findall(r"^failures:\n((?:    \S+\n)+)", self.text, re.M))
        self.failed = set(re.findall(r"^    (\S+)$", lists, re.M))
        self.broken = "error: could not compile" in self.text

    def of(self, part):
        """Tests whose name has this part, and those of them that failed; none when none ran."""
        found = {n for n in self.names if part in n}
        return None if self.broken or not found else (found, found & self.failed)

    def passed(self, part):
        """Tests whose name has this part; none when there are none, or one of them failed."""
        found = self.of(part)
        return None if not found or found[1] else len(found[0])

    def failures(self, part):
        """How many of them failed."""
        found = self.of(part)
        return None if not found else len(found[1])

    def numbers(self, pattern):
        """What a line says."""
        return re.search(pattern, self.text)


def machine():
    """Which processor."""
    cpus = pathlib.Path("/proc/cpuinfo")
    facts = cpus.read_text().splitlines() if cpus.exists() else []

    def fact(name):
        return next((l.split(":")[1].strip() for l in facts if l.split("\t")[0] == name), None)

    cpu = fact("model name") or platform.machine()
    # Of a virtual machine the name may leave open which processor it is.
    if fact("cpu family") and not re.search(r"\d", cpu):
        cpu += f", family {fact('cpu family')}, model {fact('model')}"
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    some = {"of": os.cpu_count()} if own != os.cpu_count() else {}
    return {"cpu": cpu, "processors": own, **some}


def timed():
    """Prints the rows of a part that is measured by itself, with machine and commit."""
    print(json.dumps({"machine": machine(), "commit": said("git", "rev-parse", "HEAD"), "rows": ROWS}))


def take(path, names=""):
    """Takes the rows of such a part whose name has this pattern; what was measured elsewhere, or of an earlier commit,
    says so."""
    part = json.loads(path.read_text())
    at = part["machine"]
    of = f" of {at['of']}" if "of" in at else ""
    where = "" if at == machine() else f"; {at['cpu']}, {at['processors']}{of} processors"
    if part.get("commit") not in (None, said("git", "rev-parse", "HEAD")):
        where += f"; measured at {part['commit'][:7]}"
    some = (r for r in part["rows"] if re.search(names, r["name"]))
    ROWS.extend(r if r["value"] is None else {**r, "unit": r["unit"] + where} for r in some)


def said(*command):
    """The first line that a command prints, if there is one."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
        return text.strip().splitlines()[0]
    except (OSError, IndexError):
        return None


def write(at=None, **versions):
    """Prints the result file; `at`: the machine, where it is not this one."""
    commit = said("git", "rev-parse", "HEAD")
    result = {"machine": at or machine(), "commit": commit, "versions": versions, "rows": ROWS}
    print(json.dumps(result, indent=1))
