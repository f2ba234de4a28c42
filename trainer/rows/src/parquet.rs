//! Rows of a Parquet file.
use super::layout::{self, Unused, bad};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use q4_core::{Error, Result};
use serde_json::{Map, Number, Value};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// All rows, in order; a row group that is damaged is an error with the row it came to.
pub(super) fn rows(path: &Path, unused: &mut Unused) -> Result<Vec<(usize, layout::Row)>> {
    let file = File::open(path).map_err(|e| Error::io(path, &e))?;
    // The reader checks what it reads, but not all of what a damaged file can say.
    catch_unwind(AssertUnwindSafe(|| collect(file, unused)))
        .unwrap_or_else(|_| Err(damaged("its pages contradict its header")))
}

fn damaged(have: impl std::fmt::Display) -> Error {
    bad("not a Parquet file that can be read").need("a whole Parquet file").have(have.to_string()).fix(
        "in Python: pandas.read_parquet('IN').to_json('OUT.jsonl', orient='records', lines=True), which says \
         what is wrong",
    )
}

fn collect(file: File, unused: &mut Unused) -> Result<Vec<(usize, layout::Row)>> {
    let mut rows = Vec::new();
    let reader = SerializedFileReader::new(file).map_err(damaged)?;
    for row in reader.get_row_iter(None).map_err(damaged)? {
        let at = rows.len() + 1;
        let within = |e: Error| e.within(format!("row {at}"));
        let object = object(&row.map_err(|e| within(damaged(e)))?);
        let row = layout::row(object, unused).map_err(within)?;
        rows.push((at, row));
    }
    Ok(rows)
}

/// Columns without a value are left out: every row has every column.
fn object(row: &Row) -> Map<String, Value> {
    let fields = row.get_column_iter().map(|(name, field)| (name.clone(), value(field)));
    fields.filter(|(_, v)| !v.is_null()).collect()
}

fn value(field: &Field) -> Value {
    match field {
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |k: &Field| match value(k) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(k, v)| (key(k), value(v))).collect())
        }
        // Bytes that nothing declares to be text are no text.
        Field::Bytes(bytes) => {
            let about = ("bytes".to_owned(), Value::Number(Number::from(bytes.len())));
            Value::Object(Map::from_iter([about]))
        }
        plain => plain.to_json_value(),
    }
}
