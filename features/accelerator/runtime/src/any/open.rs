//! Which accelerators this machine has, and the one that a text names.

use thiserror::Error;
use vm_accel::Accelerator as _;

use super::AnyAccelerator;

/// Most characters of what was asked for that an error repeats.
const MOST: usize = 64;

/// Why an accelerator was not opened.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text names none.
    #[error(
        "{spec:?} names no accelerator: write auto, cpu, cuda:N, rocm:N, guest, or a PCI address as in 0000:65:00.0"
    )]
    Name {
        /// What was asked for.
        spec: String,
    },
    /// This build has no such accelerators.
    #[error(
        "{spec} needs the cargo feature `{feature}`, which this was built without: build it with that; there is {found}"
    )]
    Feature {
        /// What was asked for.
        spec: String,
        /// The feature.
        feature: &'static str,
        /// The accelerators that there are.
        found: String,
    },
    /// It is not there, or can't be used.
    #[error("{spec} can't be opened: {cause}; there is {found}")]
    Unusable {
        /// What was asked for.
        spec: String,
        /// What was wrong, and what to do.
        cause: String,
        /// The accelerators that there are.
        found: String,
    },
}

/// How the accelerators of a kind are found.
struct Kind {
    /// What it is called, which is also its feature.
    name: &'static str,
    /// All that can be used.
    all: fn() -> Vec<AnyAccelerator>,
    /// That with a number, or why not.
    numbered: fn(u32) -> Result<AnyAccelerator, String>,
    /// That at a PCI address, or why not.
    at: fn(&str) -> Result<AnyAccelerator, String>,
}

/// The kinds that this build has, those that `auto` takes first at the front.
const KINDS: &[Kind] = &[
    #[cfg(feature = "guest")]
    guest::KIND,
    #[cfg(feature = "cuda")]
    cuda::KIND,
    #[cfg(feature = "rocm")]
    rocm::KIND,
    #[cfg(feature = "cpu")]
    cpu::KIND,
];

/// Kinds that a build may lack.
const FEATURES: [&str; 4] = ["guest", "cuda", "rocm", "cpu"];

impl AnyAccelerator {
    /// The accelerator that a text names: `cpu`, `guest` for the one that the host shares with this guest, `cuda:N` or `rocm:N` for the GPU of that
    /// number, a GPU's PCI address as in `0000:65:00.0`, or `auto` for the host's, else the first GPU of NVIDIA's, else of AMD's, else the processor.
    ///
    /// # Errors
    /// [`OpenError`], with what was asked for, what there is, and what to do.
    pub fn open(spec: &str) -> Result<Self, OpenError> {
        let shown = || spec.chars().take(MOST).collect::<String>();
        let unusable = |causes: Vec<String>| {
            Err(OpenError::Unusable { spec: shown(), cause: causes.join("; "), found: found() })
        };
        let first = |open: &dyn Fn(&Kind) -> Result<Self, String>| {
            let mut causes = Vec::new();
            for kind in KINDS {
                match open(kind) {
                    Ok(accelerator) => return Ok(accelerator),
                    Err(cause) if causes.contains(&cause) => {}
                    Err(cause) => causes.push(cause),
                }
            }
            unusable(causes)
        };
        if spec == "auto" {
            return first(&|kind| (kind.numbered)(0));
        }
        if let Some(address) = address(spec) {
            return first(&|kind| (kind.at)(&address));
        }
        let (name, number) = match spec.split_once(':') {
            None => (spec, Some(0)),
            // What `parse` takes beside digits is no number here.
            Some((name, number)) => (name, number.parse().ok().filter(|_| !number.starts_with('+'))),
        };
        let feature = FEATURES.into_iter().find(|feature| *feature == name);
        match (feature, number, KINDS.iter().find(|kind| kind.name == name)) {
            (Some(_), Some(number), Some(kind)) => {
                (kind.numbered)(number).or_else(|cause| unusable(vec![cause]))
            }
            (Some(feature), Some(_), None) => {
                Err(OpenError::Feature { spec: shown(), feature, found: found() })
            }
            _ => Err(OpenError::Name { spec: shown() }),
        }
    }

    /// The accelerators of this machine that can be used, in the order in which [`AnyAccelerator::open`] tries them for `auto`.
    pub fn all() -> Vec<Self> {
        KINDS.iter().flat_map(|kind| (kind.all)()).collect()
    }

