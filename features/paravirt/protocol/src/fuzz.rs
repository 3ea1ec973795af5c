//! What a decoder must do with any bytes, for fuzzing.

use crate::{Argument, Batch, BatchWriter, Config, FrameHeader, Info, LogReader, Operation, Range, Reply};

/// Feeds arbitrary bytes to every decoder: each must answer without a panic and in time that the length bounds; and a
/// batch that is accepted is encoded again to just these bytes. Returns whether the bytes are a batch.
pub fn frame(bytes: &[u8]) -> bool {
    let _ = Config::decode(bytes);
    let _ = Info::decode(bytes);
    if let Some(header) = bytes.first_chunk() {
        for read in [FrameHeader::decode_batch(header), FrameHeader::decode_reply(header)] {
            assert!(read.is_ok_and(|read| read.encode() == *header) || read.is_err());
        }
    }
    LogReader::new(bytes).flatten().for_each(|entry| assert!(entry.bytes() <= bytes.len() + 8));
    if let Ok(reply) = Reply::decode(bytes) {
        assert!(reply.results().all(|result| result.is_ok()));
        let _ = reply.check();
    }
    let Ok(batch) = Batch::decode(bytes) else { return false };
    assert_eq!(batch.operations().count(), batch.len());
    let mut again = Again { bytes, at: 0 };
    again.header(batch.len());
    for operation in batch.operations() {
        let Ok(operation) = operation else { panic!("an accepted batch has a malformed operation") };
        again.operation(&operation);
    }
    assert_eq!(again.at, bytes.len(), "an accepted batch is longer than its operations");
    true
}

/// Compares a batch with what the writer makes of each of its operations.
struct Again<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Again<'_> {
    fn header(&mut self, operations: usize) {
        assert_eq!(self.bytes[12..16], (operations as u32).to_le_bytes());
        self.at = 16;
    }

    fn operation(&mut self, operation: &Operation<'_>) {
        // Large parts are compared in place; what is left fits here.
        let mut room = [0; 16 + 8 + 32 + crate::MAX_ARGUMENTS * 72];
        let rest = match operation {
            Operation::CreateModule { code, .. } => code.len().div_ceil(8) * 8,
            Operation::ImportBuffer { ranges, .. } => ranges.len() * 16,
            _ => 0,
        };
        let Ok(mut writer) = BatchWriter::new(&mut room) else { panic!("a header has room") };
        let written = match operation {
            Operation::Query => writer.query(),
            Operation::CreateModule { module, .. } => writer.create_module(*module, &[]),
            Operation::CreateModuleFrom { module, source } => writer.create_module_from(*module, *source),
            Operation::DestroyModule { module } => writer.destroy_module(*module),
            Operation::CreateBuffer { buffer, bytes } => writer.create_buffer(*buffer, *bytes),
            Operation::ImportBuffer { buffer, ranges } => {
                assert!(!ranges.is_empty());
                assert_eq!(ranges.iter().count(), ranges.len());
                writer.import_buffer(*buffer, &[Range { address: 0, bytes: 0 }])
            }
            Operation::DestroyBuffer { buffer } => writer.destroy_buffer(*buffer),
            Operation::Copy { target, source } => {
                assert_eq!(target.bytes, source.bytes);
                writer.copy((target.buffer, target.offset), (source.buffer, source.offset), target.bytes)
            }
            Operation::Fill { target, value } => writer.fill(*target, *value),
            Operation::Launch(launch) => {
                let mut arguments = [Argument::Scalar(0); crate::MAX_ARGUMENTS];
                let mut count = 0;
                for (slot, argument) in arguments.iter_mut().zip(launch.arguments) {
                    let Ok(argument) = argument else {
                        panic!("an accepted launch has a malformed argument")
                    };
                    *slot = argument;
                    count += 1;
                }
                assert_eq!(count, launch.arguments.len());
                let arguments = &arguments[..count];
                writer.launch_with_fuel(launch.module, launch.kernel, launch.grid, launch.fuel, arguments)
            }
            Operation::Fence => writer.fence(),
            Operation::Log => writer.log(),
        };
        assert!(written.is_ok(), "an accepted operation can't be written");
        let len = writer.finish() - 16;
        // Of the two with a part of any length, the head is compared: code, and the number.
        let (head, skip) = match operation {
            Operation::CreateModule { .. } => (4, len),
            Operation::ImportBuffer { .. } => (4, len - 16),
            _ => (len, len),
        };
        assert_eq!(room[16..16 + head], self.bytes[self.at..self.at + head]);
        self.at += skip + rest;
    }
}
