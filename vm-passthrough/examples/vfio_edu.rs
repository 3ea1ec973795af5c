//! Drives QEMU's `edu` device from user space through VFIO: registers, DMA, interrupts, reset.
//!
//! ```text
//! vfio_edu ADDRESS [--backend iommufd|group] [--rounds N]
//! ```
//!
//! The function is claimed, or its claim taken up. Every step is checked, and the first that does not
//! hold ends the program with exit status 1. It doubles as the proof on a real IOMMU that the VFIO layer does what it says.
//!
//! Then it is shared with a process that is nobody, has the descriptors alone, and does most of that again. This one is the
//! keeper, and answers it.

use std::error::Error;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::gpu::{RegionRegisters, Registers as _};
use vm_passthrough::vfio::{
    self, AddressSpace as _, Backend, CONFIG_REGION, DeviceFile, DeviceInfo, DeviceParts, DmaPermission,
    HostMemory, IrqTrigger, Keeper, MSI_IRQ, Presence, REQ_IRQ, ResetEvidence, ResetReport, SpaceParts,
    VfioDevice, VfioError,
};
use vm_passthrough::{PassthroughManager, PciAddress};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// Registers in BAR 0 (QEMU, docs/specs/edu.rst).
const ID: u64 = 0x00;
const LIVENESS: u64 = 0x04;
const IRQ_RAISE: u64 = 0x60;
const IRQ_ACK: u64 = 0x64;
const DMA_SOURCE: u64 = 0x80;
const DMA_TARGET: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;
const DMA_RUN: u64 = 1;
const DMA_TO_RAM: u64 = 2;
/// The device's own buffer, as DMA addresses it.
const EDU_BUFFER: u64 = 0x40000;

const BAR: u32 = 0;
const IOVA: u64 = 0x4000_0000;

