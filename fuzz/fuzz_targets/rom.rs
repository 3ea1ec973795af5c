//! Expansion ROMs from files.
#![cfg_attr(feature = "libfuzzer", no_main)]

use vm_passthrough::pci::RomImage;

fuzz::target!(|data: &[u8]| {
    if let Ok(rom) = RomImage::parse(data.to_vec()) {
        assert_eq!(rom.bytes(), data);
        assert!(rom.bar_size() >= data.len() as u64);
    }
});
