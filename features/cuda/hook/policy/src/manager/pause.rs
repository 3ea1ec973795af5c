//! Pause and resume: devices' memory is given back while a program waits, and its contents are the host's.
//!
//! ```text
//! running ──pause──▶ paused     settle, wait for all work, save; then unmap and release
//!    ▲                  │
//!    └──────resume──────┘       create and map, restore meanwhile; what fails is undone, and the program stays paused
//! ```
//!
//! Mapping runs ahead of the copies that restore: the driver asks for a range after the other, each of which is mapped then. The caller sees to it that no call of the program runs meanwhile. Nothing changes before all is saved, and what can't be unmapped then stays.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use super::{Event, Manager};
use crate::driver::{Context, Device, Driver, Failure, OUT_OF_MEMORY, Place, Range};
use crate::tracker::{Allocation, Away, Piece};

/// Why a program can't be paused or resumed; then it is what it was.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Cant {
    /// A graph is being captured, in which no work may be waited for.
    #[error("a stream is being captured: try again when the program has ended the capture")]
    Capture,
    /// The host can't hold the contents.
    #[error(
        "the host can't hold {bytes} bytes of device memory: free some of its memory, or raise its limit"
    )]
    NoHostMemory {
        /// So many bytes must be held.
        bytes: u64,
    },
    /// The device has too little.
    #[error(
        "a device lacks {missing} of {bytes} bytes: the program stays paused; free device memory, and resume it again"
    )]
    NoRoom {
        /// So many bytes are needed.
        bytes: u64,
        /// So many of them are not free.
        missing: u64,
    },
    /// The driver failed.
    #[error("the driver: {0}")]
    Driver(#[from] Failure),
}

/// What stayed on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes that others may reach: exported, with tokens, or registered.
    pub pinned: u64,
    /// Bytes that the driver allocated itself.
    pub native: u64,
    /// Bytes that it did not unmap.
    pub failed: u64,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes of devices that were given back, or taken again.
    pub bytes: u64,
    /// So many of them without their contents.
    pub dropped: u64,
    /// What was not.
    pub kept: Kept,
}

impl<D: Driver> Manager<D> {
    /// Is the program paused?
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Does a capture run?
    pub fn is_capturing(&self) -> bool {
        self.captures != 0
    }

    /// Gives devices' memory back, and keeps what it had.
    ///
    /// # Errors
    /// [`Cant`]; then all is as it was.
    pub fn pause(&mut self) -> Result<Report, Cant> {
        if self.captures != 0 {
            return Err(Cant::Capture);
        }
        if self.is_paused {
            return Ok(self.report());
        }
        self.settle_for_nobody()?;
        let contexts: BTreeSet<Context> = self.tracker.all().map(|of| of.context).collect();
        for context in &contexts {
            self.driver.synchronize(*context)?;
        }
        let mut saved = BTreeMap::new();
        for context in contexts {
            let ranges: Vec<Range> =
                self.leaving(context).filter(|part| !part.1).map(|part| part.0).collect();
            if ranges.is_empty() {
                continue;
            }
            let bytes = ranges.iter().map(|range| range.bytes).sum();
            let kept = self.driver.save(context, &ranges).map_err(|error| match error {
                OUT_OF_MEMORY => Cant::NoHostMemory { bytes },
                error => Cant::Driver(error),
            })?;
            saved.insert(context, kept);
        }
        self.saved = saved;
        self.is_paused = true;
        let driver = &self.driver;
        let mut offsets: BTreeMap<Context, u64> = BTreeMap::new();
        for of in self.tracker.all_mut().filter(|of| leaves(of)) {
            let is_dropped = is_dropped(of);
            let mut stays = Vec::new();
            for piece in std::mem::take(&mut of.pieces) {
                if piece.of_host {
                    stays.push(piece);
                    continue;
                }
                let offset = offsets.entry(of.context).or_default();
                let saved = (!is_dropped).then_some(*offset);
                *offset += if is_dropped { 0 } else { piece.bytes };
                if driver.unmap(of.address + piece.offset, piece.bytes).is_err() {
                    stays.push(piece);
                    continue;
                }
                // Its memory is lost to all where this fails, and the program has none there either way.
                let _ = driver.release(piece.handle);
                match of.away.last_mut() {
                    // One piece with the one before it, as its contents are.
                    Some(last) if last.offset + last.bytes == piece.offset => last.bytes += piece.bytes,
                    _ => of.away.push(Away { offset: piece.offset, bytes: piece.bytes, saved, left: None }),
                }
            }
            of.pieces = stays;
        }
        let report = self.report();
        self.events.push(Event::Paused { bytes: report.bytes, dropped: report.dropped });
        Ok(report)
    }

    /// What leaves a context's device, in order, and whether its contents are dropped.
    fn leaving(&self, context: Context) -> impl Iterator<Item = (Range, bool)> {
        self.tracker.all().filter(move |of| of.context == context && leaves(of)).flat_map(|of| {
            let pieces = of.pieces.iter().filter(|piece| !piece.of_host);
            pieces.map(|piece| {
                (Range { address: of.address + piece.offset, bytes: piece.bytes }, is_dropped(of))
            })
        })
    }

