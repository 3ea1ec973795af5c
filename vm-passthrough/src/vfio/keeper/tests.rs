//! Tests of a received function that need no device: its files are `/dev/null`, which answers no ioctl.

use std::fs::File;
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::vfio::{AddressSpace as _, Backend, ResetEvidence, Space, SpaceParts, VfioError};

/// Notes what it is asked.
#[derive(Debug, Default)]
struct Asked(Mutex<Vec<&'static str>>);

impl Asked {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }
}

const BY_KEEPER: ResetReport = ResetReport { method: None, evidence: ResetEvidence::LinuxReport };
const BY_OPEN: ResetReport = ResetReport { method: None, evidence: ResetEvidence::Register("MSI Mask") };

impl Keeper for Asked {
    fn wake(&self) -> Result<()> {
        self.note("wake");
        Ok(())
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        self.note("reset");
        Ok(BY_KEEPER)
    }

    fn set_at_rest(&self, at_rest: bool) {
        self.note(if at_rest { "at rest" } else { "in use" });
    }

    fn presence(&self) -> Presence {
        self.note("presence");
        Presence::Asleep
    }
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// What was shared of a function without interrupts.
fn parts(group: Option<u32>) -> DeviceParts {
    DeviceParts {
        address: "0000:65:00.0".parse().unwrap(),
        info: DeviceInfo { regions: 9, irqs: 0, reset: true },
        is_virtual: true,
        reset_by_open: Some(BY_OPEN),
        file: null(),
        wanted: Some(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
        group: group.map(|number| (number, null())),
    }
}

#[test]
fn what_takes_a_path_is_asked_of_the_keeper() {
    let (space, asked) = (Space::receive(SpaceParts::Iommufd(null(), 1)), Arc::new(Asked::default()));
    let device = VfioDevice::receive(parts(None), &space, asked.clone()).unwrap();
    assert!(device.is_virtual());
    // That opening it reset it counts once; the keeper knows nothing of that any more.
    assert_eq!(DeviceFile::reset_and_prove(&*device).unwrap(), BY_OPEN);
    assert_eq!(DeviceFile::reset_and_prove(&*device).unwrap(), BY_KEEPER);
    DeviceFile::wake(&*device).unwrap();
    assert_eq!(device.presence(), Presence::Asleep);
    DeviceFile::set_at_rest(&*device, true);
    assert_eq!(*asked.0.lock().unwrap(), ["reset", "wake", "presence", "at rest"]);
    // What takes a descriptor is not.
    assert!(matches!(device.region(0), Err(VfioError::System { .. })));
    device.close().unwrap();
    space.close().unwrap();
}

#[test]
fn a_function_that_the_host_wants_back_is_not_reset() {
    let (space, asked) = (Space::receive(SpaceParts::Iommufd(null(), 1)), Arc::new(Asked::default()));
    let parts = parts(None);
    rustix::io::write(parts.wanted.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
    let device = VfioDevice::receive(parts, &space, asked.clone()).unwrap();
    assert!(matches!(DeviceFile::reset_and_prove(&*device), Err(VfioError::WantedBack { .. })));
    assert!(asked.0.lock().unwrap().is_empty());
}

#[test]
fn a_function_joins_the_space_that_it_was_opened_in() {
    let of = |group| VfioDevice::receive(parts(group), &Space::receive(SpaceParts::Group(null())), keeper());
    fn keeper() -> Arc<dyn Keeper> {
        Arc::new(Asked::default())
    }
    assert!(of(None).unwrap_err().to_string().contains("another back end"));
    let device = of(Some(12)).unwrap();
    let space = device.space().clone();
    assert_eq!(space.backend(), Backend::Group);
    assert!(device.kvm_file().is_some());
    let twice = VfioDevice::receive(parts(Some(12)), &space, keeper()).unwrap_err().to_string();
    assert!(twice.contains("is open in this address space already"), "{twice}");
    assert!(matches!(space.close(), Err(VfioError::Busy { .. })));
    // Whoever put the group into the container takes it out: /dev/null would refuse.
    device.close().unwrap();
    space.close().unwrap();
}
