"""Writes an OpenVINO model of a Qwen3 size with random weights: openvino_model.py SHAPE OUT.xml.

Linear layers are int4 with an f16 scale per 128, the tied embedding and head int8 per row, the key-value cache is a
state, and only the last position has logits: what OpenVINO's own export of a language model comes to.
"""
import sys

import numpy as np
import openvino as ov
from openvino import op, opset13 as o
from openvino.op.util import Variable, VariableInfo

VOCAB, HEAD_DIM, GROUP = 151_936, 128, 128
# layers, hidden, intermediate, heads, kv heads
SHAPES = {"qwen3-0.6b": (28, 1024, 3072, 16, 8), "qwen3-4b": (36, 2560, 9728, 32, 8)}
RANDOM = np.random.Generator(np.random.SFC64(1))
F32, F16, I64 = ov.Type.f32, ov.Type.f16, ov.Type.i64


def const(values, dtype=np.float32):
    return o.constant(np.array(values, dtype))


def spread(shape, deviation):
    return o.constant((RANDOM.uniform(0.8, 1.2, shape) / deviation).astype(np.float16))


def int4(n, k):
    data = np.frombuffer(RANDOM.bytes(n * k // 2), np.uint8)
    codes = op.Constant(ov.Tensor(data.copy(), ov.Shape([n, k // GROUP, GROUP]), ov.Type.i4))
    values = o.multiply(o.convert(codes, F16), spread((n, k // GROUP, 1), 4.6 * k**0.5))
    return o.convert(o.reshape(values, const([n, k], np.int64), False), F32)


def int8(n, k):
    codes = o.constant(np.frombuffer(RANDOM.bytes(n * k), np.uint8).reshape(n, k))
    centred = o.subtract(o.convert(codes, F16), o.convert(o.constant(np.full((n, 1), 128, np.uint8)), F16))
    return o.convert(o.multiply(centred, spread((n, 1), 74 * k**0.5)), F32)


def linear(x, n, k):
    return o.matmul(x, int4(n, k), False, True)


def norm(x, width):
    mean = o.reduce_mean(o.power(x, const(2.0)), const([-1], np.int64), True)
    return o.multiply(const(np.ones(width)), o.multiply(x, o.divide(const(1.0), o.sqrt(o.add(mean, const(1e-6))))))


def rotate(x, cos, sin):
    half, one, last = HEAD_DIM // 2, const([1], np.int64), const([3], np.int64)
    low = o.slice(x, const([0], np.int64), const([half], np.int64), one, last)
    high = o.slice(x, const([half], np.int64), const([2**31], np.int64), one, last)
    return o.add(o.multiply(x, cos), o.multiply(o.concat([o.multiply(high, const(-1.0)), low], -1), sin))


def heads_of(x, count, normed):
    x = o.reshape(x, const([0, 0, count, HEAD_DIM], np.int64), True)
    return o.transpose(norm(x, HEAD_DIM) if normed else x, const([0, 2, 1, 3], np.int64))


def main(name, out):
    layers, hidden, inner, heads, kv_heads = SHAPES[name]
    ids = o.parameter([-1, -1], I64, name="input_ids")
    positions = o.parameter([-1, -1], I64, name="position_ids")
    beams = o.parameter([-1], ov.Type.i32, name="beam_idx")
    for p, text in (ids, "input_ids"), (positions, "position_ids"), (beams, "beam_idx"):
        p.output(0).set_names({text})
    batch = o.gather(o.shape_of(ids), const([0], np.int64), const(0, np.int64))

    table = int8(VOCAB, hidden)
    x = o.gather(table, o.convert(ids, ov.Type.i32), const(0, np.int32))
    frequencies = const(1e6 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = o.multiply(o.unsqueeze(o.convert(positions, F32), const(-1, np.int64)), frequencies)
    angles = o.unsqueeze(o.concat([angles, angles], -1), const(1, np.int64))
    cos, sin = o.cos(angles), o.sin(angles)

    states, mask = [], None

    def cached(fresh, variable_id):
        nonlocal mask
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, kv_heads, -1, HEAD_DIM])
        info.data_type, info.variable_id = F32, variable_id
        variable = Variable(info)
        shape = o.concat([batch, const([kv_heads, 0, HEAD_DIM], np.int64)], 0)
        past = o.gather(o.read_value(o.broadcast(const(0.0), shape), variable), beams, const(0, np.int64))
        all_ = o.concat([past, fresh], 2)
        states.append(o.assign(all_, variable))
        if mask is None:
            length = o.gather(o.shape_of(all_), const(2, np.int64), const(0, np.int64))
            keys = o.range(const(0, np.int64), length, const(1, np.int64), I64)
            queries = o.unsqueeze(o.unsqueeze(positions, const(1, np.int64)), const(-1, np.int64))
            mask = o.select(o.greater(keys, queries), const(-65504.0), const(0.0))
        wide = o.unsqueeze(all_, const(2, np.int64))
        sizes = o.shape_of(wide)
        part = lambda i: o.gather(sizes, const(i, np.int64), const(0, np.int64))
        wide = o.broadcast(wide, o.concat([part([0, 1]), const([heads // kv_heads], np.int64), part([3, 4])], 0), "BIDIRECTIONAL")
        return o.reshape(wide, const([0, heads, -1, HEAD_DIM], np.int64), True)

    for i in range(layers):
        h = norm(x, hidden)
        q = rotate(heads_of(linear(h, heads * HEAD_DIM, hidden), heads, True), cos, sin)
        k = rotate(heads_of(linear(h, kv_heads * HEAD_DIM, hidden), kv_heads, True), cos, sin)
        v = heads_of(linear(h, kv_heads * HEAD_DIM, hidden), kv_heads, False)
        keys, values = cached(k, f"past_key_values.{i}.key"), cached(v, f"past_key_values.{i}.value")
        a = o.scaled_dot_product_attention(q, keys, values, mask)
        a = o.reshape(o.transpose(a, const([0, 2, 1, 3], np.int64)), const([0, 0, heads * HEAD_DIM], np.int64), True)
        x = o.add(x, linear(a, hidden, heads * HEAD_DIM))
        h = norm(x, hidden)
        gated = o.multiply(o.swish(linear(h, inner, hidden)), linear(h, inner, hidden))
        x = o.add(x, linear(gated, hidden, inner))
    last = o.slice(norm(x, hidden), const([-1], np.int64), const([2**31], np.int64), const([1], np.int64), const([1], np.int64))
    logits = o.result(o.matmul(last, table, False, True))
    model = ov.Model([logits], states, [ids, positions, beams], name)
    ov.save_model(model, out, compress_to_fp16=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
