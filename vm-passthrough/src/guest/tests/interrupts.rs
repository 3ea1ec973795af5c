//! MSI and MSI-X from the device to the guest.

use std::fmt::Debug;
use std::sync::Mutex;

use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::*;
use crate::sim::Fault;
use crate::vfio::{MSI_IRQ, MSIX_IRQ};

const ENABLE: u16 = 0x8000;
const MASK_ALL: u16 = 0x4000;

fn pending(rig: &Rig) -> u64 {
    let mut data = [0; 8];
    rig.device.bar_read(2, 0x3000, &mut data).unwrap();
    u64::from_le_bytes(data)
}

#[test]
fn msix_delivers_masks_and_remembers() {
    for noresize in [false, true] {
        let rig = Rig::msix(4, noresize);
        rig.write16(MSIX + 2, ENABLE | MASK_ALL);
        // The device sees it on at once, with no vector in use.
        assert_eq!((rig.sim.enabled(MSIX_IRQ), rig.vmm.routes()), (1, 0));
        rig.entry(1, message(1), false);
        assert_eq!(rig.vmm.routes(), 0);
        rig.write16(MSIX + 2, ENABLE);
        assert_eq!(rig.vmm.routes(), 1);
        rig.vmm.delivered();
        assert!(rig.sim.fire(MSIX_IRQ, 1));
        assert_eq!(rig.vmm.delivered(), [message(1)]);
        assert!(!rig.sim.fire(MSIX_IRQ, 3), "vector 3 was never unmasked");

        // Masked: it is pending, and delivered once on unmasking.
        rig.mask(1, true);
        assert_eq!(pending(&rig), 0);
        assert!(rig.sim.fire(MSIX_IRQ, 1));
        assert!(rig.sim.fire(MSIX_IRQ, 1));
        assert_eq!((rig.vmm.delivered(), pending(&rig)), (vec![], 2));
        rig.mask(1, false);
        assert_eq!(rig.vmm.delivered(), [message(1)]);
        assert_eq!(pending(&rig), 0);

        // All masked by the function.
        rig.write16(MSIX + 2, ENABLE | MASK_ALL);
        assert!(rig.sim.fire(MSIX_IRQ, 1));
        assert_eq!((rig.vmm.delivered(), pending(&rig)), (vec![], 2));
        rig.write16(MSIX + 2, ENABLE);
        assert_eq!(rig.vmm.delivered(), [message(1)]);

        // Another message, as when the guest moves the interrupt to another vCPU.
        rig.entry(1, MsiMessage { address: 0xfee0_2000, data: 0x99 }, false);
        rig.sim.fire(MSIX_IRQ, 1);
        assert_eq!(rig.vmm.delivered(), [MsiMessage { address: 0xfee0_2000, data: 0x99 }]);

        rig.write16(MSIX + 2, 0);
        assert_eq!((rig.sim.enabled(MSIX_IRQ), rig.vmm.routes()), (0, 0));
    }
}

#[test]
fn growing_loses_nothing_and_costs_one_call_a_vector() {
    if !raise_descriptor_limit() {
        return;
    }
    let count = 2048u16;
    for (noresize, most) in [(false, 2048 + 1), (true, 2048 + 2 * 12)] {
        let rig = Rig::msix(count, noresize);
        rig.write16(MSIX + 2, ENABLE);
        rig.log.take();
        for vector in 0..u64::from(count) {
            rig.entry(vector, message(vector as u32), false);
            // What fires while vectors are added reaches the guest, too often at worst.
            if vector % 61 == 1 {
                rig.vmm.delivered();
                assert!(rig.sim.fire(MSIX_IRQ, vector as usize - 1));
                assert!(rig.vmm.delivered().contains(&message(vector as u32 - 1)));
            }
        }
        let calls = rig.log.take().iter().filter(|line| line.starts_with("irq")).count();
        assert!(calls <= most, "{calls} calls for {count} vectors");
        assert_eq!(rig.sim.enabled(MSIX_IRQ), 2048);
    }
}

#[test]
fn vectors_are_signalled_after_all_were_disabled_to_grow() {
    let rig = Rig::msix(8, true);
    rig.write16(MSIX + 2, ENABLE);
    rig.entry(0, message(0), false);
    rig.entry(1, message(1), true);
    rig.vmm.delivered();
    // Vector 2 needs more than VFIO has enabled: what came to vector 0 in between would be lost.
    rig.entry(2, message(2), false);
    assert_eq!(rig.vmm.delivered(), [message(0)]);
}

