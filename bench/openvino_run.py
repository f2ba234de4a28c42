"""Rates of an OpenVINO model as JSON: openvino_run.py MODEL.xml THREADS PREFILL DECODE REPETITIONS."""
import json
import sys
import time

import numpy as np
import openvino as ov

PROMPT, VOCAB = 16, 151_936


def main(path, threads, prefill, decode, repetitions):
    config = {"INFERENCE_NUM_THREADS": int(threads), "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(path, "CPU", config).create_infer_request()
    beams, random = np.zeros(1, np.int32), np.random.default_rng(1)

    def step(first, count):
        ids = random.integers(0, VOCAB, (1, count))
        positions = np.arange(first, first + count)[None]
        logits = request.infer({"input_ids": ids, "position_ids": positions, "beam_idx": beams})[0]
        if not np.isfinite(logits).all():
            sys.exit("logits are not finite")

    rates = {"prefill": [], "decode": []}
    prefill, decode = int(prefill), int(decode)
    request.reset_state()
    step(0, PROMPT)
    step(PROMPT, 1)
    for _ in range(int(repetitions)):
        request.reset_state()
        start = time.perf_counter()
        step(0, prefill)
        rates["prefill"].append(prefill / (time.perf_counter() - start))
        request.reset_state()
        step(0, PROMPT)
        start = time.perf_counter()
        for i in range(decode):
            step(PROMPT + i, 1)
        rates["decode"].append(decode / (time.perf_counter() - start))
    print(json.dumps(rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
