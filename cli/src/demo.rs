//! The model inside the executable: what `q4` runs when no model is named, so that the first command needs no
//! download.
use q4_core::Result;
use q4_model::checkpoint::{Bytes, Checkpoint};

/// What the user calls it.
pub const NAME: &str = "demo";

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../demo/", $name)).as_slice())),*]
    };
}

static FILES: [(&str, &[u8]); 7] = embedded![
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// Opens it; its bytes are part of the executable's own mapping and are not copied.
pub fn open() -> Result<Checkpoint> {
    let files = FILES.iter().map(|(name, bytes)| ((*name).to_owned(), Bytes::from(*bytes))).collect();
    Checkpoint::from_files(NAME, files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_small_and_whole() {
        let bytes: usize = FILES.iter().map(|f| f.1.len()).sum();
        assert!(bytes < 5_000_000, "{bytes} bytes");
        open().expect("opens").bind_all().expect("every tensor is there and sound");
    }
}
