//! Tests of the proof: which register takes the marker, and what it shows afterwards.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::host::SysfsWriter;

#[derive(Debug)]
struct Plain;

impl SysfsWriter for Plain {
    fn write(&self, path: &Path, value: &str, _deadline: Duration) -> io::Result<()> {
        std::fs::write(path, value)
    }
}

/// A host with one function whose config space has these bytes.
struct Fake {
    _root: tempfile::TempDir,
    host: Host,
    address: PciAddress,
}

impl Fake {
    fn new(config: &[u8]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path(), std::sync::Arc::new(Plain));
        let address: PciAddress = "65:00.0".parse().unwrap();
        std::fs::create_dir_all(host.pci_device(address)).unwrap();
        let fake = Self { _root: root, host, address };
        fake.write(config);
        fake
    }

    fn write(&self, config: &[u8]) {
        std::fs::write(self.host.pci_device(self.address).join("config"), config).unwrap();
    }

    fn read(&self) -> Vec<u8> {
        std::fs::read(self.host.pci_device(self.address).join("config")).unwrap()
    }
}

/// Config space with these capabilities, at 0x40 and every 0x20 bytes on.
fn config(capabilities: &[&[u8]]) -> Vec<u8> {
    let mut config = vec![0; 256];
    config[..4].copy_from_slice(&[0xde, 0x10, 0x84, 0x26]);
    config[0x0b] = 0x03;
    if !capabilities.is_empty() {
        config[0x06] = 0x10;
        config[0x34] = 0x40;
    }
    for (index, capability) in capabilities.iter().enumerate() {
        let offset = 0x40 + index * 0x20;
        config[offset..offset + capability.len()].copy_from_slice(capability);
        config[offset + 1] = if index + 1 < capabilities.len() { offset as u8 + 0x20 } else { 0 };
    }
    config
}

