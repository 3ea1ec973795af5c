//! Which functions are open in an address space, which of them are at rest, and which were reset along with another.
//!
//! A hot reset reaches every function of a slot or bus. It must not hit one that a guest uses, so it waits until the
//! others are closed, or at rest: their guest no longer uses them, and a reset of their own follows.

use std::collections::{BTreeMap, BTreeSet};

use super::interface::ResetEvidence;
use crate::PciAddress;

/// The functions of a space.
#[derive(Debug, Default)]
pub(super) struct OpenDevices {
    open: BTreeSet<PciAddress>,
    /// Of those, the ones that nobody uses now.
    at_rest: BTreeSet<PciAddress>,
    /// Functions that were reset along with another while they were closed or at rest, and what showed it.
    fresh: BTreeMap<PciAddress, ResetEvidence>,
}

impl OpenDevices {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn contains(&self, address: PciAddress) -> bool {
        self.open.contains(&address)
    }

    pub(super) fn open(&mut self, address: PciAddress) {
        self.open.insert(address);
    }

    pub(super) fn close(&mut self, address: PciAddress) {
        self.open.remove(&address);
        self.at_rest.remove(&address);
        self.fresh.remove(&address);
    }

    /// Notes whether an open function is used. One that is used is no longer as a reset left it.
    pub(super) fn set_at_rest(&mut self, address: PciAddress, at_rest: bool) {
        if !at_rest {
            self.at_rest.remove(&address);
            self.fresh.remove(&address);
        } else if self.open.contains(&address) {
            self.at_rest.insert(address);
        }
    }

    /// Those of `set` that a hot reset for `address` must not reach now.
    pub(super) fn in_use(&self, address: PciAddress, set: &[PciAddress]) -> Named {
        let in_use = |other: &PciAddress| {
            *other != address && self.open.contains(other) && !self.at_rest.contains(other)
        };
        Named(set.iter().copied().filter(in_use).collect())
    }

    /// Notes functions that were reset along with another.
    pub(super) fn add_fresh(&mut self, fresh: Vec<(PciAddress, ResetEvidence)>) {
        self.fresh.extend(fresh);
    }

    /// Whether a function was reset along with another since it was last used, and what showed it. True once.
    pub(super) fn take_fresh(&mut self, address: PciAddress) -> Option<ResetEvidence> {
        self.fresh.remove(&address)
    }

    /// All that are open.
    pub(super) fn all(&self) -> Named {
        Named(self.open.clone())
    }
}

/// Functions, to be named.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named(BTreeSet<PciAddress>);

impl Named {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROVED: ResetEvidence = ResetEvidence::Register("MSI Mask");

    fn function(number: u8) -> PciAddress {
        PciAddress::new(0, 0x65, 0, number).unwrap()
    }

    #[test]
    fn a_hot_reset_spares_what_is_in_use() {
        fn check(prepare: impl FnOnce(&mut OpenDevices), expect: &str) {
            let (gpu, audio, usb) = (function(0), function(1), function(2));
            let mut devices = OpenDevices::default();
            devices.open(gpu);
            prepare(&mut devices);
            assert_eq!(devices.in_use(gpu, &[gpu, audio, usb]).to_string(), expect);
        }
        let (audio, usb, elsewhere) = (function(1), function(2), function(7));
        check(|_| {}, "");
        check(|devices| devices.open(audio), "0000:65:00.1");
        check(
            |devices| [usb, audio].into_iter().for_each(|other| devices.open(other)),
            "0000:65:00.1, 0000:65:00.2",
        );
        check(|devices| devices.open(elsewhere), "");
        let at_rest = |devices: &mut OpenDevices| {
            devices.open(audio);
            devices.set_at_rest(audio, true);
        };
        check(at_rest, "");
        check(
            |devices| {
                at_rest(devices);
                devices.set_at_rest(audio, false);
            },
            "0000:65:00.1",
        );
        // What was said of it before does not outlast it.
        check(
            |devices| {
                at_rest(devices);
                devices.close(audio);
                devices.open(audio);
            },
            "0000:65:00.1",
        );
        check(
            |devices| {
                devices.set_at_rest(audio, true);
                devices.open(audio);
            },
            "0000:65:00.1",
        );
    }

    #[test]
    fn a_reset_with_another_counts_once_and_until_it_is_used() {
        let audio = function(1);
        let mut devices = OpenDevices::default();
        devices.add_fresh(vec![(audio, PROVED)]);
        assert_eq!(devices.take_fresh(audio), Some(PROVED));
        assert_eq!(devices.take_fresh(audio), None);
        for forget in [
            |devices: &mut OpenDevices| devices.set_at_rest(function(1), false),
            |devices: &mut OpenDevices| devices.close(function(1)),
        ] {
            devices.add_fresh(vec![(audio, PROVED)]);
            forget(&mut devices);
            assert_eq!(devices.take_fresh(audio), None);
        }
        devices.add_fresh(vec![(audio, PROVED)]);
        devices.open(audio);
        devices.set_at_rest(audio, true);
        assert_eq!(devices.take_fresh(audio), Some(PROVED));
    }
}
