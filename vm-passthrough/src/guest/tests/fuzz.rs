//! Hostile devices and hostile guests.

use proptest::prelude::*;

use crate::sim::fuzz_config_space;

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_device_and_any_guest(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz_config_space(&data);
    }
}

/// Starts from a device with everything, which arbitrary bytes hardly ever make.
#[test]
fn a_full_device_and_any_guest() {
    let config = super::config(64).bytes();
    // 4096 bytes of config space, an endpoint with a capability list, in pieces of 31 bytes.
    let mut head = vec![0u8, 0];
    for (index, piece) in config[..0x400].chunks(31).enumerate() {
        head.extend((index as u16 * 31).to_be_bytes());
        head.push(piece.len() as u8);
        head.extend(piece);
        head[1] += 1;
    }
    // BARs of 1 MiB, none, 64 KiB, none, 256 bytes; 8 vectors of MSI, 64 of MSI-X.
    head.extend([20, 0, 0, 16, 0, 0, 8, 0, 0, 8, 0, 64]);
    proptest!(ProptestConfig { cases: 500, ..ProptestConfig::default() },
        |(guest in prop::collection::vec(any::<u8>(), 0..3000))| {
            let mut data = head.clone();
            data.extend(guest);
            fuzz_config_space(&data);
        }
    );
}
