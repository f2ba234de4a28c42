//! Every linear layer of a model, decoded to f32 and written as safetensors under the layer's name, so that
//! other decoders can be held against q4's bit for bit. Values are not judged: scales may be anything.
//!
//! ```console
//! $ cargo run --release -p q4-model --example layers -- MODEL OUT.safetensors
//! ```
use q4_core::{Code, DType, Error, Result};
use q4_model::checkpoint::{Checkpoint, OpenOptions, names};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    let words: Vec<_> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [model, out] = &words[..] else {
        return Err(Error::new(Code::Usage, "layers MODEL OUT").need("a model and a file to be written"));
    };
    let checkpoint = Checkpoint::open(model, &OpenOptions::default())?;
    write(&checkpoint, out)
}

fn write(checkpoint: &Checkpoint, out: &Path) -> Result<()> {
    let layers: Vec<_> = (0..checkpoint.config().num_hidden_layers)
        .flat_map(|i| names::linears(checkpoint.config(), i))
        .collect();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, n, k) in &layers {
        let start = end;
        end += n * k * DType::F32.size();
        let entry = serde_json::json!({"dtype": "F32", "shape": [n, k], "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::from(header).to_string();
    let failed = |e| Error::io(out, &e);
    let mut file = BufWriter::new(std::fs::File::create(out).map_err(failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(header.as_bytes()).map_err(failed)?;
    for (name, n, k) in layers {
        let layer = checkpoint.bind(&name, n, k)?;
        let rows = layer.rows()?;
        let mut row = vec![0f32; k];
        for r in 0..n {
            rows.row(r, &mut row);
            file.write_all(bytemuck::cast_slice(&row)).map_err(failed)?;
        }
    }
    file.flush().map_err(failed)
}
