//! A kernel that the host compiled, and what a launch of it sends.

use vm_accel::{Arguments, Artifact, Error, Result, Slot};
use vm_paravirt_guest::protocol::{Argument, MAX_ARGUMENTS, MAX_RANK};

/// A kernel of a module on the host.
#[derive(Debug)]
pub struct GuestKernel {
    pub(crate) artifact: Artifact,
    pub(crate) module: u32,
    /// Its place in the module.
    pub(crate) index: u32,
}

/// A module on the host.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) number: u32,
    /// Its kernels, in order.
    pub(crate) kernels: Vec<String>,
}

/// That launches of a kernel can be sent.
pub(crate) fn check(artifact: &Artifact) -> Result<()> {
    let bad = |reason: String| Err(Error::Load { kernel: artifact.entry().to_owned(), reason });
    let params = artifact.params();
    if params.slots.len() > MAX_ARGUMENTS {
        let count = params.slots.len();
        return bad(format!(
            "it has {count} parameters, a guest's launch has up to {MAX_ARGUMENTS}; split the kernel"
        ));
    }
    if params.guard.is_some() || !params.maps.is_empty() {
        return bad("it was compiled for a device; compile it for the target `ir`".into());
    }
    Ok(())
}

impl GuestKernel {
    /// Its symbol.
    pub fn name(&self) -> &str {
        self.artifact.entry()
    }

    /// What was packed for it, as a launch sends it. `find` says which buffer an address is in, and where.
    pub(crate) fn arguments(
        &self,
        packed: &Arguments,
        find: impl Fn(u64) -> Result<(u32, u64)>,
        into: &mut Vec<Argument>,
    ) -> Result<()> {
        into.clear();
        let words = packed.words();
        for slot in &self.artifact.params().slots {
            let first = slot.offset() as usize / 8;
            let argument = match *slot {
                Slot::View { rank, .. } => {
                    let rank = (rank as usize).min(MAX_RANK);
                    let all = words.get(first..first + 2 * rank).unwrap_or_default();
                    let Some((address, rest)) = all.split_first() else { return Err(self.foreign()) };
                    let (extents, strides) = rest.split_at(rank);
                    let (buffer, offset) = find(*address)?;
                    match rank {
                        1 => Argument::view(buffer, offset, extents),
                        _ => Argument::strided(buffer, offset, extents, strides),
                    }
                }
                Slot::Scalar { offset, bytes } => {
                    let Some(word) = words.get(first) else { return Err(self.foreign()) };
                    let unused = 64 - 8 * bytes.clamp(1, 8);
                    let low = word >> (8 * (offset % 8));
                    Ok(Argument::Scalar(low << unused >> unused))
                }
            };
            into.push(argument.map_err(|_| self.foreign())?);
        }
        Ok(())
    }

    fn foreign(&self) -> Error {
        Error::Arguments {
            kernel: self.name().to_owned(),
            parameter: String::new(),
            reason: "they were packed for another kernel".into(),
        }
    }
}
