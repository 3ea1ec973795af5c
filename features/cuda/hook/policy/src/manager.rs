//! A process's virtual memory: allocates, puts copies off, and moves memory instead of copying it.
//!
//! An allocation that is likely to take over another's contents gets physical memory only behind as much as the other has. If the program then
//! copies the other there and frees it, as one does to grow an array, the other's memory is moved. Any call that could let somebody look at
//! either before, or give work that could, first settles: what is missing gets memory, and the copy runs. So nobody ever sees anything else than
//! without the hook.

use std::collections::BTreeMap;

use crate::driver::{Context, Device, Driver, Failure, GRANULE, OUT_OF_MEMORY, Place, Result};
use crate::plan::{self, Backing};
use crate::tracker::{Allocation, Piece, Tracker};

mod accounts;
mod native;
mod pause;

use native::Natives;
pub use native::{Id, Kind};
pub use pause::{Cant, Kept, Report};

/// A copy that was put off.
#[derive(Clone, Debug)]
struct Pending<C> {
    from: u64,
    to: u64,
    copy: C,
}

/// What happened, to be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Virtual memory was allocated.
    Allocated {
        /// Where.
        address: u64,
        /// What was asked for.
        bytes: u64,
        /// So much of it has no memory yet.
        missing: u64,
        /// Of which device.
        device: Device,
    },
    /// An allocation failed.
    Failed {
        /// What was asked for.
        bytes: u64,
        /// The driver's error.
        code: u32,
    },
    /// It was freed.
    Freed {
        /// Its address.
        address: u64,
        /// Its size.
        bytes: u64,
    },
    /// The driver allocated itself.
    NativeAllocated {
        /// What.
        kind: Kind,
        /// Where.
        id: Id,
        /// How much.
        bytes: u64,
    },
    /// That was freed.
    NativeFreed {
        /// What.
        kind: Kind,
        /// Where.
        id: Id,
        /// How much.
        bytes: u64,
    },
    /// A copy waits.
    PutOff {
        /// The source's address.
        from: u64,
        /// The target's.
        to: u64,
    },
    /// One allocation's memory became another's.
    Moved {
        /// The source's address.
        from: u64,
        /// The target's.
        to: u64,
        /// How much.
        bytes: u64,
    },
    /// A copy that waited was run.
    Copied {
        /// The source's address.
        from: u64,
        /// The target's.
        to: u64,
    },
    /// What was missing got memory, of the host's if the device had none.
    Filled {
        /// The allocation's address.
        address: u64,
        /// How much it lacked.
        bytes: u64,
        /// Is it the host's memory?
        of_host: bool,
    },
    /// The program was paused.
    Paused {
        /// So many bytes of devices were given back.
        bytes: u64,
        /// So many of them without a copy.
        dropped: u64,
    },
    /// It goes on.
    Resumed {
        /// So many bytes of devices were taken again.
        bytes: u64,
    },
}

/// How far something is freed.
#[derive(Debug)]
pub enum Freed {
    /// It was not allocated here.
    Not,
    /// It is.
    Done,
    /// It is no more the program's, but work may use it: that is waited for without the manager, which other threads need for what the work waits for.
    AfterWork(Allocation),
}

/// How many allocations there have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    own: u64,
    native: u64,
}

/// The memory of a process.
pub struct Manager<D: Driver> {
    driver: D,
    tracker: Tracker,
    /// No two have an allocation in common.
    pending: Vec<Pending<D::Copy>>,
    /// What is freed when the captures end, in which no stream may be waited for, or with its context, whose work failed.
    zombies: Vec<Allocation>,
    /// Bytes that are freed and still there, as work may use them.
    leaving: u64,
    captures: u32,
    /// Is anything put off at all?
    puts_off: bool,
    /// Bytes that all allocations together may have.
    quota: Option<u64>,
    native: Natives,
    events: Vec<Event>,
    /// What a copy that was put off failed with, and nobody was told yet.
    failed: Option<Failure>,
    /// Is the program paused?
    is_paused: bool,
    /// What its contexts' memory had then.
    saved: BTreeMap<Context, D::Saved>,
}

