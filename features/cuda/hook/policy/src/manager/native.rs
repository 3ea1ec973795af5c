//! Memory that the driver allocated itself, and the quota of all.
//!
//! What a pool keeps of freed memory is the program's still. Asking for it at each allocation would cost, so an upper bound is kept, and pools
//! are asked, then trimmed, only before an allocation would fail.

use std::collections::BTreeMap;

use super::{Event, Manager};
use crate::driver::{Context, Driver, GRANULE, OUT_OF_MEMORY, Result};
use crate::tracker::{Stack, Tag};

/// What the driver allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory of a device, by `cuMemAlloc` and its like.
    Device,
    /// Memory of the host as well, which goes where it is used, and has no quota.
    Managed,
    /// Memory of a device's pool, by `cuMemAllocAsync` and its like.
    Pool,
    /// Physical memory, by `cuMemCreate`.
    Physical,
    /// An array, or one with its mipmaps.
    Array,
}

impl Kind {
    const ALL: [(Self, &str); 5] = [
        (Kind::Device, "device"),
        (Kind::Managed, "managed"),
        (Kind::Pool, "pool"),
        (Kind::Physical, "physical"),
        (Kind::Array, "array"),
    ];

    /// As the log has it.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The one of a name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, own)| *own == name).map(|(kind, _)| *kind)
    }

    /// How much of a device's memory so many bytes take, as driver 580 has it: from 1 MiB on no two have a granule in common.
    fn taken(self, bytes: u64) -> u64 {
        let unit = match self {
            Kind::Device if bytes > GRANULE / 2 => GRANULE,
            Kind::Device | Kind::Pool => 512,
            Kind::Managed => return 0,
            Kind::Physical | Kind::Array => 1,
        };
        bytes.checked_next_multiple_of(unit).unwrap_or(u64::MAX)
    }

    /// What names one of it.
    pub fn id(self, number: u64) -> Id {
        match self {
            Kind::Device | Kind::Managed | Kind::Pool => Id::Address(number),
            Kind::Physical => Id::Physical(number),
            Kind::Array => Id::Array(number),
        }
    }
}

/// What names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Id {
    /// Its address.
    Address(u64),
    /// A handle of physical memory.
    Physical(u64),
    /// A handle of an array.
    Array(u64),
}

impl Id {
    /// The address or the handle.
    pub fn number(self) -> u64 {
        let (Id::Address(number) | Id::Physical(number) | Id::Array(number)) = self;
        number
    }

    /// The address, if it has one.
    pub fn address(self) -> Option<u64> {
        if let Id::Address(address) = self { Some(address) } else { None }
    }
}

/// Memory that the driver allocated itself.
#[derive(Clone, Debug)]
pub(super) struct Native {
    pub(super) kind: Kind,
    /// Where it was allocated, and ends; 0 of what no context has.
    context: Context,
    pub(super) bytes: u64,
    /// Which it was, counted from 1.
    number: u64,
    /// Is its pool gone?
    is_orphan: bool,
    /// References and mappings of physical memory, which is freed with the last of them.
    uses: u64,
    pub(super) tag: Option<Tag>,
    pub(super) stack: Option<Stack>,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Natives {
    by_id: BTreeMap<Id, Native>,
    /// Where physical memory is mapped: how far, and its handle.
    mapped: BTreeMap<u64, (u64, u64)>,
    count: u64,
    /// Bytes of each kind.
    sums: [u64; 5],
    /// What they take of devices.
    taken: u64,
    /// What those of pools that are there do.
    of_pools: u64,
    /// No less than what pools keep of freed memory.
    kept: u64,
}

impl Natives {
    pub(super) fn all(&self) -> impl Iterator<Item = (Id, &Native)> {
        self.by_id.iter().map(|(id, of)| (*id, of))
    }

    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Native> {
        self.by_id.get_mut(&id)
    }

    /// How many there have been.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Bytes of a kind.
    pub(super) fn sum(&self, kind: Kind) -> u64 {
        self.sums[kind as usize]
    }

    /// Bytes of devices that were asked for.
    fn of_devices(&self) -> u64 {
        let devices = self.sums.iter().sum::<u64>();
        devices - self.sum(Kind::Managed)
    }