#[test]
fn growing_falls_back_when_the_host_has_too_few() {
    let rig = Rig::msix(8, true);
    rig.write16(MSIX + 2, ENABLE);
    rig.entry(0, message(0), false);
    rig.sim.fail(Fault::SetTriggers);
    let error = rig.device.bar_write(2, 0x205c, &[0; 4]).unwrap_err();
    assert!(error.to_string().contains("VFIO_DEVICE_SET_IRQS"), "{error}");
    assert_eq!(rig.vmm.routes(), 1);
    // Once it works again, so do both vectors.
    rig.sim.heal();
    rig.mask(5, true);
    rig.entry(5, message(5), false);
    rig.vmm.delivered();
    assert!(rig.sim.fire(MSIX_IRQ, 0));
    assert!(rig.sim.fire(MSIX_IRQ, 5));
    assert_eq!(rig.vmm.delivered(), [message(0), message(5)]);
}

#[test]
fn growing_takes_what_the_host_has() {
    let rig = Rig::msix(8, true);
    rig.write16(MSIX + 2, ENABLE);
    // Growing doubles: 1, 2, then 4, where the host has 3.
    rig.sim.set_host_vectors(3);
    for vector in 0..3 {
        rig.entry(vector, message(vector as u32), false);
    }
    let deliver = |vectors: std::ops::Range<u32>| {
        rig.vmm.delivered();
        assert!(vectors.clone().all(|vector| rig.sim.fire(MSIX_IRQ, vector as usize)));
        assert_eq!(rig.vmm.delivered(), vectors.map(message).collect::<Vec<_>>());
    };
    deliver(0..3);
    // One more than the host has is refused, and the others stay.
    let error = rig.device.bar_write(2, 0x203c, &[0; 4]).unwrap_err();
    assert!(
        error.to_string().contains("cannot enable 4 interrupt vectors of 0000:65:00.0: the host has 3"),
        "{error}"
    );
    deliver(0..3);
    // Once the host has more, unmasking the vector again connects it.
    rig.sim.set_host_vectors(8);
    rig.mask(3, true);
    rig.entry(3, message(3), false);
    deliver(0..4);
}

#[test]
fn a_guest_sees_how_many_msi_vectors_the_host_enabled() {
    let rig = Rig::new();
    rig.write32(MSI + 4, 0xfee0_3000);
    rig.write16(MSI + 12, 0x48);
    // The host has 3 of the 8 vectors that the guest enables: 2 is the largest power of two.
    rig.sim.set_host_vectors(3);
    rig.write16(MSI + 2, 0x0031);
    assert_eq!((rig.sim.enabled(MSI_IRQ), rig.read16(MSI + 2) & 0x71), (2, 0x11));
    rig.vmm.delivered();
    for vector in 0..2 {
        assert!(rig.sim.fire(MSI_IRQ, vector));
        assert_eq!(rig.vmm.delivered(), [MsiMessage { address: 0xfee0_3000, data: 0x48 | vector as u32 }]);
    }
    // No vector at all, then as many as the guest enables.
    rig.write16(MSI + 2, 0);
    rig.sim.set_host_vectors(0);
    rig.write16(MSI + 2, 0x0031);
    assert_eq!(rig.sim.enabled(MSI_IRQ), 0);
    rig.sim.set_host_vectors(8);
    rig.write16(MSI + 2, 0x0031);
    assert_eq!(rig.sim.enabled(MSI_IRQ), 8);
}

#[test]
fn msi_delivers_masks_and_remembers() {
    let rig = Rig::new();
    rig.write32(MSI + 4, 0xfee0_3000);
    rig.write32(MSI + 8, 0);
    rig.write16(MSI + 12, 0x4b);
    // 4 of 8 vectors.
    rig.write16(MSI + 2, 0x0021);
    assert_eq!((rig.sim.enabled(MSI_IRQ), rig.vmm.routes()), (4, 4));
    let message = |vector: u32| MsiMessage { address: 0xfee0_3000, data: 0x48 | vector };
    for vector in 0..4 {
        assert!(rig.sim.fire(MSI_IRQ, vector as usize));
        assert_eq!(rig.vmm.delivered(), [message(vector)]);
    }
    rig.write32(MSI + 16, 0b0100);
    rig.sim.fire(MSI_IRQ, 2);
    assert_eq!((rig.vmm.delivered(), rig.read32(MSI + 20)), (vec![], 0b0100));
    rig.write32(MSI + 16, 0);
    assert_eq!((rig.vmm.delivered(), rig.read32(MSI + 20)), (vec![message(2)], 0));
    // More than there are: what the device has.
    rig.write16(MSI + 2, 0x0071);
    assert_eq!(rig.sim.enabled(MSI_IRQ), 8);
    rig.write16(MSI + 2, 0);
    assert_eq!((rig.sim.enabled(MSI_IRQ), rig.vmm.routes()), (0, 0));
}

