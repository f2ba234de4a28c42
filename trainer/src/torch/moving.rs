//! What of a model moves: adapters beside named modules, each with matrices of its own, and weights that
//! stay.
use super::Tch;
use super::adapter::Adapter;
use super::kernels::Kernels;
use super::weights::{Maker, Params, Source};
use crate::adapters::Adapters;
use crate::freeze::Still;
use q4_core::{Code, Error, Result};
use tch::{Device, Kind, Tensor};

impl Params {
    /// Adapters beside `targets` alone (by their last names), new or those of `init`. Modules that share
    /// their input no longer share `a`: theirs lie behind each other, and `b` has zeros where it would mix
    /// them, which stay.
    ///
    /// # Errors
    /// As [`Adapters::half`]; [`Code::Container`] where `init` has modules that the model does not have.
    pub fn target(
        &mut self,
        targets: &[String],
        init: Option<&Adapters>,
        seed: u64,
        kernels: &Kernels,
    ) -> Result<()> {
        let Some((rank, _)) = self.keep.lora else { return Ok(()) };
        let mut make = Maker::again(self.keep, seed, kernels);
        let mut used = 0;
        for p in &mut self.all {
            let own = |(module, _): &(String, usize)| {
                targets.iter().any(|t| module.rsplit('.').next() == Some(t.as_str()))
            };
            let has: Vec<bool> = p.parts.iter().map(own).collect();
            let (Source::Adapted(_, adapter) | Source::Frozen(_, Some(adapter))) = &mut p.source else {
                continue;
            };
            let (n, k) = (p.shape[0], p.shape[1]);
            let all = rank * has.iter().filter(|h| **h).count();
            if all == 0 {
                p.source.without_adapter()?;
                continue;
            }
            let host = (Kind::Float, Device::Cpu);
            let fresh = make.adapter(n, k, all, adapter.scale * all as f64)?;
            let b = Tensor::f_zeros([n as i64, all as i64], host).t()?;
            let mask = b.f_zeros_like().t()?;
            let (mut row, mut column) = (0, 0);
            for ((module, rows), has) in p.parts.iter().zip(&has) {
                let rows = *rows as i64;
                if *has {
                    let block =
                        |t: &Tensor| t.f_narrow(0, row, rows).t()?.f_narrow(1, column, rank as i64).t();
                    let _ = block(&mask)?.f_fill_(1.0).t()?;
                    if let Some(init) = init {
                        let (a, own) = (
                            init.half(module, "A", [rank, k])?,
                            init.half(module, "B", [rows as usize, rank])?,
                        );
                        let of = |values: &[f32], shape: [i64; 2]| {
                            Tensor::f_from_slice(values).t()?.f_view(shape).t()
                        };
                        fresh
                            .a
                            .master
                            .f_narrow(0, column, rank as i64)
                            .t()?
                            .f_copy_(&of(&a, [rank as i64, k as i64])?)
                            .t()?;
                        block(&b)?.f_copy_(&of(&own, [rows, rank as i64])?).t()?;
                        used += 2;
                    }
                    column += rank as i64;
                }
                row += rows;
            }
            fresh.b.master.shallow_clone().f_copy_(&b).t()?;
            let mask = mask.f_to_device(kernels.device()).t()?;
            *adapter = Adapter { own: Some((has, mask)), ..fresh };
        }
        match init.map(Adapters::count).transpose()? {
            Some(len) if len != used => {
                Err(Error::new(Code::Container, "lora.init: adapters of other layers")
                    .need(format!("{used} tensors, as this model has modules for"))
                    .have(format!("{len}"))
                    .fix("the base that they were trained on"))
            }
            _ => Ok(()),
        }
    }

    /// Keeps what `still` names as it is: no gradient, no moments.
    pub fn freeze(&mut self, still: &Still) {
        for p in &mut self.all {
            let names: Vec<&str> = p.parts.iter().map(|(module, _)| module.as_str()).collect();
            if let (Source::Trained(t), true) = (&p.source, still.holds(&names)) {
                p.source = Source::Fixed(t.master.shallow_clone());
            }
        }
    }
}

impl Source {
    /// The base alone, which stays as it is.
    fn without_adapter(&mut self) -> Result<()> {
        match self {
            Self::Adapted(base, _) => {
                *self = Self::Frozen(super::executor::Weight::Dense(base.decode()?), None)
            }
            Self::Frozen(_, adapter) => *adapter = None,
            Self::Trained(_) | Self::Fixed(_) => {}
        }
        Ok(())
    }
}