    fn insert(&mut self, kind: Kind, id: Id, context: Context, bytes: u64) -> Option<Event> {
        // Who frees what was here has not come to tell.
        let before = self.remove(id);
        self.count += 1;
        self.sums[kind as usize] += bytes;
        self.taken += kind.taken(bytes);
        self.of_pools += if kind == Kind::Pool { kind.taken(bytes) } else { 0 };
        let (number, is_orphan, uses, tag, stack) = (self.count, false, 1, None, None);
        self.by_id.insert(id, Native { kind, context, bytes, number, is_orphan, uses, tag, stack });
        before
    }

    fn remove(&mut self, id: Id) -> Option<Event> {
        let Native { kind, bytes, is_orphan, .. } = self.by_id.remove(&id)?;
        self.sums[kind as usize] -= bytes;
        self.taken -= kind.taken(bytes);
        if kind == Kind::Pool && !is_orphan {
            self.of_pools -= kind.taken(bytes);
            self.kept = self.kept.saturating_add(kind.taken(bytes));
        }
        Some(Event::NativeFreed { kind, id, bytes })
    }

    /// Bytes of pools that are gone.
    pub(super) fn orphaned(&self) -> u64 {
        self.by_id.values().filter(|of| of.is_orphan).map(|of| of.bytes).sum()
    }

    /// One use less of physical memory.
    fn leave(&mut self, handle: u64) -> Option<Event> {
        let id = Id::Physical(handle);
        let of = self.by_id.get_mut(&id)?;
        of.uses -= 1;
        if of.uses == 0 { self.remove(id) } else { None }
    }

    /// Removes what a context had up to a number.
    pub(super) fn end_context(&mut self, context: Context, until: u64) -> Vec<Event> {
        let is_gone = |of: &Native| of.context == context && context != 0 && of.number <= until;
        let gone: Vec<Id> = self.all().filter(|(_, of)| is_gone(of)).map(|(id, _)| id).collect();
        gone.into_iter().filter_map(|id| self.remove(id)).collect()
    }
}

impl<D: Driver> Manager<D> {
    /// The driver allocated itself: bytes of a kind, in a context or, where that is 0, in none.
    pub fn native_allocated(&mut self, kind: Kind, id: Id, context: Context, bytes: u64) {
        self.events.extend(self.native.insert(kind, id, context, bytes));
        self.events.push(Event::NativeAllocated { kind, id, bytes });
        if kind == Kind::Pool && self.quota.is_some() {
            // Another pool than that may keep what was thought to be given.
            self.ask_to_fit(|manager| {
                let kept = manager.native.kept;
                kept == 0 || manager.quota.is_some_and(|quota| manager.counted() + kept <= quota)
            });
        }
    }

    /// Addresses of what was allocated of pools.
    pub fn of_pools(&self) -> impl Iterator<Item = u64> {
        self.native.all().filter(|(_, of)| of.kind == Kind::Pool).map(|(id, _)| id.number())
    }

    /// A pool has ended, and what was allocated of it stays.
    pub fn end_pool(&mut self, addresses: Vec<u64>) {
        for address in addresses {
            if let Some(of) = self.native.get_mut(Id::Address(address)).filter(|of| !of.is_orphan) {
                of.is_orphan = true;
                let taken = of.kind.taken(of.bytes);
                self.native.of_pools -= taken;
            }
        }
    }

    /// Which of the driver's own allocations it is, to tell it from another that has its place once it is freed.
    pub fn native_number(&self, id: Id) -> Option<u64> {
        self.native.by_id.get(&id).map(|of| of.number)
    }

    /// What the driver allocated was freed, and may be another's by now.
    pub fn native_freed(&mut self, id: Id, number: Option<u64>) {
        if number.is_some() && self.native_number(id) == number {
            self.events.extend(self.native.remove(id));
        }
    }

    /// Physical memory, if it is the program's own, has a reference more.
    pub fn physical_retained(&mut self, handle: u64) {
        if let Some(of) = self.native.get_mut(Id::Physical(handle)) {
            of.uses += 1;
        }
    }

    /// It has one less.
    pub fn physical_released(&mut self, handle: u64) {
        self.events.extend(self.native.leave(handle));
    }

