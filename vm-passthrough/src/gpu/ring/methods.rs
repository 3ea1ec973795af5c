//! What a ring's commands are in a pushbuffer: method headers and data.
//!
//! The forms are those of NVIDIA's open-gpu-doc (`manuals/volta/gv100/dev_ram.ref.txt`, "FIFO_DMA") and of the class headers of
//! open-gpu-kernel-modules: `clc46f.h` for the host's methods (TURING_CHANNEL_GPFIFO_A), `clc5b5.h` for the copy engine's
//! (TURING_DMA_COPY_A).

use super::RingError;

/// Bits of an address that a channel has.
pub const ADDRESS_BITS: u32 = 40;

/// The opcode of a header whose methods are at ascending addresses, one for each dword of data (`NV_FIFO_DMA_SEC_OP_INC_METHOD`).
pub const INC_METHOD: u32 = 1;
/// The subchannel that the copy engine is bound to, as NVIDIA's driver does it.
pub const COPY_SUBCHANNEL: u32 = 4;
/// The copy engine's class.
pub const COPY_CLASS: u32 = 0xc5b5;

/// Methods of the host.
pub mod host {
    /// Binds a class to the subchannel.
    pub const SET_OBJECT: u32 = 0x0;
    /// Interrupts, and goes on.
    pub const NON_STALL_INTERRUPT: u32 = 0x20;
    /// Lower half of a semaphore's address.
    pub const SEM_ADDR_LO: u32 = 0x5c;
    /// Upper half of the address.
    pub const SEM_ADDR_HI: u32 = 0x60;
    /// Lower half of the payload.
    pub const SEM_PAYLOAD_LO: u32 = 0x64;
    /// Upper half of the payload.
    pub const SEM_PAYLOAD_HI: u32 = 0x68;
    /// Does it.
    pub const SEM_EXECUTE: u32 = 0x6c;
    /// What [`SEM_EXECUTE`] does.
    pub const SEM_OPERATION: u32 = 0x7;
    /// Writes the payload.
    pub const SEM_RELEASE: u32 = 1;
    /// Waits until the semaphore is at the payload or behind it, modulo 2 to the power of 32.
    pub const SEM_ACQ_CIRC_GEQ: u32 = 3;
    /// Lets others have the engine meanwhile.
    pub const SEM_ACQUIRE_SWITCH_TSG: u32 = 1 << 12;
    /// Once what came before is done.
    pub const SEM_RELEASE_WFI: u32 = 1 << 20;
}

/// Methods of the copy engine.
pub mod copy {
    /// Transfers what the others describe.
    pub const LAUNCH_DMA: u32 = 0x300;
    /// Not before what came before is done; flushed; source and destination are linear.
    pub const LAUNCH_LINEAR: u32 = 2 | 1 << 2 | 1 << 7 | 1 << 8;
    /// Components are replaced as [`SET_REMAP_COMPONENTS`] says.
    pub const LAUNCH_REMAP: u32 = 1 << 10;
    /// Upper half of the source's address.
    pub const OFFSET_IN_UPPER: u32 = 0x400;
    /// Lower half of the source's address.
    pub const OFFSET_IN_LOWER: u32 = 0x404;
    /// Upper half of the destination's.
    pub const OFFSET_OUT_UPPER: u32 = 0x408;
    /// Lower half of it.
    pub const OFFSET_OUT_LOWER: u32 = 0x40c;
    /// Elements of a line.
    pub const LINE_LENGTH_IN: u32 = 0x418;
    /// How many lines.
    pub const LINE_COUNT: u32 = 0x41c;
    /// The constant A.
    pub const SET_REMAP_CONST_A: u32 = 0x700;
    /// What each component becomes.
    pub const SET_REMAP_COMPONENTS: u32 = 0x708;
    /// One component of four bytes, which is the constant A.
    pub const REMAP_CONST_A: u32 = 4 | 3 << 16;
}

