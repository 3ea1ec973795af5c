//! The protocol of the paravirtual accelerator: what a guest asks of an accelerator that its host shares, and what it is
//! answered. Host and guest use this one definition; docs/paravirt.md describes it in prose.
//!
//! A guest puts a [batch](Batch) of [operations](Operation) into a virtqueue buffer, and the device puts a
//! [reply](Reply) with one result for each behind it. Programs of a guest that has no driver for the queue send the same
//! batches over a [stream](FrameHeader). The numbers of modules and buffers are the guest's choice, so one
//! batch can create a module, use it and wait for it, without a round trip between.
//!
//! ```
//! use vm_paravirt::{Argument, BatchWriter, Operation, Batch};
//!
//! let mut bytes = [0; 512];
//! let mut batch = BatchWriter::new(&mut bytes)?;
//! batch.create_buffer(7, 4096)?;
//! batch.launch(1, 0, [4, 1, 1], &[Argument::view(7, 0, &[1024])?, Argument::f32(2.0)])?;
//! batch.fence()?;
//! let len = batch.finish();
//!
//! let batch = Batch::decode(&bytes[..len])?;
//! assert_eq!(batch.len(), 3);
//! assert!(matches!(batch.operations().next(), Some(Ok(Operation::CreateBuffer { buffer: 7, bytes: 4096 }))));
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
//! # Hostile bytes
//! Decoding borrows from the bytes that it is given and allocates nothing. Every count and length has a cap and is
//! checked against what is there before it is used; nothing recurses; reserved fields must be zero. The bytes must not
//! change meanwhile: whoever reads them from memory that someone else can write copies them first.
#![no_std]

mod config;
#[doc(hidden)]
pub mod fuzz;
mod info;
mod reply;
mod request;
mod status;
mod stream;
mod wire;

pub use config::{CONFIG_BYTES, Config, Takes};
pub use info::{Info, LogEntry, LogReader, LogWriter};
pub use reply::{Reply, ReplyWriter, Results, reply_bytes};
pub use request::{
    Argument, Arguments, Batch, BatchWriter, Launch, Operation, Operations, Range, Ranges, Span, View,
};
pub use status::Status;
pub use stream::{FRAME_BYTES, FrameHeader};
pub use wire::{Malformed, NoRoom};

/// The protocol's version. A device and a driver of different versions do not work together.
pub const VERSION: u16 = 1;

/// The virtio device id: the last that the PCI transport has (section 4.1.2 of the specification: PCI device 0x1040 plus
/// the id, up to 0x107f). The ids that are registered grow from the other end.
pub const DEVICE_ID: u16 = 0x3f;

/// The PCI vendor and device of the function: virtio's vendor, 0x1040 plus [`DEVICE_ID`].
pub const PCI_ID: (u16, u16) = (0x1af4, 0x1040 + DEVICE_ID);

/// The shared memory region (section 2.10) that is the window.
pub const WINDOW_ID: u8 = 0;

/// The virtqueue that takes batches.
pub const QUEUE: u16 = 0;
/// The most entries of it.
pub const QUEUE_SIZE: u16 = 256;

/// Feature bit: buffers over the guest's memory ([`Operation::ImportBuffer`]) are used in place.
pub const FEATURE_IMPORT: u64 = 1 << 0;
/// Feature bit: the device has no queue. It takes batches over streams, and its buffers lie in a window of memory.
pub const FEATURE_WINDOW: u64 = 1 << 1;

/// The most bytes of a batch.
pub const MAX_BATCH_BYTES: usize = 1 << 20;
/// The most operations of a batch.
pub const MAX_OPERATIONS: usize = 16384;
/// The most bytes of a reply.
pub const MAX_REPLY_BYTES: usize = 1 << 20;
/// The most ranges of guest memory under one buffer.
pub const MAX_RANGES: usize = 4096;
/// The most arguments of a launch.
pub const MAX_ARGUMENTS: usize = 64;
/// The most dimensions of a view.
pub const MAX_RANK: usize = 4;
/// The most bytes of a text in an answer.
pub const MAX_TEXT: usize = 512;
