//! What a guest has set up of its device, and the steps that make it so: BARs in the guest's memory, interrupts in
//! VFIO and the VMM.

use std::ops::Range;
use std::sync::Arc;

use super::bars::{Bar, ROM};
use super::config::ConfigSpace;
use super::interrupts::Vectors;
use super::intx::Intx;
use super::peers::ExposedId;
use super::{DecodedBar, DeviceError, MapId, MsixTable, PeerDma, Vmm};
use crate::pci::regs;
use crate::vfio::{DeviceFile, Mapping};

/// The changing part of a device.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: ConfigSpace,
    pub(super) table: MsixTable,
    pub(super) msi: Vectors,
    pub(super) msix: Vectors,
    pub(super) intx: Intx,
    places: Vec<Place>,
    /// Parts of BARs that the guest was to lose, and the VMM could not take from it.
    stale: Vec<MapId>,
    /// Parts that the guest's other devices were to lose, and still may reach.
    reached: Vec<ExposedId>,
    /// What maps BARs for those.
    peers: Option<PeerDma>,
    file: Arc<dyn DeviceFile>,
    vmm: Arc<dyn Vmm>,
}

/// A BAR, and where it is in the guest.
#[derive(Debug)]
struct Place {
    bar: Bar,
    /// Parts to map.
    pieces: Vec<Piece>,
    /// Where it decodes.
    decoded: Option<Decoded>,
}

/// What is made of a BAR where it decodes.
#[derive(Debug)]
struct Decoded {
    /// Guest-physical address.
    address: u64,
    /// What is mapped into the guest.
    mapped: Vec<MapId>,
    /// What the guest's other devices may reach.
    exposed: Vec<ExposedId>,
}

/// A part of a BAR to map into the guest.
#[derive(Debug)]
struct Piece {
    range: Range<u64>,
    /// Its mapping into this process, once there is one.
    memory: Option<Arc<dyn Mapping>>,
}

impl State {
    pub(super) fn new(
        file: Arc<dyn DeviceFile>,
        vmm: Arc<dyn Vmm>,
        config: ConfigSpace,
        bars: Vec<Bar>,
        irqs: (Vectors, Vectors, Intx),
        peers: Option<PeerDma>,
    ) -> Self {
        let page = rustix::param::page_size() as u64;
        let places = bars
            .into_iter()
            .map(|bar| {
                let pieces = bar.pieces(&trapped(&config, bar.index), page);
                Place {
                    bar,
                    pieces: pieces.into_iter().map(|range| Piece { range, memory: None }).collect(),
                    decoded: None,
                }
            })
            .collect();
        let vectors = config.msix.map_or(0, |msix| msix.vectors);
        Self {
            config,
            table: MsixTable::new(vectors),
            msi: irqs.0,
            msix: irqs.1,
            intx: irqs.2,
            places,
            stale: Vec::new(),
            reached: Vec::new(),
            peers,
            file,
            vmm,
        }
    }

    /// Where BARs decode now.
    pub(super) fn decoded(&self) -> Vec<DecodedBar> {
        let decoded = |place: &Place| {
            let address = place.decoded.as_ref()?.address;
            Some(DecodedBar { bar: place.bar.index, address, size: place.bar.size, io: place.bar.io })
        };
        self.places.iter().filter_map(decoded).collect()
    }

    /// Takes BARs from the guest's other devices, and from the guest, that do not decode where they did. Must come before the device
    /// stops decoding: a guest that reaches a mapped BAR of a device that does not would be stopped, and DMA to it is an error
    /// that some hosts do not survive.
    ///
    /// # Errors
    /// The first failure. What could not be taken is tried again the next time.
    pub(super) fn withdraw_bars(&mut self) -> Result<(), DeviceError> {
        // A BAR that could not be withdrawn whole is mapped anew once its parts are gone.
        let is_partial = !self.stale.is_empty() || !self.reached.is_empty();
        for index in 0..self.places.len() {
            let wanted = self.wanted(index);
            let Some(place) = self.places.get_mut(index) else { continue };
            let pieces = place.pieces.len();
            if let Some(decoded) = place.decoded.take_if(|decoded| {
                Some(decoded.address) != wanted || is_partial && decoded.mapped.len() < pieces
            }) {
                self.stale.extend(decoded.mapped);
                self.reached.extend(decoded.exposed);
            }
        }
        let mut result = self.peers.as_ref().map_or(Ok(()), |peers| peers.withdraw(&mut self.reached));
        self.stale.retain(|&id| match self.vmm.unmap(id) {
            Ok(()) => false,
            Err(error) => {
                if result.is_ok() {
                    result = Err(error.into());
                }
                true
            }
        });
        result
    }

    /// Gives the guest the BARs that decode now. A part that can't be mapped is served by exits.
    pub(super) fn expose_bars(&mut self) {
        for index in 0..self.places.len() {
            let wanted = self.wanted(index);
            let Some((place, address)) = self.places.get_mut(index).zip(wanted) else { continue };
            if place.decoded.is_some() {
                continue;
            }
            let (mut mapped, mut exposed) = (Vec::with_capacity(place.pieces.len()), Vec::new());
            for piece in &mut place.pieces {
                match map_piece(&*self.file, &*self.vmm, &place.bar, piece, address) {
                    Ok(id) => {
                        mapped.push(id);
                        let memory = piece.memory.clone();
                        exposed.extend(self.peers.as_ref().zip(memory).map(|(peers, memory)| {
                            peers.expose(self.file.space(), address + piece.range.start, memory)
                        }));
                    }
                    Err(error) => tracing::debug!(
                        device = %self.file.address(),
                        bar = place.bar.index,
                        %error,
                        "a part of a BAR is not mapped into the guest: its accesses exit to the VMM"
                    ),
                }
            }
            place.decoded = Some(Decoded { address, mapped, exposed });
        }
    }

