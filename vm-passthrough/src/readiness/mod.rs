//! Every reason why a function cannot be passed through, each with its remedy.
//!
//! [`explain`] reads and judges, and changes nothing. It does not stop at the first reason: what it lists is all that
//! has to be put right. What it could not look at, for want of permission, is listed too
//! ([`BlockerCode::Unchecked`]).
//!
//! ```
//! use vm_passthrough::readiness::{ExplainOptions, explain};
//! use vm_passthrough::sim::{SimFunction, SimHost};
//!
//! let sim = SimHost::new()?;
//! let address = "0000:01:00.0".parse()?;
//! sim.add(&SimFunction::nvme(address).no_group())?;
//! let readiness = explain(&sim.plain_host(), address, &ExplainOptions::default())?;
//! assert!(!readiness.is_ready());
//! assert_eq!(readiness.blockers[0].code.as_str(), "no-iommu");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod acpi;
mod device;
mod disks;
mod divided;
mod facts;
mod guest;
mod holders;
mod host_use;
mod huge_pages;
mod iommu_setup;
mod isolation;
mod memory;
mod removal;
mod slot;
mod text;
mod tunnel;
mod usable;
mod windows;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

pub use holders::{Holder, holders, users};
pub use huge_pages::{HugePagesTooFew, check_huge_pages};
pub(crate) use memory::size_text;
pub use slot::left_with_host;
pub use windows::{UnassignedBars, unassigned_bars};

use facts::HostFacts;

use crate::iommu::{self, DriverChoice, IovaRange, Part, VfioDriver};
use crate::pci::config::ConfigSource as _;
use crate::pci::placement::{FunctionRequest, Windows};
use crate::pci::{self, PciFunction, ScanError, regs};
use crate::{Host, PciAddress, usb4};

/// Open files that one interrupt vector takes: an eventfd that VFIO signals, and one more by which it is routed.
pub const FILES_PER_VECTOR: u64 = 2;

/// What is meant to be done with the function. It grows: make one by [`default`](Self::default) or
/// [`for_memory`](Self::for_memory), and assign what differs.
///
/// ```
/// use vm_passthrough::readiness::ExplainOptions;
///
/// let mut options = ExplainOptions::for_memory(16 << 30);
/// options.with_group = true;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExplainOptions {
    /// Guest-physical addresses of the guest's RAM, which are also the I/O virtual addresses that it is mapped at.
    pub ram: Vec<IovaRange>,
    /// Whether that is only assumed, and the guest may have as much less as the host has.
    pub ram_is_assumed: bool,
    /// What that RAM is made of.
    pub pages: RamPages,
    /// Guest-physical addresses that BARs below 4 GiB can have.
    pub mmio32: IovaRange,
    /// Whether another device of the guest has all of that pinned already.
    pub ram_is_pinned: bool,
    /// Where the functions' BARs can be in a guest that runs: the windows of the slot that they would come into.
    pub slot: Option<Windows>,
    /// Bits of the guest's physical addresses; `None` for as many as the host's CPUs have.
    pub physical_address_bits: Option<u8>,
    /// Guest-physical addresses within these bits that the processor keeps to itself, so that no BAR may be there:
    /// HyperTransport's, on AMD's. Empty by default.
    pub processor_reserved: std::ops::Range<u64>,
    /// What the VMM emulates beside the functions of the host, whose BARs take addresses too.
    pub emulated: Vec<FunctionRequest>,
    /// Whether each function of the host is behind a PCI Express port of its own in the guest, and not on a root bus.
    pub behind_ports: bool,
    /// Files that the process has open while the guest runs, beside [`FILES_PER_VECTOR`] for each interrupt vector.
    pub open_files: u64,
    /// Whether the functions of other slots in the IOMMU group are given away too.
    pub with_group: bool,
    /// Whether to look through the open files of all processes, and to ask the host's
    /// [`DiskProbe`](crate::host::DiskProbe) about disks of which nothing else shows a use.
    pub check_open_files: bool,
    /// Blockers that whoever asks accepts: they are reported as warnings. It changes nothing of what the Linux kernel refuses.
    pub accept: Vec<BlockerCode>,
    /// Which VFIO driver a claim is to bind.
    pub driver: VfioDriver,
    /// Sizes in bytes that BARs of functions get before a guest has them, by index.
    pub bar_sizes: BTreeMap<PciAddress, BTreeMap<u8, u64>>,
    /// Functions that the guest has already, or that are claimed along with those that are explained.
    pub beside: Vec<PciAddress>,
    /// The running guest's VMM process.
    pub vmm: Option<VmmProcess>,
}

