//! The kernels of a recording.

use std::collections::{BTreeMap, HashMap};

use super::{Call, Recording, name};
use crate::wire::{Reader, own};

/// Offsets and sizes of a kernel's parameters.
pub type Parameters = Vec<(u64, u64)>;

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(8 * at..)?.first_chunk().map(|word| u64::from_ne_bytes(*word))
}

/// What a call gave, if it succeeded.
fn given(call: &Call) -> Option<u64> {
    let answer = call.answer.as_ref().filter(|answer| answer.code == 0)?;
    word(&answer.reply.kept, 0)
}

impl Recording {
    /// The kernels that the program asked for by their names, with their parameters as the driver told them: none of a kernel that was not launched.
    #[must_use]
    pub fn kernels(&self) -> BTreeMap<String, Parameters> {
        let (mut names, mut kernels) = (HashMap::new(), BTreeMap::new());
        for call in &self.calls {
            let payload = &call.payload.kept;
            match name(call.number) {
                Some("cuLibraryGetKernel" | "cuModuleGetFunction") => {
                    let text = word(payload, 2).and_then(|len| payload.get(24..)?.get(..len as usize));
                    if let (Some(handle), Some(text)) = (given(call), text) {
                        let text = String::from_utf8_lossy(text).into_owned();
                        kernels.entry(text.clone()).or_default();
                        names.insert(handle, text);
                    }
                }
                Some("cuKernelGetFunction") => {
                    let kernel = word(payload, 1).and_then(|kernel| names.get(&kernel)).cloned();
                    if let (Some(function), Some(kernel)) = (given(call), kernel) {
                        names.insert(function, kernel);
                    }
                }
                _ if call.number == own::LAYOUT => {
                    let of = word(payload, 0).and_then(|handle| kernels.get_mut(names.get(&handle)?));
                    if let (Some(of), Some(answer)) = (of, &call.answer) {
                        let mut reader = Reader(&answer.reply.kept);
                        *of =
                            std::iter::from_fn(|| Some((reader.word().ok()?, reader.word().ok()?))).collect();
                    }
                }
                _ => {}
            }
        }
        kernels
    }
}