    /// What is away, and what stayed.
    fn report(&self) -> Report {
        let mut report = Report::default();
        report.kept.native = self.native_bytes(false);
        for of in self.tracker.all() {
            let backed =
                of.pieces.iter().filter(|piece| !piece.of_host).map(|piece| piece.bytes).sum::<u64>();
            match of.is_pinned {
                true => report.kept.pinned += backed,
                false => report.kept.failed += backed,
            }
            report.bytes += of.paused();
            let dropped = of.away.iter().filter(|away| away.saved.is_none());
            report.dropped += dropped.map(|away| away.bytes).sum::<u64>();
        }
        report
    }

    /// Takes devices' memory again, with what it had, and returns the host's, which is to be freed.
    ///
    /// # Errors
    /// [`Cant`]; then the program is paused on, and nothing is lost.
    pub fn resume(&mut self) -> Result<(Report, Vec<D::Saved>), Cant> {
        if !self.is_paused {
            return Ok((Report::default(), Vec::new()));
        }
        let report = self.report();
        let mut mapped = 0;
        self.tracker.all_mut().for_each(|of| of.cut(&mut mapped));
        let away: Vec<Allocation> = self.tracker.all().filter(|of| !of.away.is_empty()).cloned().collect();
        let contexts: BTreeSet<(Context, Device)> = away.iter().map(|of| (of.context, of.device)).collect();
        let mut made: Vec<(u64, Piece)> = Vec::new();
        for (context, device) in contexts {
            let own: Vec<&Allocation> = away.iter().filter(|of| of.context == context).collect();
            let mut is_full = false;
            if let Err(failure) = self.bring(context, &own, &mut made, &mut is_full) {
                self.undo(made);
                if !is_full {
                    return Err(Cant::Driver(failure));
                }
                let bytes = away.iter().filter(|of| of.device == device).map(Allocation::paused).sum();
                let free = self.driver.free_bytes(context).unwrap_or(0);
                return Err(Cant::NoRoom { bytes, missing: bytes.saturating_sub(free) });
            }
        }
        for (address, piece) in made {
            if let Some(of) = self.tracker.at_mut(address) {
                of.pieces.push(piece);
                of.pieces.sort_by_key(|piece| piece.offset);
                of.away.clear();
            }
        }
        self.is_paused = false;
        self.events.push(Event::Resumed { bytes: report.bytes });
        Ok((report, std::mem::take(&mut self.saved).into_values().collect()))
    }

    /// Maps what a context lacks, and has the driver copy there meanwhile; tells what was made, and whether the device had too little.
    fn bring(
        &self,
        context: Context,
        own: &[&Allocation],
        made: &mut Vec<(u64, Piece)>,
        is_full: &mut bool,
    ) -> Result<(), Failure> {
        let all = || own.iter().flat_map(|of| of.away.iter().map(move |away| (of, away)));
        let range =
            |of: &Allocation, away: &Away| Range { address: of.address + away.offset, bytes: away.bytes };
        let mut mapped = all().filter_map(|(of, away)| {
            let Away { offset, bytes, saved, left } = *away;
            let piece = match left {
                Some(handle) => Ok(Piece { offset, bytes, handle, of_host: false }),
                None => self.piece(Place::Device(of.device), of.address, offset, bytes, of.device),
            };
            *is_full = piece == Err(OUT_OF_MEMORY);
            match piece {
                Ok(piece) => made.push((of.address, piece)),
                Err(failure) => return Some(Err(failure)),
            }
            Some(Ok((saved?, range(of, away))))
        });
        match self.saved.get(&context) {
            Some(saved) => self.driver.restore(context, saved, mapped.by_ref())?,
            None => mapped.try_for_each(|range| range.map(drop))?,
        }
        drop(mapped);
        let mut dropped = all().filter(|(_, away)| away.saved.is_none());
        dropped.try_for_each(|(of, away)| self.driver.clear(context, range(of, away)))
    }

    /// Unmaps and releases what resuming made.
    fn undo(&mut self, made: Vec<(u64, Piece)>) {
        for (address, piece) in made {
            let left = match self.driver.unmap(address + piece.offset, piece.bytes) {
                Ok(()) => {
                    let _ = self.driver.release(piece.handle);
                    None
                }
                Err(_) => Some(piece.handle),
            };
            let of = self.tracker.at_mut(address).into_iter().flat_map(|of| &mut of.away);
            of.filter(|away| away.offset == piece.offset).for_each(|away| away.left = left);
        }
    }
}

/// Does an allocation's memory leave its device?
fn leaves(of: &Allocation) -> bool {
    !of.is_pinned
}

fn is_dropped(of: &Allocation) -> bool {
    of.tag.as_ref().is_some_and(|tag| tag.is_droppable)
}