/// The VMM process of a running guest, where it is not the process that explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmProcess {
    /// Its process ID. The files that it has open are not another user's.
    pub pid: u32,
    /// Bytes that it may lock for devices, of which it has locked none yet; `None` without a limit.
    pub memlock: Option<u64>,
}

/// What a guest's RAM is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RamPages {
    /// Pages of whatever size the Linux kernel finds.
    #[default]
    Any,
    /// Huge pages of this size in bytes, which are to come from the host's pool of such.
    Huge(u64),
    /// Huge pages that the guest has got already.
    HugeReserved,
}

impl ExplainOptions {
    /// For a guest with `bytes` of RAM: up to 3 GiB from 0, more from 4 GiB on, and what does not end below 1012 GiB from
    /// 1 TiB on, as IOMMUs of AMD translate nothing between (it is HyperTransport's).
    pub fn for_memory(bytes: u64) -> Self {
        const ROOMS: [IovaRange; 3] = [0..=(3 << 30) - 1, 4 << 30..=(1012 << 30) - 1, 1 << 40..=u64::MAX];
        let mut ram = Vec::new();
        let mut left = bytes;
        for room in &ROOMS {
            let part = left.min((room.end() - room.start()).saturating_add(1));
            if part > 0 {
                ram.push(*room.start()..=room.start() + (part - 1));
            }
            left -= part;
        }
        Self {
            ram,
            ram_is_assumed: false,
            ram_is_pinned: false,
            pages: RamPages::Any,
            slot: None,
            mmio32: 0xc000_0000..=0xdfff_ffff,
            physical_address_bits: None,
            processor_reserved: 0..0,
            emulated: Vec::new(),
            behind_ports: true,
            open_files: 256,
            with_group: false,
            check_open_files: true,
            accept: Vec::new(),
            driver: VfioDriver::Best,
            bar_sizes: BTreeMap::new(),
            beside: Vec::new(),
            vmm: None,
        }
    }

    /// Where BARs can be in a guest whose physical addresses have as many bits, which is where a VMM should place them.
    /// `None` when it is not known how many; then they end nowhere.
    pub fn windows(&self, physical_address_bits: Option<u8>) -> Windows {
        if let Some(slot) = &self.slot {
            return slot.clone();
        }
        let ram_end = self.ram.iter().map(|ram| ram.end().saturating_add(1)).max().unwrap_or(0);
        let low = *self.mmio32.start()..self.mmio32.end().saturating_add(1);
        Windows::above(low, ram_end, physical_address_bits.unwrap_or(Windows::MOST_BITS))
            .without(&self.processor_reserved)
    }

    /// Returns a function as its guest gets it: its BARs with the sizes of [`bar_sizes`](Self::bar_sizes).
    #[must_use]
    pub fn sized(&self, mut function: PciFunction) -> PciFunction {
        if let Some(sizes) = self.bar_sizes.get(&function.address) {
            for bar in &mut function.bars {
                bar.size = sizes.get(&bar.index).copied().unwrap_or(bar.size);
            }
        }
        function
    }

    /// Bytes of RAM.
    pub fn memory(&self) -> u64 {
        let size = |range: &IovaRange| range.end().saturating_sub(*range.start()).saturating_add(1);
        self.ram.iter().fold(0, |sum, range| sum.saturating_add(size(range)))
    }
}

impl Default for ExplainOptions {
    /// A guest with 1 GiB of RAM, or as much less as the host has.
    fn default() -> Self {
        Self { ram_is_assumed: true, ..Self::for_memory(1 << 30) }
    }
}

