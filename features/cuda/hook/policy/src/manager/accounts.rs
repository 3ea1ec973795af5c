//! What has how much of a process's memory.

use std::collections::BTreeMap;

use super::{Id, Kind, Manager};
use crate::control::{Accounts, Holder, Owner};
use crate::driver::Driver;
use crate::tracker::{Stack, Tag};

impl<D: Driver> Manager<D> {
    /// The sums, and the largest allocations.
    pub fn accounts(&self, largest: usize) -> Accounts {
        let orphaned = self.native.orphaned();
        let all = || self.tracker.all();
        let mut owners: Vec<Owner> = all()
            .map(|of| Owner {
                address: of.address,
                bytes: of.bytes,
                kind: "virtual".into(),
                number: of.number,
                tag: of.tag.as_ref().map(|tag| tag.name.clone()),
                droppable: of.tag.as_ref().is_some_and(|tag| tag.is_droppable),
                pinned: of.is_pinned,
                native: false,
            })
            .collect();
        owners.extend(self.native.all().map(|(id, of)| Owner {
            address: id.number(),
            bytes: of.bytes,
            kind: of.kind.name().into(),
            number: 0,
            tag: of.tag.as_ref().map(|tag| tag.name.clone()),
            droppable: false,
            pinned: false,
            native: true,
        }));
        owners.sort_by_key(|of| (std::cmp::Reverse(of.bytes), of.address));
        owners.truncate(largest);
        Accounts {
            quota: self.quota,
            r#virtual: all().map(|of| of.backed()).sum(),
            native: self.native.sum(Kind::Device),
            managed: self.native.sum(Kind::Managed),
            pools: self.driver.pools(false).max(self.native.sum(Kind::Pool) - orphaned) + orphaned,
            physical: self.native.sum(Kind::Physical),
            arrays: self.native.sum(Kind::Array),
            reserved: 0,
            paused: all().map(|of| of.paused()).sum(),
            promised: self.promised(),
            pinned: all().filter(|of| of.is_pinned).map(|of| of.backed()).sum(),
            allocations: (self.tracker.all().count() + self.native.all().count()) as u64,
            largest: owners,
        }
    }

    /// What call stacks hold, the most first, with their return addresses.
    pub fn holders(&self) -> Vec<(Holder, Stack)> {
        let mut sums: BTreeMap<Stack, Holder> = BTreeMap::new();
        let own = self.tracker.all().map(|of| (&of.stack, of.bytes));
        for (stack, bytes) in own.chain(self.native.all().map(|(_, of)| (&of.stack, of.bytes))) {
            let sum = sums.entry(stack.clone().unwrap_or_default()).or_default();
            sum.bytes += bytes;
            sum.allocations += 1;
        }
        let mut holders: Vec<(Holder, Stack)> = sums.into_iter().map(|(stack, sum)| (sum, stack)).collect();
        holders.sort_by_key(|(of, _)| std::cmp::Reverse(of.bytes));
        holders
    }

    /// Notes which call stack allocated something.
    pub fn allocated_by(&mut self, id: Id, stack: Stack) {
        if let Id::Address(address) = id
            && let Some(of) = self.tracker.at_mut(address)
        {
            of.stack = Some(stack);
        } else if let Some(of) = self.native.get_mut(id) {
            of.stack = Some(stack);
        }
    }

    /// Notes what the program says of what is at an address; false if nothing begins there.
    pub fn tag(&mut self, address: u64, tag: Tag) -> bool {
        if let Some(of) = self.tracker.at_mut(address) {
            of.tag = Some(tag);
        } else if let Some(of) = self.native.get_mut(Id::Address(address)) {
            of.tag = Some(tag);
        } else {
            return false;
        }
        true
    }
}
