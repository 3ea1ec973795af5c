//! Results of NVML.

use std::ffi::CStr;

use vm_bridge::wire::code;

/// A result that is none: `nvmlReturn_t`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Error {
    Uninitialized,
    InvalidArgument,
    NotSupported,
    NotFound,
    InsufficientSize,
    DriverNotLoaded,
    Timeout,
    LibraryNotFound,
    GpuIsLost,
    VersionMismatch,
    Unknown,
    /// What the server's NVML says.
    Theirs(u32),
}

impl Error {
    /// The result.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Uninitialized => 1,
            Self::InvalidArgument => 2,
            Self::NotSupported => 3,
            Self::NotFound => 6,
            Self::InsufficientSize => 7,
            Self::DriverNotLoaded => 9,
            Self::Timeout => 10,
            Self::LibraryNotFound => 12,
            Self::GpuIsLost => 15,
            Self::VersionMismatch => 25,
            Self::Unknown => 999,
            Self::Theirs(code) => code,
        }
    }

    /// What a result of CUDA's driver, or of the bridge, is here.
    pub(crate) fn of_driver(result: u32) -> Self {
        match result {
            code::NO_DEVICE => Self::DriverNotLoaded,
            code::NOT_SUPPORTED => Self::NotSupported,
            code::TIMEOUT => Self::Timeout,
            code::UNAVAILABLE | code::NOT_FOUND => Self::GpuIsLost,
            _ => Self::Unknown,
        }
    }
}

/// What a result means.
pub(crate) fn text(result: u32) -> &'static CStr {
    match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires restart",
        17 => c"The operating system has blocked the request.",
        18 => c"RM has detected an NVML/RM version mismatch.",
        19 => c"GPU in use",
        20 => c"Insufficient Memory",
        21 => c"No data",
        23 => c"Insufficient resources",
        25 => c"Argument version mismatch",
        26 => c"Deprecated",
        27 => c"Not ready",
        28 => c"GPU not found",
        29 => c"Invalid state",
        _ => c"Unknown Error",
    }
}