/// All that keeps a function from being passed through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// The function.
    pub address: PciAddress,
    /// Its names, as in `NVIDIA Corporation AD102 [GeForce RTX 4090]`, or its numbers.
    pub name: String,
    /// The functions that are given away together: this one first, then its companions.
    pub functions: Vec<PciAddress>,
    /// The VFIO driver that each of them is bound to by a claim, and why; none of a bridge.
    pub drivers: Vec<(PciAddress, DriverChoice)>,
    /// What was found, blockers first.
    pub blockers: Vec<Blocker>,
}

impl Readiness {
    /// Whether nothing keeps it from being passed through; warnings don't.
    pub fn is_ready(&self) -> bool {
        self.blockers.iter().all(|blocker| blocker.severity != Severity::Blocker)
    }

    /// The first thing that keeps it from being passed through.
    pub fn first_blocker(&self) -> Option<&Blocker> {
        self.blockers.iter().find(|blocker| blocker.severity == Severity::Blocker)
    }
}

/// One reason, what shows it and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// Which reason.
    pub code: BlockerCode,
    /// Whether it keeps the function from being passed through.
    pub severity: Severity,
    /// The function that it is about: the one that was asked for, or a companion.
    pub function: PciAddress,
    /// What was read, and where.
    pub evidence: String,
    /// What to do: a command or a setting.
    pub remedy: String,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Severity {
    /// The function can't be passed through, or only to the host's harm.
    Blocker,
    /// It works, but not as well or as safely as it should.
    Warning,
}

/// The first step that a blocker keeps a function from.
enum Stage {
    Claim,
    /// A claim, as the host itself uses it.
    HostUse,
    Guest,
}

macro_rules! codes {
    ($($name:ident = $text:literal, $stage:ident, $summary:literal;)*) => {
        /// A reason, named for good: scripts may rely on [`as_str`](Self::as_str).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum BlockerCode {
            $(#[doc = concat!("`", $text, "`: ", $summary, ".")] $name,)*
        }

        impl BlockerCode {
            /// All there are.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its stable name, in kebab case.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// What it means, in a few words.
            pub const fn summary(self) -> &'static str {
                match self { $(Self::$name => $summary,)* }
            }

            /// Whether a function with it is not claimed either. The others keep it from a guest, or from some guests, and
            /// are looked at again when it is given to one.
            pub const fn keeps_from_claim(self) -> bool {
                match self { $(Self::$name => matches!(Stage::$stage, Stage::Claim | Stage::HostUse),)* }
            }

            /// Whether it says that the host itself uses the function.
            pub const fn is_host_use(self) -> bool {
                match self { $(Self::$name => matches!(Stage::$stage, Stage::HostUse),)* }
            }
        }
    };
}