impl<D: Driver> Manager<D> {
    /// One without any memory.
    pub fn new(driver: D, quota: Option<u64>) -> Self {
        let (tracker, pending, zombies, native, events) = Default::default();
        let (leaving, captures, puts_off, is_paused, saved) = (0, 0, true, false, BTreeMap::new());
        Self {
            driver,
            tracker,
            pending,
            zombies,
            native,
            leaving,
            captures,
            puts_off,
            quota,
            events,
            failed: None,
            is_paused,
            saved,
        }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// The allocations.
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// What happened since this was asked last.
    pub fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Must something be done before anybody looks at memory?
    pub fn is_unsettled(&self) -> bool {
        self.waits() || self.failed.is_some()
    }

    /// Does anything lack memory, or wait to be copied?
    pub fn waits(&self) -> bool {
        !self.pending.is_empty() || self.tracker.is_missing()
    }

    /// From here on nothing is put off.
    ///
    /// # Errors
    /// As [`settle_for_nobody`](Manager::settle_for_nobody).
    pub fn put_nothing_off(&mut self) -> Result<()> {
        self.puts_off = false;
        self.settle_for_nobody()
    }

    /// Bytes that allocations lack.
    pub fn promised(&self) -> u64 {
        self.tracker.all().map(|of| of.missing).sum()
    }

    /// Allocates for a context; none where the driver's own function is to.
    ///
    /// # Errors
    /// [`OUT_OF_MEMORY`]; the driver's.
    pub fn allocate(&mut self, context: Context, device: Device, bytes: u64) -> Result<Option<u64>> {
        if self.captures != 0 {
            return Ok(None);
        }
        // What others were promised is not given to this one.
        let promised = self.promised();
        let driver = &self.driver;
        let has =
            |bytes: u64| driver.free_bytes(context).is_ok_and(|free| free >= promised.saturating_add(bytes));
        if promised != 0 && !has(bytes.saturating_add(plan::SPARE)) {
            self.settle_for_nobody()?;
        }
        let promised = self.promised();
        let driver = &self.driver;
        let has =
            |bytes: u64| driver.free_bytes(context).is_ok_and(|free| free >= promised.saturating_add(bytes));
        let could_wait = |bytes| self.puts_off && driver.is_idle() && has(bytes);
        let backing = plan::allocate(&self.tracker, context, device, bytes, could_wait);
        let missing = match backing {
            Backing::Native => return Ok(None),
            Backing::Whole => 0,
            Backing::Behind(first) => first,
        };
        self.admit(bytes.next_multiple_of(GRANULE), Kind::Device)?;
        let made = self.back(context, device, bytes, missing);
        self.events.push(match made {
            Ok(address) => Event::Allocated { address, bytes, missing, device },
            Err(Failure(code)) => Event::Failed { bytes, code },
        });
        made.map(Some)
    }

    fn back(&mut self, context: Context, device: Device, bytes: u64, missing: u64) -> Result<u64> {
        let reserved = bytes.next_multiple_of(GRANULE);
        let address = self.driver.reserve(reserved)?;
        let mut pieces = Vec::new();
        if missing < reserved {
            match self.piece(Place::Device(device), address, missing, reserved - missing, device) {
                Ok(piece) => pieces.push(piece),
                Err(error) => {
                    // It fails only where nothing can be given back anyway.
                    let _ = self.driver.unreserve(address, reserved);
                    return Err(error);
                }
            }
        }
        let (is_pinned, number, away, tag, stack) = (false, 0, Vec::new(), None, None);
        let made = Allocation {
            address,
            bytes,
            context,
            device,
            pieces,
            missing,
            is_pinned,
            number,
            away,
            tag,
            stack,
        };
        self.tracker.insert(made);
        Ok(address)
    }

    /// Gives a part of an allocation physical memory.
    fn piece(&self, place: Place, address: u64, offset: u64, bytes: u64, device: Device) -> Result<Piece> {
        let handle = self.driver.create(place, bytes)?;
        match self.driver.map(address + offset, bytes, handle, device) {
            Ok(()) => Ok(Piece { offset, bytes, handle, of_host: matches!(place, Place::Host(_)) }),
            Err(error) => {
                let _ = self.driver.release(handle);
                Err(error)
            }
        }
    }

    /// Puts a copy off, if that may be. If not, what it could see is settled, and the caller runs it.
    ///
    /// # Errors
    /// As [`settle`](Manager::settle).
    pub fn copy(&mut self, to: u64, from: u64, bytes: u64, copy: D::Copy) -> Result<bool> {
        let waits =
            |of: &Pending<D::Copy>| [of.from, of.to].iter().any(|other| *other == from || *other == to);
        if self.captures == 0
            && self.puts_off
            && !self.is_paused
            && let (Some(source), Some(target)) = (self.tracker.at(from), self.tracker.at(to))
            && plan::may_wait(source, target, bytes)
            && !self.pending.iter().any(waits)
        {
            self.pending.push(Pending { from, to, copy });
            self.events.push(Event::PutOff { from, to });
            return Ok(true);
        }
        self.settle()?;
        Ok(false)
    }

    /// Gives what is missing memory, and runs the copies that wait.
    ///
    /// # Errors
    /// [`OUT_OF_MEMORY`] when neither the device nor the host has any; the driver's. What could be settled was, and what lacks memory is tried again
    /// at the next call.
    pub fn settle(&mut self) -> Result<()> {
        self.fill_all()?;
        match self.failed.take() {
            Some(failure) => Err(failure),
            None => self.copy_all(),
        }
    }

    /// The same for no call of the program's: the next is told what a copy fails with.
    ///
    /// # Errors
    /// As [`settle`](Manager::settle).
    pub fn settle_for_nobody(&mut self) -> Result<()> {
        self.fill_all()?;
        self.copy_all().inspect_err(|failure| self.failed = self.failed.or(Some(*failure)))
    }

    fn fill_all(&mut self) -> Result<()> {
        let missing: Vec<u64> =
            self.tracker.all().filter(|of| of.missing != 0).map(|of| of.address).collect();
        for address in missing {
            self.fill(address)?;
        }
        Ok(())
    }

    fn copy_all(&mut self) -> Result<()> {
        while !self.pending.is_empty() {
            let Pending { from, to, copy } = self.pending.remove(0);
            self.driver.copy(&copy)?;
            self.events.push(Event::Copied { from, to });
        }
        Ok(())
    }

    /// Gives an allocation what it lacks.
    fn fill(&mut self, address: u64) -> Result<()> {
        let Some(of) = self.tracker.at(address) else { return Ok(()) };
        let (missing, device) = (of.missing, of.device);
        let mut of_host = false;
        let mut piece = self.piece(Place::Device(device), address, 0, missing, device);
        if piece == Err(OUT_OF_MEMORY) {
            // Somebody else took what was free when it was allocated. The program was given it, so it is the host's.
            of_host = true;
            piece = self.piece(Place::Host(device), address, 0, missing, device);
        }
        let piece = piece?;
        if let Some(of) = self.tracker.at_mut(address) {
            of.pieces.insert(0, piece);
            of.missing = 0;
        }
        self.events.push(Event::Filled { address, bytes: missing, of_host });
        Ok(())
    }

    /// Frees what was allocated at an address, with a wait in it; false if it was not by this.
    ///
    /// # Errors
    /// The driver's.
    pub fn free(&mut self, address: u64) -> Result<bool> {
        match self.begin_free(address)? {
            Freed::Not => return Ok(false),
            Freed::Done => {}
            Freed::AfterWork(of) => {
                let waited = self.driver.synchronize(of.context);
                self.end_free(of, waited)?;
            }
        }
        Ok(true)
    }

    /// The second half of [`begin_free`](Manager::begin_free), behind the work of the context, and what waiting for it failed with.
    ///
    /// # Errors
    /// That; the driver's.
    pub fn end_free(&mut self, of: Allocation, waited: Result<()>) -> Result<()> {
        match waited {
            Ok(()) => self.left(of),
            // Either a capture has begun meanwhile, in which nobody waits, or it is freed with its context.
            Err(failure) => {
                self.zombies.push(of);
                if self.captures != 0 { Ok(()) } else { Err(failure) }
            }
        }
    }

    /// Frees what was allocated at an address, but for what work may use still.
    ///
    /// # Errors
    /// The driver's.
    pub fn begin_free(&mut self, address: u64) -> Result<Freed> {
        if self.tracker.at(address).is_none() {
            // The driver's own function waits for work that may use what is unsettled.
            self.settle()?;
            return Ok(Freed::Not);
        }
        match self.pending.iter().position(|pending| pending.from == address) {
            Some(at) => {
                if !self.moved(at)? {
                    self.settle()?;
                }
            }
            // A copy to what is freed is not needed any more; others may wait on.
            None => self.pending.retain(|pending| pending.to != address),
        }
        let Some(of) = self.tracker.remove(address) else { return Ok(Freed::Done) };
        self.events.push(Event::Freed { address, bytes: of.bytes });
        self.leaving += of.backed();
        if self.captures != 0 {
            self.zombies.push(of);
            return Ok(Freed::Done);
        }
        Ok(Freed::AfterWork(of))
    }

    /// Moves the memory of a copy's source to its target. False if that failed, and nothing has changed.
    fn moved(&mut self, at: usize) -> Result<bool> {
        let (from, to) = (self.pending[at].from, self.pending[at].to);
        let (Some(source), Some(target)) = (self.tracker.at(from).cloned(), self.tracker.at(to)) else {
            return Ok(false);
        };
        let (missing, device) = (target.missing, target.device);
        if self.captures != 0 || source.is_pinned || target.is_pinned || source.reserved() > missing {
            return Ok(false);
        }
        self.driver.synchronize(source.context)?;
        // What the source does not fill is the device's first, or there is nothing to move.
        let rest = missing - source.reserved();
        let rest = match rest {
            0 => None,
            rest => match self.piece(Place::Device(device), to, source.reserved(), rest, device) {
                Ok(piece) => Some(piece),
                Err(_) => return Ok(false),
            },
        };
        for (done, piece) in source.pieces.iter().enumerate() {
            if self.driver.map(to + piece.offset, piece.bytes, piece.handle, device).is_err() {
                for piece in &source.pieces[..done] {
                    self.driver.unmap(to + piece.offset, piece.bytes)?;
                }
                if let Some(piece) = rest {
                    self.driver.unmap(to + piece.offset, piece.bytes)?;
                    self.driver.release(piece.handle)?;
                }
                return Ok(false);
            }
        }
        // The memory is both's until here: what follows can't be undone, and need not be.
        self.pending.remove(at);
        if let Some(target) = self.tracker.at_mut(to) {
            target.pieces.splice(0..0, source.pieces.iter().cloned().chain(rest));
            target.missing = 0;
        }
        self.events.push(Event::Moved { from, to, bytes: source.reserved() });
        let pieces = match self.tracker.at_mut(from) {
            Some(source) => {
                source.missing = source.reserved();
                std::mem::take(&mut source.pieces)
            }
            None => Vec::new(),
        };
        for piece in pieces {
            self.driver.unmap(from + piece.offset, piece.bytes)?;
        }
        Ok(true)
    }

    /// Gives back what was freed before.
    fn left(&mut self, of: Allocation) -> Result<()> {
        let bytes = of.backed();
        self.release(of)?;
        self.leaving -= bytes;
        Ok(())
    }

    /// Gives back an allocation's memory and addresses.
    fn release(&self, of: Allocation) -> Result<()> {
        for piece in &of.pieces {
            self.driver.unmap(of.address + piece.offset, piece.bytes)?;
            self.driver.release(piece.handle)?;
        }
        for (away, handle) in of.away.iter().filter_map(|away| Some((away, away.left?))) {
            self.driver.unmap(of.address + away.offset, away.bytes)?;
            self.driver.release(handle)?;
        }
        self.driver.unreserve(of.address, of.reserved())
    }

    /// A capture of a stream begins: what is unsettled is settled before.
    ///
    /// # Errors
    /// As [`settle`](Manager::settle).
    pub fn begin_capture(&mut self) -> Result<()> {
        self.settle()?;
        self.captures += 1;
        Ok(())
    }

    /// A capture has ended, or did not begin.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_capture(&mut self) -> Result<()> {
        self.captures = self.captures.saturating_sub(1);
        let mut result = Ok(());
        if self.captures == 0 {
            for of in std::mem::take(&mut self.zombies) {
                let released = self.driver.synchronize(of.context).and_then(|()| self.left(of));
                result = result.and(released);
            }
        }
        result
    }

