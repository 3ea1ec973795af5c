//! A function that a guest is to have, before it is attached.

use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;
use vm_passthrough::pci::placement::FunctionRequest;
use vm_passthrough::pci::{PciFunction, regs};

use super::link::DeviceLink;

/// A function of the host that a guest is to have, by what a scan found of it. The guest may start before it is attached: its
/// port has its bus and its windows, and what identifies it can be read. Whoever reaches further waits until it has arrived.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExpectedFunction {
    pub(super) address: PciAddress,
    /// What its BARs need.
    pub(super) request: FunctionRequest,
    /// The registers that say what it is; the others are not known yet.
    header: [Option<u8>; 16],
    pub(super) link: Option<DeviceLink>,
    /// The host's NUMA node that it is on.
    pub(super) node: Option<u16>,
}

impl ExpectedFunction {
    /// What is expected of a function that was found.
    pub fn of(function: &PciFunction) -> Self {
        let mut header = [None; 16];
        let mut put = |offset: u16, bytes: &[u8]| {
            for (register, byte) in header[usize::from(offset)..].iter_mut().zip(bytes) {
                *register = Some(*byte);
            }
        };
        put(0, &function.ids.vendor.to_le_bytes());
        put(2, &function.ids.device.to_le_bytes());
        put(regs::CLASS_REVISION, &(function.class.0 << 8 | u32::from(function.ids.revision)).to_le_bytes());
        put(regs::HEADER_TYPE, &[function.header_type]);
        let link = function.link.map(DeviceLink::found);
        let (address, request) = (function.address, FunctionRequest::of(function, true));
        Self { address, request, header, link, node: function.numa_node }
    }

    /// Names the slot that it belongs into.
    pub(super) fn slot(&self) -> PciAddress {
        self.request.slot.unwrap_or(self.address)
    }

    /// Reads what identifies it; `false` for what is not known before it is attached.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) -> bool {
        let offset = usize::from(offset);
        let registers = self.header.get(offset..offset + data.len());
        let known = registers.and_then(|registers| registers.iter().copied().collect::<Option<Vec<u8>>>());
        known.map(|known| data.copy_from_slice(&known)).is_some()
    }
}

#[cfg(test)]
impl ExpectedFunction {
    /// What is expected of a device that behaves as it was found.
    pub(in crate::vmm) fn like(device: &dyn vm_passthrough::PassthroughDevice) -> Self {
        let mut header = [0; 16];
        device.config_read(0, &mut header);
        let known = [0, 1, 2, 3, 8, 9, 10, 11, 14];
        let header = std::array::from_fn(|at| known.contains(&at).then_some(header[at]));
        let bars = vm_passthrough::pci::placement::probe(device);
        let request = FunctionRequest { name: device.address().to_string(), slot: Some(device.slot()), bars };
        Self { address: device.address(), request, header, link: DeviceLink::of(device), node: None }
    }
}

#[cfg(test)]
mod tests {
    use vm_passthrough::pci;
    use vm_passthrough::sim::{SimFunction, SimHost};

    use super::*;

    #[test]
    fn what_identifies_a_function_is_known_and_nothing_else() {
        let sim = SimHost::new().unwrap();
        let address = "0000:01:00.1".parse().unwrap();
        sim.add(&SimFunction::nvme(address).revision(3)).unwrap();
        let expected = ExpectedFunction::of(&pci::scan(&sim.plain_host()).unwrap()[0]);
        assert_eq!((expected.address, expected.slot()), (address, "0000:01:00.0".parse().unwrap()));
        assert_eq!(expected.request.bars.len(), 1);
        let config = SimFunction::nvme(address).revision(3).config_space();
        for offset in 0..64u16 {
            for len in [1, 2, 4] {
                let mut data = vec![0xff; len];
                let known = expected.read(offset, &mut data);
                let end = usize::from(offset) + len;
                let is_known = |at| matches!(at, 0..4 | 8..12 | 14);
                assert_eq!(known, (usize::from(offset)..end).all(is_known), "{offset:#x} {len}");
                let expect = if known { &config[usize::from(offset)..end] } else { &[0xff; 4][..len] };
                assert_eq!(data, expect, "{offset:#x} {len}");
            }
        }
    }
}
