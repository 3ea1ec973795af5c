//! The virtio PCI transport (section 4.1), modern only, with MSI-X.
//!
//! One 64-bit BAR holds all registers; notifications are ioeventfds and interrupts irqfds, so neither leaves to user
//! space once the driver runs. Memory that the device shares with the guest is a second BAR, and a memory slot of KVM.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use kvm_ioctls::{IoEventAddress, NoDatamatch};
use vm_memory::MmapRegion;
use vm_passthrough::guest::{KvmVmm, MapId, Vmm as _, VmmError};
use vm_passthrough::pci::placement::BarRequest;
use vm_passthrough::pci::regs;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::interrupt::Interrupt;
use super::registers::{NEEDS_RESET, Registers};
use super::worker::Worker;
use super::{Activation, Busy, VirtioDevice};
use crate::vmm::error::MachineError;
use crate::vmm::pci::{COMMAND_OTHER, ConfigSpace, Function, MsixTable};

const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
/// The register of the BAR of shared memory: the third, as the first takes two.
const SHARED_BAR: u16 = regs::BASE_ADDRESS_0 + 8;
const MSIX_TABLE: u64 = 0x4000;
const MSIX_PENDING: u64 = 0x5000;
const BAR_SIZE: u64 = 0x8000;
/// Bytes between the notification addresses of two queues.
const NOTIFY_MULTIPLIER: u64 = 4;

/// A virtio device as a PCI function.
pub(in crate::vmm) struct VirtioPci {
    device: Box<dyn VirtioDevice>,
    vmm: Arc<KvmVmm>,
    msix: Arc<MsixTable>,
    interrupt: Arc<Interrupt>,
    /// Signalled by the driver's notifications, one for each queue.
    kicks: Vec<EventFd>,
    /// Offset of the MSI-X capability.
    msix_capability: u16,
    /// Memory that the guest reaches in the second BAR.
    shared: Option<Arc<MmapRegion>>,
    /// Offset of the capability through which config space reaches the BAR.
    window_capability: u16,
    state: Mutex<State>,
}

struct State {
    config: ConfigSpace,
    registers: Registers,
    worker: Option<Worker>,
    /// The driver reset the device, and the worker has not ended yet.
    resetting: bool,
    /// Where the BAR was when the notification addresses were given to KVM.
    notified_at: Option<u64>,
    /// Where the shared memory is in the guest.
    shared_at: Option<(u64, MapId)>,
}

impl VirtioPci {
    /// The BARs of a device, which has a window of as many bytes if it has one.
    pub(in crate::vmm) fn bars(window: Option<u64>) -> Vec<BarRequest> {
        let registers = BarRequest { index: 0, size: BAR_SIZE, wide: true, prefetchable: false, io: false };
        let shared =
            window.map(|size| BarRequest { index: 2, size, wide: true, prefetchable: true, io: false });
        std::iter::once(registers).chain(shared).collect()
    }