    /// Somebody else may reach what an address lies in: it is settled, and stays where it is.
    ///
    /// # Errors
    /// As [`settle`](Manager::settle).
    pub fn pin(&mut self, address: u64) -> Result<()> {
        if self.tracker.around(address).is_none() {
            return Ok(());
        }
        self.settle()?;
        if let Some(of) = self.tracker.around_mut(address) {
            of.is_pinned = true;
        }
        Ok(())
    }

    /// How many allocations there have been: a context that ends takes none that come later, as its handle may come again at once.
    pub fn mark(&self) -> Mark {
        Mark { own: self.tracker.count(), native: self.native.count() }
    }

    /// A context is gone: so is its memory, as much of it as there was at the mark.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_context(&mut self, context: Context, until: Mark) -> Result<()> {
        let is_gone = |of: &Allocation| of.context == context && of.number <= until.own;
        self.pending.retain(|pending| !self.tracker.at(pending.from).is_some_and(is_gone));
        for of in self.zombies.extract_if(.., |of| is_gone(of)).collect::<Vec<_>>() {
            self.left(of)?;
        }
        // The driver frees its own.
        self.events.extend(self.native.end_context(context, until.native));
        let gone: Vec<u64> = self.tracker.all().filter(|of| is_gone(of)).map(|of| of.address).collect();
        for address in gone {
            if let Some(of) = self.tracker.remove(address) {
                self.events.push(Event::Freed { address, bytes: of.bytes });
                self.release(of)?;
            }
        }
        Ok(())
    }
}