const PM_CAPABILITY: &[u8] = &[0x01, 0, 3, 0];
const MSIX_OFF: &[u8] = &[0x11, 0, 4, 0];
const MSIX_ON: &[u8] = &[0x11, 0, 4, 0x80];
const MSI_PLAIN: &[u8] = &[0x05, 0, 0, 0];
const MSI_64: &[u8] = &[0x05, 0, 0x80, 0];
const MSI_64_MASK: &[u8] = &[0x05, 0, 0x80, 1];
const MSI_MASKED: &[u8] = &[0x05, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const MSI_ON: &[u8] = &[0x05, 0, 1, 1];

#[test]
fn the_best_register_takes_the_marker() {
    fn check(capabilities: &[&[u8]], expect: &[(&str, u16)]) {
        let config = config(capabilities);
        let read = |offset: u16| {
            let field = config.get(usize::from(offset)..).and_then(|rest| rest.first_chunk());
            field.map(|field| u16::from_le_bytes(*field)).ok_or(io::ErrorKind::UnexpectedEof.into())
        };
        let found = candidates(&read).unwrap();
        let found: Vec<_> = found.iter().map(|candidate| (candidate.register, candidate.offset)).collect();
        assert_eq!(found, expect, "{capabilities:?}");
    }
    check(&[], &[]);
    check(&[PM_CAPABILITY], &[]);
    check(&[MSIX_OFF], &[("MSI-X Function Mask", 0x42)]);
    check(&[MSIX_ON], &[]);
    check(&[PM_CAPABILITY, MSI_PLAIN], &[("MSI Message Data", 0x68)]);
    check(&[MSI_64], &[("MSI Message Data", 0x4c)]);
    check(&[MSI_64_MASK], &[("MSI Mask", 0x50), ("MSI Message Data", 0x4c)]);
    check(&[MSI_MASKED], &[("MSI Message Data", 0x48)]);
    check(&[MSI_ON], &[]);
    check(&[MSI_64, MSIX_OFF], &[("MSI-X Function Mask", 0x62), ("MSI Message Data", 0x4c)]);
}

/// A mask register has to end within config space; capabilities are anywhere in it.
#[test]
fn markers_stay_in_config_space() {
    fn check(at: u8, expect: &[(&str, u16)]) {
        let mut config = config(&[PM_CAPABILITY]);
        config[0x41] = at;
        // MSI with 64-bit addresses and masking, cut off at the end.
        let end = (usize::from(at) + 4).min(256);
        config[usize::from(at)..end].copy_from_slice(&MSI_64_MASK[..end - usize::from(at)]);
        config[usize::from(at) + 1] = 0;
        let read = |offset: u16| {
            let field = config.get(usize::from(offset)..).and_then(|rest| rest.first_chunk());
            field.map(|field| u16::from_le_bytes(*field)).ok_or(io::ErrorKind::UnexpectedEof.into())
        };
        let found = candidates(&read).unwrap();
        let found: Vec<_> = found.iter().map(|candidate| (candidate.register, candidate.offset)).collect();
        assert_eq!(found, expect, "{at:#x}");
    }
    check(0x80, &[("MSI Mask", 0x90), ("MSI Message Data", 0x8c)]);
    check(0xec, &[("MSI Mask", 0xfc), ("MSI Message Data", 0xf8)]);
    check(0xf0, &[]);
    check(0xf8, &[]);
}

#[test]
fn a_marker_inverts_bits() {
    for (old, changed, now, expect) in [
        (0, 0x4000, 0x4000, 0x4000),
        (0, 0x4000, 0, 0),
        (0x4000, 0x4000, 0x4000, 0),
        (0x4000, 0x4000, 0, 0x4000),
        // Another bit of the register does not count.
        (0, 0x4000, 0x8000, 0),
        (0xffff, 0x5aa5, 0xa55a, 0x5aa5),
        (0x00a0, 0x5aa5, 0x0005, 0x00a5),
    ] {
        assert_eq!(taken(old, now, changed), expect, "{old:#x} {changed:#x} {now:#x}");
    }
    // MSI Message Data with a value of its own.
    let mut capability = MSI_64.to_vec();
    capability.resize(14, 0);
    capability[12..].copy_from_slice(&[0xa0, 0xff]);
    let before = config(&[&capability]);
    let fake = Fake::new(&before);
    let marker = Marker::put(&fake.host, fake.address).unwrap();
    assert_eq!(fake.read()[0x4c..0x4e], [0x05, 0xa5]);
    assert!(!marker.is_gone().unwrap());
    fake.write(&before);
    assert!(marker.is_gone().unwrap());
}

#[test]
fn walks_of_hostile_lists_end() {
    // A list that points at itself, all ones, and a list that runs off the end.
    let mut looped = config(&[MSI_PLAIN]);
    looped[0x41] = 0x40;
    let mut last = config(&[PM_CAPABILITY]);
    last[0x41] = 0xfc;
    last[0xfc..].copy_from_slice(MSI_64);
    for hostile in [looped, vec![0xff; 256], last, vec![0xff; 64], Vec::new()] {
        let fake = Fake::new(&hostile);
        if let Some(marker) = Marker::put(&fake.host, fake.address) {
            marker.undo();
        }
        assert_eq!(fake.read(), hostile);
    }
}

#[test]
fn what_a_marker_shows() {
    fn check(
        capability: &[u8],
        cleared: bool,
        reported: Result<(), &str>,
        expect: Result<ResetEvidence, &str>,
    ) {
        let before = config(&[capability]);
        let fake = Fake::new(&before);
        let marker = Marker::put(&fake.host, fake.address);
        if marker.is_some() {
            assert_ne!(fake.read(), before);
        }
        if cleared {
            fake.write(&before);
        }
        match (judge(marker, reported.map_err(str::to_owned)), expect) {
            (Ok(got), Ok(expect)) => assert_eq!(got, expect),
            (Err(why), Err(expect)) => assert!(why.contains(expect), "{why}"),
            (got, expect) => panic!("{got:?}, expected {expect:?}"),
        }
        assert_eq!(fake.read(), before, "the marker was left behind");
    }
    let shown = |register| Ok(ResetEvidence::Register(register));
    check(MSIX_OFF, true, Ok(()), shown("MSI-X Function Mask"));
    check(MSIX_OFF, true, Err("no link"), shown("MSI-X Function Mask"));
    check(MSIX_OFF, false, Ok(()), Err("nothing was reset"));
    check(MSIX_OFF, false, Err("no link"), Err("no link"));
    check(MSI_64_MASK, true, Ok(()), shown("MSI Mask"));
    check(MSI_64_MASK, false, Ok(()), Err("nothing was reset"));
    check(MSI_64, true, Ok(()), shown("MSI Message Data"));
    // Its value after a reset is not specified, so one that stays refutes nothing.
    check(MSI_64, false, Ok(()), Ok(ResetEvidence::LinuxReport));
    check(MSI_64, false, Err("no link"), Err("no link"));
    check(PM_CAPABILITY, false, Ok(()), Ok(ResetEvidence::LinuxReport));
    check(PM_CAPABILITY, false, Err("no link"), Err("no link"));
}

#[test]
fn reset_methods_are_read_and_put_back() {
    fn check(text: Option<&str>, expect: &[Option<ResetMethod>]) {
        let fake = Fake::new(&[]);
        let path = fake.host.pci_device(fake.address).join("reset_method");
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
        let methods = Methods::read(&fake.host, fake.address);
        assert_eq!(methods.steps(), expect, "{text:?}");
        methods.restore(&fake.host);
        assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), text, "touched without need");
        if let Some(text) = text {
            methods.restrict(&fake.host, ResetMethod::Bus, &mut RESET_STEPS.clone()).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "bus");
            methods.restore(&fake.host);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text.trim());
        }
    }
    use ResetMethod::{AfFlr, Bus, CxlBus, DeviceSpecific, Flr, Pm};
    check(None, &[None]);
    check(Some("\n"), &[None]);
    check(Some("flr bus\n"), &[Some(Flr), Some(Bus)]);
    check(
        Some("device_specific acpi flr af_flr pm bus cxl_bus\n"),
        &[
            Some(DeviceSpecific),
            Some(ResetMethod::Acpi),
            Some(Flr),
            Some(AfFlr),
            Some(Pm),
            Some(Bus),
            Some(CxlBus),
        ],
    );
    check(Some("teleport bus\n"), &[None, Some(Bus)]);
}