#[test]
fn a_refused_message_stays_masked_and_can_be_mended() {
    let rig = Rig::new();
    rig.write16(MSIX + 2, ENABLE);
    rig.vmm.fail(Fault::SetRoute);
    assert!(rig.device.bar_write(2, 0x200c, &[0; 4]).is_err());
    rig.vmm.heal();
    rig.entry(0, message(0), true);
    rig.entry(0, message(0), false);
    rig.sim.fire(MSIX_IRQ, 0);
    assert_eq!(rig.vmm.delivered(), [message(0)]);
}

#[test]
fn a_vector_that_keeps_its_message_is_not_routed_again() {
    let rig = Rig::new();
    rig.write16(MSIX + 2, ENABLE);
    rig.entry(0, message(0), false);
    rig.vmm.fail(Fault::SetRoute);
    rig.device.bar_write(2, 0x2008, &message(0).data.to_le_bytes()).unwrap();
    assert!(rig.device.bar_write(2, 0x2008, &message(1).data.to_le_bytes()).is_err());
}

#[test]
fn msix_that_could_be_enabled_only_later_is_disabled() {
    for noresize in [false, true] {
        let rig = Rig::msix(4, noresize);
        rig.sim.fail(Fault::SetTriggers);
        rig.write16(MSIX + 2, ENABLE);
        rig.sim.heal();
        assert_eq!(rig.sim.enabled(MSIX_IRQ), 0);
        rig.entry(0, message(0), false);
        assert_eq!(rig.sim.enabled(MSIX_IRQ), 1);
        rig.write16(MSIX + 2, 0);
        assert_eq!((rig.sim.enabled(MSIX_IRQ), rig.vmm.routes()), (0, 0));
    }
}

#[test]
fn each_vector_has_its_pending_bit() {
    let rig = Rig::msix(130, false);
    rig.write16(MSIX + 2, ENABLE);
    // 130 vectors have three quadwords of pending bits.
    let mut expect = [0; 24];
    for (vector, byte, bit) in [(1, 0, 1), (9, 1, 1), (63, 7, 7), (64, 8, 0), (77, 9, 5), (129, 16, 1)] {
        rig.entry(vector, message(vector as u32), false);
        rig.mask(vector, true);
        assert!(rig.sim.fire(MSIX_IRQ, vector as usize));
        expect[byte] = 1u8 << bit;
    }
    // In one access, by dwords, by bytes.
    for len in [24, 4, 1] {
        let mut pending = [0; 24];
        for (offset, part) in (0x3000..).step_by(len).zip(pending.chunks_mut(len)) {
            rig.device.bar_read(2, offset, part).unwrap();
        }
        assert_eq!(pending, expect, "{len}");
    }
}

/// The warnings of one thread, each as its fields.
#[derive(Clone, Default)]
pub(super) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Takes all warnings out.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| text += &format!("{field}={value:?} "));
        self.0.lock().unwrap().push(text);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn an_interrupt_that_cannot_be_delivered_is_warned_of() {
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let expect = |what: &str| {
            let found = warnings.take();
            assert!(found.len() == 1 && found[0].contains(what), "{found:?}");
            assert!(found[0].contains("device=0000:65:00.0"), "{found:?}");
        };
        // A vector that the host does not have.
        let rig = Rig::msix(4, true);
        rig.write16(MSIX + 2, ENABLE);
        rig.sim.set_host_vectors(1);
        rig.device.bar_write(2, 0x201c, &[0; 4]).unwrap_err();
        expect("the host has 1");
        // A message that the VMM does not route, by the table and by config space.
        rig.sim.set_host_vectors(4);
        rig.vmm.fail(Fault::SetRoute);
        rig.device.bar_write(2, 0x200c, &[0; 4]).unwrap_err();
        expect("interrupt route");
        rig.write16(MSIX + 2, 0);
        rig.write16(MSI + 2, 1);
        expect("interrupt route");
    });
}
