//! What a modelled GPU does of its channel's pushbuffers.

use std::collections::BTreeMap;

use crate::gpu::Layout;
use crate::gpu::ring::methods::{ADDRESS_BITS, COPY_CLASS, COPY_SUBCHANNEL, INC_METHOD, copy, host};
use crate::gpu::ring::{ENTRY_SIZE, GP_GET, GP_PUT, NOTIFIER_INFO, NOTIFIER_STATUS};
use crate::sim::SimSpace;

/// Submissions that one ring of the doorbell has done at most: more than a ring has.
pub(super) const DISPATCH: usize = 1 << 16;
/// Most bytes that one method transfers: a length that a test does not mean is no reason to copy for hours.
const MOST_BYTES: u64 = 1 << 24;

/// A page fault, as NVIDIA's driver numbers it (Xid 31).
const PAGE_FAULT: u32 = 31;
/// A pushbuffer that is none (Xid 32).
const BAD_PUSHBUFFER: u32 = 32;
/// A copy that is none (Xid 39, of copy engine 0).
const BAD_COPY: u32 = 39;

/// A channel.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) handle: u32,
    layout: Layout,
    /// The entry that is worked on, and the dword of its segment that comes next.
    get: u32,
    at: u32,
    /// What was written to the methods, by subchannel.
    methods: BTreeMap<(u32, u32), u32>,
    has_faulted: bool,
    /// Interrupts that it has raised and nobody delivered.
    pub(super) interrupts: u32,
}

/// Why a channel does not go on.
enum Stop {
    /// A semaphore is not there yet.
    Wait,
    /// An error.
    Fault(u32),
}

impl Channel {
    pub(super) fn new(handle: u32, layout: Layout) -> Self {
        Self { handle, layout, get: 0, at: 0, methods: BTreeMap::new(), has_faulted: false, interrupts: 0 }
    }

    /// Does up to `most` submissions; how many were done.
    pub(super) fn run(&mut self, space: &SimSpace, most: usize, writes_get: bool) -> usize {
        let mut done = 0;
        while done < most && !self.has_faulted {
            match self.entry(space) {
                Ok(false) => break,
                Ok(true) => {
                    (self.get, self.at) = ((self.get + 1) % self.layout.count(), 0);
                    done += 1;
                    if writes_get && space.store(self.layout.userd() + GP_GET, self.get).is_err() {
                        self.fault(space, PAGE_FAULT);
                    }
                }
                Err(Stop::Wait) => break,
                Err(Stop::Fault(code)) => self.fault(space, code),
            }
        }
        done
    }

    /// Tells of an error, and stops.
    fn fault(&mut self, space: &SimSpace, code: u32) {
        self.has_faulted = true;
        self.interrupts += 1;
        let notifier = self.layout.notifier();
        // Where even that can't be written, nobody hears of it but by a deadline.
        let _ = space
            .store(notifier + NOTIFIER_INFO, code)
            .and_then(|()| space.store(notifier + NOTIFIER_STATUS, 0xffff_0000));
    }

    /// Works on the next entry; false if there is none.
    fn entry(&mut self, space: &SimSpace) -> Result<bool, Stop> {
        let put = load(space, self.layout.userd() + GP_PUT)?;
        if put >= self.layout.count() {
            return Err(Stop::Fault(BAD_PUSHBUFFER));
        }
        if put == self.get {
            return Ok(false);
        }
        let entry = self.layout.entries() + u64::from(self.get) * ENTRY_SIZE;
        let (low, high) = (load(space, entry)?, load(space, entry + 4)?);
        let length = high >> 10 & 0x1f_ffff;
        let segment = u64::from(high & 0xff) << 32 | u64::from(low & !3);
        // A control entry: no operation, or one that is not modelled.
        if length == 0 {
            return if high & 0xff == 0 { Ok(true) } else { Err(Stop::Fault(BAD_PUSHBUFFER)) };
        }
        while self.at < length {
            let header = load(space, segment + u64::from(self.at) * 4)?;
            let (opcode, count) = (header >> 29, header >> 16 & 0x1fff);
            let (subchannel, method) = (header >> 13 & 7, (header & 0xfff) << 2);
            if opcode != INC_METHOD || self.at + count >= length {
                return Err(Stop::Fault(BAD_PUSHBUFFER));
            }
            for index in 0..count {
                let data = load(space, segment + u64::from(self.at + 1 + index) * 4)?;
                self.method(space, subchannel, method + index * 4, data)?;
            }
            self.at += 1 + count;
        }
        Ok(true)
    }

