//! What crosses the socket: frames of numbers and texts. Each side checks what it reads; the client because a
//! library may have written it, the server because a cut frame must not become another question.
use crate::descriptor::Descriptor;
use q4_core::{Code, CudaDevice, Error, Found, HostEnv, ProbeItem, Reject, RejectCode};
use q4_plugin_abi::Q4LinearSpec;
use std::borrow::Cow;

/// Of the protocol; both sides are one executable, so a difference means that it was replaced in between.
pub const VERSION: u32 = 4;
/// Longest frame.
pub const MOST: usize = 4 << 20;
/// Longest text of an answer, and most reasons or items.
pub const MAX_TEXT: usize = 1024;
pub const MAX_LIST: u32 = 256;

/// Questions.
pub mod ask {
    pub const HELLO: u32 = 1;
    pub const CAN_PREPARE: u32 = 2;
    pub const PROBE: u32 = 3;
    pub const PREPARE: u32 = 4;
    pub const WORKSPACE: u32 = 5;
    pub const CALL: u32 = 6;
    pub const RELEASE: u32 = 7;
    pub const REGION: u32 = 8;
    pub const TABLE: u32 = 9;
    pub const CONDUCT: u32 = 10;
    pub const BYE: u32 = 11;
    pub const LOAD: u32 = 12;
    pub const FUSES: u32 = 13;
    pub const DEVICE_FREE: u32 = 14;
    pub const GROUP: u32 = 15;
    pub const GROUP_WORKSPACE: u32 = 16;
    pub const RELEASE_GROUP: u32 = 17;
}

/// The operation of a [`CALL`](ask::CALL) to a group, beside those of [`q4_plugin_abi::op`].
pub const GROUPED: u32 = 1 << 31;

/// How an answer begins.
pub mod answer {
    pub const DONE: u32 = 0x6b6f;
    pub const FAILED: u32 = 0x6f6e;
}

/// A frame being written: its length, then its fields.
#[derive(Default)]
pub struct Frame(Vec<u8>);

impl Frame {
    /// Starts anew, keeping the memory.
    pub fn begin(&mut self, first: u32) -> &mut Self {
        self.0.clear();
        self.0.extend_from_slice(&[0; 4]);
        self.u32(first)
    }
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    pub fn f32(&mut self, v: f32) -> &mut Self {
        self.u32(v.to_bits())
    }
    pub fn text(&mut self, v: &str) -> &mut Self {
        self.raw(v.as_bytes())
    }
    pub fn raw(&mut self, v: &[u8]) -> &mut Self {
        self.u32(v.len() as u32);
        self.0.extend_from_slice(v);
        self
    }
    /// The bytes to send; `None` when they are too many.
    pub fn bytes(&mut self) -> Option<&[u8]> {
        let len = self.0.len().checked_sub(4).filter(|len| *len <= MOST)?;
        self.0[..4].copy_from_slice(&(len as u32).to_le_bytes());
        Some(&self.0)
    }

    pub fn error(&mut self, e: &Error) -> &mut Self {
        let code = Code::ALL.iter().position(|c| *c == e.code()).unwrap_or(usize::MAX);
        let part = |name: &str| e.parts().find(|p| p.0 == name).map_or("", |p| cut(p.1));
        self.u32(code as u32).text(cut(e.what())).text(part("need")).text(part("have"))
    }

    pub fn reasons(&mut self, reasons: &[Reject]) -> &mut Self {
        let reasons = &reasons[..reasons.len().min(MAX_LIST as usize)];
        self.u32(reasons.len() as u32);
        for r in reasons {
            let code = RejectCode::ALL.iter().position(|c| *c == r.code).unwrap_or(usize::MAX);
            self.u32(code as u32).text(cut(&r.need)).text(cut(&r.have));
        }
        self
    }

    pub fn items(&mut self, items: &[ProbeItem]) -> &mut Self {
        let items = &items[..items.len().min(MAX_LIST as usize)];
        self.u32(items.len() as u32);
        for i in items {
            self.text(cut(&i.id)).text(cut(&i.detail)).reasons(&i.reasons);
        }
        self
    }

    pub fn descriptor(&mut self, d: &Descriptor) -> &mut Self {
        self.text(&d.name).text(&d.version).text(&d.vendor).u32(d.abi.0).u32(d.abi.1)
    }