codes! {
    NotAnEndpoint = "not-an-endpoint", Claim, "it is a bridge, which VFIO does not expose";
    NotResponding = "not-responding", Claim, "its config space reads as that of a device that is gone, in reset or broken";
    NoIommu = "no-iommu", Claim, "no IOMMU keeps it away from the host's memory";
    GroupNotViable = "group-not-viable", Claim, "a driver of the host uses another function of its IOMMU group";
    AcsMissing = "acs-missing", Guest, "a port above it lets it reach its neighbours past the IOMMU";
    InterruptRemappingOff = "interrupt-remapping-off", Guest, "it could raise interrupts that are not its own";
    FirmwareMemory = "firmware-memory", Guest, "the firmware wants memory mapped for it at all times";
    VfioPciUnavailable = "vfio-pci-unavailable", Claim, "the VFIO driver that it would be bound to is not there";
    VfioVariantNotLoaded = "vfio-variant-not-loaded", Guest, "a VFIO driver that is made for it is not loaded";
    VfioNodeMissing = "vfio-node-missing", Guest, "there is no device node to reach VFIO through";
    Permission = "permission", Claim, "this process may not do what it takes";
    BootDisplay = "boot-display", HostUse, "the host's console is on it";
    MountedDisk = "mounted-disk", HostUse, "the host uses a disk behind it";
    DefaultRoute = "default-route", HostUse, "the host's default route goes through it";
    InUse = "in-use", HostUse, "processes have it open";
    InUseShared = "in-use-shared", HostUse, "processes run kernels on it";
    Claimed = "claimed", Claim, "another process has claimed it, and is alive";
    ClaimRecordUnreadable = "claim-record-unreadable", Guest, "its former driver is in a record of the ledger that can't be read";
    VfsInUse = "vfs-in-use", Claim, "its virtual functions are enabled";
    VgpuFunction = "vgpu-function", Claim, "it is a vGPU, which NVIDIA's driver serves to guests";
    VgpusInUse = "vgpus-in-use", HostUse, "it is divided into vGPUs or other mediated devices";
    MigInUse = "mig-in-use", HostUse, "it is divided into MIG instances";
    D3cold = "d3cold", Guest, "it is switched off";
    SlotDivided = "slot-divided", Guest, "functions of its slot are in other IOMMU groups, and stay with the host";
    NoReset = "no-reset", Guest, "nothing can reset it between guests";
    LegacyInterrupt = "legacy-interrupt", Guest, "it interrupts by INTx alone, on a line of the host that others use";
    Cxl = "cxl", Guest, "it is a CXL device, of which a guest gets the PCI Express side alone";
    PortIo = "port-io", Guest, "it is programmed through port I/O, for which the guest has no ports left";
    BarUnassigned = "bar-unassigned", Guest, "the host gave one of its BARs no address";
    BarsTooLarge = "bars-too-large", Guest, "its BARs don't fit into the guest's physical addresses";
    IovaReserved = "iova-reserved", Guest, "the guest's RAM lies where DMA can't be mapped";
    IovaTooWide = "iova-too-wide", Guest, "the guest's RAM or BARs lie beyond what the IOMMU can address";
    OpenFilesTooLow = "open-files-too-low", Guest, "the process may not open as many files as the guest's interrupts take";
    HostMemoryTooLow = "host-memory-too-low", Guest, "the host has too little memory for the guest's, all of which is pinned";
    HugePagesTooFew = "huge-pages-too-few", Guest, "the host has too few free huge pages for the guest's RAM";
    MemlockTooLow = "memlock-too-low", Guest, "the process may not lock as much memory as the guest has";
    Tunnelled = "tunnelled", Guest, "it is behind a USB4 tunnel, and may be pulled out at any time";
    DmaUnprotected = "dma-unprotected", Guest, "Linux does not count on the IOMMU to keep what is connected by USB4 from the host's memory";
    BarNotResized = "bar-not-resized", Guest, "one of its BARs is smaller than it could be";
    UnbindMayHang = "unbind-may-hang", Guest, "its driver may not let go of it";
    Unchecked = "unchecked", Guest, "something could not be looked at";
}

impl fmt::Display for BlockerCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Explains functions of one host, with what is true of the whole host, and of an IOMMU group, read once.
#[derive(Debug)]
pub struct Explainer<'a> {
    host: &'a Host,
    facts: HostFacts,
    groups: Mutex<HashMap<u32, Arc<Group>>>,
}

/// An IOMMU group and its functions.
#[derive(Debug)]
struct Group {
    group: iommu::IommuGroup,
    functions: Vec<PciFunction>,
}

impl<'a> Explainer<'a> {
    /// Reads what is true of the whole host: mounts, swap, routes, limits, permissions.
    pub fn new(host: &'a Host) -> Self {
        Self { host, facts: HostFacts::read(host), groups: Mutex::default() }
    }

    /// Every reason why the function at `address` cannot be passed through.
    ///
    /// # Errors
    /// When there is no such function, or it can't be read.
    pub fn explain(&self, address: PciAddress, options: &ExplainOptions) -> Result<Readiness, ScanError> {
        self.explain_function(pci::read_function(self.host, address)?, options)
    }

    /// As [`explain`](Self::explain), of a function that was just scanned.
    ///
    /// # Errors
    /// When a companion in its group can't be read.
    pub fn explain_function(
        &self,
        function: PciFunction,
        options: &ExplainOptions,
    ) -> Result<Readiness, ScanError> {
        let function = options.sized(function);
        let guest = [&function];
        self.explain_case(function.clone(), &guest, options)
    }