/// Something that a device does in its address space. Addresses and lengths are multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Writes a value again and again.
    Fill {
        /// Where from.
        at: u64,
        /// How many bytes.
        len: u32,
        /// The value.
        value: u32,
    },
    /// Copies memory, which must not overlap.
    Copy {
        /// Where from.
        from: u64,
        /// Where to.
        to: u64,
        /// How many bytes.
        len: u32,
    },
    /// Waits until a value is in memory, or one after it, modulo 2 to the power of 32.
    Acquire {
        /// Where.
        at: u64,
        /// The value.
        value: u32,
    },
}

impl Command {
    fn check(&self) -> Result<(), RingError> {
        let range = |at: u64, len: u32| {
            let fits = at.checked_add(len.into()).is_some_and(|end| end <= 1 << ADDRESS_BITS);
            if len != 0 && at.is_multiple_of(4) && len.is_multiple_of(4) && fits {
                Ok(())
            } else {
                Err(RingError::Range { at, len })
            }
        };
        match *self {
            Self::Fill { at, len, .. } => range(at, len),
            Self::Acquire { at, .. } => range(at, 4),
            Self::Copy { from, to, len } => {
                range(from, len)?;
                range(to, len)?;
                if from < to + u64::from(len) && to < from + u64::from(len) {
                    return Err(RingError::Range { at: to, len });
                }
                Ok(())
            }
        }
    }
}

/// The pushbuffer segment of a submission: its commands, then the fence and the interrupt that tell that they are done.
pub(super) fn encode(commands: &[Command], fence: (u64, u32), most: usize) -> Result<Vec<u32>, RingError> {
    let mut out = Vec::new();
    push(&mut out, COPY_SUBCHANNEL, host::SET_OBJECT, &[COPY_CLASS]);
    for command in commands {
        command.check()?;
        match *command {
            Command::Fill { at, len, value } => {
                push(&mut out, COPY_SUBCHANNEL, copy::SET_REMAP_CONST_A, &[value]);
                push(&mut out, COPY_SUBCHANNEL, copy::SET_REMAP_COMPONENTS, &[copy::REMAP_CONST_A]);
                push(&mut out, COPY_SUBCHANNEL, copy::OFFSET_OUT_UPPER, &[high(at), at as u32]);
                push(&mut out, COPY_SUBCHANNEL, copy::LINE_LENGTH_IN, &[len / 4, 1]);
                let launch = copy::LAUNCH_LINEAR | copy::LAUNCH_REMAP;
                push(&mut out, COPY_SUBCHANNEL, copy::LAUNCH_DMA, &[launch]);
            }
            Command::Copy { from, to, len } => {
                let places = [high(from), from as u32, high(to), to as u32];
                push(&mut out, COPY_SUBCHANNEL, copy::OFFSET_IN_UPPER, &places);
                push(&mut out, COPY_SUBCHANNEL, copy::LINE_LENGTH_IN, &[len, 1]);
                push(&mut out, COPY_SUBCHANNEL, copy::LAUNCH_DMA, &[copy::LAUNCH_LINEAR]);
            }
            Command::Acquire { at, value } => {
                let execute = host::SEM_ACQ_CIRC_GEQ | host::SEM_ACQUIRE_SWITCH_TSG;
                push(&mut out, 0, host::SEM_ADDR_LO, &[at as u32, high(at), value, 0, execute]);
            }
        }
    }
    let (at, value) = fence;
    let execute = host::SEM_RELEASE | host::SEM_RELEASE_WFI;
    push(&mut out, 0, host::SEM_ADDR_LO, &[at as u32, high(at), value, 0, execute]);
    push(&mut out, 0, host::NON_STALL_INTERRUPT, &[0]);
    if out.len() > most {
        return Err(RingError::TooLong { dwords: out.len(), most });
    }
    Ok(out)
}

fn high(address: u64) -> u32 {
    (address >> 32) as u32
}

fn push(out: &mut Vec<u32>, subchannel: u32, method: u32, data: &[u32]) {
    out.push(INC_METHOD << 29 | (data.len() as u32) << 16 | subchannel << 13 | method >> 2);
    out.extend_from_slice(data);
}