    /// Its number, as the driver of its kind counts the devices that it shows this process; none for one that is no GPU of this
    /// machine's.
    pub fn ordinal(&self) -> Option<u32> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => Some(cuda.ordinal()),
            #[cfg(feature = "rocm")]
            Self::Rocm(rocm) => Some(rocm.ordinal()),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    /// What [`AnyAccelerator::open`] takes for this one: its PCI address, or what it is where it has none.
    pub fn spec(&self) -> String {
        let info = self.info();
        info.address.clone().unwrap_or_else(|| info.backend.to_owned())
    }
}

/// The accelerators that there are, in words.
fn found() -> String {
    let all = AnyAccelerator::all();
    let shown =
        |one: &AnyAccelerator| format!("{} ({}, {})", one.spec(), one.info().name, one.info().backend);
    match all.as_slice() {
        [] => "none that can be used".into(),
        all => all.iter().map(shown).collect::<Vec<_>>().join(", "),
    }
}

/// A PCI address as accelerators write it, with its domain and in lower case; `None` for what is none.
fn address(text: &str) -> Option<String> {
    let hex = |part: &str, digits: usize| {
        let digit =
            !part.is_empty() && part.len() <= digits && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        digit.then(|| u32::from_str_radix(part, 16).ok())?
    };
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.split_once(':').unwrap_or(("0", rest));
    let (domain, bus) = (hex(domain, 8)?, hex(bus, 2)?);
    let (device, function) =
        (hex(device, 2).filter(|device| *device < 32)?, hex(function, 1).filter(|function| *function < 8)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

#[cfg(feature = "guest")]
mod guest {
    use super::{AnyAccelerator, Kind};
    use crate::GuestAccelerator;

    pub(super) const KIND: Kind = Kind {
        name: "guest",
        all: || open(0).into_iter().collect(),
        numbered: open,
        at: |_| Err("the host's accelerator is named guest".into()),
    };

    fn open(number: u32) -> Result<AnyAccelerator, String> {
        if number != 0 {
            return Err(format!("there is no accelerator {number} of the host's: the first one is used"));
        }
        GuestAccelerator::new().map(AnyAccelerator::Guest).map_err(|error| error.to_string())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{AnyAccelerator, Kind};
    use crate::{CudaAccelerator, cuda_devices};

    pub(super) const KIND: Kind = Kind {
        name: "cuda",
        all: || {
            let all = cuda_devices().inspect_err(|error| tracing::debug!(%error, "no CUDA devices"));
            all.unwrap_or_default().into_iter().map(AnyAccelerator::Cuda).collect()
        },
        numbered: |number| named(CudaAccelerator::new(number)),
        at: |address| named(CudaAccelerator::at(address)),
    };

    fn named(opened: vm_accel::Result<CudaAccelerator>) -> Result<AnyAccelerator, String> {
        opened.map(AnyAccelerator::Cuda).map_err(|error| error.to_string())
    }
}

#[cfg(feature = "rocm")]
mod rocm {
    use super::{AnyAccelerator, Kind};
    use crate::rocm::{RocmAccelerator, RocmDevice, RocmError, Roots, devices};

    pub(super) const KIND: Kind = Kind {
        name: "rocm",
        all: || {
            let all = devices(&Roots::system()).inspect_err(|error| tracing::debug!(%error, "no AMD GPUs"));
            let open = |device: RocmDevice| {
                device
                    .open()
                    .inspect_err(|error| tracing::warn!(%device, %error, "an AMD GPU is left out"))
                    .ok()
            };
            all.unwrap_or_default().into_iter().filter_map(open).map(AnyAccelerator::Rocm).collect()
        },
        // As the compute driver lists them, which needs no HIP.
        numbered: |number| {
            let all = devices(&Roots::system()).map_err(|error| error.to_string())?;
            let device = all.get(number as usize).ok_or_else(|| {
                format!("the compute driver lists {} of AMD's GPUs, counted from 0", all.len())
            })?;
            named(device.open())
        },
        at: |address| named(RocmAccelerator::at(&Roots::system(), address)),
    };

    fn named(opened: Result<RocmAccelerator, RocmError>) -> Result<AnyAccelerator, String> {
        opened.map(AnyAccelerator::Rocm).map_err(|error| error.to_string())
    }
}

#[cfg(feature = "cpu")]
mod cpu {
    use super::{AnyAccelerator, Kind};
    use crate::CpuAccelerator;

    pub(super) const KIND: Kind = Kind {
        name: "cpu",
        all: || open(0).into_iter().collect(),
        numbered: open,
        at: |_| Err("the processor has no PCI address".into()),
    };

    fn open(number: u32) -> Result<AnyAccelerator, String> {
        if number != 0 {
            return Err(format!("there is no processor {number}: all cores are the one cpu"));
        }
        CpuAccelerator::new().map(AnyAccelerator::Cpu).map_err(|error| error.to_string())
    }
}
