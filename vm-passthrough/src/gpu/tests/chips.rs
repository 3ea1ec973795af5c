//! Boot registers and the chips that they name.

use super::super::identify::{BOOT_0, BOOT_1, BOOT_42};
use super::super::{Architecture, BootRegisters, RegisterError, Registers, Unidentified, identify};

/// A BAR with these registers; others read `0xbad0da00`, and are noted.
#[derive(Debug)]
struct Fixed(Vec<(u64, u32)>);

impl Registers for Fixed {
    fn size(&self) -> u64 {
        16 << 20
    }

    fn read32(&self, offset: u64) -> Result<u32, RegisterError> {
        let found = self.0.iter().find(|(at, _)| *at == offset);
        found.map(|(_, value)| *value).ok_or(RegisterError::Outside { offset, size: 4 })
    }

    fn write32(&self, offset: u64, _: u32) -> Result<(), RegisterError> {
        panic!("identifying a chip wrote to {offset:#x}")
    }
}

fn read(registers: &[(u64, u32)]) -> Result<String, String> {
    let boot = BootRegisters::read(&Fixed(registers.to_vec())).map_err(|error| error.to_string())?;
    identify(boot).map(|chip| chip.to_string()).map_err(|error| error.to_string())
}

/// What `NV_PMC_BOOT_42` reads beside a `NV_PMC_BOOT_0`, by the fields of both.
fn boot_42(boot_0: u32) -> u32 {
    boot_0 & 0x1ff0_0000 | (boot_0 & 0xf0) << 12 | (boot_0 & 0xf) << 12
}

/// What real cards read, as the logs of nouveau and of drivers that people have published show.
#[test]
fn real_boot_registers_name_their_chips() {
    use Architecture::*;
    let check = |boot_0: u32, name: &str, architecture: Architecture, revision: &str| {
        let mut registers = vec![(BOOT_0, boot_0), (BOOT_1, 0)];
        let with_boot_42 = architecture >= Maxwell;
        if with_boot_42 {
            registers.push((BOOT_42, boot_42(boot_0)));
        }
        let boot = BootRegisters::read(&Fixed(registers)).unwrap();
        let chip = identify(boot).unwrap();
        let got = (chip.name, chip.architecture, chip.revision.to_string(), chip.confirmed, chip.is_virtual);
        assert_eq!(got, (name, architecture, revision.to_owned(), with_boot_42, false), "{boot_0:#010x}");
    };
    check(0x0842_00a2, "G84", Tesla, "A2");
    check(0x086f_00a2, "G86", Tesla, "A2");
    check(0x0941_00a1, "G94", Tesla, "A1");
    check(0x0960_80c1, "G96", Tesla, "C1");
    check(0x0a31_00a2, "GT215", Tesla, "A2");
    check(0x0aa4_00a2, "MCP77/MCP78", Tesla, "A2");
    check(0x0c1a_00a1, "GF108", Fermi, "A1");
    check(0x0e71_f0a2, "GK107", Kepler, "A2");
    check(0x0e73_c0a2, "GK107", Kepler, "A2");
    check(0x1081_20a1, "GK208", Kepler, "A1");
    check(0x1171_b0a2, "GM107", Maxwell, "A2");
    check(0x1200_80a1, "GM200", Maxwell, "A1");
    check(0x1240_00a1, "GM204", Maxwell, "A1");
    check(0x1241_70a1, "GM204", Maxwell, "A1");
    check(0x1340_00a1, "GP104", Pascal, "A1");
    check(0x1360_00a1, "GP106", Pascal, "A1");
    check(0x1370_00a1, "GP107", Pascal, "A1");
    check(0x1670_00a1, "TU117", Turing, "A1");
    check(0x1680_00a1, "TU116", Turing, "A1");
    check(0x1700_00a1, "GA100", Ampere, "A1");
    // Bits that no field has are set in these.
    check(0xb720_00a1, "GA102", Ampere, "A1");
    check(0x1800_00a1, "GH100", Hopper, "A1");
    check(0x1920_00a1, "AD102", Ada, "A1");
    check(0x1940_00a1, "AD104", Ada, "A1");
    check(0x1b20_00a1, "GB202", Blackwell, "A1");
}

