//! Why a guest's program could not be loaded.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a guest's program, initial RAM disk or command line could not be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// A file could not be read.
    #[error("{path} can't be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// It was asked to stop.
    #[error("loading the guest's program was stopped")]
    Stopped,
    /// The file is neither a bzImage nor an ELF program for x86-64.
    #[error("{path} is not a bzImage or an x86-64 ELF program: {reason}")]
    NotBootable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The program does not fit the RAM below 3 GiB.
    #[error(
        "{path} needs the guest-physical addresses {start:#x} to {end:#x}, but RAM for it is from {ram_start:#x} to {ram_end:#x}; raise `memory`"
    )]
    KernelTooBig {
        /// The file.
        path: PathBuf,
        /// First address that it needs.
        start: u64,
        /// First address after it.
        end: u64,
        /// First address where it may lie.
        ram_start: u64,
        /// First address after the RAM.
        ram_end: u64,
    },
    /// The initial RAM disk does not fit behind the kernel.
    #[error("the initrd {path} has {size} bytes, but only {room} are left behind the kernel; raise `memory`")]
    InitrdTooBig {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// Bytes that are free.
        room: u64,
    },
    /// The command line is too long.
    #[error("the command line has {len} bytes, but the kernel takes at most {limit}; shorten it")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// The most that fit.
        limit: u64,
    },
    /// The command line has a zero byte, which would end it.
    #[error("the command line has a zero byte in it; remove it")]
    CmdlineZero,
    /// The RAM does not even hold what every guest is booted with.
    #[error("the RAM is too small to boot anything; give the guest at least 2 MiB")]
    TooLittleRam,
}