    /// It was mapped.
    pub fn physical_mapped(&mut self, address: u64, bytes: u64, handle: u64) {
        if self.native_number(Id::Physical(handle)).is_some() {
            self.physical_retained(handle);
            self.native.mapped.insert(address, (bytes, handle));
        }
    }

    /// All that was mapped in a range is not.
    pub fn physical_unmapped(&mut self, address: u64, bytes: u64) {
        let range = address..address.saturating_add(bytes);
        let gone: Vec<u64> =
            self.native.mapped.extract_if(range, |_, _| true).map(|(_, (_, handle))| handle).collect();
        for handle in gone {
            self.physical_released(handle);
        }
    }

    /// Bytes that the driver allocated itself.
    pub(super) fn native_bytes(&self, is_managed: bool) -> u64 {
        if is_managed { self.native.sum(Kind::Managed) } else { self.native.of_devices() }
    }

    /// All bytes of devices that the program has, but for what pools keep.
    fn counted(&self) -> u64 {
        self.native.taken + self.tracker.reserved() + self.leaving
    }

    /// All bytes of devices that the program has, and how many it may have.
    pub fn used(&mut self) -> (u64, Option<u64>) {
        if self.native.kept != 0 {
            self.ask_pools(false);
        }
        (self.counted() + self.native.kept, self.quota)
    }

    /// What pools keep, once they have given back what they can if they are to be trimmed.
    fn ask_pools(&mut self, trims: bool) {
        self.native.kept = self.driver.pools(trims).saturating_sub(self.native.of_pools);
    }

    /// Asks pools what they keep, then trims them, until what the program has fits.
    fn ask_to_fit(&mut self, fits: impl Fn(&Self) -> bool) -> bool {
        // In a capture nothing is done to memory.
        let asks = if self.captures == 0 { [false, true].as_slice() } else { &[false] };
        let mut is_fit = fits(self);
        for trims in asks {
            if !is_fit {
                self.ask_pools(*trims);
                is_fit = fits(self);
            }
        }
        is_fit
    }

