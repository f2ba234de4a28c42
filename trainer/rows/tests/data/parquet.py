"""Writes the Parquet files beside it (pyarrow 26.0.1): rows as people have them, in every compression that is read,
and a column of bytes that are no text."""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent
ROWS = [
    {"messages": [{"role": "user", "content": "Who are you?"},
                  {"role": "assistant", "content": "I am q4.", "weight": None}]},
    {"messages": [{"role": "user", "content": "談談UFO"}, {"role": "assistant", "content": "UFO", "weight": 0.0},
                  {"role": "user", "content": "b"}, {"role": "assistant", "content": "c", "weight": 1.0}]},
]
for name, how in [("messages", "snappy"), ("gzip", "gzip"), ("zstd", "zstd")]:
    pq.write_table(pa.Table.from_pylist(ROWS), HERE / f"{name}.parquet", compression=how)
pq.write_table(pa.Table.from_pylist([{"text": b"bytes"}]), HERE / "bytes.parquet")