    /// Every reason why a guest can't have these functions, which were just scanned, all at once: in their order, what keeps
    /// each of them, and what they lack together, reported of the one that lacks it.
    ///
    /// # Errors
    /// When a companion in the group of one of them can't be read.
    pub fn explain_guest(
        &self,
        functions: &[&PciFunction],
        options: &ExplainOptions,
    ) -> Result<Vec<Readiness>, ScanError> {
        let functions: Vec<_> = functions.iter().map(|&function| options.sized(function.clone())).collect();
        let guest: Vec<_> = functions.iter().collect();
        functions.iter().map(|function| self.explain_case(function.clone(), &guest, options)).collect()
    }

    fn explain_case(
        &self,
        function: PciFunction,
        guest: &[&PciFunction],
        options: &ExplainOptions,
    ) -> Result<Readiness, ScanError> {
        let group = function.iommu_group.map(|number| self.group(number)).transpose()?.flatten();
        let others = group.iter().flat_map(|group| &group.functions);
        let others = others.filter(|other| other.address != function.address).cloned().collect();
        let mut case = Case {
            host: self.host,
            facts: &self.facts,
            options,
            function,
            guest,
            group: group.map(|group| group.group.clone()),
            others,
            found: Vec::new(),
        };
        case.judge();
        Ok(case.into_readiness())
    }

    /// A group, if it can be read.
    fn group(&self, number: u32) -> Result<Option<Arc<Group>>, ScanError> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(&number) {
            return Ok(Some(Arc::clone(group)));
        }
        let Ok(group) = iommu::group(self.host, number) else { return Ok(None) };
        let mut functions = Vec::new();
        for &member in &group.members {
            match pci::read_function(self.host, member) {
                Ok(member) => functions.push(member),
                // It went away since the group was read.
                Err(ScanError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let group = Arc::new(Group { group, functions });
        groups.insert(number, Arc::clone(&group));
        Ok(Some(group))
    }
}

/// Every reason why the function at `address` cannot be passed through.
///
/// # Errors
/// When there is no such function, or it can't be read.
pub fn explain(host: &Host, address: PciAddress, options: &ExplainOptions) -> Result<Readiness, ScanError> {
    Explainer::new(host).explain(address, options)
}

/// Where a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seat {
    /// On the board or in a chip.
    BuiltIn,
    /// In a slot of the board.
    Slot,
    /// In an enclosure behind a tunnel of USB4 or Thunderbolt.
    Enclosure,
}

/// One function before the judge: what was read, and what was found so far.
struct Case<'a> {
    host: &'a Host,
    facts: &'a HostFacts,
    options: &'a ExplainOptions,
    function: PciFunction,
    /// All functions of the guest that this one is for; this one is among them.
    guest: &'a [&'a PciFunction],
    group: Option<iommu::IommuGroup>,
    /// The other members of the group.
    others: Vec<PciFunction>,
    found: Vec<Blocker>,
}