#[test]
fn opening_counts_as_a_reset_only_when_the_marker_is_gone() {
    let fake = Fake::new(&config(&[MSIX_OFF]));
    let (_, report) = watch_open(&fake.host, fake.address, || Ok(())).unwrap();
    assert_eq!(report, None);
    assert_eq!(fake.read(), config(&[MSIX_OFF]), "the marker was taken back");

    let reset = || {
        fake.write(&config(&[MSIX_OFF]));
        Ok(())
    };
    let (_, report) = watch_open(&fake.host, fake.address, reset).unwrap();
    let evidence = ResetEvidence::Register("MSI-X Function Mask");
    assert_eq!(report, Some(ResetReport { method: None, evidence }));

    // A function that was not opened keeps nothing of it.
    let refused = || Err(VfioError::Lost { address: fake.address, reason: "gone".into() });
    watch_open::<()>(&fake.host, fake.address, refused).unwrap_err();
    assert_eq!(fake.read(), config(&[MSIX_OFF]));

    // One without a register for a marker shows nothing.
    let fake = Fake::new(&config(&[PM_CAPABILITY]));
    assert_eq!(watch_open(&fake.host, fake.address, || Ok(())).unwrap().1, None);
}

/// While a marker is in, another process that has the function open may use it.
#[test]
fn taking_a_marker_out_touches_nothing_else() {
    fn check(capability: &[u8], meanwhile: &[(usize, u8)], expect: &[(usize, u8)]) {
        let before = config(&[capability]);
        let fake = Fake::new(&before);
        let busy = || {
            let mut config = fake.read();
            meanwhile.iter().for_each(|&(offset, byte)| config[offset] = byte);
            fake.write(&config);
            Err(VfioError::Lost { address: fake.address, reason: "another process has it open".into() })
        };
        watch_open::<()>(&fake.host, fake.address, busy).unwrap_err();
        let mut wanted = before;
        expect.iter().for_each(|&(offset, byte)| wanted[offset] = byte);
        assert_eq!(fake.read(), wanted, "{meanwhile:x?}");
    }
    // MSI-X Control, the upper byte: bit 7 enables, bit 6 is the Function Mask, which is the marker.
    check(MSIX_OFF, &[], &[]);
    check(MSIX_OFF, &[(0x43, 0xc0)], &[(0x43, 0x80)]);
    check(MSIX_OFF, &[(0x43, 0x80)], &[(0x43, 0x80)]);
    // MSI Mask: bit 0 is the marker, the other vectors are not ours.
    check(MSI_64_MASK, &[(0x50, 0b101)], &[(0x50, 0b100)]);
    // MSI Message Data: the marker is 0x5aa5; another value is somebody's message.
    check(MSI_64, &[(0x4c, 0x41), (0x4d, 0x40)], &[(0x4c, 0x41), (0x4d, 0x40)]);
}

#[test]
fn a_function_that_does_not_answer_is_not_written_to() {
    let fake = Fake::new(&config(&[MSIX_OFF]));
    let marker = Marker::put(&fake.host, fake.address).unwrap();
    fake.write(&[0xff; 256]);
    marker.undo();
    assert_eq!(fake.read(), [0xff; 256]);
}

/// Values of a function that is dead or still in reset prove no reset, though they lack the marker too.
#[test]
fn a_dead_function_proves_no_reset() {
    fn check(what: &str, capability: &[u8], after: impl Fn(&mut Vec<u8>)) {
        let fake = Fake::new(&config(&[capability]));
        let opened = || {
            let mut config = fake.read();
            after(&mut config);
            fake.write(&config);
            Ok(())
        };
        let (_, report) = watch_open(&fake.host, fake.address, opened).unwrap();
        assert_eq!(report, None, "{what} {capability:x?}");
        // A report of success does not make up for it.
        let fake = Fake::new(&config(&[capability]));
        let marker = Marker::put(&fake.host, fake.address);
        let mut config = fake.read();
        after(&mut config);
        fake.write(&config);
        let why = judge(marker, Ok(())).unwrap_err();
        assert!(why.contains("can't be read afterwards"), "{what}: {why}");
    }
    for capability in [MSIX_OFF, MSI_64_MASK, MSI_64] {
        check("ones", capability, |config| config.fill(0xff));
        check("zeros", capability, |config| config.fill(0));
        check("a retry", capability, |config| {
            config.fill(0xff);
            config[..2].copy_from_slice(&[1, 0]);
        });
        check("a retry, then zeros", capability, |config| {
            config.fill(0);
            config[..4].copy_from_slice(&[1, 0, 0xff, 0xff]);
        });
        check("ones after the header", capability, |config| config[0x40..].fill(0xff));
        check("zeros after the header", capability, |config| config[0x40..].fill(0));
        check("ones in the header alone", capability, |bytes| {
            *bytes = config(&[capability]);
            bytes[..16].fill(0xff);
        });
        check("ones in the header", capability, |config| {
            config[4..16].fill(0xff);
            config[0x40..].fill(0);
        });
    }
}