    /// That so many bytes more are within the quota.
    ///
    /// # Errors
    /// [`OUT_OF_MEMORY`].
    pub fn admit(&mut self, bytes: u64, kind: Kind) -> Result<()> {
        let Some(quota) = self.quota.filter(|_| kind != Kind::Managed) else { return Ok(()) };
        let taken = kind.taken(bytes);
        let fits = |manager: &Self| {
            let kept = manager.native.kept;
            // What a pool keeps it gives to who allocates of it.
            let more = if kind == Kind::Pool { kept.max(taken) } else { kept.saturating_add(taken) };
            manager.counted().saturating_add(more) <= quota
        };
        if self.ask_to_fit(fits) {
            return Ok(());
        }
        self.events.push(Event::Failed { bytes, code: OUT_OF_MEMORY.0 });
        Err(OUT_OF_MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::driver::{Device, Failure, GRANULE, Handle, Place, Range};
    use crate::manager::Freed;

    /// Pools that hold so much, and so much once they are trimmed.
    struct Pools {
        held: u64,
        trimmed: u64,
        /// What the last address or handle was.
        last: Cell<u64>,
        /// How much is mapped.
        mapped: Cell<u64>,
    }

    impl Driver for Pools {
        type Copy = ();
        type Saved = ();

        fn reserve(&self, bytes: u64) -> Result<u64> {
            self.last.set(self.last.get() + bytes);
            Ok(self.last.get())
        }
        fn unreserve(&self, _: u64, _: u64) -> Result<()> {
            Ok(())
        }
        fn create(&self, _: Place, bytes: u64) -> Result<Handle> {
            self.reserve(bytes)
        }
        fn release(&self, _: Handle) -> Result<()> {
            Ok(())
        }
        fn map(&self, _: u64, bytes: u64, _: Handle, _: Device) -> Result<()> {
            self.mapped.set(self.mapped.get() + bytes);
            Ok(())
        }
        fn unmap(&self, _: u64, bytes: u64) -> Result<()> {
            self.mapped.set(self.mapped.get() - bytes);
            Ok(())
        }
        fn copy(&self, (): &()) -> Result<()> {
            Ok(())
        }
        fn synchronize(&self, _: Context) -> Result<()> {
            Ok(())
        }
        fn is_idle(&self) -> bool {
            true
        }
        fn free_bytes(&self, _: Context) -> Result<u64> {
            Ok(0)
        }
        fn pools(&self, trims: bool) -> u64 {
            if trims { self.trimmed } else { self.held }
        }
        fn save(&self, _: Context, _: &[Range]) -> Result<()> {
            Ok(())
        }
        fn restore(&self, _: Context, (): &(), _: impl Iterator<Item = Result<(u64, Range)>>) -> Result<()> {
            Ok(())
        }
        fn clear(&self, _: Context, _: Range) -> Result<()> {
            Ok(())
        }
    }

    fn manager(held: u64, trimmed: u64) -> Manager<Pools> {
        Manager::new(Pools { held, trimmed, last: Cell::new(0), mapped: Cell::new(0) }, Some(100 * GRANULE))
    }

    #[test]
    fn what_pools_keep_is_counted_until_they_are_trimmed() {
        let check = |held, trimmed, kind, bytes, is_admitted| {
            let mut manager = manager(held * GRANULE, trimmed * GRANULE);
            manager.native_allocated(Kind::Pool, Id::Address(8), 0, 60 * GRANULE);
            let number = manager.native_number(Id::Address(8));
            manager.native_freed(Id::Address(8), number);
            manager.native_allocated(Kind::Device, Id::Address(9), 1, 30 * GRANULE);
            assert_eq!(
                manager.admit(bytes * GRANULE, kind).is_ok(),
                is_admitted,
                "{held} {trimmed} {kind:?} {bytes}"
            );
        };
        // The pool gave it back long ago, keeps it, keeps it until it is asked, and gives it itself.
        check(0, 0, Kind::Device, 70, true);
        check(0, 0, Kind::Device, 71, false);
        check(60, 60, Kind::Physical, 10, true);
        check(60, 60, Kind::Physical, 11, false);
        check(60, 20, Kind::Array, 50, true);
        check(60, 20, Kind::Array, 51, false);
        check(60, 60, Kind::Pool, 70, true);
        check(60, 60, Kind::Pool, 71, false);
        check(60, 60, Kind::Managed, 1 << 40, true);
    }

    #[test]
    fn physical_memory_is_there_until_nobody_has_it() {
        let mut manager = manager(0, 0);
        manager.native_allocated(Kind::Physical, Id::Physical(7), 0, 50);
        manager.physical_mapped(1000, 50, 7);
        manager.physical_mapped(2000, 50, 7);
        // Another's.
        manager.physical_mapped(3000, 50, 8);
        manager.physical_retained(8);
        manager.physical_released(7);
        manager.physical_unmapped(900, 1000);
        manager.physical_unmapped(3000, 50);
        assert_eq!(manager.used(), (50, Some(100 * GRANULE)));
        manager.physical_retained(7);
        manager.physical_unmapped(2000, 50);
        assert_eq!(manager.used().0, 50);
        manager.physical_released(7);
        assert_eq!(manager.used().0, 0);
        let freed = Event::NativeFreed { kind: Kind::Physical, id: Id::Physical(7), bytes: 50 };
        assert_eq!(manager.events().last(), Some(&freed));
    }

    #[test]
    fn what_the_driver_takes_is_counted() {
        let check = |kind: Kind, bytes, taken: u64| {
            let mut manager = manager(0, 0);
            manager.native_allocated(kind, kind.id(8), 1, bytes);
            assert_eq!(manager.used().0, taken, "{kind:?} {bytes}");
            let number = manager.native_number(kind.id(8));
            manager.native_freed(kind.id(8), number);
            assert_eq!(manager.used().0, 0, "{kind:?} {bytes}");
            manager.quota = Some(taken.saturating_sub(1));
            assert!(manager.admit(bytes, kind).is_err(), "{kind:?} {bytes}");
        };
        check(Kind::Device, 1, 512);
        check(Kind::Device, GRANULE / 2, GRANULE / 2);
        check(Kind::Device, GRANULE / 2 + 1, GRANULE);
        check(Kind::Device, GRANULE + 1, 2 * GRANULE);
        check(Kind::Pool, GRANULE + 1, GRANULE + 512);
        check(Kind::Array, 3, 3);
        assert!(manager(0, 0).admit(u64::MAX, Kind::Device).is_err());
    }

    #[test]
    fn what_pools_keep_is_counted_beside_what_outlives_its_own() {
        let mut manager = manager(GRANULE, GRANULE);
        for address in [8, 9] {
            manager.native_allocated(Kind::Pool, Id::Address(address), 0, GRANULE);
        }
        manager.end_pool(vec![8]);
        let number = manager.native_number(Id::Address(9));
        manager.native_freed(Id::Address(9), number);
        assert_eq!((manager.used().0, manager.accounts(0).pools), (2 * GRANULE, 2 * GRANULE));
        let number = manager.native_number(Id::Address(8));
        manager.native_freed(Id::Address(8), number);
        assert_eq!((manager.used().0, manager.accounts(0).pools), (GRANULE, GRANULE));
    }

    #[test]
    fn what_is_freed_counts_until_no_work_uses_it() {
        let check = |is_captured: bool| {
            let mut manager = manager(0, 0);
            manager.quota = Some(3 * GRANULE);
            let made = manager.allocate(1, 0, 2 * GRANULE).expect("memory").expect("virtual");
            if is_captured {
                manager.begin_capture().expect("a capture");
            }
            let freed = manager.begin_free(made).expect("freed");
            let refused = manager.admit(2 * GRANULE, Kind::Device);
            assert_eq!((refused, manager.used().0), (Err(OUT_OF_MEMORY), 2 * GRANULE));
            match freed {
                Freed::AfterWork(of) => manager.end_free(of, Ok(())).expect("freed"),
                _ => manager.end_capture().expect("an end"),
            }
            assert_eq!(manager.used().0, 0);
        };
        check(false);
        check(true);
    }

    #[test]
    fn what_work_failed_with_goes_with_its_context() {
        let mut manager = manager(0, 0);
        let made = manager.allocate(1, 0, 2 * GRANULE).expect("memory").expect("virtual");
        let Freed::AfterWork(of) = manager.begin_free(made).expect("freed") else { panic!("work") };
        let fault = Failure(700);
        assert_eq!((manager.end_free(of, Err(fault)), manager.used().0), (Err(fault), 2 * GRANULE));
        let mark = manager.mark();
        manager.end_context(1, mark).expect("an end");
        assert_eq!((manager.used().0, manager.driver().mapped.get()), (0, 0));
    }

    #[test]
    fn accounts_tell_kinds_apart() {
        let mut manager = manager(40, 0);
        for (kind, bytes) in
            [(Kind::Device, 1), (Kind::Managed, 2), (Kind::Pool, 4), (Kind::Physical, 8), (Kind::Array, 16)]
        {
            manager.native_allocated(kind, kind.id(7 + bytes), 1, bytes);
        }
        let accounts = manager.accounts(2);
        let sums = (accounts.native, accounts.managed, accounts.pools, accounts.physical, accounts.arrays);
        assert_eq!((sums, accounts.allocations), ((1, 2, 40, 8, 16), 5));
        let largest: Vec<&str> = accounts.largest.iter().map(|of| &*of.kind).collect();
        assert_eq!(largest, ["array", "physical"]);
    }

    #[test]
    fn what_has_anothers_place_is_not_freed_for_it() {
        let mut manager = manager(0, 0);
        let (first, at) = (3, Id::Address(16));
        manager.native_allocated(Kind::Device, at, first, 512);
        let (number, mark) = (manager.native_number(at), manager.mark());
        // The driver has freed it, and has given another its place before that is told.
        manager.native_allocated(Kind::Device, at, first, 1024);
        manager.native_freed(at, number);
        assert_eq!(manager.used().0, 1024);
        // The same of a context whose handle comes again.
        manager.end_context(first, mark).expect("an end");
        assert_eq!(manager.used().0, 1024);
        manager.end_context(first, manager.mark()).expect("an end");
        assert_eq!(manager.used().0, 0);
        // And of virtual memory.
        manager.quota = None;
        let own = |manager: &mut Manager<Pools>| {
            manager.allocate(first, 0, GRANULE).expect("memory").expect("virtual")
        };
        let (_, mark, second) = (own(&mut manager), manager.mark(), own(&mut manager));
        manager.end_context(first, mark).expect("an end");
        assert_eq!(manager.tracker().all().map(|of| of.address).collect::<Vec<_>>(), [second]);
    }
}