impl Case<'_> {
    fn judge(&mut self) {
        if self.function.is_bridge() {
            device::bridge(self);
            return;
        }
        isolation::judge(self);
        access::judge(self);
        host_use::judge(self);
        device::judge(self);
        divided::judge(self);
        usable::judge(self);
        slot::judge(self);
        memory::judge(self);
        guest::judge(self);
        tunnel::judge(self);
        facts::judge(self);
    }

    /// The functions that are given away together.
    fn taken(&self) -> Vec<PciFunction> {
        let companions = self.others.iter().filter(|other| self.is_taken(other));
        std::iter::once(&self.function).chain(companions).cloned().collect()
    }

    /// Whether another member of the group is given away too.
    fn is_taken(&self, other: &PciFunction) -> bool {
        Part::of(other, &self.function, self.options.with_group) == Part::Taken
    }

    /// Whether a claim of the whole group takes it, and a claim without the option does not.
    fn is_taken_with_group(&self, other: &PciFunction) -> bool {
        !self.is_taken(other) && Part::of(other, &self.function, true) == Part::Taken
    }

    /// The VFIO driver that a claim binds one of them to.
    fn vfio_driver(&self, function: &PciFunction) -> DriverChoice {
        let is_target = function.address == self.function.address;
        self.facts.vfio_drivers.choose(function, &self.options.driver, is_target)
    }

    /// Returns whether the function is soldered on or part of a chip: a root bus leads to it, or a port without a slot (PCI
    /// Express 6.0, 7.5.3.2, Slot Implemented). Assumes a slot if the register cannot be read, as without privilege.
    fn is_built_in(&self) -> bool {
        const SLOT_IMPLEMENTED: u16 = 1 << 8;
        let Some(port) = self.function.upstream else { return true };
        let read = |port: &PciFunction| {
            let express = port.capabilities.iter().find(|known| known.id == regs::CAP_ID_EXP)?;
            pci::read_config(self.host, port.address)
                .ok()?
                .read_u16(usize::from(express.offset) + usize::from(regs::EXP_FLAGS))
        };
        let register = pci::read_function(self.host, port).ok().and_then(|port| read(&port));
        register.is_some_and(|register| register & SLOT_IMPLEMENTED == 0)
    }

    /// Returns where the function is, as far as a fix can move it.
    fn seat(&self) -> Seat {
        match () {
            () if usb4::may_be_tunnelled(self.host, &self.function) => Seat::Enclosure,
            () if self.is_built_in() => Seat::BuiltIn,
            () => Seat::Slot,
        }
    }

    /// A remedy for who owns the machine, or for who owns the virtual machine that the host is.
    fn remedy<'t>(&self, physical: &'t str, in_vm: &'t str) -> &'t str {
        if self.facts.is_virtual { in_vm } else { physical }
    }

    fn blocker(&mut self, code: BlockerCode, evidence: String, remedy: impl Into<String>) {
        self.add(code, Severity::Blocker, self.function.address, evidence, remedy);
    }

    fn add(
        &mut self,
        code: BlockerCode,
        severity: Severity,
        function: PciAddress,
        evidence: String,
        remedy: impl Into<String>,
    ) {
        self.found.push(Blocker { code, severity, function, evidence, remedy: remedy.into() });
    }

    /// Something that could not be looked at.
    fn unchecked(&mut self, function: PciAddress, evidence: String, remedy: &str) {
        self.add(BlockerCode::Unchecked, Severity::Warning, function, evidence, remedy);
    }

    fn into_readiness(mut self) -> Readiness {
        for blocker in &mut self.found {
            if blocker.severity == Severity::Blocker && self.options.accept.contains(&blocker.code) {
                blocker.severity = Severity::Warning;
                blocker.evidence += " (accepted)";
            }
        }
        for blocker in &mut self.found {
            blocker.evidence = self.host.with_host_paths(std::mem::take(&mut blocker.evidence));
            blocker.remedy = self.host.with_host_paths(std::mem::take(&mut blocker.remedy));
        }
        let taken = self.taken();
        let functions = taken.iter().map(|function| function.address).collect();
        let endpoints = taken.iter().filter(|function| !function.is_bridge());
        let drivers = endpoints.map(|function| (function.address, self.vfio_driver(function))).collect();
        self.found.sort_by_key(|blocker| blocker.severity);
        Readiness {
            address: self.function.address,
            name: name(&self.function),
            functions,
            drivers,
            blockers: self.found,
        }
    }
}

/// What a function is called: its names, or its numbers where it has none.
fn name(function: &PciFunction) -> String {
    let ids = &function.ids;
    let vendor = function.vendor_name().map_or_else(|| format!("vendor {:04x}", ids.vendor), str::to_owned);
    let device = function.device_name().map_or_else(|| format!("device {:04x}", ids.device), str::to_owned);
    format!("{vendor} {device}")
}

#[cfg(test)]
#[path = "tests/places.rs"]
mod place_tests;
#[cfg(test)]
#[path = "tests/running.rs"]
mod running_tests;
#[cfg(test)]
mod tests;