#[test]
fn what_is_no_chip_is_said_and_not_guessed() {
    let check = |registers: &[(u64, u32)], expect: &str| {
        let error = read(registers).unwrap_err();
        assert!(error.contains(expect), "{registers:x?}: {error}");
    };
    check(&[(BOOT_0, u32::MAX)], "NV_PMC_BOOT_0 reads all ones");
    check(&[(BOOT_0, 0)], "NV_PMC_BOOT_0 reads zero");
    // Without the pattern it would be chip 0x1ad of Blackwell.
    check(&[(BOOT_0, 0xbadf_1000)], "NV_PMC_BOOT_0 reads 0xbadf1000, which NVIDIA's chips answer");
    check(&[(BOOT_0, 0xbadf_4100)], "NV_PMC_BOOT_0 reads 0xbadf4100");
    check(&[(BOOT_0, 0x1800_00a1), (BOOT_1, u32::MAX)], "NV_PMC_BOOT_1 reads all ones");
    check(&[(BOOT_0, 0x1800_00a1), (BOOT_1, 0xbadf_5040)], "NV_PMC_BOOT_1 reads 0xbadf5040");
    // GH100 as a big-endian chip shows it.
    check(&[(BOOT_0, 0xa100_0018), (BOOT_1, 0x0100_0001)], "are big-endian");
    check(&[(BOOT_0, 0xa100_0018), (BOOT_1, 0)], "0xa1000018, chip 0x010, which is not in the table");
    let unknown = |boot_0| [(BOOT_0, boot_0), (BOOT_1, 0), (BOOT_42, 0)];
    check(&unknown(0x1c20_00a1), "chip 0x1c2, which is not in the table");
    check(&unknown(0x1810_00a1), "chip 0x181, which is not in the table");
    check(&unknown(0x0020_01a1), "chip 0x202, which is not in the table");
    check(&unknown(0xbad0_0100), "which is not in the table");
    check(&[(BOOT_0, 0x1800_00a1), (BOOT_1, 0), (BOOT_42, u32::MAX)], "NV_PMC_BOOT_42 reads all ones");
    let two = [(BOOT_0, 0x1800_00a1), (BOOT_1, 0), (BOOT_42, boot_42(0x1920_00a1))];
    check(&two, "NV_PMC_BOOT_0 reads 0x180000a1 and NV_PMC_BOOT_42 0x192a1000");
    let two = [(BOOT_0, 0x1800_00a1), (BOOT_1, 0), (BOOT_42, boot_42(0x1800_00a2))];
    check(&two, "which are two chips");
}

#[test]
fn what_more_the_registers_tell() {
    let check = |registers: &[(u64, u32)], expect: &str| assert_eq!(read(registers).unwrap(), expect);
    let boot_0 = (BOOT_0, 0x1800_00a1);
    // A virtual function of SR-IOV, and one of a hypervisor. Before Turing those bits were something else.
    check(&[boot_0, (BOOT_1, 0x2_0000), (BOOT_42, 0)], "GH100 (Hopper) revision A1, a virtual function");
    check(&[boot_0, (BOOT_1, 0x1_0000), (BOOT_42, 0)], "GH100 (Hopper) revision A1, a virtual function");
    check(&[(BOOT_0, 0x1340_00a1), (BOOT_1, 0x1_0000), (BOOT_42, 0)], "GP104 (Pascal) revision A1");
    check(&[boot_0, (BOOT_1, 0), (BOOT_42, 0x180a_1200)], "GH100 (Hopper) revision A1.2");
    let identified =
        |boot_42| identify(BootRegisters { boot_0: boot_0.1, boot_1: Some(0), boot_42 }).unwrap();
    assert!(identified(Some(0x180a_1000)).confirmed);
    for unconfirmed in [None, Some(0), Some(0xbadf_4100)] {
        assert!(!identified(unconfirmed).confirmed, "{unconfirmed:x?}");
    }
}

#[test]
fn nothing_is_read_that_a_chip_may_not_have() {
    // Fixed refuses what it does not have.
    let check = |registers: &[(u64, u32)]| assert!(read(registers).is_ok(), "{registers:x?}");
    check(&[(BOOT_0, 0x0842_00a2), (BOOT_1, 0)]);
    check(&[(BOOT_0, 0x1081_20a1), (BOOT_1, 0)]);
    for gone in [u32::MAX, 0, 0xbadf_1100] {
        let boot = BootRegisters::read(&Fixed(vec![(BOOT_0, gone)])).unwrap();
        assert!(identify(boot).unwrap_err().may_pass(), "{gone:#x}");
    }
    assert!(!Unidentified::UnknownChip { boot_0: 1, id: 1 }.may_pass());
}

proptest::proptest! {
    #[test]
    fn any_values_are_a_chip_or_an_error(boot_0: u32, boot_1: u32, boot_42: u32) {
        let boot = BootRegisters { boot_0, boot_1: Some(boot_1), boot_42: Some(boot_42) };
        if let Ok(chip) = identify(boot) {
            // What it says is in the register.
            proptest::prop_assert_eq!(u32::from(chip.id & 0x1ff) << 20, boot_0 & 0x1ff0_0000);
            proptest::prop_assert_eq!(boot_0 & 0xff, u32::from(chip.revision.major) << 4 | u32::from(chip.revision.minor));
        }
    }
}