    /// A function for `device`.
    ///
    /// # Errors
    /// When there are no file descriptors or interrupt routes left.
    pub(in crate::vmm) fn new(vmm: Arc<KvmVmm>, device: Box<dyn VirtioDevice>) -> Result<Self, MachineError> {
        let queues = device.queue_sizes().len();
        let msix = Arc::new(MsixTable::new(vmm.clone(), queues as u16 + 1)?);
        let interrupt = Arc::new(Interrupt::new(msix.clone(), queues));
        let kicks = (0..queues)
            .map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK))
            .collect::<Result<_, _>>()
            .map_err(|error| VmmError::new("create an eventfd", error))?;
        let mut config = ConfigSpace::new();
        config.set(0, &0x1af4u16.to_le_bytes());
        config.set(2, &(0x1040 + device.id()).to_le_bytes());
        // Revision 1: modern only.
        config.set(regs::CLASS_REVISION, &[1]);
        config.set(regs::CLASS_REVISION + 1, &device.class().to_le_bytes()[..3]);
        config.set(regs::SUBSYSTEM_VENDOR_ID, &0x1af4u16.to_le_bytes());
        config.set(regs::SUBSYSTEM_VENDOR_ID + 2, &(0x1040 + device.id()).to_le_bytes());
        config.allow(
            regs::COMMAND,
            &(regs::COMMAND_MEMORY | regs::COMMAND_MASTER | COMMAND_OTHER).to_le_bytes(),
        );
        // A 64-bit memory BAR.
        config.set(regs::BASE_ADDRESS_0, &[4]);
        config.allow(regs::BASE_ADDRESS_0, &(!(BAR_SIZE - 1)).to_le_bytes());
        let window = device.window();
        if let Some((_, memory)) = &window {
            // A 64-bit memory BAR that may be prefetched.
            config.set(SHARED_BAR, &[0xc]);
            config.allow(SHARED_BAR, &(!(memory.size() as u64 - 1)).to_le_bytes());
        }
        config.allow(regs::INTERRUPT_LINE, &[0xff]);
        let last = queues as u16;
        let mut msix_body = last.to_le_bytes().to_vec();
        msix_body.extend((MSIX_TABLE as u32).to_le_bytes());
        msix_body.extend((MSIX_PENDING as u32).to_le_bytes());
        let msix_capability = config.add_capability(0x11, &msix_body);
        config.allow(msix_capability + 2, &[0, 0xc0]);
        config.add_capability(9, &capability(1, COMMON, 0x38, &[]));
        config.add_capability(
            9,
            &capability(
                2,
                NOTIFY,
                queues as u64 * NOTIFY_MULTIPLIER,
                &(NOTIFY_MULTIPLIER as u32).to_le_bytes(),
            ),
        );
        config.add_capability(9, &capability(3, ISR, 1, &[]));
        if !device.config().is_empty() {
            config.add_capability(9, &capability(4, DEVICE, device.config().len() as u64, &[]));
        }
        if let Some((number, memory)) = &window {
            // The halves of offset and length that lie above 32 bits.
            let high = [[0; 4], ((memory.size() as u64 >> 32) as u32).to_le_bytes()].concat();
            let mut body = capability(8, 0, memory.size() as u64, &high);
            (body[2], body[3]) = (2, *number);
            config.add_capability(9, &body);
        }
        let window_capability = config.add_capability(9, &capability(5, 0, 0, &[0; 4]));
        config.allow(window_capability + 4, &[0xff]);
        config.allow(window_capability + 8, &[0xff; 8]);
        config.freeze();
        let registers = Registers::new(device.features(), device.queue_sizes());
        let state = Mutex::new(State {
            config,
            registers,
            worker: None,
            resetting: false,
            notified_at: None,
            shared_at: None,
        });
        let shared = window.map(|(_, memory)| memory);
        Ok(Self { device, vmm, msix, interrupt, kicks, msix_capability, shared, window_capability, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`state`](Self::state), for what must end even when a vCPU is stuck in an access.
    fn state_until(&self, until: Instant) -> Result<MutexGuard<'_, State>, Busy> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Ok(state),
                Err(TryLockError::Poisoned(state)) => return Ok(state.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => return Err(Busy),
            }
        }
    }

    fn common_read(&self, offset: u64, data: &mut [u8]) {
        let mut state = self.state();
        self.finish_reset(&mut state);
        let mut value = state.registers.read(offset, data.len(), &self.interrupt);
        if (offset, data.len()) == (0x14, 1) && self.interrupt.needs_reset() {
            value |= u64::from(NEEDS_RESET);
        }
        for (byte, of_value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = of_value;
        }
    }

    fn common_write(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        for (slot, byte) in bytes.iter_mut().zip(data) {
            *slot = *byte;
        }
        let value = u64::from_le_bytes(bytes);
        let mut state = self.state();
        self.finish_reset(&mut state);
        if (offset, data.len()) != (0x14, 1) {
            state.registers.write(offset, data.len(), value, &self.interrupt);
        } else if value == 0 {
            if let Some(worker) = &state.worker {
                worker.ask_to_end();
            }
            // The driver waits until it reads 0 (section 4.1.4.3.2), so this need not.
            state.resetting = true;
            self.finish_reset(&mut state);
        } else if !state.resetting && state.registers.set_status(value as u8) {
            self.activate(&mut state);
        }
    }

    /// Ends a reset that the driver asked for, once the worker has ended.
    fn finish_reset(&self, state: &mut State) {
        if state.resetting && state.worker.as_ref().is_none_or(Worker::ended) {
            state.worker = None;
            state.resetting = false;
            self.unregister_notifications(state);
            for kick in &self.kicks {
                // It fails when it was not signalled.
                let _ = kick.read();
            }
            self.interrupt.reset();
            state.registers = Registers::new(self.device.features(), self.device.queue_sizes());
        }
    }

    /// Starts the device for a driver that is ready.
    fn activate(&self, state: &mut State) {
        match self.start(state) {
            Ok(worker) => state.worker = Some(worker),
            Err(reason) => {
                tracing::warn!(device = %self.device.name(), reason, "a virtio device was not started");
                self.interrupt.give_up();
            }
        }
    }

    fn start(&self, state: &mut State) -> Result<Worker, String> {
        let mut queues = Vec::new();
        for (index, queue) in state.registers.build_queues(self.vmm.memory())? {
            let kick = self.kicks.get(usize::from(index)).ok_or("it has no such queue")?;
            queues.push((index, queue, kick.try_clone().map_err(|error| error.to_string())?));
        }
        self.register_notifications(state)?;
        let features = state.registers.features();
        let (memory, interrupt) = (self.vmm.memory().clone(), self.interrupt.clone());
        self.device
            .start(Activation { memory, features, queues, interrupt })
            .map_err(|error| error.to_string())
    }

    /// Lets KVM signal the kicks where the BAR is now.
    fn register_notifications(&self, state: &mut State) -> Result<(), String> {
        let Some(base) = registers_bar(&state.config) else { return Ok(()) };
        state.notified_at = Some(base);
        for (index, kick) in (0..).zip(&self.kicks) {
            let address = IoEventAddress::Mmio(notify_address(base, index));
            self.vmm.vm().register_ioevent(kick, &address, NoDatamatch).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn unregister_notifications(&self, state: &mut State) {
        let Some(base) = state.notified_at.take() else { return };
        for (index, kick) in (0..).zip(&self.kicks) {
            let address = IoEventAddress::Mmio(notify_address(base, index));
            if let Err(error) = self.vmm.vm().unregister_ioevent(kick, &address, NoDatamatch) {
                tracing::debug!(%error, "a notification address was not taken back");
            }
        }
    }

    /// Lets the shared memory be where its BAR is now. Where the guest put it onto something else it is nowhere.
    fn place_shared(&self, state: &mut State) {
        let Some(shared) = &self.shared else { return };
        let wanted = bar(&state.config, SHARED_BAR, shared.size() as u64);
        if state.shared_at.map(|(base, _)| base) == wanted {
            return;
        }
        if let Some((_, id)) = state.shared_at.take()
            && let Err(error) = self.vmm.unmap(id)
        {
            tracing::error!(device = %self.device.name(), %error, "shared memory stays where it was");
        }
        let mapped = wanted.map(|base| Ok((base, self.vmm.map_region(base, shared.clone())?)));
        match mapped.transpose() {
            Ok(mapped) => state.shared_at = mapped,
            Err::<_, VmmError>(error) => {
                tracing::debug!(device = %self.device.name(), %error, "shared memory is nowhere");
            }
        }
    }

    /// What the window in config space points to, if its data register is what is accessed.
    fn window(&self, state: &State, offset: u16, len: usize) -> Option<u64> {
        let capability = self.window_capability;
        let wanted = state.config.u32(capability + 12);
        let hit = offset == capability + 16 && state.config.u8(capability + 4) == 0 && wanted as usize == len;
        hit.then(|| u64::from(state.config.u32(capability + 8)))
    }
}

/// A virtio capability after its two header bytes (section 4.1.4).
fn capability(kind: u8, offset: u64, len: u64, more: &[u8]) -> Vec<u8> {
    let mut body = vec![16 + more.len() as u8, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(more);
    body
}

/// Where the registers are, if their BAR decodes.
fn registers_bar(config: &ConfigSpace) -> Option<u64> {
    bar(config, regs::BASE_ADDRESS_0, BAR_SIZE)
}

/// Where a BAR is, if it decodes.
fn bar(config: &ConfigSpace, register: u16, size: u64) -> Option<u64> {
    let enabled = config.u16(regs::COMMAND) & regs::COMMAND_MEMORY != 0;
    let base = u64::from(config.u32(register) & !0xf) | u64::from(config.u32(register + 4)) << 32;
    (enabled && base != 0 && base.checked_add(size).is_some()).then_some(base)
}

fn notify_address(base: u64, queue: u64) -> u64 {
    base + NOTIFY + queue * NOTIFY_MULTIPLIER
}

impl Function for VirtioPci {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let target = {
            let state = self.state();
            state.config.read(offset, data);
            self.window(&state, offset, data.len())
        };
        if let Some(target) = target {
            self.bar_read(target, data);
        }
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let mut state = self.state();
        if let Some(target) = self.window(&state, offset, data.len()) {
            drop(state);
            self.bar_write(target, data);
            return;
        }
        state.config.write(offset, data);
        self.msix.set_control(state.config.u16(self.msix_capability + 2));
        self.place_shared(&mut state);
        // A running device follows its BAR.
        if state.worker.is_some() && registers_bar(&state.config) != state.notified_at {
            self.unregister_notifications(&mut state);
            if let Err(reason) = self.register_notifications(&mut state) {
                tracing::warn!(device = %self.device.name(), reason, "a virtio device lost its notifications");
                self.interrupt.give_up();
            }
        }
    }

    fn find_bar(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(registers_bar(&self.state().config)?)?;
        (offset < BAR_SIZE).then_some(offset)
    }

    fn bar_read(&self, offset: u64, data: &mut [u8]) {
        match offset {
            COMMON..ISR => self.common_read(offset - COMMON, data),
            DEVICE..NOTIFY => {
                let config = self.device.config();
                for (at, byte) in ((offset - DEVICE) as usize..).zip(data) {
                    *byte = config.get(at).copied().unwrap_or(0);
                }
            }
            MSIX_TABLE..MSIX_PENDING => {
                data.fill(0);
                if offset < MSIX_TABLE + u64::from(self.msix.len()) * regs::MSIX_ENTRY_SIZE {
                    self.msix.read(offset - MSIX_TABLE, data);
                }
            }
            MSIX_PENDING..BAR_SIZE => self.msix.read_pending(offset - MSIX_PENDING, data),
            // The interrupt status is for INTx, which this transport does without.
            _ => data.fill(0),
        }
    }

    fn bar_write(&self, offset: u64, data: &[u8]) {
        match offset {
            COMMON..ISR => self.common_write(offset - COMMON, data),
            NOTIFY..MSIX_TABLE => {
                // KVM takes these, except through the window in config space.
                if let Some(kick) = self.kicks.get(((offset - NOTIFY) / NOTIFY_MULTIPLIER) as usize) {
                    // It fails only when the counter is full, and then it is signalled.
                    let _ = kick.write(1);
                }
            }
            MSIX_TABLE..MSIX_PENDING => self.msix.write(offset - MSIX_TABLE, data),
            _ => {}
        }
    }

    fn ask_to_stop(&self) {
        // A vCPU that is stuck may hold it.
        if let Ok(State { worker: Some(worker), .. }) = self.state.try_lock().as_deref() {
            worker.ask_to_end();
        }
    }

    fn stop(&self) -> Result<(), MachineError> {
        let (deadline, remedy) = self.device.stopping();
        let until = Instant::now() + deadline;
        let worker = || self.state_until(until)?.worker.as_ref().map_or(Ok(()), |worker| worker.end(until));
        worker().and_then(|()| self.device.stop(until)).map_err(|Busy| MachineError::Busy {
            what: self.device.name(),
            remedy,
            deadline,
        })
    }

    fn reset(&self) -> Result<(), MachineError> {
        let mut state = self.state();
        state.resetting = true;
        self.finish_reset(&mut state);
        state.config.reset();
        self.place_shared(&mut state);
        self.msix.reset();
        self.device.reset().map_err(|source| MachineError::Thread { what: "device", source })
    }
}