    pub fn env(&mut self, env: &HostEnv) -> &mut Self {
        self.text(&env.arch).text(&env.cpu_features.join(" ")).u64(env.processors as u64);
        self.u32(env.cuda_driver.unwrap_or(0)).u32(env.cuda.len() as u32);
        for d in &env.cuda {
            self.u32(d.ordinal).u32(d.capability.0).u32(d.capability.1).u64(d.memory).text(&d.name);
            self.text(cut(env.cuda_tools.unusable.get(&d.ordinal).map_or("", String::as_str)));
        }
        self.text(cut(env.cuda_missing.as_deref().unwrap_or("")));
        for tool in [&env.cuda_tools.nvrtc, &env.cuda_tools.cublaslt] {
            match tool {
                Found::Yes(version) => self.u32(*version).text(""),
                Found::No(why) => self.u32(0).text(cut(why)),
            };
        }
        self
    }

    /// A product without its names: they are [`names`](Self::names).
    pub fn spec(&mut self, s: &Q4LinearSpec) -> &mut Self {
        for v in [
            s.schema,
            s.schema_revision,
            s.scale_layout,
            s.global_convention,
            s.nibble_order,
            s.block,
            s.nested_block,
            s.dense_dtype,
            s.x_dtype,
            s.y_dtype,
            s.path,
            s.ops,
            s.activations,
            s.act_rule,
            s.act_global_kind,
            s.act_global_convention,
            s.scale_dtype,
            s.device_type,
            s.device_id,
        ] {
            self.u32(v);
        }
        self.f32(s.act_global).u64(s.n).u64(s.k).u64(s.max_m)
    }