    /// The address that a BAR is to decode now.
    fn wanted(&self, index: usize) -> Option<u64> {
        let bar = &self.places.get(index)?.bar;
        let decode = if bar.io { regs::COMMAND_IO } else { regs::COMMAND_MEMORY };
        let on = self.config.get16(regs::COMMAND) & decode != 0;
        let awake = self
            .config
            .power
            .is_none_or(|offset| self.config.get16(offset + regs::PM_CTRL) & regs::PM_CTRL_STATE_MASK == 0);
        if !on || !awake {
            return None;
        }
        let offset = bar.register();
        let low = self.config.get32(offset);
        if bar.index == ROM && low & regs::ROM_ADDRESS_ENABLE == 0 {
            return None;
        }
        let low = u64::from(low & bar.mask());
        let high = if bar.wide { u64::from(self.config.get32(offset + 4)) << 32 } else { 0 };
        let address = high | low;
        // Address 0 is where a BAR without an address is; all ones is what a size probe leaves.
        (address != 0 && address.checked_add(bar.size).is_some()).then_some(address)
    }

    /// Says where the pins of its slot lead to.
    pub(super) fn connect_pins(&mut self, lines: [u32; 4]) {
        self.config.show_pin(self.intx.connect_pins(lines));
    }

    /// Whether the guest lets the function decode anything or master the bus.
    pub(super) fn is_on(&self) -> bool {
        const ON: u16 = regs::COMMAND_IO | regs::COMMAND_MEMORY | regs::COMMAND_MASTER;
        self.config.get16(regs::COMMAND) & ON != 0
    }

    /// Connects INTx when the guest may use it: it has turned neither MSI nor MSI-X on, and has turned the function on, which
    /// could not be asked to interrupt before. It stays connected then.
    pub(super) fn sync_intx(&mut self) {
        let config = &self.config;
        let messages = config.msi.is_some_and(|msi| msi.enabled(config) != 0)
            || config.msix.is_some_and(|msix| msix.enabled(config).0);
        if !messages && self.is_on() {
            self.intx.connect();
        }
    }

    /// Makes MSI as the guest programmed it.
    pub(super) fn sync_msi(&mut self) -> Result<(), DeviceError> {
        let Some(msi) = self.config.msi else { return Ok(()) };
        let mut count = msi.enabled(&self.config);
        if count != 0 {
            self.intx.disconnect()?;
        }
        if self.msi.enabled() != count {
            self.msi.disable()?;
            if count == 0 {
                return Ok(());
            }
            let wanted = count;
            count = self.msi.enable_all(wanted)?;
            if count < wanted {
                msi.show_enabled(&mut self.config, count);
                let device = self.file.address();
                tracing::warn!(%device, wanted, count, "the host has fewer MSI vectors than the guest enables; its register shows how many");
            }
        }
        let mut result = Ok(());
        for vector in 0..count {
            result = result.and(self.msi.set(vector, msi.message(&self.config, vector, count)));
        }
        result
    }

    /// Makes MSI-X as the guest programmed it in its control register.
    pub(super) fn sync_msix(&mut self) -> Result<(), DeviceError> {
        let Some(msix) = self.config.msix else { return Ok(()) };
        if !msix.enabled(&self.config).0 {
            return self.msix.disable();
        }
        self.intx.disconnect()?;
        self.msix.enable()?;
        self.sync_vectors(0..=msix.vectors - 1)
    }

    /// Makes vectors as the guest programmed them in the table.
    pub(super) fn sync_vectors(&mut self, vectors: std::ops::RangeInclusive<u32>) -> Result<(), DeviceError> {
        let Some(msix) = self.config.msix else { return Ok(()) };
        let (enabled, masked) = msix.enabled(&self.config);
        if !enabled {
            return Ok(());
        }
        let mut result = Ok(());
        for vector in vectors {
            let message = if masked { None } else { self.table.message(vector) };
            result = result.and(self.msix.set(vector, message));
        }
        result
    }

    /// Takes interrupts and BARs from the guest and forgets what it wrote. Does all of it even if a part fails, and
    /// returns the first failure; clearing again does the rest.
    pub(super) fn clear(&mut self) -> Result<(), DeviceError> {
        self.config.reset();
        self.table.reset();
        let interrupts = self.msi.disable().and(self.msix.disable()).and(self.intx.clear());
        self.withdraw_bars().and(interrupts)
    }

    /// Drops the mappings of BARs into this process.
    pub(super) fn forget_mappings(&mut self) {
        for place in self.places.iter_mut().filter(|place| place.decoded.is_none()) {
            place.pieces.iter_mut().for_each(|piece| piece.memory = None);
        }
    }
}

fn map_piece(
    file: &dyn DeviceFile,
    vmm: &dyn Vmm,
    bar: &Bar,
    piece: &mut Piece,
    address: u64,
) -> Result<MapId, DeviceError> {
    let range = &piece.range;
    let memory = match &mut piece.memory {
        Some(memory) => memory,
        missing => missing.insert(file.map(bar.index.into(), range.start, range.end - range.start)?),
    };
    Ok(vmm.map(address + range.start, memory.clone())?)
}

/// The parts of a BAR that the guest must not reach directly: the MSI-X table and the pending bits.
fn trapped(config: &ConfigSpace, bar: u8) -> Vec<Range<u64>> {
    let Some(msix) = config.msix else { return Vec::new() };
    [(msix.table, msix.table_len()), (msix.pending, msix.pending_len())]
        .into_iter()
        .filter(|((index, _), _)| *index == bar)
        .map(|((_, start), len)| start..start + len)
        .collect()
}