    fn method(&mut self, space: &SimSpace, subchannel: u32, method: u32, data: u32) -> Result<(), Stop> {
        self.methods.insert((subchannel, method), data);
        // The host's own methods are the same on every subchannel.
        match method {
            host::SET_OBJECT | host::SEM_ADDR_LO..=host::SEM_PAYLOAD_HI => return Ok(()),
            host::SEM_EXECUTE => return self.semaphore(space, subchannel, data),
            host::NON_STALL_INTERRUPT => {
                self.interrupts += 1;
                return Ok(());
            }
            _ => {}
        }
        if subchannel != COPY_SUBCHANNEL || self.get_method(subchannel, host::SET_OBJECT) != COPY_CLASS {
            return Err(Stop::Fault(BAD_PUSHBUFFER));
        }
        match method {
            copy::LAUNCH_DMA => self.launch(space, data),
            copy::OFFSET_IN_UPPER..=copy::OFFSET_OUT_LOWER
            | copy::LINE_LENGTH_IN
            | copy::LINE_COUNT
            | copy::SET_REMAP_CONST_A
            | copy::SET_REMAP_COMPONENTS => Ok(()),
            _ => Err(Stop::Fault(BAD_COPY)),
        }
    }

    fn get_method(&self, subchannel: u32, method: u32) -> u32 {
        self.methods.get(&(subchannel, method)).copied().unwrap_or(0)
    }

    fn semaphore(&self, space: &SimSpace, subchannel: u32, execute: u32) -> Result<(), Stop> {
        let of = |method| self.get_method(subchannel, method);
        let at = u64::from(of(host::SEM_ADDR_HI) & 0xff) << 32 | u64::from(of(host::SEM_ADDR_LO) & !3);
        let payload = of(host::SEM_PAYLOAD_LO);
        match execute & host::SEM_OPERATION {
            host::SEM_RELEASE => space.store(at, payload).map_err(|_| Stop::Fault(PAGE_FAULT)),
            host::SEM_ACQ_CIRC_GEQ if load(space, at)?.wrapping_sub(payload) as i32 >= 0 => Ok(()),
            host::SEM_ACQ_CIRC_GEQ => Err(Stop::Wait),
            _ => Err(Stop::Fault(BAD_PUSHBUFFER)),
        }
    }

    fn launch(&self, space: &SimSpace, launch: u32) -> Result<(), Stop> {
        let of = |method| self.get_method(COPY_SUBCHANNEL, method);
        let address =
            |upper, lower| (u64::from(of(upper)) << 32 | u64::from(of(lower))) & ((1 << ADDRESS_BITS) - 1);
        let to = address(copy::OFFSET_OUT_UPPER, copy::OFFSET_OUT_LOWER);
        let from = address(copy::OFFSET_IN_UPPER, copy::OFFSET_IN_LOWER);
        let fills = launch & copy::LAUNCH_REMAP != 0;
        let bytes = u64::from(of(copy::LINE_LENGTH_IN)) * if fills { 4 } else { 1 };
        let is_known = launch & !copy::LAUNCH_REMAP == copy::LAUNCH_LINEAR
            && of(copy::LINE_COUNT) == 1
            && (!fills || of(copy::SET_REMAP_COMPONENTS) == copy::REMAP_CONST_A);
        if !is_known || !bytes.is_multiple_of(4) || bytes > MOST_BYTES {
            return Err(Stop::Fault(BAD_COPY));
        }
        for offset in (0..bytes).step_by(4) {
            let value = if fills { of(copy::SET_REMAP_CONST_A) } else { load(space, from + offset)? };
            space.store(to + offset, value).map_err(|_| Stop::Fault(PAGE_FAULT))?;
        }
        Ok(())
    }
}

fn load(space: &SimSpace, iova: u64) -> Result<u32, Stop> {
    space.load(iova).map_err(|_| Stop::Fault(PAGE_FAULT))
}