    /// Rows and name of each segment.
    pub fn names<'n>(&mut self, segments: impl ExactSizeIterator<Item = (u64, &'n str)>) -> &mut Self {
        self.u32(segments.len() as u32);
        for (rows, name) in segments {
            self.u64(rows).text(name);
        }
        self
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

/// A frame that is not what its beginning says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

type Read<T> = Result<T, Malformed>;

/// A frame being read.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, n: usize) -> Read<&'a [u8]> {
        let (now, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(now)
    }
    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }
    pub fn u32(&mut self) -> Read<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub fn u64(&mut self) -> Read<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub fn size(&mut self) -> Read<usize> {
        usize::try_from(self.u64()?).map_err(|_| Malformed)
    }
    pub fn f32(&mut self) -> Read<f32> {
        self.u32().map(f32::from_bits)
    }
    /// At most `most` bytes.
    pub fn raw(&mut self, most: usize) -> Read<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > most { Err(Malformed) } else { self.take(len) }
    }
    /// A text of at most `most` bytes.
    pub fn text(&mut self, most: usize) -> Read<String> {
        std::str::from_utf8(self.raw(most)?).map(str::to_owned).map_err(|_| Malformed)
    }
    /// The same, fit for a terminal.
    pub fn line(&mut self) -> Read<String> {
        let plain = |c: char| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c };
        self.text(MAX_TEXT).map(|t| t.chars().map(plain).collect())
    }
    pub fn count(&mut self, most: u32) -> Read<u32> {
        self.u32().ok().filter(|n| *n <= most).ok_or(Malformed)
    }
    /// Nothing may follow.
    pub fn end(&self) -> Read<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }

    pub fn error(&mut self) -> Read<Error> {
        let code = Code::ALL.get(self.u32()? as usize).copied().ok_or(Malformed)?;
        let (what, need, have) = (self.line()?, self.line()?, self.line()?);
        let error = Error::new(code, what);
        let error = if need.is_empty() { error } else { error.need(need) };
        Ok(if have.is_empty() { error } else { error.have(have) })
    }

    pub fn reasons(&mut self) -> Read<Vec<Reject>> {
        (0..self.count(MAX_LIST)?)
            .map(|_| {
                let code = RejectCode::ALL.get(self.u32()? as usize).copied().ok_or(Malformed)?;
                Ok(Reject::new(code, self.line()?, self.line()?))
            })
            .collect()
    }

    pub fn items(&mut self) -> Read<Vec<ProbeItem>> {
        (0..self.count(MAX_LIST)?)
            .map(|_| {
                let (id, detail) = (Cow::from(self.line()?), self.line()?);
                Ok(ProbeItem { id, detail, reasons: self.reasons()? })
            })
            .collect()
    }

    pub fn descriptor(&mut self) -> Read<Descriptor> {
        let [name, version, vendor] = [self.line()?, self.line()?, self.line()?];
        Ok(Descriptor { name, version, vendor, abi: (self.u32()?, self.u32()?) })
    }

    pub fn env(&mut self) -> Read<HostEnv> {
        let mut env = HostEnv {
            arch: self.text(MAX_TEXT)?,
            cpu_features: self.text(1 << 16)?.split_whitespace().map(str::to_owned).collect(),
            processors: self.size()?,
            cuda_driver: Some(self.u32()?).filter(|v| *v != 0),
            ..HostEnv::default()
        };
        for _ in 0..self.count(MAX_LIST)? {
            env.cuda.push(CudaDevice {
                ordinal: self.u32()?,
                capability: (self.u32()?, self.u32()?),
                memory: self.u64()?,
                name: self.text(1 << 16)?,
            });
            let (ordinal, unusable) = (env.cuda[env.cuda.len() - 1].ordinal, self.text(MAX_TEXT)?);
            if !unusable.is_empty() {
                env.cuda_tools.unusable.insert(ordinal, unusable);
            }
        }
        env.cuda_missing = Some(self.text(MAX_TEXT)?).filter(|t| !t.is_empty());
        let mut found = || {
            let (version, missing) = (self.u32()?, self.text(MAX_TEXT)?);
            Ok(if version == 0 { Found::No(missing) } else { Found::Yes(version) })
        };
        (env.cuda_tools.nvrtc, env.cuda_tools.cublaslt) = (found()?, found()?);
        Ok(env)
    }

    /// A product without segments, whose arrays are NULL.
    pub fn spec(&mut self) -> Read<Q4LinearSpec> {
        let mut v = [0; 19];
        for v in &mut v {
            *v = self.u32()?;
        }
        let [schema, schema_revision, scale_layout, global_convention, nibble_order, block, nested_block, ..] =
            v;
        let [.., act_rule, act_global_kind, act_global_convention, scale_dtype, device_type, device_id] = v;
        let [dense_dtype, x_dtype, y_dtype, path, ops, activations] = [v[7], v[8], v[9], v[10], v[11], v[12]];
        Ok(Q4LinearSpec {
            struct_size: size_of::<Q4LinearSpec>(),
            schema,
            schema_revision,
            scale_layout,
            global_convention,
            nibble_order,
            block,
            nested_block,
            dense_dtype,
            n_segments: 0,
            segment_rows: std::ptr::null(),
            segment_names: std::ptr::null(),
            act_global: self.f32()?,
            n: self.u64()?,
            k: self.u64()?,
            max_m: self.u64()?,
            x_dtype,
            y_dtype,
            path,
            ops,
            activations,
            act_rule,
            act_global_kind,
            act_global_convention,
            device_type,
            device_id,
            scale_dtype,
        })
    }

    pub fn names(&mut self) -> Read<(Vec<u64>, Vec<String>)> {
        let all: Vec<_> =
            (0..self.count(4096)?).map(|_| Ok((self.u64()?, self.text(4096)?))).collect::<Read<_>>()?;
        Ok(all.into_iter().unzip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_a_cut_frame_is_malformed() {
        let mut f = Frame::default();
        let e = Error::new(Code::ShapeMismatch, "x").need("16").have("15\u{1b}[2J");
        let r = Reject::new(RejectCode::ShapeUnsupported, "k % 16 == 0", "k = 17");
        f.begin(7).error(&e).reasons(std::slice::from_ref(&r)).u64(9);
        let bytes = f.bytes().expect("short").to_vec();
        let read = |bytes: &[u8]| -> Read<_> {
            let mut all = Fields(bytes);
            let out = (all.u32()?, all.error()?, all.reasons()?, all.u64()?);
            all.end().map(|()| out)
        };
        let (kind, error, reasons, n) = read(&bytes[4..]).expect("whole");
        assert_eq!((kind, reasons, n), (7, vec![r], 9));
        assert_eq!((error.code(), error.what()), (Code::ShapeMismatch, "x"));
        assert!(!error.to_string().contains('\u{1b}'));
        for cut in 4..bytes.len() {
            assert_eq!(read(&bytes[4..cut]).err(), Some(Malformed), "{cut}");
        }
        assert!(read(&[&bytes[4..], &[0]].concat()).is_err());
    }

    #[test]
    fn lists_and_texts_without_end_are_not_read() {
        let mut f = Frame::default();
        f.begin(0).u32(u32::MAX).u32(u32::MAX);
        let bytes = f.bytes().expect("short")[8..].to_vec();
        assert!(Fields(&bytes).reasons().is_err() && Fields(&bytes).line().is_err());
        assert!(Fields(&bytes).names().is_err() && Fields(&bytes).items().is_err());
    }
}
