"""Ranks that share a run against one rank, started by torchrun and mpirun, killed and gone on with. A part of
bench/trainer-scale.py."""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import rows

SUMS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"What is {i} plus 1?"},
                             {"role": "assistant", "content": f"{i} plus 1 is {i + 1}."}]}) + "\n" for i in range(40))


def config(**sizes):
    return json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "vocab_size": 2048, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2,
        "torch_dtype": "bfloat16", **sizes})


class Bench:
    def __init__(self, q4, work):
        self.q4, self.work, self.count = q4, work, 0

    def folder(self, model, **sizes):
        """A folder with data and, where it is no name, a model of random weights."""
        self.count += 1
        d = self.work / f"ranks-{self.count}"
        d.mkdir()
        (d / "data.jsonl").write_text(SUMS)
        head = f'path = "{model}"\n'
        if model == "model":
            (d / "model").mkdir()
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(rows.ROOT / "cli/demo" / name, d / "model")
            (d / "model/config.json").write_text(config(**sizes))
            head += 'init = "random"\n'
        (d / "run.toml").write_text(
            f"[model]\n{head}[data]\ntrain = ['data.jsonl']\nvalid = ['data.jsonl']\nseq = 48\nrows = 2\n"
            "[train]\nsteps = 12\n[optimizer]\nlr = 1e-3\n[checkpoint]\ndir = 'ck'\nevery = 1\nkeep = 20\n"
            "[eval]\nevery = 4\n")
        return d

    def line(self, *more):
        sets = [word for m in more for word in ("--set", m) if not m.startswith("--")]
        return [str(self.q4), "run.toml", "--threads", "1", "--quiet", "--json", *sets,
                *(m for m in more if m.startswith("--"))]

    def ranks(self, d, n, *more):
        """n ranks by torchrun's variables."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {**os.environ, "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port)}
        return [subprocess.Popen(self.line(*more), cwd=d, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(n)]

    def ends(self, d, n, *more):
        """The report of n ranks that all end well."""
        out = [(p, *p.communicate()) for p in self.ranks(d, n, *more)]
        for rank, (p, _, err) in enumerate(out):
            if p.returncode:
                sys.exit(f"{n} ranks, {more}: rank {rank}: {p.returncode}\n{err}")
        return json.loads(out[0][1])

    def by(self, d, *command):
        rows.must(*command, cwd=d)


def curve(d):
    """Losses, norms and held-out losses of a run, in all their digits."""
    lines = [json.loads(line) for line in (d / "ck/metrics.ndjson").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("wall_s", "tokens_per_s", "memory_bytes")} for line in lines]


def last(d, *names):
    step = max((d / "ck").glob("step-*"))
    return [(step / name).read_bytes() for name in names or ("masters.bin", "states.bin", "last_norm")]


def apart(a, b):
    """Bytes in which the last masters and moments differ, and lines of the curve that do."""
    xs, ys = last(a), last(b)
    wrong = sum(abs(len(x) - len(y)) + (0 if x == y else sum(p != q for p, q in zip(x, y))) for x, y in zip(xs, ys))
    return wrong, sum(x != y for x, y in itertools.zip_longest(curve(a), curve(b)))


def equal(bench):
    for name, model in (("tiny", "model"), ("demo", "demo")):
        one = bench.folder(model)
        bench.ends(one, 1, "train.accumulate=4")
        for n in (1, 2, 4):
            many, again = bench.folder(model), bench.folder(model)
            for d in (many, again):
                bench.ends(d, n, f"train.accumulate={4 // n}")
            wrong, lines = apart(one, many)
            what = f"{name} model, {n} rank{'s' if n > 1 else ''}"
            rows.row(f"{what}: bytes of masters and moments unlike one rank with 4-fold accumulation", wrong, "bytes",
                     "= 0")
            rows.row(f"{what}: lines of the loss curve unlike it, of {len(curve(one))}", lines, "lines", "= 0")
            names = [p.name for p in max((many / "ck").glob("step-*")).iterdir()]
            same = last(many, *sorted(names)) == last(again, *sorted(names))
            rows.row(f"{what}: files of the last checkpoint unlike a second run's", 0 if same else 1, "", "= 0")


def started(bench):
    one = bench.folder("model")
    bench.ends(one, 1, "train.accumulate=2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    for name, command in (("torchrun", torchrun), ("mpirun", mpirun)):
        if shutil.which(command[0]) is None:
            rows.row(f"two ranks started by {name}: bytes unlike one rank's", None, "bytes", "= 0",
                     f"{name} is not installed")
            continue
        d = bench.folder("model")
        bench.by(d, *command, *bench.line())
        rows.row(f"two ranks started by {name}: bytes unlike one rank's", apart(one, d)[0], "bytes", "= 0")
    # A rank that is killed under torchrun, which starts all of them again.
    d = bench.folder("model")
    again = subprocess.Popen([*torchrun[:3], "--max-restarts", "1", *torchrun[3:], *bench.line()], cwd=d,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(d, 3)
    ours = subprocess.run(["pgrep", "-f", f"{bench.q4} run.toml"], capture_output=True, text=True).stdout.split()
    mine = [int(p) for p in ours if os.path.realpath(f"/proc/{p}/cwd") == str(d.resolve()) and
            os.path.realpath(f"/proc/{p}/exe") == os.path.realpath(bench.q4)]
    os.kill(mine[-1], signal.SIGKILL)
    done = again.wait() == 0 and apart(one, d)[0] == 0
    rows.row("a rank killed under torchrun --max-restarts 1: ends that differ from an uninterrupted run's",
             0 if done else 1, "", "= 0")


def until(d, step):
    while not list((d / "ck").glob(f"step-{step:09}")):
        time.sleep(0.002)


def killed(bench, kills=50):
    whole = bench.folder("model")
    bench.ends(whole, 4)
    draw, slowest, unnamed, differ = random.Random(1), 0.0, 0, 0
    for kill in range(kills):
        d = bench.folder("model")
        ranks = bench.ranks(d, 4)
        until(d, draw.randint(1, 8))
        time.sleep(draw.random() * 0.03)
        victim = draw.randrange(4)
        ranks[victim].kill()
        begun = time.monotonic()
        said = [p.communicate()[1] for p in ranks]
        slowest = max(slowest, time.monotonic() - begun)
        unnamed += sum(r != victim and (p.returncode != 8 or f"rank {victim} " not in err)
                       for r, (p, err) in enumerate(zip(ranks, said)))
        bench.ends(d, (4, 1, 2)[kill % 3], "--resume")
        differ += apart(whole, d) != (0, 0)
        shutil.rmtree(d)
    rows.row(f"{kills} kills of a random one of four ranks: longest time until the others had ended", slowest, "s",
             "<= 10")
    rows.row("ends of other ranks without exit 8 and the name of the rank that died", unnamed, "", "= 0")
    rows.row("runs gone on with by 4, 1 or 2 ranks that end unlike an uninterrupted one", differ, "", "= 0")


def memory(bench):
    """Moments that a rank does not keep, out of its resident memory, against the plan."""
    sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=64)
    once = ("train.steps=1", "train.profile=[0]", "data.valid=[]", "eval.every=0", "checkpoint.every=0")
    for state in ("f32", "8bit"):
        def measured(n):
            d = bench.folder("model", **sizes)
            report = bench.ends(d, n, f"optimizer.state={state}", *once)
            shutil.rmtree(d)
            return [(r["planned_state_bytes"], r["ready_bytes"]) for r in report["ranks"]]
        [(all_planned, all_have)] = measured(1)
        for n in (2, 4):
            worst = max(abs((all_have - have) / (all_planned - planned) - 1) for planned, have in measured(n))
            rows.row(f"{n} ranks, {state} moments: memory saved a rank, measured against planned, the worst rank",
                     100 * worst, "%", "<= 5")


def all_of(q4, work):
    bench = Bench(q4, work)
    equal(bench)
    started(bench)
    killed(bench)
    memory(bench)
    rows.row("ranks on CUDA devices, through NCCL", None, "", "as on the CPU", "bench/cards.sh does, with two cards")