fn main() -> ExitCode {
    match run() {
        Ok(()) => {
            println!("vfio_edu: all passed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("vfio_edu: FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result {
    if std::env::var_os(RECEIVER).is_some() {
        return receive();
    }
    let mut arguments = std::env::args().skip(1);
    let (mut address, mut backend, mut rounds) = (None, None, 200u32);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--backend" => {
                backend = Some(match arguments.next().as_deref() {
                    Some("iommufd") => Backend::Iommufd,
                    Some("group") => Backend::Group,
                    other => return Err(format!("--backend takes iommufd or group, not {other:?}").into()),
                });
            }
            "--rounds" => rounds = arguments.next().ok_or("--rounds takes a number")?.parse()?,
            text => address = Some(text.parse::<PciAddress>()?),
        }
    }
    let address = address.ok_or("usage: vfio_edu ADDRESS [--backend iommufd|group] [--rounds N]")?;

    let mut manager = PassthroughManager::new()?;
    let claimed = manager.claim(address, &ClaimOptions::default())?;
    let space = vfio::open_space(manager.host(), &[address], backend)?;
    println!("back end: {}", space.backend());
    check(backend.is_none_or(|backend| backend == space.backend()), "the back end is the one asked for")?;
    let edu = claimed.open(&space)?;
    check(edu.presence() == Presence::Present, "the function is present")?;
    check(matches!(claimed.open(&space), Err(VfioError::Busy { .. })), "the function can't be opened twice")?;

    regions_of(&edu)?;
    enable(&edu)?;
    registers(&edu)?;
    dma(&edu, &space)?;
    limits(&space)?;
    interrupts(&edu, rounds)?;
    reset(&edu)?;
    share(&edu, &space)?;
    close(edu, &space)
}

/// Tells a process that it receives the function, by its standard input.
const RECEIVER: &str = "VFIO_EDU_RECEIVER";
/// The user and group of that process.
const NOBODY: u32 = 65534;
/// How much memory it may lock.
const LOCKED: u64 = 1 << 20;

/// Has another process do it all again, and answers what it asks.
fn share(edu: &VfioDevice, space: &vfio::Space) -> Result {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let parts = edu.share()?;
    let (number, files) = match space.share()? {
        SpaceParts::Iommufd(file, number) => (number, vec![file, parts.file]),
        SpaceParts::Group(file) => {
            let (number, group) = parts.group.ok_or("a container's device is in a group")?;
            (number, vec![file, parts.file, group])
        }
    };
    let DeviceInfo { regions, irqs, reset } = parts.info;
    let facts = format!("{} {} {number} {regions} {irqs} {reset}", parts.address, space.backend());
    let mut command = Command::new(std::env::current_exe()?);
    command.env(RECEIVER, "").stdin(theirs).uid(NOBODY).gid(NOBODY).current_dir("/");
    let mut receiver = command.spawn()?;
    // With the command goes the receiver's end of the socket.
    drop(command);
    send(&ours, &facts, &files)?;
    drop(files);
    while let Some((asked, _)) = take(&ours)? {
        let answer = match asked.as_str() {
            "wake" => DeviceFile::wake(edu).map(|()| String::new()),
            "reset" => DeviceFile::reset_and_prove(edu).map(|report| format!("{:?}", report.evidence)),
            "presence" => Ok(format!("{:?}", edu.presence())),
            other => return Err(format!("{other} is nothing to ask").into()),
        };
        send(&ours, &answer.unwrap_or_else(|error| format!("failed: {error}")), &[])?;
    }
    check(receiver.wait()?.success(), "another process did it, with the descriptors alone")
}

/// The other process.
fn receive() -> Result {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let (facts, files) = take(&socket)?.ok_or("nothing was shared")?;
    let [address, backend, number, regions, irqs, reset] = facts.split(' ').collect::<Vec<_>>()[..] else {
        return Err(format!("{facts:?} was shared").into());
    };
    let mut files = files.into_iter();
    let mut file = || files.next().ok_or("a descriptor is missing");
    let number = number.parse()?;
    let is_iommufd = backend == Backend::Iommufd.to_string();
    let space = match is_iommufd {
        true => SpaceParts::Iommufd(file()?, number),
        false => SpaceParts::Group(file()?),
    };
    let space = vfio::Space::receive(space);
    let parts = DeviceParts {
        address: address.parse()?,
        info: DeviceInfo { regions: regions.parse()?, irqs: irqs.parse()?, reset: reset.parse()? },
        is_virtual: false,
        reset_by_open: None,
        file: file()?,
        wanted: None,
        group: if is_iommufd { None } else { Some((number, file()?)) },
    };
    let config = format!("/sys/bus/pci/devices/{address}/config");
    let config = std::fs::OpenOptions::new().write(true).open(config);
    check(config.is_err(), "nobody writes to config space past VFIO")?;
    let edu = VfioDevice::receive(parts, &space, Arc::new(Asker(socket)))?;
    DeviceFile::wake(&*edu)?;
    check(edu.presence() == Presence::Present, "the keeper says that it is present")?;
    regions_of(&edu)?;
    enable(&edu)?;
    registers(&edu)?;
    dma(&edu, &space)?;
    limits(&space)?;
    setrlimit(Resource::Memlock, Rlimit { current: Some(LOCKED), maximum: Some(LOCKED) })?;
    let much = space.map(IOVA, Arc::new(HostMemory::new(2 * LOCKED as usize)?), DmaPermission::ReadWrite);
    check(
        matches!(much, Err(VfioError::LockedMemory { needed, limit: LOCKED, .. }) if needed == 2 * LOCKED),
        "more memory than it may lock is refused, and the error says so",
    )?;
    interrupts(&edu, 10)?;
    self::reset(&edu)?;
    edu.close()?;
    Ok(space.close()?)
}

/// Asks the keeper.
#[derive(Debug)]
struct Asker(OwnedFd);

impl Asker {
    fn ask(&self, what: &str) -> String {
        let answer = send(&self.0, what, &[]).and_then(|()| take(&self.0));
        let answer =
            answer.map(|answer| answer.map_or_else(|| "failed: it is gone".into(), |(text, _)| text));
        answer.unwrap_or_else(|error| format!("failed: {error}"))
    }

    fn failed(answer: String) -> VfioError {
        VfioError::Busy { what: "the function".into(), reason: answer }
    }
}

impl Keeper for Asker {
    fn wake(&self) -> vfio::Result<()> {
        Some(self.ask("wake"))
            .filter(|answer| !answer.is_empty())
            .map_or(Ok(()), |error| Err(Self::failed(error)))
    }

    fn reset_and_prove(&self) -> vfio::Result<ResetReport> {
        let answer = self.ask("reset");
        let evidence = match answer.starts_with("Register") {
            true => ResetEvidence::Register("one"),
            false if answer == "LinuxReport" => ResetEvidence::LinuxReport,
            false => return Err(Self::failed(answer)),
        };
        Ok(ResetReport { method: None, evidence })
    }

    fn set_at_rest(&self, _: bool) {}

    fn presence(&self) -> Presence {
        match self.ask("presence") {
            answer if answer == "Present" => Presence::Present,
            answer => Presence::Gone(answer),
        }
    }
}

/// Sends a packet.
fn send(socket: &OwnedFd, text: &str, files: &[OwnedFd]) -> Result {
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    control.push(SendAncillaryMessage::ScmRights(&files));
    // An empty packet would look like the end.
    let bytes = format!("{text}\n");
    sendmsg(socket, &[IoSlice::new(bytes.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes a packet, until the other side has gone.
fn take(socket: &OwnedFd) -> Result<Option<(String, Vec<OwnedFd>)>> {
    let mut bytes = [0; 4096];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files = files.flatten().collect();
    let text = std::str::from_utf8(&bytes[..got.bytes])?;
    Ok(text.strip_suffix('\n').map(|text| (text.to_owned(), files)))
}

/// Ends the program unless `holds`.
fn check(holds: bool, what: &str) -> Result {
    if !holds {
        return Err(format!("it does not hold that {what}").into());
    }
    println!("ok: {what}");
    Ok(())
}

fn regions_of(edu: &VfioDevice) -> Result {
    let bar = edu.region(BAR)?;
    println!("device {:?}, BAR 0 {bar:x?}", edu.info());
    check(bar.size == 1 << 20 && bar.mappable == [(0, 1 << 20)], "BAR 0 is 1 MiB and can be mapped")?;
    let mut id = [0; 4];
    edu.read(CONFIG_REGION, 0, &mut id)?;
    check(id == [0x34, 0x12, 0xe8, 0x11], "config space has edu's IDs")?;
    check(edu.region(1)?.size == 0, "there is no BAR 1")?;
    let beyond = edu.read(CONFIG_REGION, edu.region(CONFIG_REGION)?.size - 2, &mut id);
    check(matches!(beyond, Err(VfioError::OutOfRegion { .. })), "a read past config space is refused")?;
    let beyond = edu.read(BAR, u64::MAX - 1, &mut id);
    check(matches!(beyond, Err(VfioError::OutOfRegion { .. })), "a read that wraps around is refused")?;
    check(edu.read(u32::MAX, 0, &mut id).is_err(), "a region that does not exist is refused")?;
    check(edu.map(BAR, 0x800, 0x1000).is_err(), "half a page can't be mapped")
}

/// Turns memory decoding and bus mastering on.
fn enable(edu: &VfioDevice) -> Result {
    let mut command = [0; 2];
    edu.read(CONFIG_REGION, 4, &mut command)?;
    let command = u16::from_le_bytes(command) | 0b110;
    Ok(edu.write(CONFIG_REGION, 4, &command.to_le_bytes())?)
}

fn registers(edu: &Arc<VfioDevice>) -> Result {
    check(read(edu, ID)? == 0x0100_00ed, "the identification register reads 0x010000ed")?;
    let mapped = RegionRegisters::mapped(edu.clone(), BAR)?;
    check(mapped.mapped_bytes() == 1 << 20, "all of BAR 0 is mapped")?;
    check(mapped.read32(ID)? == 0x0100_00ed, "so it does through a mapping")?;
    mapped.write32(LIVENESS, 0x1234_5678)?;
    check(read(edu, LIVENESS)? == !0x1234_5678, "what a mapping writes, a read sees inverted")
}

fn dma(edu: &VfioDevice, space: &vfio::Space) -> Result {
    let memory = Arc::new(HostMemory::new(0x2000)?);
    let pattern: Vec<u8> = (0..0x1000u32).map(|index| (index * 7 + 3) as u8).collect();
    memory.write(0, &pattern)?;
    space.map(IOVA, memory.clone(), DmaPermission::ReadWrite)?;

    transfer(edu, IOVA, EDU_BUFFER, 0x1000, 0)?;
    transfer(edu, EDU_BUFFER, IOVA + 0x1000, 0x1000, DMA_TO_RAM)?;
    let mut back = vec![0; 0x1000];
    memory.read(0x1000, &mut back)?;
    check(back == pattern, "4 KiB came back as they went, by DMA both ways")?;

    // Counting: the same memory twice, one unmap leaves it.
    space.map(IOVA, memory.clone(), DmaPermission::ReadWrite)?;
    space.unmap(IOVA)?;
    memory.write(0x1000, &[0; 0x1000])?;
    transfer(edu, EDU_BUFFER, IOVA + 0x1000, 0x1000, DMA_TO_RAM)?;
    memory.read(0x1000, &mut back)?;
    check(back == pattern, "memory mapped twice and unmapped once can still be reached")?;

    space.unmap(IOVA)?;
    memory.write(0x1000, &[0x11; 0x1000])?;
    transfer(edu, EDU_BUFFER, IOVA + 0x1000, 0x1000, DMA_TO_RAM)?;
    memory.read(0x1000, &mut back)?;
    check(back == [0x11; 0x1000], "DMA to an address that is not mapped changes nothing")?;

    space.map(IOVA, memory.clone(), DmaPermission::Read)?;
    transfer(edu, EDU_BUFFER, IOVA + 0x1000, 0x1000, DMA_TO_RAM)?;
    memory.read(0x1000, &mut back)?;
    check(back == [0x11; 0x1000], "DMA to memory that may only be read changes nothing")?;
    space.unmap(IOVA)?;
    check(Arc::strong_count(&memory) == 1, "unmapped memory is returned")
}

/// Mappings that must be refused before the Linux kernel is asked.
fn limits(space: &vfio::Space) -> Result {
    let ranges = space.iova_ranges()?;
    println!("IOVA ranges {ranges:x?}, entries left {:?}", space.entries_left()?);
    let page = || HostMemory::new(0x1000).map(Arc::new);
    let refused = |iova: u64, expect: &str| -> Result {
        match space.map(iova, page()?, DmaPermission::ReadWrite) {
            Err(error @ VfioError::Range { .. }) if error.to_string().contains(expect) => {
                check(true, &format!("a bad mapping is refused: {error}"))
            }
            other => Err(format!("mapping at {iova:#x} gave {other:?}").into()),
        }
    };
    refused(0xfee0_0000, "0xfee00000..=0xfeefffff is reserved")?;
    refused(u64::MAX - 0xfff, "no address above")?;
    refused(0x1800, "multiples of 0x1000")?;
    space.map(IOVA, Arc::new(HostMemory::new(0x3000)?), DmaPermission::ReadWrite)?;
    refused(IOVA + 0x1000, "is mapped already")?;
    space.unmap(IOVA)?;
    check(space.unmap(IOVA).is_err(), "what is not mapped can't be unmapped")
}

fn interrupts(edu: &VfioDevice, rounds: u32) -> Result {
    let info = edu.irq(MSI_IRQ)?;
    check(info.count == 1 && info.eventfd, "there is one MSI vector")?;
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let two = [IrqTrigger::None, IrqTrigger::None];
    check(edu.set_triggers(MSI_IRQ, 0, &two).is_err(), "two vectors are refused")?;
    edu.set_triggers(MSI_IRQ, 0, &[IrqTrigger::Eventfd(eventfd.as_fd())])?;
    let start = Instant::now();
    for round in 1..=rounds {
        write(edu, IRQ_RAISE, round)?;
        if !interrupted(&eventfd, Duration::from_secs(2))? {
            return Err(format!("interrupt {round} did not come").into());
        }
        write(edu, IRQ_ACK, u32::MAX)?;
    }
    check(true, &format!("{rounds} MSIs came, one by one, in {:?}", start.elapsed()))?;
    edu.set_triggers(MSI_IRQ, 0, &[IrqTrigger::None])?;
    write(edu, IRQ_RAISE, 1)?;
    let silent = !interrupted(&eventfd, Duration::from_millis(50))?;
    write(edu, IRQ_ACK, u32::MAX)?;
    check(silent, "a vector without a trigger is silent")?;
    edu.set_triggers(REQ_IRQ, 0, &[IrqTrigger::Eventfd(eventfd.as_fd())])?;
    check(!interrupted(&eventfd, Duration::from_millis(5))?, "nobody wants the function back")?;
    edu.disable_irqs(REQ_IRQ)?;
    edu.disable_irqs(MSI_IRQ)?;
    edu.disable_irqs(MSI_IRQ)?;
    check(true, "interrupts can be disabled, twice")
}

fn reset(edu: &VfioDevice) -> Result {
    let report = DeviceFile::reset_and_prove(edu)?;
    println!("reset: {report:?}");
    check(
        matches!(report.evidence, ResetEvidence::Register(_)),
        "a register shows that the reset took place",
    )?;
    check(edu.presence() == Presence::Present, "the function is present after the reset")?;
    enable(edu)?;
    check(read(edu, ID)? == 0x0100_00ed, "it answers after the reset")
}

fn close(edu: Arc<VfioDevice>, space: &vfio::Space) -> Result {
    check(
        matches!(space.close(), Err(VfioError::Busy { .. })),
        "a space with an open device can't be closed",
    )?;
    edu.close()?;
    space.close()?;
    let page = Arc::new(HostMemory::new(0x1000)?);
    let mapped = space.map(IOVA, page, DmaPermission::ReadWrite);
    check(matches!(mapped, Err(VfioError::Busy { .. })), "a closed space maps nothing")
}

/// Waits for an interrupt, and takes it.
fn interrupted(eventfd: &OwnedFd, timeout: Duration) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let mut count = [0; 8];
        match rustix::io::read(eventfd, &mut count).map(|_| u64::from_ne_bytes(count)) {
            Ok(1) => return Ok(true),
            Ok(count) => return Err(format!("{count} interrupts came instead of one").into()),
            Err(error) if error != rustix::io::Errno::AGAIN => return Err(error.into()),
            Err(_) if Instant::now() > deadline => return Ok(false),
            Err(_) => sleep(Duration::from_micros(50)),
        }
    }
}

/// Runs one DMA transfer, which takes edu 100 ms.
fn transfer(edu: &VfioDevice, from: u64, to: u64, len: u64, direction: u64) -> Result {
    edu.write(BAR, DMA_SOURCE, &from.to_le_bytes())?;
    edu.write(BAR, DMA_TARGET, &to.to_le_bytes())?;
    edu.write(BAR, DMA_COUNT, &len.to_le_bytes())?;
    edu.write(BAR, DMA_COMMAND, &(direction | DMA_RUN).to_le_bytes())?;
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let mut command = [0; 8];
        edu.read(BAR, DMA_COMMAND, &mut command)?;
        if u64::from_le_bytes(command) & DMA_RUN == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err("a DMA transfer did not end in 5 s".into());
        }
        sleep(Duration::from_millis(5));
    }
}

fn read(edu: &VfioDevice, register: u64) -> Result<u32> {
    let mut value = [0; 4];
    edu.read(BAR, register, &mut value)?;
    Ok(u32::from_le_bytes(value))
}

fn write(edu: &VfioDevice, register: u64, value: u32) -> Result {
    Ok(edu.write(BAR, register, &value.to_le_bytes())?)
}
